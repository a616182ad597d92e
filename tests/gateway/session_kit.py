"""Session over an upstream that records every call, and checks that the recorded turns match those calls."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rookery.core import Limits, Message, Sampling, ToolCall, Turn, floats, ints
from rookery.gateway import Model, ModelRole, Session
from rookery.gateway.chat_renderers.protocol import ChatRenderer
from rookery.gateway.chat_renderers.threaded import ThreadedRenderer
from rookery.gateway.session import RecordMode
from rookery.trajectories import Recorder, build_segments
from rookery.upstreams.pause import PausableUpstream
from rookery.upstreams.protocol import (
    Delta,
    ModelReply,
    ModelRequest,
    OnDelta,
    OnWait,
    PauseMode,
    Upstream,
    UpstreamInfo,
)
from tests.gateway.scripted_upstream import StubUpstream


class NullWatch:
    """Watch that ignores every event."""

    def stop_clock(self) -> None: ...

    def restart_clock(self) -> None: ...

    def count_wait(self, resource: str, change: int) -> None: ...

    def on_calls_ended(self) -> None: ...


class RecordingUpstream:
    """Upstream that forwards to another one and keeps every request with its reply."""

    def __init__(self, inner: Upstream) -> None:
        self.inner = inner
        self.name, self.accepts_tokens, self.accepts_raw_json = (
            inner.name,
            inner.accepts_tokens,
            inner.accepts_raw_json,
        )
        self.calls: list[tuple[ModelRequest, ModelReply]] = []

    @property
    def version(self) -> int:
        return self.inner.version

    @version.setter
    def version(self, version: int) -> None:
        self.inner.version = version

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        return await self.inner.check(timeout=timeout)

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        return await self.inner.freeze(mode, timeout=timeout)

    async def thaw(self, *, timeout: float) -> None:
        await self.inner.thaw(timeout=timeout)

    async def close(self) -> None:
        await self.inner.close()

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        reply = await self.inner.complete(request, timeout=timeout, on_delta=on_delta, on_wait=on_wait)
        self.calls.append((request, reply))
        return reply


class CountingRenderer:
    """Chat renderer that forwards to another one and counts how often it could not extend a prompt."""

    def __init__(self, inner: ChatRenderer) -> None:
        self._inner = inner
        self.failed_extensions = 0
        self.extend = self._extend

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def _extend(self, *args: object) -> bytes | None:
        added: bytes | None = self._inner.extend(*args)  # type: ignore[arg-type]
        self.failed_extensions += added is None
        return added


class TokenScriptUpstream(StubUpstream):
    """Upstream whose replies are token IDs that a function of the test returns.

    If a request holds messages instead of tokens, it renders them itself, as an inference engine does.
    """

    name, accepts_raw_json, version = "script", False, 3

    def __init__(
        self, answer: Callable[[ModelRequest], list[int]], rendering: ChatRenderer, piece: int = 3
    ) -> None:
        self._answer = answer
        self._rendering = rendering
        self._piece = piece

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        ids = self._answer(request)
        most = request.sampling.max_tokens
        cut = most is not None and len(ids) > most
        ids = ids[:most] if cut else ids
        prompt = request.tokens
        if not prompt:
            messages = [message for message in request.messages if isinstance(message, Message)]
            prompt = self._rendering.render(messages, request.tools.schemas, request.tool_choice)
        chances = [-(token % 97) / 16 for token in ids]
        message = Message("assistant", "")
        if not request.tokens:
            message = self._rendering.parse(
                prompt[-1024:], ints(ids), request.tools.schemas, prompt_length=len(prompt) // 4
            )
        for at in range(0, len(ids), self._piece) if on_delta is not None else ():
            part = slice(at, at + self._piece)
            assert on_delta is not None
            await on_delta(Delta(sampled=ints(ids[part]), logprobs=floats(chances[part])))
        with_tokens = request.want_tokens
        return ModelReply(
            message=message,
            finish="length" if cut else "stop",
            prompt=prompt if with_tokens else b"",
            sampled=ints(ids) if with_tokens else b"",
            logprobs=floats(chances) if with_tokens else b"",
            version=3,
            prompt_tokens=len(prompt) // 4,
            sampled_tokens=len(ids),
            replica="script",
        )


@dataclass
class SessionSetup:
    """A session with its upstream, its renderer and the turns it has recorded."""

    upstream: RecordingUpstream
    pausable: PausableUpstream
    session: Session
    rendering: CountingRenderer | None
    turns: list[Turn] = field(default_factory=list)

    @property
    def policy(self) -> Model:
        return self.session.model("policy")


def open_session(
    upstream: Upstream,
    rendering: ChatRenderer | None = None,
    record: RecordMode = "tokens",
    limits: Limits | None = None,
    seed: int = 1,
    **sampling: object,
) -> SessionSetup:
    recording = RecordingUpstream(upstream)
    pausable = PausableUpstream(recording)
    counting = CountingRenderer(rendering) if rendering is not None else None
    turns: list[Turn] = []
    role = ModelRole(
        name="policy",
        upstream=pausable,
        model="",
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
        record=record,
        rendering=ThreadedRenderer(counting) if counting is not None else None,  # type: ignore[arg-type]
    )
    session = Session(
        "0.0.1", {"policy": role}, limits or Limits(), Recorder("0.0.1", turns.append), NullWatch(), seed
    )
    return SessionSetup(recording, pausable, session, counting, turns)


def full_prompts(turns: list[Turn]) -> dict[int, bytes]:
    """Return the whole prompt of every turn, joined from the turns that it extends."""
    prompts: dict[int, bytes] = {}
    for turn in sorted(turns, key=lambda turn: turn.index):
        before = b""
        if turn.prefix:
            assert turn.parent is not None
            parent = next(each for each in turns if each.index == turn.parent)
            before = prompts[parent.index] + parent.sampled
            assert len(before) == 4 * turn.prefix
        prompts[turn.index] = before + turn.prompt
    return prompts


def check_recording(open_session: SessionSetup) -> None:
    """Check what holds for every session that records tokens: turns and segments match the upstream's calls."""
    turns, calls = open_session.turns, open_session.upstream.calls
    prompts = full_prompts(turns)
    expected = sorted((reply.prompt or request.tokens, reply.sampled, reply.logprobs) for request, reply in calls)
    assert sorted((prompts[turn.index], turn.sampled, turn.logprobs) for turn in turns) == expected
    counts = open_session.session.recorder.counts
    assert counts.turns == len(turns) == counts.roots + counts.extended + counts.drifted + counts.without_tokens
    trained: list[int] = []
    for segment in build_segments(turns):
        n = len(segment.tokens) // 4
        assert (len(segment.mask), len(segment.logprobs)) == (n, 4 * n)
        trained += segment.turns
        for index in segment.turns:
            turn = next(each for each in turns if each.index == index)
            start = len(prompts[index])
            end = start + len(turn.sampled)
            assert segment.tokens[:start] == prompts[index]
            assert segment.tokens[start:end] == turn.sampled
            assert segment.mask[start // 4 : end // 4] == b"\x01" * (len(turn.sampled) // 4)
            assert segment.logprobs[start:end] == turn.logprobs
        assert segment.trained == sum(len(turn.sampled) // 4 for turn in turns if turn.index in segment.turns)
    assert sorted(trained) == sorted(turn.index for turn in turns if turn.sampled)


def check_exact_recording(open_session: SessionSetup) -> None:
    """Check also what holds in `tokens` mode: a prompt starts with the turn it extends unless extending failed."""
    check_recording(open_session)
    counts, rendering = open_session.session.recorder.counts, open_session.rendering
    assert rendering is not None
    assert open_session.session.rerendered == rendering.failed_extensions
    assert counts.drifted <= rendering.failed_extensions
    assert counts.without_tokens == 0
    bare = [turn for turn in open_session.turns if turn.parent is not None and not turn.prefix]
    assert len(bare) <= rendering.failed_extensions
    for request, _ in open_session.upstream.calls:
        assert request.messages == ()


def resend_message(message: Message, *, reasoning: bool, spacing: str) -> Message:
    """Return a reply as clients send it back: optionally without reasoning, with re-encoded JSON arguments."""
    import json

    calls = []
    for call in message.tool_calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            calls.append(call)
            continue
        written = {
            "": call.arguments,
            "tight": json.dumps(arguments, separators=(",", ":")),
            "wide": json.dumps(arguments, indent=1),
            "sorted": json.dumps(arguments, sort_keys=True),
        }[spacing]
        calls.append(ToolCall(call.id, call.name, written))
    return Message(
        "assistant",
        message.content,
        tuple(calls),
        reasoning=message.reasoning if reasoning else None,
    )
