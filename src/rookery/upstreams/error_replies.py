"""Interpret the error responses of inference engines, whatever their format. Pure: no socket, no clock.

Guarantees:
- the message is found in every format that servers use, on one line and bounded in length; parsing never raises;
- a conversation that does not fit the model's context is distinguished from a `max_tokens` that was set too high;
- only request fields that a call can do without are reported as rejected.
"""

import re
from collections.abc import Iterable
from typing import Final

import msgspec

LEARNABLE: Final = ("return_token_ids", "logprobs", "stream_options", "max_tokens", "seed")
"""Request fields that some servers reject and that calls can omit. Instead of `max_tokens`, its newer name
`max_completion_tokens` is sent."""


class ServerError(msgspec.Struct, frozen=True):
    """The message (`text`) and the code of an error that an inference engine returned."""

    text: str
    code: str = ""

    @property
    def status(self) -> int:
        """The error code as an HTTP status, for errors inside a stream; 500 if the code is not a status."""
        return int(self.code) if self.code.isdecimal() and self.code[:1] in "45" and len(self.code) == 3 else 500


def parse_error(data: bytes) -> ServerError:
    """Return the message and the code in the body of an error response. The message is one line of bounded length.

    Any format is accepted, and no exception is raised.
    """
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


def is_context_full(error: ServerError, max_tokens: int | None) -> bool:
    """Return True if a request was refused because the conversation does not fit the model's context.

    Returns False if `max_tokens` alone is as large as the context. That setting is wrong, and treating the error
    as a full context would truncate every rollout at its first turn.
    """
    coded = error.code in ("context_length_exceeded", "exceed_context_size_error")
    if not coded and not _CONTEXT.search(error.text):
        return False
    window = _WINDOW.search(error.text)
    return window is None or max_tokens is None or max_tokens < int(window[1])


def find_refused_field(error: ServerError, body: bytes, sent: Iterable[str]) -> str | None:
    """Return the first optional field of `sent` that the error mentions; None if it mentions none.

    `body` is the body of the error response, `sent` are the names of the fields that the request had.
    """
    for field in LEARNABLE:
        if field not in sent:
            continue
        if field == "max_tokens":
            if _RENAMED.search(error.text):
                return field
        elif field.encode() in body:
            return field
    return None


def error_text(value: object) -> str:
    """Return the error message in a decoded JSON value as one line of text; without a message, the JSON itself."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        return clean(value["message"])
    return clean(msgspec.json.encode(value)[:2_000].decode("utf-8", "replace"))


def clean(text: str) -> str:
    """Return the text as one printable line of at most 500 characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:2_000]).split())
    return line if len(line) <= 500 else f"{line[:499]}…"


def preview(data: bytes) -> str:
    """Return the beginning of a response body, quoted, for use in an error message."""
    return (
        repr(clean(data[:200].decode("utf-8", "replace"))[:120])
        if data
        else "with nothing, because the body is empty"
    )
