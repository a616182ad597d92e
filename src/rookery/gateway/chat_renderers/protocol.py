"""Protocols of chat renderers, which convert messages to prompt token IDs and sampled token IDs to a message.

Every renderer guarantees:
- sampled tokens are never tokenised again: `extend` only adds tokens after them, or returns None;
- token IDs are bytes of int32 numbers, as in recorded turns; no method uses the network;
- a renderer can be used from several threads at once; a reply parser is used for one reply only.
"""

from collections.abc import Sequence
from typing import Protocol

from rookery.core import Message, ToolSchema, UsageError
from rookery.upstreams.protocol import Delta


class RenderError(UsageError):
    """The messages cannot be expressed in this chat format; the sender has to change them."""


class ReplyParser(Protocol):
    """Parses one reply while it is sampled.

    All returned deltas, joined, are the message that `finish` returns.
    """

    def feed(self, sampled: bytes, logprobs: bytes = b"") -> Delta:
        """Parse the next sampled tokens and return what they add to the message.

        Takes microseconds, so it may run on the event loop.
        """
        ...

    def finish(self) -> tuple[Delta, Message]:
        """Return what was not returned by `feed` as a last delta, and the complete message.

        May take milliseconds.
        """
        ...


class ChatRenderer(Protocol):
    """A chat format with its tokenizer.

    It converts messages to prompt token IDs, and sampled token IDs to a message.
    """

    name: str
    stop_token_ids: tuple[int, ...]
    """Token IDs that end a reply."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], tool_choice: str | None) -> bytes:
        """Return the prompt token IDs of a whole conversation, up to the start of the reply.

        Raises `RenderError` if the chat format cannot express the messages.
        """
        ...

    def extend(
        self,
        prompt_tail: bytes,
        sampled: bytes,
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        tool_choice: str | None,
    ) -> bytes | None:
        """Return the token IDs to append to a reply so that `new_messages` follow it in the next prompt.

        Returns None if that cannot be done exactly; then the whole conversation has to be rendered.

        `prompt_tail` holds the last token IDs of the prompt that was sampled from: at least 256, or all of them.
        The cost depends on the new messages, not on the length of the conversation.
        """
        ...

    def parse(
        self, prompt_tail: bytes, sampled: bytes, tools: Sequence[ToolSchema], *, prompt_length: int = 0
    ) -> Message:
        """Parse the sampled tokens into a message. Never raises, whatever the model sampled.

        `prompt_tail` holds the last token IDs of the prompt, as for `extend`. `prompt_length`, the number of
        prompt tokens, makes the IDs of tool calls differ between turns with the same prompt tail.
        """
        ...

    def new_reply_parser(
        self, prompt_tail: bytes, tools: Sequence[ToolSchema], *, prompt_length: int = 0
    ) -> ReplyParser:
        """Return a parser for one streamed reply. The arguments are those of `parse`."""
        ...

    def encode(self, text: str) -> bytes:
        """Return the token IDs of a text. The names of special tokens in the text become those tokens."""
        ...

    def token_bytes(self, ids: bytes) -> list[bytes]:
        """Return the bytes of text that each token stands for."""
        ...
