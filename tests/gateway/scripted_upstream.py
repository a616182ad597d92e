"""Upstream whose replies a test scripts and steps through, and a chat format with one token per character."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from hypothesis import HealthCheck, settings

from rookery.core import Finish, Message, ToolCall, ToolSchema, floats, ints
from rookery.upstreams.protocol import CallDelta, Delta, ModelReply, ModelRequest, OnDelta, Upstream, UpstreamInfo

WAIT: Final = 60.0
"""Timeout in seconds for every wait; a test that reaches it has failed."""
END: Final = "\x03"
ANY_SPEED: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Hypothesis settings under which a slow machine is not a failure."""


def char_ids(text: str) -> bytes:
    return ints([ord(letter) for letter in text])


def render_chat(conversation: Sequence[Message | msgspec.Raw]) -> str:
    """Render a conversation up to the start of the reply."""
    text = ""
    for message in conversation:
        plain = msgspec.json.decode(message) if isinstance(message, msgspec.Raw) else msgspec.to_builtins(message)
        text += f"\x01{plain['role']}\x02{plain.get('content') or ''}{END}"
    return text + "\x01assistant\x02"


def to_deltas(text: str, size: int = 1) -> tuple[Delta, ...]:
    """Split a reply into deltas of `size` characters."""
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return tuple(
        Delta(content=part, sampled=char_ids(part), logprobs=floats([-0.5] * len(part))) for part in parts
    )


class CharRenderer:
    """Asynchronous chat renderer whose tokens are single characters."""

    name = "letters"
    stop_token_ids = (ord(END),)

    async def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], choice: str | None) -> bytes:
        return char_ids(render_chat(messages))

    async def extend(
        self, tail: bytes, sampled: bytes, new: Sequence[Message], tools: Sequence[ToolSchema], choice: str | None
    ) -> bytes | None:
        return char_ids(render_chat(new)) if sampled.endswith(char_ids(END)) else None

    @property
    def renderer(self) -> "CharRenderer":
        """The renderer itself: it needs no thread."""
        return self

    async def parse(
        self, tail: bytes, sampled: bytes, tools: Sequence[ToolSchema], prompt_length: int = 0
    ) -> Message:
        return Message("assistant", _text(sampled))

    def new_reply_parser(
        self, tail: bytes, tools: Sequence[ToolSchema], prompt_length: int = 0
    ) -> "CharReplyParser":
        return CharReplyParser()

    async def finish(self, parser: "CharReplyParser", tokens: int = 0) -> tuple[Delta, Message]:
        return Delta(), Message("assistant", parser.text)

    def token_bytes(self, ids: bytes) -> list[bytes]:
        return [chr(token).encode() for token in memoryview(ids).cast("i").tolist()]

    def close(self) -> None: ...


class CharReplyParser:
    def __init__(self) -> None:
        self.text = ""

    def feed(self, sampled: bytes, logprobs: bytes = b"") -> Delta:
        text = _text(sampled)
        self.text += text
        return Delta(content=text)


def _text(sampled: bytes) -> str:
    return "".join(map(chr, memoryview(sampled).cast("i").tolist())).removesuffix(END) if sampled else ""


# ---- scripted replies


