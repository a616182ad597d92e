"""What a model family's chat format is to us: messages to token ids, and sampled ids back to a message.

Promises, of every rendering:
- sampled ids are never tokenised again: `extend` only ever adds ids after them, or says that it cannot;
- ids are int32 bytes, as in turns; no call touches the network;
- a rendering may be used from several threads at once; only a reader belongs to one answer.
"""

from collections.abc import Sequence
from typing import Protocol

from rookery.core import Message, ToolSchema, UsageError
from rookery.upstreams.protocol import Delta


class Unrenderable(UsageError):  # noqa: N818  (what the messages are)
    """These messages cannot be said in this chat format: whoever sent them can change that, nobody else."""


class Reader(Protocol):
    """Reads one answer while it is sampled. What it told, put together, is the message that it ends with."""

    def feed(self, sampled: bytes, logprobs: bytes = b"") -> Delta:
        """The next ids; what they add to the message. Microseconds: may be called on the event loop."""
        ...

    def end(self) -> tuple[Delta, Message]:
        """What was held back until now, and the whole message. May take milliseconds."""
        ...


class Rendering(Protocol):
    """A chat format with its tokenizer."""

    name: str
    stop: tuple[int, ...]
    """Ids that end an answer."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], tool_choice: str | None) -> bytes:
        """The ids of a whole conversation, ready for the model's answer; raises `Unrenderable`."""
        ...

    def extend(
        self,
        tail: bytes,
        sampled: bytes,
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
        tool_choice: str | None,
    ) -> bytes | None:
        """The ids that follow `sampled` when `new` messages come after it; None where that is not sure.

        `tail` are the last ids of the prompt that was sampled from: at least 256, or all of them.
        The cost is that of the new messages, however long the conversation is.
        """
        ...

    def parse(self, tail: bytes, sampled: bytes, tools: Sequence[ToolSchema], *, at: int = 0) -> Message:
        """The message that sampled ids spell; never raises on what a model may sample.

        `at`, the prompt's length, makes the ids of calls differ by turn where the tail does not."""
        ...

    def reader(self, tail: bytes, tools: Sequence[ToolSchema], *, at: int = 0) -> Reader: ...

    def encode(self, text: str) -> bytes:
        """The ids of a plain text, marks in it included where the vocabulary has them."""
        ...

    def spelled(self, ids: bytes) -> list[bytes]:
        """The bytes that each id stands for."""
        ...
