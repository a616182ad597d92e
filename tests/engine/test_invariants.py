"""The guarantees of the engine, named as in its docstring. The eighth is tested in test_crash.py."""

import asyncio
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery.core import Cancelled, Completed, Failed, Group, Limits, Rollout, Truncated, label
from rookery.engine import Stopped
from rookery.engine.attempt import RunningAttempt
from tests.engine.conftest import build_engine, events, records, run_groups
from tests.servers import ModelServer
from tests.waiting import wait_until

MODES = pytest.mark.parametrize("runners", [0, 2], ids=["in-process", "two-runners"])


def row(**data: Any) -> dict[str, Any]:
    return {"prompt": "question", "data": data}


@pytest.mark.long
async def test_every_admitted_rollout_gets_exactly_one_terminal_record(model: ModelServer, tmp_path: Path) -> None:
    tasks = [row(), row(run="raise"), row(score="nan"), row(run={"1": "sandbox-lost"}), row(setup="exit")] * 4
    groups = await run_groups(model, tmp_path, tasks, k=3, runners=2, breaker=None)
    assert len(groups) == 20
    written = records(tmp_path)
    assert len(written) == 60
    assert Counter(record.id for record in written) == {f"{g}.{m}": 1 for g in range(20) for m in range(3)}
    delivered = {record.id: record.outcome for group in groups for record in group.rollouts}
    assert delivered == {record.id: record.outcome for record in written}


@pytest.mark.long
@MODES
async def test_nothing_one_rollout_does_cancels_another(model: ModelServer, tmp_path: Path, runners: int) -> None:
    actions = ["raise", "group", "recursion", "cancelled", "cancel-self", "exit", "interrupt"]
    stages = ["setup", "run", "after", "score"]
    tasks = [row(**{stage: {"1": action}}) for stage in stages for action in actions]
    groups = await run_groups(model, tmp_path, tasks, k=3, runners=runners, breaker=None)
    assert len(groups) == len(tasks)
    for group in groups:
        assert [type(rollout.outcome) for rollout in group.rollouts] == [Completed, Failed, Completed], (
            group.task.data
        )
        failed = group.rollouts[1].outcome
        assert isinstance(failed, Failed)
        assert failed.fault == "bug"
        assert failed.traceback


async def test_failed_teardown_is_an_event_and_does_not_change_the_outcome(
    model: ModelServer, tmp_path: Path
) -> None:
    tasks = [row(teardown=action) for action in ("raise", "cancelled", "exit", "hang")]
    groups = await run_groups(model, tmp_path, tasks, limits=Limits(teardown=0.05))
    assert [group.rollouts[0].outcome for group in groups] == [Completed()] * 4
    assert [group.rewards for group in groups] == [[1.0]] * 4
    assert len(events(tmp_path, "teardown.failed")) == 4


@pytest.mark.long
@MODES
async def test_a_group_always_returns_k_records_in_order_of_one_shape(
    model: ModelServer, tmp_path: Path, runners: int
) -> None:
    actions = {"0": "raise", "1": "hang-in-policy", "2": "exit", "4": "sandbox-lost", "6": "spend-turns"}
    (group,) = await run_groups(
        model, tmp_path, [row(run=actions)], k=8, runners=runners, limits=Limits(run=4.0, turns=3), breaker=None
    )
    assert [rollout.member for rollout in group.rollouts] == list(range(8))
    assert all(isinstance(rollout, Rollout) and isinstance(rollout.segments, list) for rollout in group.rollouts)
    assert [label(rollout.outcome) for rollout in group.rollouts] == [
        "bug.environment",
        "truncated.time",
        "bug.exit",
        "completed",
        "sandbox.lost",
        "completed",
        "truncated.turns",
        "completed",
    ]
    for rollout in group.rollouts:
        assert rollout.valid == (not isinstance(rollout.outcome, Failed))
        assert (rollout.reward is None) == isinstance(rollout.outcome, Failed)
        assert bool(rollout.segments) == (rollout.valid and rollout.usage.turns > 0)


