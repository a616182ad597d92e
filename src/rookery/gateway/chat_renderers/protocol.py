"""Protocols of chat renderers: messages to prompt token IDs, and sampled token IDs back to a message.

Every renderer guarantees:
- sampled tokens are never re-tokenised: `extend` only adds tokens after them, or returns None;
- token IDs are int32 bytes, as in turns; no method uses the network;
- a renderer can be used from several threads at once; a reply parser belongs to one reply.
"""

from collections.abc import Sequence
from typing import Protocol

from rookery.core import Message, ToolSchema, UsageError
from rookery.upstreams.protocol import Delta


class RenderError(UsageError):
    """The messages cannot be expressed in this chat format; the sender has to change them."""


class ReplyParser(Protocol):
    """Parses one reply while it is sampled. The deltas it returns, joined, are the message it finishes with."""

    def feed(self, sampled: bytes, logprobs: bytes = b"") -> Delta:
        """Parse the next sampled tokens and return what they add to the message.

        Takes microseconds, so it may run on the event loop.
        """
        ...

    def finish(self) -> tuple[Delta, Message]:
        """Return the text that was held back until now, and the complete message. May take milliseconds."""
        ...


class ChatRenderer(Protocol):
    """A chat format with its tokenizer."""

    name: str
    stop_token_ids: tuple[int, ...]
    """Token IDs that end a reply."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], tool_choice: str | None) -> bytes:
        """Return the prompt token IDs of a whole conversation, up to the start of the reply.

        Raises `RenderError`.
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
        """Return the token IDs to append to `sampled` so that `new_messages` follow the reply; None if that cannot
        be done exactly.

        `prompt_tail` holds the last token IDs of the prompt that was sampled from: at least 256, or all of them.
        The cost depends on the new messages, not on the length of the conversation.
        """
        ...

    def parse(
        self, prompt_tail: bytes, sampled: bytes, tools: Sequence[ToolSchema], *, prompt_length: int = 0
    ) -> Message:
        """Parse the sampled tokens into a message. Never raises, whatever the model sampled.

        `prompt_length` makes the IDs of tool calls unique per turn if the prompt tail is the same.
        """
        ...

    def new_reply_parser(
        self, prompt_tail: bytes, tools: Sequence[ToolSchema], *, prompt_length: int = 0
    ) -> ReplyParser:
        """Return a parser for one streamed reply."""
        ...

    def encode(self, text: str) -> bytes:
        """Return the token IDs of plain text. Special tokens written in the text are recognised."""
        ...

    def token_bytes(self, ids: bytes) -> list[bytes]:
        """Return the bytes of each token."""
        ...
