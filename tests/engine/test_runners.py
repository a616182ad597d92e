"""Runners: a rollout that blocks or crashes its runner fails alone."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine, Environment, Limits
from rookery.core import Failed, UsageError, label
from rookery.engine import RetryPolicy, Stopped
from tests.engine.conftest import (
    GatedEnvironment,
    build_engine,
    events,
    run_groups,
    wait_for_heartbeats,
)
from tests.processes import send_signal
from tests.servers import ModelServer
from tests.waiting import advance_clock, wait_for_status


def row(**data: Any) -> dict[str, Any]:
    return {"prompt": "question", "data": data}


@pytest.mark.long
@pytest.mark.parametrize("action", ["segfault", "abort", "_exit", "kill"])
async def test_rollout_that_kills_its_runner_fails_alone(model: ModelServer, tmp_path: Path, action: str) -> None:
    tasks = [row(run=action if n == 3 else None) for n in range(12)]
    groups = await run_groups(model, tmp_path, tasks, runners=2, concurrency=6)
    outcomes = [group.rollouts[0].outcome for group in groups]
    assert [label(outcome) for outcome in outcomes] == [
        "bug.crashed" if n == 3 else "completed" for n in range(12)
    ]
    guilty = outcomes[3]
    assert isinstance(guilty, Failed)
    assert guilty.fault == "bug"
    named = {"segfault": "Segmentation fault", "abort": "SIGABRT", "_exit": " 0", "kill": "SIGKILL"}
    assert named[action] in guilty.traceback
    # Other rollouts in the crashed runner are not charged.
    for group in groups:
        assert all(
            label(attempt.outcome) in ("runner.lost", "completed", "bug.crashed")
            for attempt in group.rollouts[0].attempts
        )


@pytest.mark.long
@pytest.mark.parametrize("action", ["block", "spin"])
async def test_rollout_that_blocks_the_event_loop_is_reported_with_its_stack_and_fails_alone(
    model: ModelServer, tmp_path: Path, action: str
) -> None:
    tasks = [row(run=action if n == 0 else None) for n in range(6)]
    groups = await run_groups(model, tmp_path, tasks, runners=1, concurrency=3, block_limit=2.0)
    assert [label(group.rollouts[0].outcome) for group in groups] == ["bug.blocked"] + ["completed"] * 5
    seen = events(tmp_path, "loop.blocked")
    assert seen
    assert all("in action" in event["stack"] for event in seen)
    assert {event["attempt"].rpartition(".")[0] for event in seen} == {"0.0"}
    outcome = groups[0].rollouts[0].outcome
    assert isinstance(outcome, Failed)
    assert "in action" in outcome.traceback


@pytest.mark.long
async def test_killed_runner_is_replaced_and_its_attempts_run_again(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, runners=2, concurrency=8) as engine:
        stream = engine.groups([row(run={"attempt 1": "hang-in-policy"})] * 8)
        await model.wait_for_requests(8)
        send_signal(engine.pids()[1:], signal.SIGKILL)
        groups = [group async for group in stream]
    assert [label(group.rollouts[0].outcome) for group in groups] == ["completed"] * 8
    assert all(len(group.rollouts[0].attempts) >= 2 for group in groups)


async def test_exit_in_a_task_does_not_end_the_runner(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, runners=1) as engine:
        pids = engine.pids()
        groups = [group async for group in engine.groups([row(run="exit-in-task"), row(), row()])]
        assert engine.pids() == pids
    by_index = {group.index: label(group.rollouts[0].outcome) for group in groups}
    assert by_index == {0: "bug.exit", 1: "completed", 2: "completed"}


async def test_environment_that_cannot_be_loaded_is_reported_before_admission(
    model: ModelServer, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        f"import os\nif os.getppid() != {os.getppid()}: raise ValueError('not here')\n"
        "from tests.engine.envs import Misbehaving\nclass Env(Misbehaving): pass\n"
    )
    with pytest.raises(UsageError, match="not here"):
        async with build_engine(model, tmp_path, env=str(tmp_path / "broken.py:Env"), runners=1):
            pass


@pytest.mark.long
async def test_runners_that_die_before_they_are_ready_stop_the_run(model: ModelServer, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(
        f"import os\nif os.getppid() != {os.getppid()}: os._exit(9)\n"
        "from tests.engine.envs import Misbehaving\nclass Env(Misbehaving): pass\n"
    )
    with pytest.raises(Stopped, match=r"\b9\b"):
        async with build_engine(model, tmp_path, env=str(tmp_path / "dying.py:Env"), runners=1):
            pass


@pytest.mark.long
async def test_rollout_without_a_free_runner_fails_at_the_queue_deadline(
    model: ModelServer, tmp_path: Path
) -> None:
    flag = tmp_path / "blocked"
    (tmp_path / "stuck.py").write_text(
        f"import os, time\nwhile os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        "from tests.engine.envs import Misbehaving\nclass Env(Misbehaving): pass\n"
    )
    env = str(tmp_path / "stuck.py:Env")
    async with build_engine(
        model, tmp_path, env=env, runners=1, limits=Limits(queue=0.5), retry=RetryPolicy(1)
    ) as engine:
        flag.touch()  # the next runner does not become ready
        os.kill(engine.pids()[1], signal.SIGKILL)
        groups = [group async for group in engine.groups([row()] * 2, k=2)]
        flag.unlink()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert label(rollout.outcome) == "engine.queue"
        assert rollout.timing.queue == 0.5


@pytest.mark.long
async def test_concurrency_is_bounded_over_all_runners_together(model: ModelServer, tmp_path: Path) -> None:
    gate = asyncio.Event()
    answer = model.default
    assert callable(answer)

    def hold_reply(request: Any) -> Any:
        reply = answer(request)
        reply.hold = gate
        return reply

    model.default = hold_reply
    async with build_engine(model, tmp_path, runners=2, concurrency=10) as engine:
        stream = engine.groups([row()] * 40)
        await model.wait_for_requests(10)
        assert (await engine.status())["in_flight"] == 10
        status = await wait_for_status(
            engine, lambda status: sum(one["calls"] for one in status["replicas"]) >= 10
        )
        (replica,) = status["replicas"]
        assert (replica["role"], replica["healthy"], replica["calls"]) == ("policy", True, 10)
        gate.set()
        groups = [group async for group in stream]
    assert len(groups) == 40
    assert model.peak <= 10


@pytest.mark.long
@pytest.mark.parametrize("runners", [0, 1])
async def test_status_counts_open_sandboxes(model: ModelServer, tmp_path: Path, runners: int) -> None:
    async with build_engine(model, tmp_path, runners=runners, concurrency=2) as engine:
        assert (await engine.status())["sandboxes"] == {}
        async with engine.groups([row(run="hang-in-sandbox")] * 2):
            await wait_for_status(engine, lambda status: sum(status["sandboxes"].values()) == 2)


@pytest.mark.long
async def test_pause_stops_admission_and_model_calls_and_always_resumes(
    model: ModelServer, tmp_path: Path
) -> None:
    async with build_engine(model, tmp_path, runners=2, concurrency=8, limits=Limits(run=10.0)) as engine:
        stream = engine.groups([row()] * 400)
        await model.wait_for_requests(20)
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with engine.paused():
                assert model.in_flight == 0
                before = len(model.requests)
                await wait_for_heartbeats(engine)
                assert len(model.requests) == before
                raise ZeroDivisionError
        groups = [group async for group in stream]
    assert len(groups) == 400
    assert all(label(group.rollouts[0].outcome) == "completed" for group in groups)


@pytest.mark.parametrize(("paused", "outcome"), [(True, "completed"), (False, "bug.hung")])
async def test_the_run_clock_excludes_pauses(
    model: ModelServer, tmp_path: Path, paused: bool, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = GatedEnvironment()
    env.close(0)
    async with build_engine(model, tmp_path, env=env, limits=Limits(run=60.0)) as engine:
        stream = engine.groups([{"prompt": "question 0"}])
        await model.wait_for_requests(1)
        async with engine.paused() if paused else contextlib.nullcontext():
            advance_clock(monkeypatch, 90.0)
            await engine.status()
        if paused:
            env.open(0)
        (rollout,) = (await anext(stream)).rollouts
    assert label(rollout.outcome) == outcome
    assert (rollout.timing.paused >= 90.0) == paused


async def test_pause_that_cannot_drain_aborts_running_calls_and_repeats_them(
    model: ModelServer, tmp_path: Path
) -> None:
    async with build_engine(model, tmp_path, runners=1) as engine:
        stream = engine.groups([row(run="hang-in-policy"), row()])
        await model.wait_for_requests(2)
        async with engine.paused(timeout=0.2):
            assert (await engine.status())["paused"]
            asked = len(model.requests)
        assert not (await engine.status())["paused"]
        assert (await anext(stream)).index == 1
        await model.wait_for_requests(asked + 1)
        await stream.aclose()


class OddRange(Environment):
    reward_range = (1.0, float("inf"))


async def test_configuration_errors_are_raised_by_the_constructor(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="reward_range"):
        Engine(OddRange(), policy="http://127.0.0.1:1")
    env = "tests.engine.envs:Misbehaving"
    for options, named in [
        ({"runners": -1}, "runners"),
        ({"concurrency": 0}, "concurrency"),
        ({"breaker": 2.0}, "breaker"),
        ({"colour": "red"}, "colour"),
        ({"policy": ""}, "--policy"),
    ]:
        with pytest.raises(UsageError, match=named):
            Engine(env, **{"policy": "http://127.0.0.1:1", **options})  # type: ignore[arg-type]
