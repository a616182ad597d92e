"""What a client was sent of a streamed answer, in case that it closes the stream before the answer is complete.

Runs in gateway shards, and in runners for calls made in Python. The turn pipeline uses it; nothing here does I/O.

Guarantees:
- a tool call is sent when it is complete, so that the beginning of one never reaches a client as a call;
- a partial turn holds every token that arrived, and says which of them the client can have read.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from rookery.core import Finish, Message, Span, ToolCall, ints
from rookery.trajectories import CutPoint
from rookery.upstreams.protocol import CallDelta, Delta


class HeldCalls:
    """Holds back the pieces of a tool call until the call is complete.

    A call is complete when the next one begins or when the answer has ended. A call without arguments, and all
    after it, wait for the end: only the whole answer says whether it has none.
    """

    def __init__(self) -> None:
        self._open: list[CallDelta] = []
        """The pieces of the call under way."""
        self._waits = False
        self._released = 0
        """How many calls were released."""

    def feed(self, pieces: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
        """The pieces of the calls that these pieces complete."""
        ready: list[CallDelta] = []
        for piece in pieces:
            if self._waits:
                continue
            at = self._open[0].index if self._open else -1
            if piece.index > at:
                if piece.index != at + 1 or (self._open and not any(one.arguments for one in self._open)):
                    self._waits = True
                    continue
                ready += self._open
                self._released = piece.index
                self._open = [piece]
            elif piece.index < at:  # the engine came back to a call that was sent
                ready.append(piece)
            else:
                self._open.append(piece)
        return tuple(ready)

    def rest(self, calls: Sequence[ToolCall]) -> tuple[CallDelta, ...]:
        """The pieces that are left to send when these are all calls of the answer."""
        left: list[CallDelta] = []
        for at in range(self._released, len(calls)):
            call = calls[at]
            own = [one for one in self._open if one.index == at]
            said = ("".join([one.id for one in own]), "".join([one.name for one in own]))
            if (*said, "".join([one.arguments for one in own])) == (call.id, call.name, call.arguments):
                left += own
            else:
                left.append(CallDelta(at, call.id, call.name, call.arguments))
        return tuple(left)


def without_half_call(message: Message, finish: Finish) -> Message:
    """The message without a last tool call that the end of the answer cut in the middle."""
    if finish not in ("length", "content_filter") or not message.tool_calls or _is_json(message.tool_calls[-1]):
        return message
    calls = message.tool_calls[:-1]
    content = message.content if calls or message.content is not None else ""
    return msgspec.structs.replace(message, tool_calls=calls, content=content)


def _is_json(call: ToolCall) -> bool:
    try:
        json.loads(call.arguments)
    except (ValueError, RecursionError):
        return False
    return True


class Sent:
    """The pieces of one streamed answer, as they are sent."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens that arrived, as far as the engine tells; at least one for each piece with text."""
        self.prompt = b""
        self._ids: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._shown = (0, 0, 0)
        self._cuts: list[CutPoint] = []
        self.sampled = 0
        """Tokens whose ids are known."""
        self._versions: list[tuple[int, int]] = []

    def note(self, delta: Delta, version: int) -> None:
        """A piece that is about to be sent. `version` is the policy version, where the piece does not say it."""
        count = len(delta.sampled) // 4
        said = delta.version if delta.version is not None else version
        if count and (not self._versions or self._versions[-1][1] != said):
            self._versions.append((self.sampled, said))
        self.prompt = self.prompt or delta.prompt
        self._ids.append(delta.sampled)
        self._logprobs.append(delta.logprobs)
        self.sampled += count
        told = bool(delta.content or delta.reasoning or delta.tool_calls)
        self.tokens += count or told
        if not told:
            return
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.index < len(self._calls):
                known = self._calls[call.index]
                self._calls[call.index] = ToolCall(
                    known.id, known.name + call.name, known.arguments + call.arguments
                )
            else:
                self._calls.append(ToolCall(call.id, call.name, call.arguments))
        content, reasoning, _ = self._shown
        self._shown = content + len(delta.content), reasoning + len(delta.reasoning), len(self._calls)
        if self._cuts and self._cuts[-1].tokens == self.sampled:
            self._cuts.pop()
        if self.sampled:
            self._cuts.append(CutPoint(*self._shown, self.sampled))

    def message(self) -> Message:
        """What the client was sent."""
        content = "".join(self._content)
        return Message(
            "assistant",
            content if content or not self._calls else None,
            tuple(self._calls),
            reasoning="".join(self._reasoning) or None,
        )

    def turn(self, *, ids: bool) -> dict[str, Any]:
        """The fields of the partial turn that these pieces are; without token data unless `ids`."""
        found: dict[str, Any] = {"response": self.message(), "partial": True, "finish": "abort", "sampled": b""}
        found["sampled_tokens"] = self.tokens
        versions = self._versions
        found["version"] = min((version for _, version in versions), default=0)
        if not ids:
            return found
        sampled, logprobs = b"".join(self._ids), b"".join(self._logprobs)
        found["sampled"] = sampled
        found["logprobs"] = logprobs if len(logprobs) == len(sampled) else b""
        found["cuts"] = ints([number for cut in self._cuts for number in cut])
        if len(versions) > 1:
            ends = [start for start, _ in versions[1:]] + [self.sampled]
            found["spans"] = tuple(
                Span(start, end, version) for (start, version), end in zip(versions, ends, strict=True)
            )
        return found
