"""The turn pipeline over real engines: embedded, and strict stand-ins of vLLM and SGLang."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rookery import Engine
from rookery.core import Limits, Message, Sampling, ToolSchema, Truncation, UpstreamError, UsageError, ints
from rookery.gateway import ModelReply
from rookery.gateway.chat_renderers.embedded_renderer import EmbeddedRenderer
from rookery.gateway.config import GatewayConfig, choose_rendering, resolved_rendering
from rookery.gateway.shards import Gateway
from rookery.trajectories import build_segments
from rookery.upstreams import UpstreamConfig, open_upstream
from rookery.upstreams.embedded.upstream import builtin
from rookery.upstreams.protocol import Delta, ModelRequest
from tests.engine_standins import StandinServer, small_weights, standin
from tests.gateway.rooms import Room, exact, holds, room, whole
from tests.upstreams.embedded_reference import logprobs

KINDS = ("embedded", "vllm", "sglang")
LONGER = Sampling(seed=0, max_tokens=12, extra={"ignore_eos": True})
LONG = 970
"""Characters that are rendered in a thread, and fit."""
ADD = ToolSchema("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})


class Place:
    """A room, and the stand-in behind it where there is one."""

    def __init__(self, made: Room, server: StandinServer | None) -> None:
        self.room = made
        self.server = server


@asynccontextmanager
async def place(kind: str, weights: str | None = "small", **options: Any) -> AsyncIterator[Place]:
    """With weights that come along where `weights` is None: these end their answers as they should."""
    async with AsyncExitStack() as stack:
        server = None
        url = f"embedded:{small_weights()}" if weights else "embedded"
        if kind != "embedded":
            server = await stack.enter_async_context(standin(kind, weights=weights))  # type: ignore[arg-type]
            url = server.root
        upstream = open_upstream(UpstreamConfig(kind=kind, urls=(url,)))
        made = room(upstream, **{"rendering": EmbeddedRenderer(), "max_tokens": 24, "seed": 5, **options})
        stack.push_async_callback(made.upstream.close)
        yield Place(made, server)


@pytest.fixture(params=KINDS)
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with place(request.param) as found:
        yield found


class Told:
    """What a listener heard; breaks at a piece where it is told to."""

    def __init__(self, breaks: int | None = None) -> None:
        self.deltas: list[Delta] = []
        self._breaks = breaks

    async def __call__(self, delta: Delta) -> None:
        if len(self.deltas) == self._breaks:
            raise ConnectionResetError("the client went away")
        self.deltas.append(delta)

    def all(self, name: str) -> Any:
        parts = [getattr(delta, name) for delta in self.deltas]
        return b"".join(parts) if name in ("sampled", "logprobs") else "".join(parts)


async def conversation(made: Room, streams: bool = False) -> list[ModelReply]:
    """Three turns, a branch of the second, and the first asked twice at once."""
    history = [Message("system", "You help."), Message("user", "What is 2 + 3?")]
    replies = []

    async def ask(messages: list[Message], seed: int) -> ModelReply:
        return await made.policy.chat(
            messages, tools=(ADD,), sampling=Sampling(seed=seed), on_delta=Told() if streams else None
        )

    for seed, text in enumerate(("What is 7 + 5?", "And 9?", "What is 1 + 1?")):
        reply = await ask(history, seed)
        replies.append(reply)
        history = [*history, reply.message, Message("user", text)]
    replies.append(await ask([*history[:3], Message("user", "other")], 10))
    replies += await asyncio.gather(*(ask(history[:2], seed) for seed in (11, 12)))
    return replies


# ---- fidelity


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streams", [True, False])
async def test_what_is_recorded_is_what_the_engine_had_and_sampled(kind: str, streams: bool) -> None:
    async with place(kind, None) as here:
        await conversation(here.room, streams)
        await _is_the_engines(here)


async def _is_the_engines(here: Place) -> None:
    exact(here.room)
    assert here.room.session.recorder.counts.drifted == 0
    turns = here.room.turns
    assert [(turn.parent, turn.prefix > 0) for turn in turns[:4]] == [
        (None, False),
        (0, True),
        (1, True),
        (0, True),
    ]
    weights = builtin()
    prompts = whole(turns)
    for turn in turns:
        ids = np.frombuffer(prompts[turn.index] + turn.sampled, "<i4")
        start = len(prompts[turn.index]) // 4
        chances = logprobs(weights, ids.tolist())[np.arange(start - 1, len(ids) - 1), ids[start:]]
        np.testing.assert_allclose(np.frombuffer(turn.logprobs, "<f4"), chances, atol=1e-3)
    if here.server is not None:
        name = "token_ids" if here.server.engine_name == "vllm" else "input_ids"
        bodies = [each["body"] for each in await here.server.requests() if "generate" in each["path"]]
        assert sorted(ints(body[name]) for body in bodies) == sorted(prompts.values())


async def test_the_kinds_give_equal_turns_for_equal_seeds() -> None:
    found: dict[str, list[tuple[Any, ...]]] = {}
    for kind in KINDS:
        async with place(kind, None) as one:
            await conversation(one.room)
            prompts = whole(one.room.turns)
            found[kind] = sorted(
                (prompts[turn.index], turn.sampled, turn.finish, turn.response.text, turn.response.tool_calls)
                for turn in one.room.turns
            )
            chances = np.concatenate([np.frombuffer(turn.logprobs, "<f4") for turn in one.room.turns[:4]])
            found.setdefault("chances", []).append((chances,))
    assert found["vllm"] == found["sglang"] == found["embedded"]
    for (chances,) in found["chances"]:
        np.testing.assert_allclose(chances, found["chances"][0][0], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [(), ("e",), ("\x00", "a")])
async def test_streamed_or_not_a_turn_is_the_same_and_what_was_told_begins_it(
    kind: str, stop: tuple[str, ...]
) -> None:
    replies = []
    for streams in (True, False):
        async with place(kind, stop=stop, max_tokens=48) as one:
            told = Told()
            reply = await one.room.policy.chat(
                "hello", tools=(ADD,), sampling=Sampling(seed=4), on_delta=told if streams else None
            )
            replies.append(reply)
            exact(one.room)
            if streams:
                assert told.all("content") == reply.message.text
                assert told.all("sampled") == reply.turn.sampled
                assert told.all("logprobs") == reply.turn.logprobs
    left, right = replies
    assert (left.message, left.finish, left.prompt) == (right.message, right.finish, right.prompt)
    assert (left.turn.sampled, left.turn.logprobs) == (right.turn.sampled, right.turn.logprobs)
    for text in stop:
        assert text not in left.message.text


@pytest.mark.parametrize("record", ["messages", "plain"])
@pytest.mark.parametrize("kind", KINDS)
async def test_where_the_engine_renders_the_prompt_is_its_own_or_nobodys(kind: str, record: Any) -> None:
    async with place(kind, record=record, rendering=None) as one:
        await conversation(one.room, streams=kind != "sglang")
        turns = one.room.turns
        if record == "messages":
            holds(one.room)
            assert all(turn.sampled for turn in turns)
            assert all(request.tokens == b"" for request, _ in one.room.upstream.noted)
        else:
            assert [(turn.prompt, turn.sampled, turn.logprobs) for turn in turns] == [(b"", b"", b"")] * len(turns)
            assert build_segments(turns) == []
            assert all(turn.sampled_tokens > 0 for turn in turns)


# ---- answers that do not come to their end


async def test_a_listener_that_breaks_at_any_piece_leaves_no_turn(here: Place) -> None:
    whole, tellings = Told(), 0
    await here.room.policy.chat("hello", on_delta=whole, sampling=Sampling(seed=1))
    assert len(whole.deltas) > 1
    recorded = len(here.room.turns)
    for piece in range(len(whole.deltas)):  # how tokens share pieces is the engine's and the network's
        try:
            await here.room.policy.chat("hello", on_delta=Told(piece), sampling=Sampling(seed=1))
            recorded += 1
        except ConnectionResetError:
            tellings += 1
        assert here.room.pausable.in_flight == 0
        assert len(here.room.turns) == recorded
    assert tellings > 1
    await here.room.policy.chat("hello")
    assert len(here.room.turns) == recorded + 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("then", ["die", "half_event", "end", "garbage"])
async def test_a_stream_that_breaks_at_any_event_is_no_turn(kind: str, then: str) -> None:
    async with place(kind, rendering=EmbeddedRenderer()) as one:
        assert one.server is not None
        for events in range(1, 6):
            await one.server.fault(after_events=events, then=then)
            told = Told()
            with pytest.raises(UpstreamError):
                await one.room.policy.chat("hello", on_delta=told, sampling=LONGER)
            assert told.all("sampled") or then == "garbage"  # which may come in one read with what is whole
            assert one.room.turns == []
        assert one.room.session.turns == 0
        if then == "garbage":  # a server that speaks something else is not asked again
            return
        await one.server.fault(after_events=0, then=then)
        reply = await one.room.policy.chat("hello", on_delta=(told := Told()), sampling=LONGER)
        assert told.all("sampled") == reply.turn.sampled  # nothing was told before it broke: it was asked again
        assert one.room.turns == [reply.turn]


async def test_an_answer_that_is_not_heard_to_its_end_is_not_recorded(here: Place) -> None:
    began = asyncio.Event()

    async def slow(_: Delta) -> None:
        began.set()
        await asyncio.Event().wait()

    call = asyncio.create_task(here.room.policy.chat("hello", on_delta=slow))
    await began.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (here.room.turns, here.room.pausable.in_flight) == ([], 0)
    if here.server is not None:
        await here.server.until(0)


async def test_a_prompt_that_fills_the_context_truncates_before_it_is_asked() -> None:
    async with place("vllm", limits=Limits(context=30)) as one:
        with pytest.raises(Truncation) as stopped:
            await one.room.policy.chat("x" * 40)
        assert (stopped.value.reason, one.room.session.truncated, one.room.turns) == ("context", "context", [])
        assert one.server is not None
        assert [each for each in await one.server.requests() if "generate" in each["path"]] == []
        one.room.session.truncated = None
        reply = await one.room.policy.chat("x")
        assert reply.turn.prompt_tokens + reply.turn.sampled_tokens <= 30


async def test_ids_that_a_caller_brings_are_the_prompt(here: Place) -> None:
    reply = await here.room.policy.complete(ints([1, 72, 105]))
    assert (reply.turn.prompt, reply.prompt) == (ints([1, 72, 105]),) * 2
    assert reply.turn.sampled
    follows = reply.prompt + reply.turn.sampled + ints([33])
    more = await here.room.policy.complete(follows)
    assert (more.turn.parent, more.turn.prefix, more.turn.prompt) == (0, len(follows) // 4 - 1, ints([33]))
    holds(here.room)
    (segment,) = build_segments(here.room.turns)
    assert segment.turns == (0, 1)


async def test_several_choices_are_turns_of_their_own_that_share_their_prompt(here: Place) -> None:
    made = here.room
    role = made.session.roles["policy"]
    call = ModelRequest(messages=(Message("user", "hello"),), sampling=Sampling(max_tokens=8))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(made.session.call(role, call)) for _ in range(3)]
    replies = [task.result() for task in tasks]
    exact(made)
    assert len({reply.turn.index for reply in replies}) == 3
    assert len({reply.prompt for reply in replies}) == 1
    assert len({reply.turn.sampled for reply in replies}) > 1
    history = [Message("user", "hello"), replies[1].message, Message("user", "more")]
    onward = await made.policy.chat(history)
    exact(made)
    assert onward.turn.parent == replies[1].turn.index or replies[1].message in (
        reply.message for reply in replies if reply is not replies[1]
    )


# ---- what cannot work is said when the object is built


def policy(kind: str = "openai", url: str = "http://127.0.0.1:9/v1") -> UpstreamConfig:
    return UpstreamConfig(kind=kind, urls=(url,), model="m")


NOWHERE = "/nowhere/at-all"
START_FAILED: list[tuple[UpstreamConfig, dict[str, Any], str]] = [
    (policy(), {"record": "tokens"}, r"needs the policy's chat format.*--tokenizer.*--record messages"),
    (policy("vllm"), {"record": "tokens"}, "needs the policy's chat format"),
    (
        policy(),
        {"record": "tokens", "rendering": {"name": "qwen9"}},
        "'qwen9'; known: auto,",
    ),
    (policy(), {"record": "tokens", "rendering": {"tokenizer": NOWHERE}}, f"there is no tokenizer at '{NOWHERE}'"),
    (policy(), {"record": "tokens", "rendering": {"name": "qwen3"}}, "no tokenizer"),
    (policy(), {"record": "tokens", "rendering": {"colour": "red"}}, "'colour'"),
    (policy(), {"record": "tokens", "rendering": {"name": 3}}, "chat format"),
    (policy(), {"record": "messages", "rendering": {"name": "embedded"}}, "leave it out to record messages"),
    (policy(), {"record": "plain", "rendering": {"name": "embedded"}}, "leave it out to record plain"),
    (
        policy("embedded", "embedded"),
        {"record": "tokens", "rendering": {"tokenizer": NOWHERE}},
        "the embedded policy has its own tokenizer and chat format",
    ),
]


@pytest.mark.parametrize(("upstream", "options", "words"), START_FAILED)
def test_a_way_of_recording_that_cannot_work_is_refused_when_an_engine_is_built(
    upstream: UpstreamConfig, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        Engine("arithmetic", policy=upstream, out=tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("upstream", "options", "words"), START_FAILED)
def test_a_way_of_recording_that_cannot_work_is_refused_when_a_gateway_is_built(
    upstream: UpstreamConfig, options: dict[str, Any], words: str
) -> None:
    config = GatewayConfig(upstreams={"policy": upstream}, **options)
    with pytest.raises(UsageError, match=words):
        Gateway(config)


@pytest.mark.parametrize("upstream", [policy("embedded", "embedded"), policy("openai", "embedded")])
def test_the_embedded_policy_needs_no_tokenizer(upstream: UpstreamConfig) -> None:
    assert choose_rendering("tokens", None, upstream) == {"name": "embedded"}
    assert resolved_rendering("tokens", {}, upstream) == {"name": "embedded"}
    assert resolved_rendering("messages", {}, upstream) == {}


@pytest.mark.needs("tokenizers")
def test_what_is_settled_is_a_folder_and_opens_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.conftest import TOKENIZERS

    folder = TOKENIZERS.resolve()
    monkeypatch.chdir(folder)
    settled = resolved_rendering("tokens", {"tokenizer": "qwen3"}, policy("vllm"))
    assert settled == {"tokenizer": str(folder / "qwen3")}
    assert resolved_rendering("tokens", settled, policy("vllm")) == settled


async def test_an_upstream_that_takes_no_ids_is_refused_before_anything_is_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rookery.upstreams.embedded import EmbeddedUpstream

    made = Engine("arithmetic", policy="embedded", record="tokens", runners=0, out=tmp_path / "runs")
    build: Callable[..., None] = EmbeddedUpstream.__init__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.accepts_tokens = False

    monkeypatch.setattr(EmbeddedUpstream, "__init__", without)
    with pytest.raises(UsageError, match=r"embedded .*token IDs.*messages or plain"):
        await made.__aenter__()
    assert not (tmp_path / "runs").exists()


async def test_a_run_of_the_embedded_policy_records_tokens_and_leaves_no_thread(tmp_path: Path) -> None:
    import threading

    from rookery.engine import executor

    assert executor.NO_DEADLINE > 1e8
    before = set(threading.enumerate())
    async with Engine("arithmetic", policy="embedded", record="tokens", runners=0, out=tmp_path / "runs") as made:
        groups = [group async for group in made.groups([{"prompt": "x" * LONG, "answer": 1}])]
    assert groups[0].rollouts[0].segments
    new = set(threading.enumerate()) - before
    assert [thread for thread in new if thread.name.startswith("rendering-")] == []
