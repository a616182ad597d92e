"""Programs in sandboxes that call models through the gateway: all their tokens belong to their attempt."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery import Engine
from rookery.core import Group, Limits, Message, Rollout, Sampling, StageClock, Turn, UsageError, label
from rookery.gateway.client import SessionRecord
from rookery.gateway.gateway_session import merge_records
from rookery.trajectories import Recorder
from rookery.upstreams import UpstreamConfig
from tests.cli.sandbox_kit import local_sandboxes
from tests.engine import sync_kit
from tests.engine.sync_kit import check_segments, load_new_weights
from tests.engine_standins import StandinServer, standin
from tests.processes import send_signal

__all__ = ["local_sandboxes"]
pytestmark = pytest.mark.usefixtures("local_sandboxes")

AGENT = """
import json, os, sys, time, urllib.error, urllib.request
def ask(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    where = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"model": "any", "messages": messages}).encode()
    for _ in range(100):
        try:
            with urllib.request.urlopen(urllib.request.Request(where, body, headers), timeout=60) as answer:
                return json.load(answer)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit("no answer")
messages = [{"role": "user", "content": os.environ["QUESTION"]}]
for turn in range(@):
    messages.append(ask(messages))
    messages.append({"role": "user", "content": "go on"})
print(json.dumps(messages))
"""


def agent(turns: int) -> str:
    return AGENT.replace("@", str(turns))


def build_engine(server: StandinServer, tmp_path: Path, **options: Any) -> Engine:
    few = Sampling(max_tokens=12, extra={"ignore_eos": True})
    more: dict[str, Any] = {"sandbox": "local", "sampling": few, **options}
    return sync_kit.build_engine(server, tmp_path, "tests.engine.gateway_envs:Agents", **more)


def tasks(count: int, turns: int = 3, **data: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "program": agent(turns), **data} for number in range(count)]


async def collect_groups(engine: Engine, rows: list[dict[str, Any]], k: int = 1) -> list[Group]:
    return [group async for group in engine.groups(rows, k=k)]


def all_rollouts(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


@pytest.mark.long
@pytest.mark.parametrize("runners", [0, 2])
async def test_every_token_sampled_by_a_program_in_a_sandbox_trains_once(runners: int, tmp_path: Path) -> None:
    async with standin("vllm") as server, build_engine(server, tmp_path, runners=runners) as engine:
        groups = await collect_groups(engine, tasks(4), k=2)
        folder = engine.folder
    check_segments(groups, 8)
    for rollout in all_rollouts(groups):
        assert (rollout.usage.turns, rollout.reward) == (3, 1.0)
        assert [one["role"] for one in json.loads(rollout.info["said"])] == ["user", "assistant"] * 3 + ["user"]
    assert folder is not None
    assert not (folder / "gateway").exists(), "a finished run keeps no session"


async def test_calls_of_the_environment_are_recorded_after_those_of_its_programs(tmp_path: Path) -> None:
    async with standin("vllm") as server, build_engine(server, tmp_path) as engine:
        (rollout,) = all_rollouts(await collect_groups(engine, tasks(1, 2, after=True)))
    assert label(rollout.outcome) == "completed", rollout.outcome
    assert (rollout.usage.turns, rollout.info["turns"]) == (3, 2)
    assert sum(segment.trained for segment in rollout.segments) == rollout.usage.sampled_tokens > 0


async def test_budget_of_the_rollout_applies_to_gateway_calls(tmp_path: Path) -> None:
    async with standin("vllm") as server, build_engine(server, tmp_path, limits=Limits(turns=2)) as engine:
        (rollout,) = all_rollouts(await collect_groups(engine, tasks(1, 5)))
    assert label(rollout.outcome) == "truncated.turns", rollout.outcome
    assert rollout.usage.turns == 2
    assert rollout.reward is not None


@pytest.mark.long
async def test_program_survives_a_killed_gateway_shard(tmp_path: Path) -> None:
    async with standin("vllm") as server, build_engine(server, tmp_path) as engine:
        taking = asyncio.create_task(collect_groups(engine, tasks(3, 6)))
        gateway = engine.supervisor.gateway
        assert gateway is not None
        await server.until_busy()
        send_signal(gateway.pids(), signal.SIGKILL)
        groups = await taking
    assert [label(one.outcome) for one in all_rollouts(groups)] == ["completed"] * 3, [
        one.info for one in all_rollouts(groups)
    ]
    for rollout in all_rollouts(groups):
        assert len(json.loads(rollout.info["said"])) == 13
        assert sum(segment.trained for segment in rollout.segments) == rollout.usage.sampled_tokens


@pytest.mark.long
async def test_pause_also_holds_calls_at_the_gateway(tmp_path: Path) -> None:
    long_replies = Sampling(max_tokens=200, extra={"ignore_eos": True})  # so that no check misses a running call
    async with standin("vllm") as server, build_engine(server, tmp_path, sampling=long_replies) as engine:
        taking = asyncio.create_task(collect_groups(engine, tasks(3, 4)))
        await server.until_busy()
        async with engine.upstream.sync(7, lambda: load_new_weights(server)):
            assert await server.running() == (0, 0)
        groups = await taking
    segments = check_segments(groups, 3)
    assert 7 in {span.version for segment in segments for span in segment.versions}


async def test_cancelling_a_run_ends_programs_and_gateway(tmp_path: Path) -> None:
    hangs = "import time\nwhile True: time.sleep(60)"
    async with standin("vllm") as server:
        async with build_engine(server, tmp_path) as engine:
            stream = engine.groups([*tasks(2, 1), {"prompt": "x", "program": hangs}])
            first = await anext(stream)
            assert first.rollouts[0].reward == 1.0
            gateway = engine.supervisor.gateway
            assert gateway is not None
            pids = gateway.pids()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


async def test_opening_a_session_without_needs_gateway_stops_the_run(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        Engine(
            "tests.engine.gateway_envs:UndeclaredGateway",
            policy=UpstreamConfig(kind="vllm", urls=(server.root,)),
            out=tmp_path / "runs",
            runners=0,
            sandbox="local",
        ) as engine,
    ):
        with pytest.raises(UsageError, match="needs_gateway"):
            await collect_groups(engine, [{"prompt": "x", "program": "pass"}])


# ---- without a run


def turn(index: int, parent: int | None = None, role: str = "policy") -> Turn:
    return Turn(
        attempt="a",
        index=index,
        parent=parent,
        role=role,
        messages=(Message("user", f"m{index}"),),
        response=Message("assistant", f"r{index}"),
    )


RECORDS = st.builds(
    lambda indices, truncated, held: SessionRecord(
        turns=tuple(turn(i) for i in sorted(indices)), truncated=truncated, waited=held
    ),
    st.sets(st.integers(0, 6)),
    st.sampled_from([None, "turns", "time"]),
    st.floats(0, 10),
)


@given(RECORDS, RECORDS)
def test_merging_a_record_never_removes_known_turns(known: SessionRecord, got: SessionRecord) -> None:
    both = merge_records(known, got)
    assert {one.index for one in both.turns} == {one.index for one in (*known.turns, *got.turns)}
    assert [one.index for one in both.turns] == sorted(one.index for one in both.turns)
    assert both.waited == max(known.waited, got.waited)
    if known.truncated is not None:
        assert both.truncated == known.truncated
    assert merge_records(both, SessionRecord()) == both


def test_adopted_turns_get_unused_indices() -> None:
    kept: list[Turn] = []
    recorder = Recorder("a", kept.append)
    recorder.record(
        recorder.match_history("policy", (Message("user", "first"),)),
        response=Message("assistant", "1"),
        sampled=b"",
    )
    moved = recorder.adopt([turn(0), turn(2, 0), turn(1)])
    assert [one.index for one in kept] == [0, 1, 2, 3]
    assert [one.parent for one in moved] == [None, None, 1]
    assert recorder.counts.turns == 4
    again = Recorder.restore("a", kept, lambda _: None)
    assert again.counts.turns == 4


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 50))
def test_waiting_time_measured_elsewhere_is_credited_once(own: float, after: float, seen: float) -> None:
    clock = StageClock(0.0, 1_000.0)
    clock.stop(0.0)
    clock.restart(own)
    now = own + after
    clock.exclude_at_least(now, seen)
    assert clock.used(now) == pytest.approx(now - max(own, min(seen, now)))
    clock.exclude_at_least(now, seen)
    assert clock.used(now) == pytest.approx(now - max(own, min(seen, now)))
