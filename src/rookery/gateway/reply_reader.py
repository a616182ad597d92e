"""Read a model's reply while it is sampled: text, tool calls and stop strings.

Runs in gateway shards, and in runners for calls made in Python. Used by the turn pipeline; does no I/O of its own.

Guarantees:
- the deltas (parts of a streamed reply) that reach the client, joined, are the beginning of the recorded message;
- the text of a reply ends before the first complete stop string. No part of that string is sent, and text is held
  back only while it may be the beginning of a stop string;
- a tool call is sent when it is complete, so that a client never receives half a call;
- a partial turn, recorded if the client closes the stream, has every token that arrived, and which of them belong
  to text that was sent to the client.
"""

import codecs
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core import Finish, Message, Span, ToolCall, UpstreamError, ints
from rookery.trajectories import CutPoint
from rookery.upstreams.protocol import CallDelta, Delta, ModelReply, ModelRequest, OnDelta

if TYPE_CHECKING:
    from rookery.gateway.chat_renderers.protocol import ChatRenderer, ReplyParser
    from rookery.gateway.chat_renderers.threaded import ThreadedRenderer
    from rookery.gateway.session import ModelRole

PROMPT_TAIL = 256
"""Number of tokens at the end of the prompt that a chat renderer needs to parse a reply or to append messages to
it."""


class StreamedReply:
    """Converts the deltas of one streamed reply, and passes each one to the caller.

    If the gateway renders prompts itself, it also parses the sampled tokens into text, reasoning and tool calls.
    """

    def __init__(self, role: "ModelRole", request: ModelRequest, prompt: bytes, on_delta: OnDelta) -> None:
        rendering, stops = role.rendering, request.sampling.stop
        self.stops = StopStringFilter(stops) if stops and rendering is not None else None
        self.parser: ReplyParser | None = None
        """Parses the reply to a prompt that the gateway rendered; otherwise None."""
        self.decoder: TextDecoder | None = None
        """Decodes the reply to a prompt of token IDs that the caller passed; otherwise None."""
        if rendering is not None and request.tokens:
            self.decoder = TextDecoder(rendering.renderer)
        elif rendering is not None and prompt:
            self.parser = rendering.renderer.new_reply_parser(
                prompt[-4 * PROMPT_TAIL :], request.tools.schemas, prompt_length=len(prompt) // 4
            )
        self.calls = ToolCallBuffer()
        self.received = PartialReply()
        self.send = on_delta
        self._upstream = role.upstream

    async def add(self, delta: Delta) -> None:
        """Process the next delta of the upstream, and pass on what the caller can get now."""
        if self.parser is not None:
            parsed = self.parser.feed(delta.sampled, delta.logprobs)
            delta = msgspec.structs.replace(
                delta,
                content=self._apply_stops(parsed.content),
                reasoning=parsed.reasoning,
                tool_calls=parsed.tool_calls,
            )
        elif self.decoder is not None:
            text = self._apply_stops(self.decoder.feed(delta.sampled))
            delta = msgspec.structs.replace(delta, content=text, reasoning="", tool_calls=())
        if delta.tool_calls:
            delta = msgspec.structs.replace(delta, tool_calls=self.calls.feed(delta.tool_calls))
        self.received.add(delta, self._upstream.version)
        await self.send(delta)

    def _apply_stops(self, text: str) -> str:
        return text if self.stops is None else self.stops.feed(text)


async def read_reply(
    role: "ModelRole",
    request: ModelRequest,
    prompt: bytes,
    reply: ModelReply,
    stream: StreamedReply | None,
    *,
    over_http: bool,
) -> tuple[Message, Finish]:
    """Return the message of a complete reply and its finish reason.

    If the reply was streamed, first sends the text and tool calls that `stream` held back. `prompt` are the token
    IDs of the prompt if they are known. Raises `UpstreamError` if the inference engine aborted the reply.
    """
    message, finish = reply.message, reply.finish
    if finish == "abort":
        raise UpstreamError(f"the inference engine at {reply.replica} aborted the reply", cause="upstream.error")
    rendering = role.rendering
    if rendering is not None and request.tokens:
        if reply.sampled:
            message = await _read_text(rendering.renderer, request, reply, stream)
    elif rendering is not None and prompt:
        message = await _parse(rendering, request, prompt, reply, stream)
        if message.tool_calls and finish == "stop":
            finish = "tool_calls"
    if over_http:  # an environment sees the finish reason, and decides for itself
        message = drop_incomplete_call(message, finish)
    if stream is not None and (calls := stream.calls.flush(message.tool_calls)):
        await stream.send(Delta(tool_calls=calls))
    return message, finish


