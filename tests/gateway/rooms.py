"""A session over a real or scripted upstream whose every call is noted, and what must hold of its turns."""

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


class Idle:
    """A watch that nobody looks at."""

    def hold(self) -> None: ...

    def release(self) -> None: ...

    def waiting(self, on: str, step: int) -> None: ...


class Noting:
    """An upstream that keeps what went in and came out of another."""

    def __init__(self, inner: Upstream) -> None:
        self.inner = inner
        self.name, self.accepts_tokens, self.accepts_raw_json = (
            inner.name,
            inner.accepts_tokens,
            inner.accepts_raw_json,
        )
        self.noted: list[tuple[ModelRequest, ModelReply]] = []

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
        self.noted.append((request, reply))
        return reply


class Watched:
    """A rendering that counts how often it could not extend."""

    def __init__(self, inner: ChatRenderer) -> None:
        self._inner = inner
        self.refused = 0
        self.extend = self._extend

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def _extend(self, *args: object) -> bytes | None:
        added: bytes | None = self._inner.extend(*args)  # type: ignore[arg-type]
        self.refused += added is None
        return added


class Script:
    """An engine whose answers are ids that a test has written, drawn by the seed of the call.

    With messages in, it renders them as a server does: by its own rendering.
    """

    name, accepts_raw_json, accepts_tokens, version = "script", False, True, 3

    def __init__(
        self, answer: Callable[[ModelRequest], list[int]], rendering: ChatRenderer, piece: int = 3
    ) -> None:
        self._answer = answer
        self._rendering = rendering
        self._piece = piece

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        return UpstreamInfo(url="")

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        return False

    async def thaw(self, *, timeout: float) -> None: ...

    async def close(self) -> None: ...

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
        told = request.want_tokens
        return ModelReply(
            message=message,
            finish="length" if cut else "stop",
            prompt=prompt if told else b"",
            sampled=ints(ids) if told else b"",
            logprobs=floats(chances) if told else b"",
            version=3,
            prompt_tokens=len(prompt) // 4,
            sampled_tokens=len(ids),
            replica="script",
        )


@dataclass
class Room:
    """A session, its turns and its calls."""

    upstream: Noting
    pausable: PausableUpstream
    session: Session
    rendering: Watched | None
    turns: list[Turn] = field(default_factory=list)

    @property
    def policy(self) -> Model:
        return self.session.model("policy")


def room(
    upstream: Upstream,
    rendering: ChatRenderer | None = None,
    record: RecordMode = "tokens",
    limits: Limits | None = None,
    seed: int = 1,
    **sampling: object,
) -> Room:
    noting = Noting(upstream)
    pausable = PausableUpstream(noting)
    watched = Watched(rendering) if rendering is not None else None
    turns: list[Turn] = []
    role = ModelRole(
        name="policy",
        upstream=pausable,
        model="",
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
        record=record,
        rendering=ThreadedRenderer(watched) if watched is not None else None,  # type: ignore[arg-type]
    )
    session = Session("0.0.1", {"policy": role}, limits or Limits(), Recorder("0.0.1", turns.append), Idle(), seed)
    return Room(noting, pausable, session, watched, turns)


def whole(turns: list[Turn]) -> dict[int, bytes]:
    """By turn: all ids of its prompt, put together from those it extends."""
    found: dict[int, bytes] = {}
    for turn in sorted(turns, key=lambda turn: turn.index):
        before = b""
        if turn.prefix:
            assert turn.parent is not None
            parent = next(each for each in turns if each.index == turn.parent)
            before = found[parent.index] + parent.sampled
            assert len(before) == 4 * turn.prefix
        found[turn.index] = before + turn.prompt
    return found


def holds(room: Room) -> None:
    """What must hold of every session that records ids, whatever was said in it."""
    turns, noted = room.turns, room.upstream.noted
    prompts = whole(turns)
    went = sorted((reply.prompt or request.tokens, reply.sampled, reply.logprobs) for request, reply in noted)
    assert sorted((prompts[turn.index], turn.sampled, turn.logprobs) for turn in turns) == went
    counts = room.session.recorder.counts
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


def exact(room: Room) -> None:
    """Beyond that, where we render ourselves: a prompt begins with the turn it extends, wherever that can be."""
    holds(room)
    counts, rendering = room.session.recorder.counts, room.rendering
    assert rendering is not None
    assert room.session.rerendered == rendering.refused
    assert counts.drifted <= rendering.refused
    assert counts.without_tokens == 0
    bare = [turn for turn in room.turns if turn.parent is not None and not turn.prefix]
    assert len(bare) <= rendering.refused
    for request, _ in room.upstream.noted:
        assert request.messages == ()


def as_clients_do(message: Message, *, reasoning: bool, spaced: str) -> Message:
    """An answer as it is sent back: without its reasoning, its calls' JSON written anew."""
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
        }[spaced]
        calls.append(ToolCall(call.id, call.name, written))
    return Message(
        "assistant",
        message.content,
        tuple(calls),
        reasoning=message.reasoning if reasoning else None,
    )