@dataclass
class ScriptedReply:
    """One scripted reply: its deltas, for streamed calls, and how it ends."""

    text: str = "ok"
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    finish: Finish = "stop"
    size: int = 1
    """Characters per delta."""
    deltas: tuple[Delta, ...] | None = None
    """Replaces the deltas that are made from the text."""
    error: BaseException | None = None
    """Raised after `after` deltas."""
    after: int = 1 << 30
    stepwise: bool = False
    """Each step waits until the test calls `advance`."""
    reply_fields: dict[str, Any] = field(default_factory=dict)
    """Overrides fields of the `ModelReply`."""

    def stream_deltas(self) -> tuple[Delta, ...]:
        if self.deltas is not None:
            return self.deltas
        deltas = [Delta(reasoning=self.reasoning)] if self.reasoning else []
        deltas += to_deltas(self.text, self.size)
        for at, call in enumerate(self.calls):
            deltas.append(Delta(tool_calls=(CallDelta(at, call.id, call.name),)))
            deltas += [Delta(tool_calls=(CallDelta(at, arguments=letter),)) for letter in call.arguments]
        deltas.append(Delta(sampled=char_ids(END), logprobs=floats([-0.5])))
        return tuple(deltas)

    def model_reply(self, request: ModelRequest) -> ModelReply:
        prompt = request.tokens or char_ids(render_chat(request.messages))
        sampled = char_ids(self.text + END)
        n = len(self.text) + 1
        tops: list[tuple[tuple[int, float], ...]] = []
        if request.top_logprobs:
            tops = [tuple((ord("a") + at, -1.0 - at) for at in range(request.top_logprobs))] * n
        return ModelReply(
            **{
                "message": Message("assistant", self.text, self.calls, reasoning=self.reasoning),
                "finish": "tool_calls" if self.calls else self.finish,
                "prompt": prompt,
                "sampled": sampled,
                "logprobs": floats([-0.5] * n),
                "version": 7,
                "prompt_tokens": len(prompt) // 4,
                "sampled_tokens": n,
                "replica": "one",
                "tops": tuple(tops),
            }
            | self.reply_fields
        )


class UpstreamCall:
    """One call that the upstream received."""

    def __init__(self, request: ModelRequest, reply: ScriptedReply) -> None:
        self.request = request
        self.reply = reply
        self.sent = 0
        """Number of deltas that the caller has accepted."""
        self.cancelled = False
        self.ended = asyncio.Event()
        self._steps: asyncio.Semaphore = asyncio.Semaphore(0)

    def advance(self, steps: int = 1) -> None:
        """Let the reply continue by `steps` deltas; its end counts as one step."""
        for _ in range(steps):
            self._steps.release()

    def finish(self) -> None:
        self.advance(1 << 10)

    async def step(self) -> None:
        if self.reply.stepwise:
            await self._steps.acquire()

    async def wait_until_ended(self) -> None:
        async with asyncio.timeout(WAIT):
            await self.ended.wait()


class StubUpstream(Upstream):
    """Base for upstreams of tests: everything but `complete` does nothing."""

    name = "stub"
    accepts_tokens = True
    accepts_raw_json = True
    version = 0

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        return UpstreamInfo(url="")


class ScriptedUpstream(StubUpstream):
    """Upstream that returns its scripted replies in order, then its default reply."""

    name = "scripted"

    def __init__(self, default: ScriptedReply | str = "ok") -> None:
        self.default = ScriptedReply(default) if isinstance(default, str) else default
        self.calls: list[UpstreamCall] = []
        self.closed = False
        self._script: deque[ScriptedReply] = deque()
        self._changed = asyncio.Condition()

    def then(self, *replies: ScriptedReply) -> None:
        self._script.extend(replies)

    async def wait_for_call(self, count: int = 1) -> UpstreamCall:
        """Wait for the call with this number, counted from 1, and return it."""
        async with asyncio.timeout(WAIT), self._changed:
            await self._changed.wait_for(lambda: len(self.calls) >= count)
        return self.calls[count - 1]

    async def complete(
        self, request: ModelRequest, *, timeout: float, on_delta: OnDelta | None = None, **options: Any
    ) -> ModelReply:
        model_call = UpstreamCall(request, self._script.popleft() if self._script else self.default)
        self.calls.append(model_call)
        async with self._changed:
            self._changed.notify_all()
        reply = model_call.reply
        try:
            for delta in reply.stream_deltas()[: reply.after]:
                await model_call.step()
                if on_delta is not None:
                    await on_delta(delta)
                model_call.sent += 1
            await model_call.step()
            if reply.error is not None:
                raise reply.error
            return reply.model_reply(request)
        except asyncio.CancelledError:
            model_call.cancelled = True
            raise
        finally:
            model_call.ended.set()

    async def close(self) -> None:
        self.closed = True