async def _parse(
    rendering: "ThreadedRenderer",
    request: ModelRequest,
    prompt: bytes,
    reply: ModelReply,
    stream: StreamedReply | None,
) -> Message:
    """Parse the sampled tokens of a reply to a prompt that the gateway rendered."""
    if stream is not None and stream.parser is not None:
        last, message = await rendering.finish(stream.parser, len(reply.sampled) // 4)
        if stream.stops is not None:
            last = msgspec.structs.replace(last, content=stream.stops.finish(last.content))
        if last.content or last.reasoning:
            await stream.send(msgspec.structs.replace(last, tool_calls=()))
    else:
        message = await rendering.parse(
            prompt[-4 * PROMPT_TAIL :], reply.sampled, request.tools.schemas, prompt_length=len(prompt) // 4
        )
    return StopStringFilter(request.sampling.stop).cut(message) if request.sampling.stop else message


async def _read_text(
    renderer: "ChatRenderer", request: ModelRequest, reply: ModelReply, stream: StreamedReply | None
) -> Message:
    """Return the reply to a prompt of token IDs.

    It is plain text: tool calls and reasoning in it are not parsed.
    """
    if stream is not None and stream.decoder is not None:
        last = stream.decoder.finish()
        if stream.stops is not None:
            last = stream.stops.finish(last)
        if last:
            await stream.send(Delta(content=last))
    message = Message("assistant", TextDecoder(renderer).decode(reply.sampled))
    return StopStringFilter(request.sampling.stop).cut(message) if request.sampling.stop else message


class TextDecoder:
    """Decodes sampled token IDs to text incrementally, leaving out the stop tokens."""

    def __init__(self, renderer: "ChatRenderer") -> None:
        self.renderer = renderer
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, sampled: bytes) -> str:
        if not sampled:
            return ""
        ids, ends = memoryview(sampled).cast("i").tolist(), self.renderer.stop_token_ids
        pieces = self.renderer.token_bytes(sampled)
        return self._decode(b"".join(piece for token, piece in zip(ids, pieces, strict=True) if token not in ends))

    def finish(self) -> str:
        return self._decode(b"", True)

    def decode(self, sampled: bytes) -> str:
        return self.feed(sampled) + self.finish()


