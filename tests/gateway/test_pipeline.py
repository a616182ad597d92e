"""The turn pipeline over the embedded policy and over strict stand-ins for vLLM and SGLang."""

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
from rookery.gateway.config import GatewayConfig, choose_rendering, resolve_rendering
from rookery.gateway.shards import Gateway
from rookery.trajectories import build_segments
from rookery.upstreams import UpstreamConfig, open_upstream
from rookery.upstreams.embedded.upstream import load_builtin_weights
from rookery.upstreams.protocol import Delta, ModelRequest
from tests.engine_standins import StandinServer, small_weights, standin
from tests.gateway.session_kit import (
    SessionSetup,
    check_exact_recording,
    check_recording,
    full_prompts,
    open_session,
)
from tests.upstreams.embedded_reference import logprobs

KINDS = ("embedded", "vllm", "sglang")
LONGER = Sampling(seed=0, max_tokens=12, extra={"ignore_eos": True})
LONG = 970
"""Number of characters that is rendered in a thread and still fits the context."""
ADD = ToolSchema("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})


class EngineSetup:
    """A session over an engine, with the stand-in server unless the engine is embedded."""

    def __init__(self, setup: SessionSetup, server: StandinServer | None) -> None:
        self.setup = setup
        self.server = server


@asynccontextmanager
async def open_engine(kind: str, weights: str | None = "small", **options: Any) -> AsyncIterator[EngineSetup]:
    """Open a session over an engine. `weights=None` selects the built-in weights, which end their replies."""
    async with AsyncExitStack() as stack:
        server = None
        url = f"embedded:{small_weights()}" if weights else "embedded"
        if kind != "embedded":
            server = await stack.enter_async_context(standin(kind, weights=weights))  # type: ignore[arg-type]
            url = server.root
        upstream = open_upstream(UpstreamConfig(kind=kind, urls=(url,)))
        setup = open_session(upstream, **{"rendering": EmbeddedRenderer(), "max_tokens": 24, "seed": 5, **options})
        stack.push_async_callback(setup.upstream.close)
        yield EngineSetup(setup, server)


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[EngineSetup]:
    async with open_engine(request.param) as results:
        yield results


class DeltaListener:
    """Delta callback that keeps the deltas and raises at a given one."""

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


async def conversation(setup: SessionSetup, streams: bool = False) -> list[ModelReply]:
    """Run three turns, a branch of the second, and two concurrent repetitions of the first."""
    history = [Message("system", "You help."), Message("user", "What is 2 + 3?")]
    replies = []

    async def ask(messages: list[Message], seed: int) -> ModelReply:
        return await setup.policy.chat(
            messages, tools=(ADD,), sampling=Sampling(seed=seed), on_delta=DeltaListener() if streams else None
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
async def test_recorded_turns_match_the_engine(kind: str, streams: bool) -> None:
    async with open_engine(kind, None) as engine:
        await conversation(engine.setup, streams)
        await check_against_the_engine(engine)


async def check_against_the_engine(engine: EngineSetup) -> None:
    check_exact_recording(engine.setup)
    assert engine.setup.session.recorder.counts.drifted == 0
    turns = engine.setup.turns
    assert [(turn.parent, turn.prefix > 0) for turn in turns[:4]] == [
        (None, False),
        (0, True),
        (1, True),
        (0, True),
    ]
    weights = load_builtin_weights()
    prompts = full_prompts(turns)
    for turn in turns:
        ids = np.frombuffer(prompts[turn.index] + turn.sampled, "<i4")
        start = len(prompts[turn.index]) // 4
        chances = logprobs(weights, ids.tolist())[np.arange(start - 1, len(ids) - 1), ids[start:]]
        np.testing.assert_allclose(np.frombuffer(turn.logprobs, "<f4"), chances, atol=1e-3)
    if engine.server is not None:
        name = "token_ids" if engine.server.engine_name == "vllm" else "input_ids"
        bodies = [each["body"] for each in await engine.server.requests() if "generate" in each["path"]]
        assert sorted(ints(body[name]) for body in bodies) == sorted(prompts.values())


async def test_all_engines_give_equal_turns_for_equal_seeds() -> None:
    results: dict[str, list[tuple[Any, ...]]] = {}
    for kind in KINDS:
        async with open_engine(kind, None) as engine:
            await conversation(engine.setup)
            prompts = full_prompts(engine.setup.turns)
            results[kind] = sorted(
                (prompts[turn.index], turn.sampled, turn.finish, turn.response.text, turn.response.tool_calls)
                for turn in engine.setup.turns
            )
            chances = np.concatenate([np.frombuffer(turn.logprobs, "<f4") for turn in engine.setup.turns[:4]])
            results.setdefault("chances", []).append((chances,))
    assert results["vllm"] == results["sglang"] == results["embedded"]
    for (chances,) in results["chances"]:
        np.testing.assert_allclose(chances, results["chances"][0][0], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [(), ("e",), ("\x00", "a")])
async def test_streamed_and_whole_replies_record_the_same_turn(kind: str, stop: tuple[str, ...]) -> None:
    replies = []
    for streams in (True, False):
        async with open_engine(kind, stop=stop, max_tokens=48) as engine:
            listener = DeltaListener()
            reply = await engine.setup.policy.chat(
                "hello", tools=(ADD,), sampling=Sampling(seed=4), on_delta=listener if streams else None
            )
            replies.append(reply)
            check_exact_recording(engine.setup)
            if streams:
                assert listener.all("content") == reply.message.text
                assert listener.all("sampled") == reply.turn.sampled
                assert listener.all("logprobs") == reply.turn.logprobs
    left, right = replies
    assert (left.message, left.finish, left.prompt) == (right.message, right.finish, right.prompt)
    assert (left.turn.sampled, left.turn.logprobs) == (right.turn.sampled, right.turn.logprobs)
    for text in stop:
        assert text not in left.message.text


@pytest.mark.parametrize("record", ["messages", "plain"])
@pytest.mark.parametrize("kind", KINDS)
async def test_messages_mode_records_the_engines_prompt_and_plain_mode_none(kind: str, record: Any) -> None:
    async with open_engine(kind, record=record, rendering=None) as engine:
        await conversation(engine.setup, streams=kind != "sglang")
        turns = engine.setup.turns
        if record == "messages":
            check_recording(engine.setup)
            assert all(turn.sampled for turn in turns)
            assert all(request.tokens == b"" for request, _ in engine.setup.upstream.calls)
        else:
            assert [(turn.prompt, turn.sampled, turn.logprobs) for turn in turns] == [(b"", b"", b"")] * len(turns)
            assert build_segments(turns) == []
            assert all(turn.sampled_tokens > 0 for turn in turns)


# ---- incomplete replies


async def test_listener_that_raises_at_any_delta_records_no_turn(engine: EngineSetup) -> None:
    listener, failures = DeltaListener(), 0
    await engine.setup.policy.chat("hello", on_delta=listener, sampling=Sampling(seed=1))
    assert listener.deltas
    recorded = len(engine.setup.turns)
    for piece in range(len(listener.deltas)):  # the number of deltas may vary between calls
        try:
            await engine.setup.policy.chat("hello", on_delta=DeltaListener(piece), sampling=Sampling(seed=1))
            recorded += 1
        except ConnectionResetError:
            failures += 1
        assert engine.setup.pausable.in_flight == 0
        assert len(engine.setup.turns) == recorded
    assert failures >= 1
    await engine.setup.policy.chat("hello")
    assert len(engine.setup.turns) == recorded + 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("then", ["die", "half_event", "end", "garbage"])
async def test_stream_that_breaks_at_any_event_records_no_turn(kind: str, then: str) -> None:
    async with open_engine(kind, rendering=EmbeddedRenderer()) as engine:
        assert engine.server is not None
        for events in range(1, 6):
            await engine.server.fault(after_events=events, then=then)
            listener = DeltaListener()
            with pytest.raises(UpstreamError):
                await engine.setup.policy.chat("hello", on_delta=listener, sampling=LONGER)
            # Garbage may arrive in one read with complete events.
            assert listener.all("sampled") or then == "garbage"
            assert engine.setup.turns == []
        assert engine.setup.session.turns == 0
        if then == "garbage":  # a server that violates the protocol is not retried
            return
        await engine.server.fault(after_events=0, then=then)
        reply = await engine.setup.policy.chat("hello", on_delta=(listener := DeltaListener()), sampling=LONGER)
        # No delta was sent before the failure, so the call was retried.
        assert listener.all("sampled") == reply.turn.sampled
        assert engine.setup.turns == [reply.turn]


async def test_cancelled_stream_records_no_turn(engine: EngineSetup) -> None:
    began = asyncio.Event()

    async def slow(_: Delta) -> None:
        began.set()
        await asyncio.Event().wait()

    call = asyncio.create_task(engine.setup.policy.chat("hello", on_delta=slow))
    await began.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (engine.setup.turns, engine.setup.pausable.in_flight) == ([], 0)
    if engine.server is not None:
        await engine.server.until(0)


async def test_prompt_that_fills_the_context_truncates_without_a_call() -> None:
    async with open_engine("vllm", limits=Limits(context=30)) as engine:
        with pytest.raises(Truncation) as stopped:
            await engine.setup.policy.chat("x" * 40)
        assert (stopped.value.reason, engine.setup.session.truncated, engine.setup.turns) == (
            "context",
            "context",
            [],
        )
        assert engine.server is not None
        assert [each for each in await engine.server.requests() if "generate" in each["path"]] == []
        engine.setup.session.truncated = None
        reply = await engine.setup.policy.chat("x")
        assert reply.turn.prompt_tokens + reply.turn.sampled_tokens <= 30


async def test_token_ids_of_the_caller_are_the_prompt(engine: EngineSetup) -> None:
    reply = await engine.setup.policy.complete(ints([1, 72, 105]))
    assert (reply.turn.prompt, reply.prompt) == (ints([1, 72, 105]),) * 2
    assert reply.turn.sampled
    follows = reply.prompt + reply.turn.sampled + ints([33])
    more = await engine.setup.policy.complete(follows)
    assert (more.turn.parent, more.turn.prefix, more.turn.prompt) == (0, len(follows) // 4 - 1, ints([33]))
    check_recording(engine.setup)
    (segment,) = build_segments(engine.setup.turns)
    assert segment.turns == (0, 1)


async def test_concurrent_calls_are_separate_turns_that_share_a_prompt(engine: EngineSetup) -> None:
    setup = engine.setup
    role = setup.session.roles["policy"]
    call = ModelRequest(messages=(Message("user", "hello"),), sampling=Sampling(max_tokens=8))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(setup.session.call(role, call)) for _ in range(3)]
    replies = [task.result() for task in tasks]
    check_exact_recording(setup)
    assert len({reply.turn.index for reply in replies}) == 3
    assert len({reply.prompt for reply in replies}) == 1
    assert len({reply.turn.sampled for reply in replies}) > 1
    history = [Message("user", "hello"), replies[1].message, Message("user", "more")]
    onward = await setup.policy.chat(history)
    check_exact_recording(setup)
    assert onward.turn.parent == replies[1].turn.index or replies[1].message in (
        reply.message for reply in replies if reply is not replies[1]
    )


# ---- errors at construction


def policy(kind: str = "openai", url: str = "http://127.0.0.1:9/v1") -> UpstreamConfig:
    return UpstreamConfig(kind=kind, urls=(url,), model="m")


NOWHERE = "/nowhere/at-all"
INVALID: list[tuple[UpstreamConfig, dict[str, Any], str]] = [
    (policy(), {"record": "tokens"}, r"--tokenizer.*--record messages"),
    (policy("vllm"), {"record": "tokens"}, "--tokenizer"),
    (
        policy(),
        {"record": "tokens", "rendering": {"name": "qwen9"}},
        "qwen9.*auto",
    ),
    (policy(), {"record": "tokens", "rendering": {"tokenizer": NOWHERE}}, NOWHERE),
    (policy(), {"record": "tokens", "rendering": {"name": "qwen3"}}, "tokenizer"),
    (policy(), {"record": "tokens", "rendering": {"colour": "red"}}, "colour"),
    (policy(), {"record": "tokens", "rendering": {"name": 3}}, "name"),
    (policy(), {"record": "messages", "rendering": {"name": "embedded"}}, "messages"),
    (policy(), {"record": "plain", "rendering": {"name": "embedded"}}, "plain"),
    (
        policy("embedded", "embedded"),
        {"record": "tokens", "rendering": {"tokenizer": NOWHERE}},
        "embedded",
    ),
]


@pytest.mark.parametrize(("upstream", "options", "mentioned"), INVALID)
def test_engine_rejects_an_impossible_record_mode_at_construction(
    upstream: UpstreamConfig, options: dict[str, Any], mentioned: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=mentioned):
        Engine("arithmetic", policy=upstream, out=tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("upstream", "options", "mentioned"), INVALID)
def test_gateway_rejects_an_impossible_record_mode_at_construction(
    upstream: UpstreamConfig, options: dict[str, Any], mentioned: str
) -> None:
    config = GatewayConfig(upstreams={"policy": upstream}, **options)
    with pytest.raises(UsageError, match=mentioned):
        Gateway(config)


@pytest.mark.parametrize("upstream", [policy("embedded", "embedded"), policy("auto", "embedded")])
def test_embedded_policy_needs_no_tokenizer(upstream: UpstreamConfig) -> None:
    assert choose_rendering("tokens", None, upstream) == {"name": "embedded"}
    assert resolve_rendering("tokens", {}, upstream)[0] == {"name": "embedded"}
    assert resolve_rendering("messages", {}, upstream)[0] == {}


@pytest.mark.needs("tokenizers")
def test_resolved_rendering_is_an_absolute_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.conftest import TOKENIZERS

    folder = TOKENIZERS.resolve()
    monkeypatch.chdir(folder)
    resolved = resolve_rendering("tokens", {"tokenizer": "qwen3"}, policy("vllm"))[0]
    assert resolved == {"tokenizer": str(folder / "qwen3")}
    assert resolve_rendering("tokens", resolved, policy("vllm"))[0] == resolved


async def test_tokens_mode_rejects_an_upstream_that_takes_no_token_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rookery.upstreams.embedded import EmbeddedUpstream

    setup = Engine("arithmetic", policy="embedded", record="tokens", runners=0, out=tmp_path / "runs")
    build: Callable[..., None] = EmbeddedUpstream.__init__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.accepts_tokens = False

    monkeypatch.setattr(EmbeddedUpstream, "__init__", without)
    with pytest.raises(UsageError, match=r"embedded.*messages.*plain"):
        await setup.__aenter__()
    assert not (tmp_path / "runs").exists()


async def test_run_of_the_embedded_policy_records_tokens_and_leaves_no_thread(tmp_path: Path) -> None:
    import threading

    from rookery.engine import executor

    assert executor.NO_DEADLINE > 1e8
    before = set(threading.enumerate())
    async with Engine("arithmetic", policy="embedded", record="tokens", runners=0, out=tmp_path / "runs") as setup:
        groups = [group async for group in setup.groups([{"prompt": "x" * LONG, "answer": 1}])]
    assert groups[0].rollouts[0].segments
    new = set(threading.enumerate()) - before
    assert [thread for thread in new if thread.name.startswith("rendering-")] == []
