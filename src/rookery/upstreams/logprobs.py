"""The logprobs of an answer, as OpenAI-compatible servers write them: nine tenths of its bytes. Pure.

Promises:
- they are read once, also where the caller wants them as they were written: an answer of 500 tokens costs 160 µs
  instead of 260 on two slow cores;
- what is cut out of an answer is the list of its only choice, or nothing is cut out.
"""

from typing import Final, NamedTuple

import msgspec

from rookery.upstreams.format import ReplyFormatError, Tops

_NAMED: Final = "token_id:"
"""How a token is written that is named by its id."""
_NULL: Final = msgspec.Raw(b"null")
_SHORT: Final = 4 << 10
"""Bytes up to which an answer is read in one piece."""
_BEGIN: Final = b'"logprobs":{"content":['
_END: Final = b'"top_logprobs":[]}]'
_HERE: Final = b"[\t\n\t]"
"""What stands for the list that was cut out. No server writes an empty list so."""


class Logprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float


class _Top(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    token: str = ""


class _LogprobTops(msgspec.Struct, frozen=True):
    top_logprobs: list[_Top] = []


class Logprobs(msgspec.Struct, frozen=True):
    content: list[Logprob] | None = None
    token_logprobs: list[float] | None = None


class LogprobsSeen(msgspec.Struct, frozen=True):
    content: msgspec.Raw = msgspec.Raw(b"null")
    token_logprobs: list[float] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


_decode_logprobs = msgspec.json.Decoder(LogprobsSeen | None).decode
_decode_content = msgspec.json.Decoder(list[Logprob] | None).decode
_decode_tops = msgspec.json.Decoder(list[_LogprobTops] | None).decode


class Apart(NamedTuple):
    """An answer in two pieces."""

    rest: bytes
    content: msgspec.Raw
    values: list[float]

    def belongs(self, choices: list[LogprobsSeen | None]) -> bool:
        """Whether these are the logprobs of all choices of the rest."""
        return len(choices) == 1 and (only := choices[0]) is not None and bytes(only.content) == _HERE


def apart(data: bytes) -> Apart | None:
    """The list of logprobs without alternatives, cut out of an answer; None where there is no telling.

    In JSON a quote that no backslash stands before cannot be inside of a text: both marks are keys. Where they are
    keys of something else, either the piece between them is no list of logprobs, or the rest's choice has others.
    """
    if len(data) < _SHORT or (begin := data.find(_BEGIN)) < 0 or (end := data.rfind(_END)) < begin:
        return None
    begin, end = begin + len(_BEGIN) - 1, end + len(_END)
    content = msgspec.Raw(data[begin:end])
    try:
        entries = _decode_content(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    assert entries is not None
    return Apart(data[:begin] + _HERE + data[end:], content, [entry.logprob for entry in entries])


def logprob_values(given: Logprobs) -> list[float] | None:
    if given.content is not None:
        return [entry.logprob for entry in given.content]
    return given.token_logprobs


def read_logprobs(given: msgspec.Raw) -> tuple[list[float] | None, msgspec.Raw | None, tuple[Tops, ...]]:
    """The values, the list as it was written (of a chat), and the alternatives where they are named by id."""
    try:
        return seen_logprobs(_decode_logprobs(given))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReplyFormatError(f"the logprobs of the reply cannot be read: {error}") from None


def seen_logprobs(
    said: LogprobsSeen | None, *, named: bool = True
) -> tuple[list[float] | None, msgspec.Raw | None, tuple[Tops, ...]]:
    """As `read_logprobs`, of what was read so far. `named`: alternatives may be named by id, and are wanted."""
    try:
        if said is None:
            return None, None, ()
        if said.content is not _NULL and said.content != _NULL:
            entries = _decode_content(said.content) or []
            tops = _tops(said.content) if named and _NAMED.encode() in bytes(said.content) else ()
            return [entry.logprob for entry in entries], said.content, tops
        return said.token_logprobs, None, _listed(said.top_logprobs or [])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReplyFormatError(f"the logprobs of the reply cannot be read: {error}") from None


def _tops(content: msgspec.Raw) -> tuple[Tops, ...]:
    entries = _decode_tops(content) or []
    return tuple(
        tuple((int(top.token[len(_NAMED) :]), top.logprob) for top in entry.top_logprobs if is_named(top.token))
        for entry in entries
    )


def _listed(listed: list[dict[str, float] | None]) -> tuple[Tops, ...]:
    if not any(map(is_named, (name for entry in listed[:1] for name in entry or ()))):
        return ()
    return tuple(
        tuple((int(name[len(_NAMED) :]), value) for name, value in (entry or {}).items() if is_named(name))
        for entry in listed
    )


def is_named(token: str) -> bool:
    """Whether a token is named by its id."""
    return token.startswith(_NAMED) and token[len(_NAMED) :].isdecimal()