@pytest.mark.long
@MODES
async def test_exceptions_after_the_generation_fail_three_of_500_rollouts(
    model: ModelServer, tmp_path: Path, runners: int
) -> None:
    """In other systems an exception after the generation has failed the whole step."""
    bad = {17: "raise", 250: "group", 499: "cancelled"}
    tasks = [row(after=bad.get(n)) for n in range(500)]
    groups = await run_groups(model, tmp_path, tasks, runners=runners)
    outcomes = {group.index: group.rollouts[0].outcome for group in groups}
    assert len(outcomes) == len(records(tmp_path)) == 500
    assert sum(isinstance(outcome, Completed) for outcome in outcomes.values()) == 497
    for n in bad:
        failed = outcomes[n]
        assert isinstance(failed, Failed)
        assert "in action" in failed.traceback


@pytest.mark.long
@MODES
@pytest.mark.parametrize("stage", ["setup", "run", "after", "score"])
async def test_every_stage_has_a_deadline_that_the_engine_enforces(
    model: ModelServer, tmp_path: Path, stage: str, runners: int
) -> None:
    hangs = "run" if stage == "after" else stage
    limits = msgspec.structs.replace(Limits(setup=60.0, run=60.0, score=60.0), **{hangs: 5.0})
    tasks = [row(**{stage: {"0": "hang"}})]
    (group,) = await run_groups(model, tmp_path, tasks, k=2, limits=limits, runners=runners)
    first, second = group.rollouts
    assert isinstance(first.outcome, Failed)
    assert (first.outcome.fault, first.outcome.cause) == ("bug", "bug.hung")
    assert "asyncio.sleep(FOREVER)" in first.outcome.traceback
    assert second.outcome == Completed()


@pytest.mark.long
@pytest.mark.parametrize("action", ["hang-in-policy", "hang-in-sandbox"])
async def test_run_deadline_while_policy_or_sandbox_works_truncates_and_scores(
    model: ModelServer, tmp_path: Path, action: str
) -> None:
    (group,) = await run_groups(model, tmp_path, [row(run=action, score="tell-truncated")], limits=Limits(run=2.0))
    assert group.rollouts[0].outcome == Truncated("time")
    assert group.rollouts[0].info == {"truncated": "time"}
    assert group.rewards == [0.5]


@pytest.mark.long
async def test_setup_or_score_deadline_in_a_sandbox_or_model_call_is_infra(
    model: ModelServer, tmp_path: Path
) -> None:
    tasks = [row(setup="hang-in-sandbox"), row(score="hang-in-policy")]
    groups = await run_groups(model, tmp_path, tasks, limits=Limits(setup=1.0, score=1.0), breaker=None)
    assert [label(group.rollouts[0].outcome) for group in groups] == ["engine.setup", "scoring.timeout"]
    assert [len(group.rollouts[0].attempts) for group in groups] == [3, 3]


