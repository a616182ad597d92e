"""Limits of cells and graded programs: without limits of the environment, and from the task."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Completed, Limits, SandboxSpec, Task, UsageError
from rookery.environments.code_environment import CodeEnvironment
from rookery.environments.code_environment.limits import is_unlimited, normalize_limits
from rookery.journal import RunReader
from rookery.workers.limits import MIN_MEMORY
from tests.environments.rlm.helpers import Models, run_tasks
from tests.environments.test_code import ADD, RIGHT, get_observations, run_task
from tests.servers import ModelServer

MB = 1 << 20


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer() as made:
        yield made


def warnings_in(tmp_path: Path) -> list[dict[str, Any]]:
    """Return the warnings that the attempts of the run logged."""
    with RunReader(tmp_path / "runs" / "latest") as reader:
        return [event.payload for event in reader.events() if event.kind == "log.warning"]


def test_arguments_are_checked_at_construction() -> None:
    none = CodeEnvironment(default_timeout_seconds=None, default_memory_limit_bytes=None).cell_limits
    assert is_unlimited(none)
    assert none.memory is None
    assert CodeEnvironment(default_memory_limit_bytes=256e6).cell_limits.memory == 256_000_000
    with pytest.warns(UserWarning, match="default_memory_limit_bytes"):
        assert CodeEnvironment(default_memory_limit_bytes=16 * MB).cell_limits.memory == MIN_MEMORY
    for bad in (0, -1, "10", True, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="default_timeout_seconds"):
            CodeEnvironment(default_timeout_seconds=bad)  # type: ignore[arg-type]
    for bad in (0, -1, 512, "1G", True, float("nan"), float("inf"), 1e8 + 0.5):
        with pytest.raises(UsageError, match="default_memory_limit_bytes"):
            CodeEnvironment(default_memory_limit_bytes=bad)  # type: ignore[arg-type]


def test_byte_counts_may_be_floats_and_small_limits_are_raised() -> None:
    data, notes = normalize_limits(
        {"memory_limit_bytes": 256e6, "limits": {"memory": 1e6, "disk": 1e9, "wall": 0.5}}
    )
    assert data == {
        "memory_limit_bytes": 256_000_000,
        "limits": {"memory": MIN_MEMORY, "disk": 10**9, "wall": 0.5},
    }
    assert len(notes) == 1
    assert normalize_limits({"memory_limit_bytes": -5, "limits": 3}) == (
        {"memory_limit_bytes": -5, "limits": 3},
        [],
    )


def test_sandbox_has_more_memory_than_the_tasks_limit() -> None:
    env = CodeEnvironment(default_timeout_seconds=None, default_memory_limit_bytes=None)
    spec = SandboxSpec(memory=1024 * MB)
    assert env.sandbox_for(Task(id="x"), spec).memory == spec.memory
    made = env.sandbox_for(Task(id="x", data={"memory_limit_bytes": 2e9, "limits": {"disk": 3e8}}), spec)
    assert (made.memory or 0) > 4e9
    assert made.disk == 300_000_000


@pytest.mark.long
@pytest.mark.needs("mount")
async def test_cells_and_grading_run_without_limits_of_the_environment(
    server: ModelServer, tmp_path: Path
) -> None:
    env = CodeEnvironment(default_timeout_seconds=None, default_memory_limit_bytes=None)
    # 600 MB are more than the default limit, and less than the sandbox has.
    use = "x = b'x' * (600 << 20)\nlen(x)\n"
    slow = f"```python\ny = b'y' * (600 << 20)\n{ADD['solution']}\n```"
    rollout = await run_task(server, tmp_path, ADD, f"<code>{use}", slow, env=env, limits=Limits(score=600.0))
    assert get_observations(server) == [f"<result>{600 << 20}</result>"]
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0), rollout.info


@pytest.mark.needs("mount")
async def test_task_may_have_more_memory_than_the_default(server: ModelServer, tmp_path: Path) -> None:
    env = CodeEnvironment(default_memory_limit_bytes=64e6)
    cell = "<code>x = b'x' * (150 << 20)\nlen(x)"
    submission = f"```python\ny = b'y' * (150 << 20)\n{ADD['solution']}\n```"
    for more, reward in (({}, 0.0), ({"memory_limit_bytes": 300e6}, 1.0)):
        rollout = await run_task(server, tmp_path, {**ADD, **more}, cell, submission, env=env)
        assert rollout.outcome == Completed()
        assert ("memory_limit" in get_observations(server)[0]) is not bool(reward), get_observations(server)
        assert rollout.reward == reward


@pytest.mark.long
@pytest.mark.needs("mount")
async def test_task_may_have_more_memory_than_the_sandbox_default(server: ModelServer, tmp_path: Path) -> None:
    cell = "<code>x = b'x' * (1200 << 20)\nlen(x)"
    submission = f"```python\ny = b'y' * (1200 << 20)\n{ADD['solution']}\n```"
    rollout = await run_task(
        server, tmp_path, {**ADD, "limits": {"memory": 1500 * MB, "wall": 60}}, cell, submission
    )
    assert get_observations(server) == [f"<result>{1200 << 20}</result>"]
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0), rollout.info


@pytest.mark.needs("mount")
async def test_limit_below_the_minimum_is_raised_with_a_warning(server: ModelServer, tmp_path: Path) -> None:
    rollout = await run_task(server, tmp_path, {**ADD, "memory_limit_bytes": 1e6}, "<code>1 + 1", RIGHT)
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0), rollout
    (warning,) = warnings_in(tmp_path)
    assert "memory_limit_bytes" in warning["message"]


@pytest.mark.long
@pytest.mark.needs("mount")
@pytest.mark.parametrize("repl", ["python", "bash"])
async def test_rlm_uses_the_limits_of_a_task(tmp_path: Path, repl: str) -> None:
    hang, use = (
        ("while True: pass", "x = b'x' * (300 << 20)")
        if repl == "python"
        else (
            "while :; do :; done",
            "x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo ${#x}",
        )
    )
    task = {"prompt": "?", "context": "c", "answer": 1}
    tasks = [
        {**task, "id": "late", "timeout_seconds": 1, "prompt": hang},
        {**task, "id": "same", "limits": {"wall": 1, "turns": 5}, "prompt": hang},
        {**task, "id": "small", "memory_limit_bytes": 128e6, "prompt": use},
        {**task, "id": "least", "memory_limit_bytes": 1e6, "prompt": "true" if repl == "bash" else "1"},
        {**task, "id": "bad", "memory_limit_bytes": -1},
        {**task, "id": "worse", "limits": {"odd": 1}},
    ]
    seen: dict[str, str] = {}

    def root(messages: list[dict[str, Any]]) -> str:
        cell = messages[1]["content"]
        if messages[-1]["role"] == "user" and messages[-1]["content"] == cell:
            return f"<code>{cell}"
        seen[cell] = messages[-1]["content"]
        return "1"

    groups = await run_tasks(Models(root), tmp_path, tasks, repl=repl, cell_seconds=120.0, cell_memory=1e9)
    rollouts = [group.rollouts[0] for group in groups]
    metrics = [set(rollout.metrics) for rollout in rollouts[:4]]
    assert "cells/time_limit" in metrics[0]
    assert "cells/time_limit" in metrics[1]
    assert "cells/memory_limit" in metrics[2] or "cells/exited" not in metrics[2], rollouts[2].metrics
    assert rollouts[3].outcome == Completed()
    causes = [getattr(rollout.outcome, "cause", "") for rollout in rollouts[4:]]
    assert causes == ["task.invalid", "task.invalid"]
