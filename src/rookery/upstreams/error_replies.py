"""What a server says is wrong, in whatever shape it says it. Pure: no socket, no clock.

Promises:
- a complaint is found in every shape that servers use, on one line, bounded, and looking for it never raises;
- a full context is told from a limit that was set too high;
- a field is only found to be refused where a call can go on without it.
"""

import re
from collections.abc import Iterable
from typing import Final

import msgspec

LEARNABLE: Final = ("return_token_ids", "logprobs", "stream_options", "max_tokens", "seed")
"""Fields that some servers refuse; a call can go on without them (`max_tokens` under its newer name)."""


class ServerError(msgspec.Struct, frozen=True):
    """What a server said was wrong."""

    text: str
    code: str = ""

    @property
    def status(self) -> int:
        """The HTTP status that it stands for, where it came in the middle of a stream; 500 where it says none."""
        return int(self.code) if self.code.isdecimal() and self.code[:1] in "45" and len(self.code) == 3 else 500


def parse_error(data: bytes) -> ServerError:
    """The message of an error answer, whatever its shape; never raises, bounded, on one line."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ServerError(clean(data[:2_000].decode("utf-8", "replace")))
    code = ""
    if isinstance(body, dict):
        inner = body.get("error")
        if isinstance(inner, dict):
            body = inner
        code = str(body.get("code") or body.get("type") or "")
        for key in ("message", "error", "detail"):
            if body.get(key):
                body = body[key]
                break
    return ServerError(error_text(body), clean(code)[:80])


_CONTEXT = re.compile(
    r"context[ _](length|window|size)"
    r"|max_model_len|maximum (model|sequence|input) length"
    r"|(prompt|input|request|messages?)\b[^.]{0,60}\b(too long|longer than)"
    r"|reduce the length of the (messages|prompt|input)",
    re.IGNORECASE,
)
_RENAMED = re.compile(r"\buse\W+max_completion_tokens", re.IGNORECASE)
_WINDOW = re.compile(r"(?:context|model|sequence)[ _](?:length|window|size)\D{0,40}?(\d+)", re.IGNORECASE)


def is_context_full(said: ServerError, max_tokens: int | None) -> bool:
    """Whether the request was refused because the conversation no longer fits the model's context.

    Not where `max_tokens` alone is as large as the context: that is a setting to fix, and would end every
    rollout at its first turn as if the policy had talked too long.
    """
    coded = said.code in ("context_length_exceeded", "exceed_context_size_error")
    if not coded and not _CONTEXT.search(said.text):
        return False
    window = _WINDOW.search(said.text)
    return window is None or max_tokens is None or max_tokens < int(window[1])


def find_refused_field(said: ServerError, body: bytes, sent: Iterable[str]) -> str | None:
    """Which of the fields `sent` the server complains about, if it is one that a call can do without."""
    for field in LEARNABLE:
        if field not in sent:
            continue
        if field == "max_tokens":
            if _RENAMED.search(said.text):
                return field
        elif field.encode() in body:
            return field
    return None


def error_text(value: object) -> str:
    """One line about anything that JSON can hold."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        return clean(value["message"])
    return clean(msgspec.json.encode(value)[:2_000].decode("utf-8", "replace"))


def clean(text: str) -> str:
    """One printable line of at most 500 characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:2_000]).split())
    return line if len(line) <= 500 else f"{line[:499]}…"


def preview(data: bytes) -> str:
    """How an answer begins, to be shown."""
    return repr(clean(data[:200].decode("utf-8", "replace"))[:120]) if data else "nothing: the answer is empty"
