"""Chat renderer for the embedded policy, Rookery's own small model, whose tokens are bytes and a few markers.

The chat format is defined in `upstreams.embedded.chat`. This renderer needs no tokenizer and no optional
dependency. It streams names and arguments of tool calls as they are sampled.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rookery.core import Message, ToolSchema, UsageError, ints
from rookery.gateway.chat_renderers.protocol import RenderError
from rookery.upstreams.embedded import chat, streaming
from rookery.upstreams.embedded.streaming import DeltaDecoder
from rookery.upstreams.protocol import CallDelta, Delta

if TYPE_CHECKING:
    from rookery.gateway.chat_renderers import RendererConfig

_BYTES: Final = [bytes([byte]) for byte in range(256)]


def open_embedded_renderer(config: "RendererConfig") -> "EmbeddedRenderer":
    """Open the chat renderer of the embedded policy. This is the entry point `embedded`.

    Raises `UsageError` if a tokenizer, parser or option is configured.
    """
    if config.tokenizer or config.options or config.tool_parser or config.reasoning_parser:
        raise UsageError(
            "the embedded policy has its own tokenizer and parsers: remove the tokenizer, parser or option"
        )
    return EmbeddedRenderer()


class EmbeddedRenderer:
    """Chat renderer for the embedded policy. Implements `ChatRenderer`."""

    name = "embedded"
    stop_token_ids = (chat.END, *sorted(chat.ENDS - {chat.END}))

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], tool_choice: str | None) -> bytes:
        _check_text_only(messages)
        return ints(chat.prompt(messages, tools, tool_choice).ids)

    def extend(
        self,
        prompt_tail: bytes,
        sampled: bytes,
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        tool_choice: str | None,
    ) -> bytes | None:
        del prompt_tail
        ids = _unpack_ids(sampled)
        if not new_messages or any(message.role == "assistant" for message in new_messages):
            return None
        if any(token in chat.ENDS for token in ids[:-1]) or (ids and ids[-1] in chat.ENDS - {chat.END}):
            return None  # the model sampled past the end of its message: the format cannot express that
        _check_text_only(new_messages)
        added_ids = [] if ids and ids[-1] == chat.END else [chat.END]
        for message in new_messages:
            added_ids += chat.message_ids(message)
        rest = chat.prompt((), tools, tool_choice).ids  # a forced tool call starts after the role token
        added_ids += rest[rest.index(chat.ASSISTANT) :]
        return ints(added_ids)

    def parse(
        self, prompt_tail: bytes, sampled: bytes, tools: Sequence[ToolSchema], *, prompt_length: int = 0
    ) -> Message:
        del tools
        return chat.answer(_unpack_ids(sampled), _get_started_call(prompt_tail), at=prompt_length)

    def new_reply_parser(
        self, prompt_tail: bytes, tools: Sequence[ToolSchema], *, prompt_length: int = 0
    ) -> "EmbeddedReplyParser":
        del tools
        return EmbeddedReplyParser(_get_started_call(prompt_tail), prompt_length)

    def encode(self, text: str) -> bytes:
        return ints(chat.text_ids(text))

    def token_bytes(self, ids: bytes) -> list[bytes]:
        names = chat.NAMES
        return [_BYTES[at] if 0 <= at < 256 else names.get(at, "").encode() for at in _unpack_ids(ids)]


class EmbeddedReplyParser:
    """Parses one reply of the embedded policy while it is sampled. Implements `ReplyParser`."""

    def __init__(self, started_call: str, prompt_length: int) -> None:
        self._started_call, self._prompt_length = started_call, prompt_length
        self._tokens: list[int] = []
        self._stream = DeltaDecoder(prefix=started_call, prompt_length=prompt_length)

    def feed(self, sampled: bytes, logprobs: bytes = b"") -> Delta:
        self._tokens += _unpack_ids(sampled)
        delta = self._stream.feed(self._tokens, len(self._tokens))
        return Delta(delta.text, "", _convert_calls(delta), sampled, logprobs)

    def finish(self) -> tuple[Delta, Message]:
        delta = self._stream.finish(self._tokens, len(self._tokens))
        return Delta(delta.text, "", _convert_calls(delta)), chat.answer(
            self._tokens, self._started_call, at=self._prompt_length
        )


def _convert_calls(delta: streaming.DecodedDelta) -> tuple[CallDelta, ...]:
    return tuple(CallDelta(call.index, call.id, call.name, call.arguments) for call in delta.calls)


def _check_text_only(messages: Sequence[Message]) -> None:
    for message in messages:
        if isinstance(message.content, tuple) and any(part.get("type") != "text" for part in message.content):
            raise RenderError(
                f"a {message.role} message has content other than text: the embedded policy supports text only"
            )


def _get_started_call(prompt_tail: bytes) -> str:
    """Return the beginning of a tool call at the end of the prompt, or an empty string if there is none.

    If a request forces a tool call, the rendered prompt ends with the beginning of that call, so that the model
    has to continue it.
    """
    ids = _unpack_ids(prompt_tail)
    for at in range(len(ids) - 1, -1, -1):
        if ids[at] >= chat.BEGIN:
            name = bytes(ids[at + 1 :]).decode("utf-8", "replace")
            return chat.NAMES[chat.CALL] + name if ids[at] == chat.CALL else ""
    return ""


def _unpack_ids(ids: bytes) -> list[int]:
    """Unpack token IDs from native 32-bit integers.

    Negative IDs, which are invalid, are replaced by `chat.VOCAB`, the first ID outside the vocabulary.
    """
    found = memoryview(ids).cast("i").tolist()
    return [chat.VOCAB if at < 0 else at for at in found] if found and min(found) < 0 else found
