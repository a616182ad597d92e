"""Runners: a rollout that blocks, crashes or is killed costs only itself."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine, Environment, Limits
from rookery.core import Failed, UsageError, label
from rookery.engine import RetryPolicy, Stopped
from tests.engine.conftest import engine, events, gather
from tests.servers import ModelServer


def row(**data: Any) -> dict[str, Any]:
    return {"prompt": "question", "data": data}


@pytest.mark.parametrize("deed", ["segfault", "abort", "_exit", "kill"])
async def test_a_rollout_that_kills_its_runner_costs_only_itself(
    model: ModelServer, tmp_path: Path, deed: str
) -> None:
    tasks = [row(run=deed if n == 3 else None) for n in range(12)]
    groups = await gather(model, tmp_path, tasks, runners=2, concurrency=6)
    outcomes = [group.rollouts[0].outcome for group in groups]
    assert [label(outcome) for outcome in outcomes] == [
        "bug.crashed" if n == 3 else "completed" for n in range(12)
    ]
    convicted = outcomes[3]
    assert isinstance(convicted, Failed)
    assert convicted.fault == "bug"
    words = {"segfault": "Segmentation fault", "abort": "SIGABRT", "_exit": "status 0", "kill": "SIGKILL"}
    assert words[deed] in convicted.traceback
    # Neighbours of a crash are never charged: what they lost does not count against them.
    for group in groups:
        assert all(
            label(attempt.outcome) in ("runner.lost", "completed", "bug.crashed")
            for attempt in group.rollouts[0].attempts
        )


@pytest.mark.long
@pytest.mark.parametrize("deed", ["block", "spin"])
async def test_a_rollout_that_blocks_the_loop_is_seen_with_its_stack_and_convicted_alone(
    model: ModelServer, tmp_path: Path, deed: str
) -> None:
    tasks = [row(run=deed if n == 0 else None) for n in range(6)]
    groups = await gather(model, tmp_path, tasks, runners=1, concurrency=3, block_limit=2.0)
    assert [label(group.rollouts[0].outcome) for group in groups] == ["bug.blocked"] + ["completed"] * 5
    seen = events(tmp_path, "loop.blocked")
    assert seen
    assert all("in deed" in event["stack"] for event in seen)
    assert {event["attempt"].rpartition(".")[0] for event in seen} == {"0.0"}
    outcome = groups[0].rollouts[0].outcome
    assert isinstance(outcome, Failed)
    assert "in deed" in outcome.traceback


async def test_a_runner_killed_from_outside_is_replaced_and_its_attempts_run_again(
    model: ModelServer, tmp_path: Path
) -> None:
    async with engine(model, tmp_path, runners=2, concurrency=8) as made:
        stream = made.groups([row(run={"attempt 1": "hang-in-policy"})] * 8)
        await model.wait_for_requests(8)
        for pid in made.pids()[1:]:
            os.kill(pid, signal.SIGKILL)
        groups = [group async for group in stream]
    assert [label(group.rollouts[0].outcome) for group in groups] == ["completed"] * 8
    assert all(len(group.rollouts[0].attempts) >= 2 for group in groups)


async def test_exit_in_a_task_of_the_users_does_not_end_the_runner(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path, runners=1) as made:
        pids = made.pids()
        groups = [group async for group in made.groups([row(run="exit-in-task"), row(), row()])]
        assert made.pids() == pids
    by_index = {group.index: label(group.rollouts[0].outcome) for group in groups}
    assert by_index == {0: "bug.exit", 1: "completed", 2: "completed"}


async def test_an_environment_that_cannot_be_loaded_is_said_before_anything_is_admitted(
    model: ModelServer, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        f"import os\nif os.getppid() != {os.getppid()}: raise ValueError('not here')\n"
        "from tests.engine.envs import Misbehaving\nclass Env(Misbehaving): pass\n"
    )
    with pytest.raises(UsageError, match="not here"):
        async with engine(model, tmp_path, env=str(tmp_path / "broken.py:Env"), runners=1):
            pass


async def test_runners_that_die_before_they_are_ready_stop_the_run(model: ModelServer, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(
        f"import os\nif os.getppid() != {os.getppid()}: os._exit(9)\n"
        "from tests.engine.envs import Misbehaving\nclass Env(Misbehaving): pass\n"
    )
    with pytest.raises(Stopped, match="status 9"):
        async with engine(model, tmp_path, env=str(tmp_path / "dying.py:Env"), runners=1):
            pass


async def test_a_rollout_that_finds_no_runner_ends_at_the_queues_deadline(
    model: ModelServer, tmp_path: Path
) -> None:
    flag = tmp_path / "blocked"
    (tmp_path / "stuck.py").write_text(
        f"import os, time\nwhile os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        "from tests.engine.envs import Misbehaving\nclass Env(Misbehaving): pass\n"
    )
    env = str(tmp_path / "stuck.py:Env")
    async with engine(model, tmp_path, env=env, runners=1, limits=Limits(queue=0.5), retry=RetryPolicy(1)) as made:
        flag.touch()  # the next runner never gets ready
        os.kill(made.pids()[1], signal.SIGKILL)
        groups = [group async for group in made.groups([row()] * 2, k=2)]
        flag.unlink()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert label(rollout.outcome) == "engine.queue"
        assert rollout.timing.queue == 0.5


async def test_concurrency_is_bounded_over_all_runners_together(model: ModelServer, tmp_path: Path) -> None:
    gate = asyncio.Event()
    answer = model.default
    assert callable(answer)

    def held(request: Any) -> Any:
        made = answer(request)
        made.hold = gate
        return made

    model.default = held
    async with engine(model, tmp_path, runners=2, concurrency=10) as made:
        stream = made.groups([row()] * 40)
        await model.wait_for_requests(10)
        assert (await made.status())["in_flight"] == 10
        gate.set()
        groups = [group async for group in stream]
    assert len(groups) == 40
    assert model.peak <= 10


async def test_pausing_stops_admission_and_model_calls_and_resumes_on_every_path(
    model: ModelServer, tmp_path: Path
) -> None:
    async with engine(model, tmp_path, runners=2, concurrency=8, limits=Limits(run=10.0)) as made:
        stream = made.groups([row()] * 400)
        await model.wait_for_requests(20)
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with made.paused():
                assert model.in_flight == 0
                before = len(model.requests)
                await asyncio.sleep(0.3)  # a chance for a call that must not come
                assert len(model.requests) == before
                raise ZeroDivisionError
        groups = [group async for group in stream]
    assert len(groups) == 400
    assert all(label(group.rollouts[0].outcome) == "completed" for group in groups)


@pytest.mark.long
async def test_the_run_clock_excludes_pauses(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path, limits=Limits(run=3.0)) as made:
        stream = made.groups([row(run="wait-for-door")])
        async with made.paused():
            await asyncio.sleep(3.2)  # longer than the whole run stage may take
        groups = [group async for group in stream]
    assert [label(group.rollouts[0].outcome) for group in groups] == ["completed"]


async def test_a_pause_that_cannot_drain_aborts_what_is_under_way_and_asks_again(
    model: ModelServer, tmp_path: Path
) -> None:
    async with engine(model, tmp_path, runners=1) as made:
        stream = made.groups([row(run="hang-in-policy"), row()])
        await model.wait_for_requests(2)
        async with made.paused(timeout=0.2):
            assert (await made.status())["paused"]
            asked = len(model.requests)
        assert not (await made.status())["paused"]
        assert (await anext(stream)).index == 1
        await model.wait_for_requests(asked + 1)
        await stream.aclose()


class OddRange(Environment):
    reward_range = (1.0, float("inf"))


async def test_configuration_errors_are_raised_when_the_object_is_built(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="reward_range must be two finite numbers"):
        Engine(OddRange(), policy="http://127.0.0.1:1")
    env = "tests.engine.envs:Misbehaving"
    for options, words in [
        ({"runners": -1}, "runners"),
        ({"concurrency": 0}, "concurrency"),
        ({"breaker": 2.0}, "breaker"),
        ({"colour": "red"}, "no option colour"),
        ({"policy": ""}, "--policy"),
    ]:
        with pytest.raises(UsageError, match=words):
            Engine(env, **{"policy": "http://127.0.0.1:1", **options})  # type: ignore[arg-type]
