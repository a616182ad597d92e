"""Takes the words out of requests of other people's programs, and leaves their shape.

Promises:
- no prose that is not ours survives: every letter of it is filler, every digit a nought;
- what a program reads stays: keys, types, order, flags, names of tools, cache hints, schemas, tags, line breaks,
  lengths, and the marks that the gateway looks for;
- ids, keys, paths and what tells of a machine or a person are gone; ids that were equal are equal still;
- equal texts become equal texts, so that a conversation that went on still does.
"""

import json
import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

FILLER: Final = "rookerynestperchfledgewingsoarplumegathertwigs"
"""Letters for all prose, taken in a ring; where a text begins in it is all that is left of its words."""
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
"""Under these keys even one word is prose."""
_WORD: Final = re.compile(r"(?![/~])[^\s/]{0,80}(?:/[^\s/]{1,40})?")
"""What is not prose: one word, no path, and no address of a page."""
_MARKS: Final = re.compile(r"x-anthropic-billing-header:|</?[a-z][a-z0-9_-]*>")
_SEAL: Final = "rk1."
_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{12,}")
_AGE: Final = 10**11
"""From here on a number is a time."""
_SECRET: Final = frozenset({"authorization", "x-api-key", "cookie"})
_GONE: Final = frozenset({"host", "content-length"})
_MACHINE: Final = frozenset({"x-stainless-arch", "x-stainless-os", "x-stainless-runtime-version"})
_TOLD: Final = frozenset(
    {
        "accept", "accept-encoding", "anthropic-beta", "anthropic-dangerous-direct-browser-access",
        "anthropic-version", "connection", "content-encoding", "content-type", "originator", "x-app",
        "x-codex-beta-features", "x-stainless-helper-method", "x-stainless-lang", "x-stainless-package-version",
        "x-stainless-retry-count", "x-stainless-runtime", "x-stainless-timeout",
    }
)  # fmt: skip


class Scrubber:
    """For one conversation. `own` are texts of ours: they stay, alone and within others."""

    def __init__(self, own: Sequence[str] = ()) -> None:
        self._own = frozenset(own)
        within = sorted((text for text in own if len(text) > 5), key=len, reverse=True)
        self._kept = re.compile("|".join([*map(re.escape, within), _MARKS.pattern]))
        self._ids: dict[str, str] = {}

    def headers(self, given: dict[str, str]) -> dict[str, str]:
        """In their order; one that holds a secret, or tells of a machine, has no value."""
        found: dict[str, str] = {}
        for name, value in given.items():
            low = name.lower()
            if low in _GONE:
                continue
            if low in _SECRET or low in _MACHINE:
                found[name] = ""
            elif low == "user-agent":
                found[name] = value.split(" ", 1)[0]
            else:
                found[name] = value if low in _TOLD else self._text(value, "")
        return found

    def body(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {self._text(name, ""): self.body(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.body(inner, key) for inner in value]
        if isinstance(value, str):
            return self._text(value, key)
        if isinstance(value, int) and not isinstance(value, bool) and value > _AGE:
            return _AGE
        return value

    def _text(self, text: str, key: str) -> str:
        if text in self._own or text.startswith(_SEAL):
            return text
        if text.startswith(("{", "[")):
            try:
                found = json.loads(text)
            except ValueError:
                return self.filled(text)
            tight, plain = ": " not in text, "\\u" not in text
            return json.dumps(
                self.body(found, key), separators=(",", ":") if tight else None, ensure_ascii=not plain
            )
        if key not in PROSE and (key == "$schema" or _WORD.fullmatch(text)):
            return _ID.sub(self._id, text)
        return self.filled(text)

    def _id(self, found: re.Match[str]) -> str:
        """The next one that was not given yet, in the same form."""
        text = found[0]
        if text not in self._ids:
            number = f"{len(self._ids) + 1:012x}"
            self._ids[text] = f"00000000-0000-4000-8000-{number}" if "-" in text else number.zfill(len(text))
        return self._ids[text]

    def filled(self, text: str) -> str:
        """As long, with its lines, marks and signs, and with none of its words."""
        at = blake2b(text.encode(), digest_size=2).digest()[0]
        out: list[str] = []
        end = 0
        for kept in self._kept.finditer(text):
            out += (_filler(text[end : kept.start()], at), kept[0])
            end = kept.end()
        return "".join([*out, _filler(text[end:], at)])


def _filler(text: str, at: int) -> str:
    out: list[str] = []
    for sign in text:
        if sign.isalpha():
            letter = FILLER[at % len(FILLER)]
            out.append(letter.upper() if sign.isupper() else letter)
            at += 1
        else:
            out.append("0" if sign.isnumeric() else sign)
    return "".join(out)


# ---- looking for what should not be there


def prose(value: Any) -> Iterator[str]:
    """All texts in it, keys too; what is JSON is looked into."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from prose(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from prose(inner)
    elif isinstance(value, str):
        if value.startswith(("{", "[")):
            try:
                yield from prose(json.loads(value))
            except ValueError:
                yield value
        else:
            yield value


def foreign(value: Any, own: Sequence[str], most: int = 3) -> list[str]:
    """Texts in it of more than `most` words that are neither ours nor filler: one stretch of the ring."""
    kept = Scrubber(own)._kept
    found: list[str] = []
    for text in prose(value):
        for part in kept.split(text) if text not in own else ():
            said = "".join(sign.lower() for sign in part if sign.isalpha())
            if len(part.split()) > most and said not in FILLER * (len(said) // len(FILLER) + 2):
                found.append(part)
    return found


def survivors(before: Any, after: Any, own: Sequence[str], most: int = 3) -> list[str]:
    """Runs of more than `most` words of `before` that `after` has as well, but for ours."""
    ours = set(_runs("\n".join(own), most))
    known = {run for text in prose(before) for run in _runs(text, most)} - ours
    return [run for text in prose(after) for run in _runs(text, most) if run in known]


def _runs(text: str, most: int) -> list[str]:
    said = [" ".join(letters(word)) for word in text.split() if letters(word)]
    return [" | ".join(said[at : at + most + 1]) for at in range(len(said) - most)]


def letters(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())