@pytest.mark.long
async def test_rollout_that_swallows_its_cancellation_is_recorded_and_its_runner_replaced(
    model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with build_engine(model, tmp_path, runners=1, limits=Limits(run=3.0), concurrency=4) as engine:
        before = engine.pids()[1:]
        groups = [group async for group in engine.groups([row(run="swallow"), row(), row()])]
        by_task = {group.index: label(group.rollouts[0].outcome) for group in groups}
        assert by_task == {0: "bug.uncancellable", 1: "completed", 2: "completed"}
        more = [group async for group in engine.groups([row()] * 3)]
        assert [label(group.rollouts[0].outcome) for group in more] == ["completed"] * 3
        await wait_until(lambda: set(engine.pids()).isdisjoint(before))
        assert len(engine.pids()) == 2


async def test_blocking_stages_run_in_threads(model: ModelServer, tmp_path: Path) -> None:
    groups = await run_groups(model, tmp_path, ["a", "b", "c"], env="tests.engine.envs:Blocking")
    assert all(group.rollouts[0].info["thread"].startswith("rookery-run") for group in groups)
    assert [group.rewards for group in groups] == [[1.0]] * 3


async def test_cancelling_reaches_the_upstream(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        stream = engine.groups([row(run="hang-in-policy"), row(run="background-call", after="hang")])
        await model.wait_for_requests(3)
        await stream.aclose()
        await model.wait_for_disconnects(2)
    assert [record.outcome for record in records(tmp_path)] == [Cancelled("user")] * 2


@pytest.mark.long
@MODES
async def test_teardown_runs_after_a_cancellation_and_after_a_failed_setup(
    model: ModelServer, tmp_path: Path, runners: int
) -> None:
    async with build_engine(model, tmp_path, runners=runners) as engine:
        stream = engine.groups([row(run="hang-in-policy", teardown="say"), row(setup="raise", teardown="say")])
        assert (await anext(stream)).index == 1
        await model.wait_for_requests(1)
        await stream.aclose()
    assert [event["stage"] for event in events(tmp_path, "log.info")] == ["teardown"] * 2
    assert events(tmp_path, "teardown.failed") == []


async def test_forgotten_task_ends_with_its_attempt_in_a_runner(model: ModelServer, tmp_path: Path) -> None:
    tasks = [row(run="background-sleep")] * 3 + [row(run="count-sleepers")]
    groups = await run_groups(model, tmp_path, tasks, runners=1, concurrency=1)
    assert [label(group.rollouts[0].outcome) for group in groups] == ["completed"] * 4
    assert groups[3].rollouts[0].metrics == {"sleepers": 0.0}


async def test_cancelling_reaches_the_sandbox(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, runners=1) as engine:
        stream = engine.groups([row(run="hang-in-sandbox", after="hang")] * 3)
        leases = tmp_path / "runs" / "latest" / "sandboxes" / "leases"
        await wait_until(lambda: len(list(leases.glob("*.json"))) >= 3)
        await stream.aclose()
        await wait_until(lambda: not list(leases.glob("*.json")))
    assert [record.outcome for record in records(tmp_path)] == [Cancelled("user")] * 3


@pytest.mark.long
@MODES
async def test_cancelling_the_consumer_cancels_everything(
    model: ModelServer, tmp_path: Path, runners: int
) -> None:
    async def consume() -> None:
        async with build_engine(model, tmp_path, runners=runners) as engine:
            async for _ in engine.groups(
                [row(run="hang-in-policy"), row(run="hang"), row(run="hang-in-sandbox")], k=4
            ):
                pass

    task = asyncio.create_task(consume())
    await model.wait_for_requests(4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert records(tmp_path) == []  # the rollouts are unfinished, so a resume runs them again


@pytest.mark.long
@MODES
async def test_the_original_exception_with_its_traceback_is_in_the_record_and_the_log(
    model: ModelServer, tmp_path: Path, runners: int, caplog: pytest.LogCaptureFixture
) -> None:
    await run_groups(model, tmp_path, [row(run="raise"), row(score="group")], runners=runners)
    logs = caplog.text + "".join(
        path.read_text() for path in (tmp_path / "runs" / "latest" / "logs").glob("*.log")
    )
    first, second = (record.outcome for record in records(tmp_path))
    assert isinstance(first, Failed)
    assert first.detail == "CustomError: raised in run of 0.0.1"
    assert isinstance(second, Failed)
    assert (second.cause, second.stage) == ("bug.scoring", "score")
    for outcome, words in ((first, "raised in run of 0.0.1"), (second, "raised in a child task")):
        assert "Traceback" in outcome.traceback
        assert words in outcome.traceback
        assert words in logs


async def test_failures_above_a_rate_stop_admission_with_a_clear_message(
    model: ModelServer, tmp_path: Path
) -> None:
    with pytest.raises(Stopped, match=r"bug\.environment") as caught:
        await run_groups(model, tmp_path, [row(run="raise")] * 500, concurrency=8)
    assert "rookery resume" in str(caught.value)
    assert 20 <= len(records(tmp_path)) <= 40
    assert events(tmp_path, "stopped")


async def test_few_failures_do_not_stop_the_run(model: ModelServer, tmp_path: Path) -> None:
    tasks = [row(run="raise" if n % 3 == 0 else None) for n in range(90)]
    groups = await run_groups(model, tmp_path, tasks)
    assert len(groups) == 90


async def test_only_infra_faults_are_retried_and_counted(model: ModelServer, tmp_path: Path) -> None:
    tasks = [
        row(run={"attempt 1": "sandbox-lost", "attempt 2": "sandbox-lost"}),
        row(run="sandbox-lost"),
        row(run="raise"),
        row(run="task-broken"),
    ]
    groups = await run_groups(model, tmp_path, tasks, breaker=None)
    rollouts = [group.rollouts[0] for group in groups]
    assert [len(rollout.attempts) for rollout in rollouts] == [3, 3, 1, 1]
    assert [label(rollout.outcome) for rollout in rollouts] == [
        "completed",
        "sandbox.lost",
        "bug.environment",
        "task.setup",
    ]
    assert [attempt.id for attempt in rollouts[0].attempts] == ["0.0.1", "0.0.2", "0.0.3"]
    assert [label(attempt.outcome) for attempt in rollouts[0].attempts] == [
        "sandbox.lost",
        "sandbox.lost",
        "completed",
    ]


async def test_task_fault_quarantines_the_task(model: ModelServer, tmp_path: Path) -> None:
    tasks = [{"id": "broken", **row(setup="task-broken")}, {"id": "fine", **row()}]
    groups = await run_groups(model, tmp_path, tasks, k=4, stream={"epochs": 3}, concurrency=1)
    labels = [[label(rollout.outcome) for rollout in group.rollouts] for group in groups]
    assert labels == [["task.setup"] * 4, ["completed"] * 4] * 3
    # One attempt ran; the other eleven rollouts end with the same cause without one.
    assert (
        sum(len(rollout.attempts) for group in groups for rollout in group.rollouts if group.task.id == "broken")
        == 1
    )
    assert [event["task"] for event in events(tmp_path, "task.quarantined")] == ["broken"]


async def test_invalid_row_is_quarantined_and_the_others_run(model: ModelServer, tmp_path: Path) -> None:
    groups = await run_groups(model, tmp_path, [row(), {"no": "prompt"}, row()], k=2)
    assert [[label(rollout.outcome) for rollout in group.rollouts] for group in groups] == [
        ["completed"] * 2,
        ["task.invalid"] * 2,
        ["completed"] * 2,
    ]
    assert len(model.requests) == 4


async def test_invalid_reward_is_a_fault_and_not_zero(model: ModelServer, tmp_path: Path) -> None:
    groups = await run_groups(
        model, tmp_path, [row(score=action) for action in ("nan", "nothing", "too-much", "half")]
    )
    assert [label(group.rollouts[0].outcome) for group in groups] == ["bug.reward"] * 3 + ["completed"]
    assert [group.rewards for group in groups] == [[None], [None], [None], [0.5]]


async def test_spent_budgets_truncate_the_rollout_and_it_is_scored(model: ModelServer, tmp_path: Path) -> None:
    tasks = [
        {**row(run="spend-turns"), "limits": {"turns": 3}},
        {**row(run="spend-turns"), "limits": {"tokens": 7}},
        {**row(run="truncate")},
        {**row(), "limits": {"context": 4}},
    ]
    groups = await run_groups(model, tmp_path, tasks)
    assert [label(group.rollouts[0].outcome) for group in groups] == [
        "truncated.turns",
        "truncated.tokens",
        "truncated.context",
        "truncated.context",
    ]
    assert [group.rollouts[0].usage.turns for group in groups] == [3, 4, 0, 1]
    assert all(group.rewards == [1.0] for group in groups)


async def test_background_task_ends_with_its_attempt(model: ModelServer, tmp_path: Path) -> None:
    groups = await run_groups(model, tmp_path, [row(run="background-call")])
    assert groups[0].rollouts[0].outcome == Completed()
    await model.wait_for_disconnects(1)


@pytest.mark.long
async def test_sandboxes_are_closed_with_their_attempt(model: ModelServer, tmp_path: Path) -> None:
    tasks = ["a", {"prompt": "b", "files": {"data/in.txt": "héllo\n"}}]
    groups: list[Group] = await run_groups(
        model, tmp_path, tasks, k=4, env="tests.engine.envs:WithSandbox", runners=2
    )
    assert [group.rewards for group in groups] == [[1.0] * 4] * 2
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        (usage,) = rollout.attempts[-1].sandboxes
        assert usage.commands >= 1
        assert usage.seconds > 0


@pytest.mark.long
async def test_blocking_stage_past_its_deadline_replaces_its_runner_and_fails_alone(
    model: ModelServer, tmp_path: Path
) -> None:
    async with build_engine(
        model, tmp_path, env="tests.engine.envs:Blocking", runners=1, concurrency=4, limits=Limits(run=3.0)
    ) as engine:
        before = engine.pids()
        groups = [group async for group in engine.groups([row(), {"id": "stuck", **row()}, row(), row()])]
        outcomes = {group.task.id: label(group.rollouts[0].outcome) for group in groups}
        assert Counter(outcomes.values()) == {"completed": 3, "bug.hung": 1}
        assert outcomes["stuck"] == "bug.hung"
        assert [group.rewards async for group in engine.groups([row()])] == [[1.0]]
        await wait_until(lambda: set(engine.pids()[1:]).isdisjoint(before))
        assert len(engine.pids()) == 2


@pytest.mark.long
@MODES
async def test_values_stored_by_an_environment_become_plain_data(
    model: ModelServer, tmp_path: Path, runners: int
) -> None:
    tasks = [row(run="odd-data"), row(run="bad-metrics"), row(run="bad-info"), row()]
    groups = await run_groups(model, tmp_path, tasks, runners=runners)
    assert [label(group.rollouts[0].outcome) for group in groups] == ["completed"] * 4
    first, second, *_ = (group.rollouts[0] for group in groups)
    assert first.metrics == {"float32": 0.5, "int": 3.0, "plain": 1.0}
    assert set(first.info) == {"array", "3", "set", "path"}
    assert second.metrics == {}
    assert "many" in str(second.info)  # kept as text
    (logged,) = events(tmp_path, "log.info")
    assert logged["message"] == "odd"


async def test_ended_attempt_is_freed_without_garbage_collection(model: ModelServer, tmp_path: Path) -> None:
    """Reference cycles would make runners grow by half a kilobyte per rollout and cost CPU time."""
    gc.collect()
    before = [thing for thing in gc.get_objects() if isinstance(thing, RunningAttempt)]  # left by other tests
    gc.disable()
    try:
        await run_groups(model, tmp_path, [row()] * 30)
        found = [thing for thing in gc.get_objects() if isinstance(thing, RunningAttempt)]
        assert [thing for thing in found if thing not in before] == []
    finally:
        gc.enable()


async def test_limit_of_the_run_overrides_the_limit_of_a_task(model: ModelServer, tmp_path: Path) -> None:
    tasks = [{**row(run="spend-turns"), "limits": {"turns": 5}}, row(run="spend-turns")]
    groups = await run_groups(model, tmp_path, tasks, limits=Limits(turns=2))
    assert [group.rollouts[0].usage.turns for group in groups] == [2, 2]
    assert [label(group.rollouts[0].outcome) for group in groups] == ["truncated.turns"] * 2