class StopStringFilter:
    """Cuts the text of one reply, which may arrive in parts, before its first stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._buffer = ""
        self._stopped = False

    def feed(self, text: str) -> str:
        """Add the next part of the text, and return the text that can be sent now.

        The end of the text is held back while it may be the beginning of a stop string.
        """
        if self._stopped:
            return ""
        self._buffer += text
        if (at := self._find(self._buffer)) >= 0:
            ready, self._buffer, self._stopped = self._buffer[:at], "", True
            return ready
        end = len(self._buffer) - self._count_held_back()
        ready, self._buffer = self._buffer[:end], self._buffer[end:]
        return ready

    def finish(self, text: str) -> str:
        """Add the last part of the text, and return all text that was not sent yet."""
        rest = self.feed(text)
        return rest if self._stopped else rest + self._buffer

    def cut(self, message: Message) -> Message:
        """Return a complete message with its text cut before the first stop string."""
        if not isinstance(message.content, str) or (at := self._find(message.content)) < 0:
            return message
        return msgspec.structs.replace(message, content=message.content[:at])

    def _find(self, text: str) -> int:
        """Return the start of the stop string that ends first in the text; -1 if the text contains none."""
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(matches)[1] if matches else -1

    def _count_held_back(self) -> int:
        """Return how many characters at the end of the buffer may be the beginning of a stop string."""
        longest = min(len(self._buffer), max((len(stop) for stop in self._stops), default=1) - 1)
        for size in range(longest, 0, -1):
            end = self._buffer[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0


class ToolCallBuffer(msgspec.Struct):
    """Holds back the deltas of a tool call until the call is complete.

    A call is complete when the next call begins or when the reply has ended. A call without arguments, and all
    calls after it, are held back until the reply has ended, because only then it is known that no arguments
    follow.
    """

    _current: list[CallDelta] = []
    """The deltas of the call that is being sampled."""
    _deferred: bool = False
    _released: int = 0
    """Number of complete calls whose deltas were returned for sending."""

    def feed(self, deltas: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
        """Add deltas, and return the deltas of those calls that are complete now."""
        ready: list[CallDelta] = []
        for delta in deltas:
            if self._deferred:
                continue
            at = self._current[0].index if self._current else -1
            if delta.index > at:
                if delta.index != at + 1 or (self._current and not any(one.arguments for one in self._current)):
                    self._deferred = True
                    continue
                ready += self._current
                self._released = delta.index
                self._current = [delta]
            elif delta.index < at:  # the inference engine continues a call that was already sent
                ready.append(delta)
            else:
                self._current.append(delta)
        return tuple(ready)

    def flush(self, calls: Sequence[ToolCall]) -> tuple[CallDelta, ...]:
        """Return the deltas that are still to be sent at the end of a reply. `calls` are all its tool calls."""
        left: list[CallDelta] = []
        for at in range(self._released, len(calls)):
            call = calls[at]
            own = [delta for delta in self._current if delta.index == at]
            joined = tuple("".join(getattr(delta, name) for delta in own) for name in ("id", "name", "arguments"))
            if joined == (call.id, call.name, call.arguments):
                left += own
            else:
                left.append(CallDelta(at, call.id, call.name, call.arguments))
        return tuple(left)


def drop_incomplete_call(message: Message, finish: Finish) -> Message:
    """Return the message without its last tool call if that is incomplete.

    A call is incomplete if the reply ended at a limit (`length`, `content_filter`) and its arguments are not JSON.
    """
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


class PartialReply(msgspec.Struct):
    """Collects the deltas sent to a client.

    If the client closes the stream, a partial turn is recorded from them.
    """

    tokens: int = 0
    """Number of tokens that arrived; a delta with text but without token IDs counts as one."""
    sampled: int = 0
    """Number of tokens whose IDs are known."""
    prompt: bytes = b""
    _ids: list[bytes] = []
    _logprobs: list[bytes] = []
    _content: list[str] = []
    _reasoning: list[str] = []
    _calls: list[ToolCall] = []
    _lengths: tuple[int, int, int] = (0, 0, 0)
    """Characters of content, characters of reasoning and number of tool calls so far."""
    _cuts: list[CutPoint] = []
    _versions: list[tuple[int, int]] = []
    """One entry per change of the policy version: the index of the first token sampled with it, and the
    version."""

    def add(self, delta: Delta, version: int) -> None:
        """Add a delta that is about to be sent.

        `version` is the policy version to assume if the delta names none.
        """
        count = len(delta.sampled) // 4
        version = delta.version if delta.version is not None else version
        if count and (not self._versions or self._versions[-1][1] != version):
            self._versions.append((self.sampled, version))
        self.prompt = self.prompt or delta.prompt
        self._ids.append(delta.sampled)
        self._logprobs.append(delta.logprobs)
        self.sampled += count
        visible = bool(delta.content or delta.reasoning or delta.tool_calls)
        self.tokens += count or visible
        if not visible:
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
        content, reasoning, _ = self._lengths
        self._lengths = content + len(delta.content), reasoning + len(delta.reasoning), len(self._calls)
        if self._cuts and self._cuts[-1].tokens == self.sampled:
            self._cuts.pop()
        if self.sampled:
            self._cuts.append(CutPoint(*self._lengths, self.sampled))

    def message(self) -> Message:
        """Return the part of the message that was sent to the client."""
        content = "".join(self._content)
        return Message(
            "assistant",
            content if content or not self._calls else None,
            tuple(self._calls),
            reasoning="".join(self._reasoning) or None,
        )

    def turn_fields(self, *, with_tokens: bool) -> dict[str, Any]:
        """Return the fields of the partial turn to record.

        Token IDs and logprobs are included only if `with_tokens`.
        """
        versions = self._versions
        fields: dict[str, Any] = {
            "response": self.message(),
            "partial": True,
            "finish": "abort",
            "sampled": b"",
            "sampled_tokens": self.tokens,
            "version": min((version for _, version in versions), default=0),
        }
        if not with_tokens:
            return fields
        sampled, logprobs = b"".join(self._ids), b"".join(self._logprobs)
        fields["sampled"] = sampled
        fields["logprobs"] = logprobs if len(logprobs) == len(sampled) else b""
        fields["cuts"] = ints([number for cut in self._cuts for number in cut])
        if len(versions) > 1:
            ends = [start for start, _ in versions[1:]] + [self.sampled]
            fields["spans"] = tuple(
                Span(start, end, version) for (start, version), end in zip(versions, ends, strict=True)
            )
        return fields
