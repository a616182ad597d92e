"""The time limit for a task's tests, and which of several settings applies."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery import Engine
from rookery.core import Completed, Limits, Task, UsageError
from rookery.environments.agent import AgentEnvironment
from rookery.environments.swe import SweEnvironment
from rookery.tasks import check_tasks, load_tasks
from rookery.tasks.swe import (
    GRADING_OVERHEAD_SECONDS,
    GRADING_TIME_SHARE,
    RUNS_PER_GRADING,
    get_swe_task,
    with_test_timeout,
)
from tests.cli.helpers import rookery
from tests.environments.swe.helpers import SUBMIT, scripted_model
from tests.servers import ModelServer

ROW: dict[str, Any] = {"id": "x", "instruction": "Do it.", "tests": {"test.sh": "sleep 600\n"}}
NONE = Limits()


def load_task(folder: Path, **more: Any) -> Task:
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    path.write_text(json.dumps({**ROW, **more}))
    (task,) = load_tasks(path)
    assert not task.invalid, task.invalid
    return task


def get_limits(env: SweEnvironment, task: Task, run: Limits = NONE) -> tuple[float, float | None]:
    """Return the time limits of the tests and of the score stage."""
    limits = env.limits_for(task, run)
    timed = with_test_timeout(get_swe_task(task), limits.test_timeout, env.test_timeout)
    return timed.steps[-1].verifier.timeout, limits.score


def score_limit(timeout: float) -> float:
    """Return the time limit of the score stage for tests with this timeout."""
    return (RUNS_PER_GRADING * timeout + 2 * GRADING_OVERHEAD_SECONDS) / GRADING_TIME_SHARE


def test_run_overrides_task_and_task_overrides_environment(tmp_path: Path) -> None:
    plain, with_timeout = SweEnvironment(), SweEnvironment(test_timeout=700)
    untimed, timed = load_task(tmp_path), load_task(tmp_path, test_timeout=30)
    assert get_limits(plain, untimed)[0] == 600
    assert get_limits(with_timeout, untimed) == (700, score_limit(700))
    assert get_limits(with_timeout, timed) == (30, score_limit(30))
    assert get_limits(with_timeout, timed, Limits(test_timeout=5)) == (5, score_limit(5))
    assert get_limits(with_timeout, timed, Limits(test_timeout=5, score=17)) == (5, 17)
    assert get_limits(with_timeout, load_task(tmp_path, limits={"score": 19}), Limits(test_timeout=5)) == (5, 19)
    agent = AgentEnvironment("mini-swe-agent", test_timeout=700)
    assert agent.limits_for(untimed, NONE).score == score_limit(700)


def test_limits_of_the_run_override_those_of_the_task(tmp_path: Path) -> None:
    task = load_task(tmp_path, limits={"turns": 9}, timeout=50)
    env = SweEnvironment()
    assert env.limits_for(task, NONE).turns == 9
    found = env.limits_for(task, Limits(turns=3, score=40, run=30))
    assert (found.turns, found.score, found.run) == (3, 40, 30)


@pytest.mark.parametrize("bad", [0, -1, float("inf"), float("nan"), "5", True])
def test_invalid_test_timeout_is_refused(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(UsageError, match="test_timeout"):
        SweEnvironment(test_timeout=bad)
    if bad in (0, -1, "5"):
        (tmp_path / "t.jsonl").write_text(json.dumps({**ROW, "test_timeout": bad}))
        assert [one.field for one in check_tasks(tmp_path / "t.jsonl").problems] == ["test_timeout"]


def test_timeout_of_the_task_applies_to_steps_without_their_own(tmp_path: Path) -> None:
    steps = [
        {"instruction": "a", "tests": ROW["tests"]},
        {"instruction": "b", "tests": ROW["tests"], "test_timeout": 7},
        {"instruction": "c", "tests": ROW["tests"], "verifier": {"timeout": 8}},
    ]
    (tmp_path / "t.jsonl").write_text(json.dumps({"id": "x", "steps": steps, "test_timeout": 6}))
    (task,) = load_tasks(tmp_path / "t.jsonl")
    assert [step.verifier.timeout for step in get_swe_task(task).steps] == [6, 7, 8]
    assert "test_timeout" not in task.data


def test_rows_and_sidecar_files_may_set_the_timeout(tmp_path: Path) -> None:
    data = tmp_path / "task-data" / "one"
    (data / "tests").mkdir(parents=True)
    for name, text in (
        ("instruction.md", "Do it."),
        ("tests/test.sh", "true"),
        ("rookery.json", '{"test_timeout": 9}'),
    ):
        (data / name).write_text(text)
    rows = [{"env_config": {"task_id": "one"}, **more} for more in ({}, {"test_timeout": 8})]
    rows.append({"env_config": {"task_id": "one", "test_timeout": 7}})
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [get_swe_task(task).steps[0].verifier.timeout for task in load_tasks(tmp_path / "t.jsonl")]
    assert found == [9, 8, 7]


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer() as made:
        yield made


@pytest.mark.long
@pytest.mark.needs("mount")
@pytest.mark.parametrize("where", ["run", "task", "environment"])
async def test_tests_that_hang_end_at_the_test_timeout(server: ModelServer, tmp_path: Path, where: str) -> None:
    server.default = scripted_model(SUBMIT)
    env = SweEnvironment(test_timeout=1 if where == "environment" else None)
    more = {"test_timeout": {"run": 500, "task": 1}[where]} if where != "environment" else {}
    task = load_task(tmp_path, **more)
    limits = Limits(test_timeout=1) if where == "run" else Limits()
    async with Engine(
        env, policy=server.url, out=tmp_path / "runs", runners=0, sandbox="local", limits=limits
    ) as engine:
        (group,) = [group async for group in engine.groups([task])]
    rollout = group.rollouts[0]
    assert (rollout.outcome, rollout.reward) == (Completed(), 0.0)
    assert rollout.metrics["grade/runs"] == 2


@pytest.mark.long
async def test_command_line_sets_the_timeout_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(ROW))
    run = (
        "run",
        "swe",
        "--tasks",
        "t.jsonl",
        "--policy",
        "http://127.0.0.1:1",
        "--model",
        "m",
        "--dry-run",
        "--json",
    )
    done = await rookery(*run, "--test-timeout", "7.5", cwd=tmp_path)
    values = {row["name"]: row["value"] for row in done.events[0]["values"]}
    assert values["limits.test_timeout"] == 7.5
    (tmp_path / "rookery.toml").write_text("[run.limits]\ntest_timeout = 9\nscore = 11\n")
    done = await rookery(*run, cwd=tmp_path)
    values = {row["name"]: row["value"] for row in done.events[0]["values"]}
    assert (values["limits.test_timeout"], values["limits.score"]) == (9, 11)
    assert (await rookery(*run, "--test-timeout", "0", cwd=tmp_path)).code != 0


def test_task_without_steps_keeps_its_limits() -> None:
    broken = Task(id="x", data={"swe": {"id": "x"}}, limits=Limits(score=5))
    assert SweEnvironment(test_timeout=9).limits_for(broken, NONE).score == 5
    assert msgspec.to_builtins(Limits(test_timeout=1.0)) == {"test_timeout": 1.0}
