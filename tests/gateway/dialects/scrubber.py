"""Remove the prose from recorded requests of other programs, and keep their structure.

- No prose that is not ours survives: every letter of it becomes filler, every digit a zero.
- What a program reads stays: keys, types, order, flags, tool names, cache hints, schemas, tags, line breaks,
  lengths, and the marks that the gateway looks for.
- IDs, keys, paths and everything that identifies a machine or a person are replaced; equal IDs stay equal.
- Equal texts become equal texts, so that a conversation still continues its own history.
"""

import json
import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

FILLER: Final = "rookerynestperchfledgewingsoarplumegathertwigs"
"""Letters that replace all prose, used cyclically. Only the starting position depends on the original text."""
PROSE: Final = frozenset(
    {
        "content",
        "definition",
        "description",
        "instructions",
        "output",
        "prompt",
        "system",
        "text",
        "thinking",
        "title",
    }
)
"""Keys whose values count as prose even if they are a single word."""
_WORD: Final = re.compile(r"(?![/~])[^\s/]{0,80}(?:/[^\s/]{1,40})?")
"""Matches text that is not prose: one word that is neither a path nor a URL."""
_MARKS: Final = re.compile(r"x-anthropic-billing-header:|</?[a-z][a-z0-9_-]*>")
_SEAL: Final = "rk1."
_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{12,}")
_MIN_TIMESTAMP: Final = 10**11
"""Larger numbers are treated as timestamps."""
_SECRET_HEADERS: Final = frozenset({"authorization", "x-api-key", "cookie"})
_DROPPED_HEADERS: Final = frozenset({"host", "content-length"})
_MACHINE_HEADERS: Final = frozenset({"x-stainless-arch", "x-stainless-os", "x-stainless-runtime-version"})
_KEPT_HEADERS: Final = frozenset(
    {
        "accept", "accept-encoding", "anthropic-beta", "anthropic-dangerous-direct-browser-access",
        "anthropic-version", "connection", "content-encoding", "content-type", "originator", "x-app",
        "x-codex-beta-features", "x-stainless-helper-method", "x-stainless-lang", "x-stainless-package-version",
        "x-stainless-retry-count", "x-stainless-runtime", "x-stainless-timeout",
    }
)  # fmt: skip


class Scrubber:
    """Scrubs one conversation. The texts in `own` are kept, alone and inside other texts."""

    def __init__(self, own: Sequence[str] = ()) -> None:
        self._own = frozenset(own)
        within = sorted((text for text in own if len(text) > 5), key=len, reverse=True)
        self.kept = re.compile("|".join([*map(re.escape, within), _MARKS.pattern]))
        self._ids: dict[str, str] = {}

    def headers(self, headers: dict[str, str]) -> dict[str, str]:
        """Scrub headers, keeping their order; those with secrets or machine details get an empty value."""
        scrubbed: dict[str, str] = {}
        for name, value in headers.items():
            low = name.lower()
            if low in _DROPPED_HEADERS:
                continue
            if low in _SECRET_HEADERS or low in _MACHINE_HEADERS:
                scrubbed[name] = ""
            elif low == "user-agent":
                scrubbed[name] = value.split(" ", 1)[0]
            else:
                scrubbed[name] = value if low in _KEPT_HEADERS else self._text(value, "")
        return scrubbed

    def body(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {self._text(name, ""): self.body(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.body(inner, key) for inner in value]
        if isinstance(value, str):
            return self._text(value, key)
        if isinstance(value, int) and not isinstance(value, bool) and value > _MIN_TIMESTAMP:
            return _MIN_TIMESTAMP
        return value

    def _text(self, text: str, key: str) -> str:
        if text in self._own or text.startswith(_SEAL):
            return text
        if text.startswith(("{", "[")):
            try:
                value = json.loads(text)
            except ValueError:
                return self.fill(text)
            tight, plain = ": " not in text, "\\u" not in text
            return json.dumps(
                self.body(value, key), separators=(",", ":") if tight else None, ensure_ascii=not plain
            )
        if key not in PROSE and (key == "$schema" or _WORD.fullmatch(text)):
            return _ID.sub(self._id, text)
        return self.fill(text)

    def _id(self, match: re.Match[str]) -> str:
        """Return the replacement of an ID, in the same format."""
        text = match[0]
        if text not in self._ids:
            number = f"{len(self._ids) + 1:012x}"
            self._ids[text] = f"00000000-0000-4000-8000-{number}" if "-" in text else number.zfill(len(text))
        return self._ids[text]

    def fill(self, text: str) -> str:
        """Replace the words of a text by filler, keeping its length, line breaks, marks and punctuation."""
        at = blake2b(text.encode(), digest_size=2).digest()[0]
        out: list[str] = []
        end = 0
        for kept in self.kept.finditer(text):
            out += (_filler(text[end : kept.start()], at), kept[0])
            end = kept.end()
        return "".join([*out, _filler(text[end:], at)])


def _filler(text: str, at: int) -> str:
    out: list[str] = []
    for char in text:
        if char.isalpha():
            letter = FILLER[at % len(FILLER)]
            out.append(letter.upper() if char.isupper() else letter)
            at += 1
        else:
            out.append("0" if char.isnumeric() else char)
    return "".join(out)


# ---- search for prose that should not be there


def iter_texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value, including keys and strings inside encoded JSON."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from iter_texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from iter_texts(inner)
    elif isinstance(value, str):
        if value.startswith(("{", "[")):
            try:
                yield from iter_texts(json.loads(value))
            except ValueError:
                yield value
        else:
            yield value


def find_foreign_text(value: Any, own: Sequence[str], most: int = 3) -> list[str]:
    """List texts of more than `most` words that are neither in `own` nor filler."""
    kept = Scrubber(own).kept
    foreign: list[str] = []
    for text in iter_texts(value):
        for part in kept.split(text) if text not in own else ():
            letters = "".join(char.lower() for char in part if char.isalpha())
            if len(part.split()) > most and letters not in FILLER * (len(letters) // len(FILLER) + 2):
                foreign.append(part)
    return foreign


def find_surviving_runs(before: Any, after: Any, own: Sequence[str], most: int = 3) -> list[str]:
    """List runs of more than `most` words that occur in both `before` and `after` but not in `own`."""
    ours = set(_runs("\n".join(own), most))
    known = {run for text in iter_texts(before) for run in _runs(text, most)} - ours
    return [run for text in iter_texts(after) for run in _runs(text, most) if run in known]


def _runs(text: str, most: int) -> list[str]:
    words = [" ".join(letter_runs(word)) for word in text.split() if letter_runs(word)]
    return [" | ".join(words[at : at + most + 1]) for at in range(len(words) - most)]


def letter_runs(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())
