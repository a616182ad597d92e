"""Programs that call models themselves, in boxes of a run: every token they sampled is their attempt's."""

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
from tests.engine.sync_kit import judged, push
from tests.engine_standins import StandinServer, standin

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


def engine(server: StandinServer, tmp_path: Path, **options: Any) -> Engine:
    few = Sampling(max_tokens=12, extra={"ignore_eos": True})
    more: dict[str, Any] = {"sandbox": "local", "sampling": few, **options}
    return sync_kit.engine(server, tmp_path, "tests.engine.gateway_envs:Agents", **more)


def tasks(count: int, turns: int = 3, **data: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}", "program": agent(turns), **data} for number in range(count)]


async def all_of(made: Engine, rows: list[dict[str, Any]], k: int = 1) -> list[Group]:
    return [group async for group in made.groups(rows, k=k)]


def flat(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("runners", [0, 2])
async def test_every_token_that_a_program_in_a_box_sampled_is_its_attempts_and_trains_once(
    runners: int, tmp_path: Path
) -> None:
    async with standin("vllm") as server, engine(server, tmp_path, runners=runners) as made:
        groups = await all_of(made, tasks(4), k=2)
        folder = made.folder
    judged(groups, 8)
    for rollout in flat(groups):
        assert (rollout.usage.turns, rollout.reward) == (3, 1.0)
        assert [one["role"] for one in json.loads(rollout.info["said"])] == ["user", "assistant"] * 3 + ["user"]
    assert folder is not None
    assert not (folder / "gateway").exists(), "a run that is over keeps no session"


async def test_calls_of_the_environments_own_come_after_those_of_its_programs(tmp_path: Path) -> None:
    async with standin("vllm") as server, engine(server, tmp_path) as made:
        (rollout,) = flat(await all_of(made, tasks(1, 2, after=True)))
    assert label(rollout.outcome) == "completed", rollout.outcome
    assert (rollout.usage.turns, rollout.info["turns"]) == (3, 2)
    assert sum(segment.trained for segment in rollout.segments) == rollout.usage.sampled_tokens > 0


async def test_a_budget_holds_at_the_door_and_is_the_rollouts(tmp_path: Path) -> None:
    async with standin("vllm") as server, engine(server, tmp_path, limits=Limits(turns=2)) as made:
        (rollout,) = flat(await all_of(made, tasks(1, 5)))
    assert label(rollout.outcome) == "truncated.turns", rollout.outcome
    assert rollout.usage.turns == 2
    assert rollout.reward is not None


async def test_a_killed_shard_costs_a_program_nothing_but_time(tmp_path: Path) -> None:
    async with standin("vllm") as server, engine(server, tmp_path) as made:
        taking = asyncio.create_task(all_of(made, tasks(3, 6)))
        gateway = made.supervisor.gateway
        assert gateway is not None
        async with asyncio.timeout(60):
            while not (await server.running())[0]:
                await asyncio.sleep(0.002)
        for pid in gateway.pids():
            os.kill(pid, signal.SIGKILL)
        groups = await taking
    assert [label(one.outcome) for one in flat(groups)] == ["completed"] * 3, [one.info for one in flat(groups)]
    for rollout in flat(groups):
        assert len(json.loads(rollout.info["said"])) == 13
        assert sum(segment.trained for segment in rollout.segments) == rollout.usage.sampled_tokens


async def test_a_pause_holds_the_calls_at_the_doors_too(tmp_path: Path) -> None:
    async with standin("vllm") as server, engine(server, tmp_path) as made:
        taking = asyncio.create_task(all_of(made, tasks(3, 6)))
        async with asyncio.timeout(60):
            while not (await server.running())[0]:
                await asyncio.sleep(0.002)
        async with made.upstream.sync(7, lambda: push(server)):
            assert await server.running() == (0, 0)
        groups = await taking
    segments = judged(groups, 3)
    assert 7 in {span.version for segment in segments for span in segment.versions}


async def test_cancelling_a_run_ends_programs_and_doors(tmp_path: Path) -> None:
    hangs = "import time\nwhile True: time.sleep(60)"
    async with standin("vllm") as server:
        async with engine(server, tmp_path) as made:
            stream = made.groups([*tasks(2, 1), {"prompt": "x", "program": hangs}])
            first = await anext(stream)
            assert first.rollouts[0].reward == 1.0
            gateway = made.supervisor.gateway
            assert gateway is not None
            pids = gateway.pids()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


async def test_a_door_where_there_is_no_gateway_is_an_error_in_words(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        Engine(
            "tests.engine.gateway_envs:Doorless",
            policy=UpstreamConfig(kind="vllm", urls=(server.root,)),
            out=tmp_path / "runs",
            runners=0,
            sandbox="local",
        ) as made,
    ):
        with pytest.raises(UsageError, match="needs_gateway"):
            await all_of(made, [{"prompt": "x", "program": "pass"}])


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
def test_fetching_a_record_never_takes_from_what_is_known(known: SessionRecord, got: SessionRecord) -> None:
    both = merge_records(known, got)
    assert {one.index for one in both.turns} == {one.index for one in (*known.turns, *got.turns)}
    assert [one.index for one in both.turns] == sorted(one.index for one in both.turns)
    assert both.waited == max(known.waited, got.waited)
    if known.truncated is not None:
        assert both.truncated == known.truncated
    assert merge_records(both, SessionRecord()) == both


def test_adopted_turns_get_numbers_that_are_free() -> None:
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
def test_what_others_saw_of_waiting_is_charged_once(own: float, after: float, seen: float) -> None:
    clock = StageClock(0.0, 1_000.0)
    clock.hold(0.0)
    clock.release(own)
    now = own + after
    clock.credit(now, seen)
    assert clock.used(now) == pytest.approx(now - max(own, min(seen, now)))
    clock.credit(now, seen)
    assert clock.used(now) == pytest.approx(now - max(own, min(seen, now)))
