"""The embedded policy's own chat format, as a rendering: bytes are tokens (see `upstreams.embedded.chat`).

Promises, beyond those of every rendering:
- it needs no tokenizer and no extra;
- a call's name and arguments are told as they come: what follows its mark is nothing else.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rookery.core import Message, ToolSchema, UsageError, ints
from rookery.gateway.renderings.protocol import Unrenderable
from rookery.upstreams.embedded import chat, streaming
from rookery.upstreams.embedded.streaming import Deltas
from rookery.upstreams.protocol import CallDelta, Delta

if TYPE_CHECKING:
    from rookery.gateway.renderings import RenderingConfig

_BYTES: Final = [bytes([byte]) for byte in range(256)]


def open_embedded(config: "RenderingConfig") -> "Embedded":
    """The entry point `embedded`."""
    if config.tokenizer or config.options or config.tool_parser or config.reasoning_parser:
        raise UsageError("the embedded format has its own tokenizer and parsers and no options: name none")
    return Embedded()


class Embedded:
    """The rendering."""

    name = "embedded"
    stop = (chat.END, *sorted(chat.ENDS - {chat.END}))

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], tool_choice: str | None) -> bytes:
        _check(messages)
        return ints(chat.prompt(messages, tools, tool_choice).ids)

    def extend(
        self,
        tail: bytes,
        sampled: bytes,
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
        tool_choice: str | None,
    ) -> bytes | None:
        del tail
        ids = _ids(sampled)
        if not new or any(message.role == "assistant" for message in new):
            return None
        if any(token in chat.ENDS for token in ids[:-1]) or (ids and ids[-1] in chat.ENDS - {chat.END}):
            return None  # it went on after its end, or began another message: nobody renders that
        _check(new)
        more = [] if ids and ids[-1] == chat.END else [chat.END]
        for message in new:
            more += chat.message_ids(message)
        rest = chat.prompt((), tools, tool_choice).ids  # what a choice of a tool begins comes after the role
        more += rest[rest.index(chat.ASSISTANT) :]
        return ints(more)

    def parse(self, tail: bytes, sampled: bytes, tools: Sequence[ToolSchema], *, at: int = 0) -> Message:
        del tools
        return chat.answer(_ids(sampled), _begun(tail), at=at)

    def reader(self, tail: bytes, tools: Sequence[ToolSchema], *, at: int = 0) -> "EmbeddedReader":
        del tools
        return EmbeddedReader(_begun(tail), at)

    def encode(self, text: str) -> bytes:
        return ints(chat.text_ids(text))

    def spelled(self, ids: bytes) -> list[bytes]:
        names = chat.NAMES
        return [_BYTES[at] if 0 <= at < 256 else names.get(at, "").encode() for at in _ids(ids)]


class EmbeddedReader:
    """Reads one answer of the embedded policy."""

    def __init__(self, begun: str, at: int) -> None:
        self._begun, self._at = begun, at
        self._tokens: list[int] = []
        self._deltas = Deltas(begun=begun, at=at)

    def feed(self, sampled: bytes, logprobs: bytes = b"") -> Delta:
        self._tokens += _ids(sampled)
        told = self._deltas.more(self._tokens, len(self._tokens))
        return Delta(told.text, "", _calls(told), sampled, logprobs)

    def end(self) -> tuple[Delta, Message]:
        told = self._deltas.end(self._tokens, len(self._tokens))
        return Delta(told.text, "", _calls(told)), chat.answer(self._tokens, self._begun, at=self._at)


def _calls(told: streaming.Delta) -> tuple[CallDelta, ...]:
    return tuple(CallDelta(call.index, call.id, call.name, call.arguments) for call in told.calls)


def _check(messages: Sequence[Message]) -> None:
    for message in messages:
        if isinstance(message.content, tuple) and any(part.get("type") != "text" for part in message.content):
            raise Unrenderable(
                f"a {message.role} message holds more than text: the embedded policy reads text only"
            )


def _begun(tail: bytes) -> str:
    """The call that a choice of a tool has begun in the prompt, with its mark; empty where none has."""
    ids = _ids(tail)
    for at in range(len(ids) - 1, -1, -1):
        if ids[at] >= chat.BEGIN:
            name = bytes(ids[at + 1 :]).decode("utf-8", "replace")
            return chat.NAMES[chat.CALL] + name if ids[at] == chat.CALL else ""
    return ""


def _ids(ids: bytes) -> list[int]:
    """Ids as numbers; what is below all of them is as strange as what is above."""
    found = memoryview(ids).cast("i").tolist()
    return [chat.VOCAB if at < 0 else at for at in found] if found and min(found) < 0 else found
