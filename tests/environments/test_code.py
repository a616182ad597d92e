"""`code` rollouts end to end: a real engine, real sandboxes and a scripted inference engine."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery import Context, Engine, Limits
from rookery.core import Completed, Failed, Group, Rollout, Truncated, UsageError, label
from rookery.engine.retry import RetryPolicy
from rookery.environments.code_environment import CodeEnvironment
from rookery.workers import Cell
from tests.servers import Answer, ModelServer, Request

ADD = {
    "id": "add",
    "prompt": "Write add(a, b).",
    "entry_point": "add",
    "tests": "assert add(1, 2) == 3\nassert add(-1, 1) == 0",
    "solution": "def add(a, b):\n    return a + b",
}
QUICK = RetryPolicy(attempts=2, base=0.001)
RIGHT = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```"


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer() as made:
        yield made


async def run_task(
    server: ModelServer,
    tmp_path: Path,
    task: dict[str, Any],
    *answers: Answer | str,
    env: CodeEnvironment | None = None,
    **options: Any,
) -> Rollout:
    server.then(*(Answer(one) if isinstance(one, str) else one for one in answers))
    settings: dict[str, Any] = {"runners": 0, "sandbox": "local", "retry": QUICK}
    async with Engine(
        env or CodeEnvironment(), policy=server.url, out=tmp_path / "runs", **{**settings, **options}
    ) as engine:
        groups: list[Group] = [group async for group in engine.groups([task])]
    return groups[0].rollouts[0]


def get_observations(server: ModelServer) -> list[str]:
    """Return what the policy read after each of its cells."""
    last: Request = server.requests[-1]
    return [m["content"] for m in last.body["messages"][2:] if m["role"] in ("user", "tool")]


pytestmark = pytest.mark.needs("mount")
THREAD = "<code>import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()"
"""Prevents savepoints: an interpreter with threads cannot be forked safely."""
EXIT = "<code>import os; os._exit(1)"


async def test_context_persists_across_turns_and_the_submission_is_graded(
    server: ModelServer, tmp_path: Path
) -> None:
    rollout = await run_task(
        server,
        tmp_path,
        ADD,
        "<code>\ndef add(a, b):\n    return a + b\n",
        "Try it. <code>add(20, 22)",
        RIGHT,
    )
    assert get_observations(server) == ["<result>(no output)</result>", "<result>42</result>"]
    assert [request.body["stop"] for request in server.requests] == [["</code>"]] * 3
    assert rollout.outcome == Completed()
    assert rollout.reward == 1.0
    assert [test["verdict"] for test in rollout.info["grade"]["tests"]] == ["passed"] * len(
        rollout.info["grade"]["tests"]
    )
    assert not rollout.info["grade"].get("weaker")
    assert rollout.metrics["cells"] == 2


async def test_wrong_submission_is_completed_with_a_low_reward(server: ModelServer, tmp_path: Path) -> None:
    rollout = await run_task(server, tmp_path, ADD, "```python\ndef add(a, b):\n    return 3\n```")
    assert (rollout.outcome, rollout.reward) == (Completed(), 0.0)
    partly = await run_task(
        server,
        tmp_path,
        {**ADD, "tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]},
        "```python\ndef add(a, b):\n    return 3\n```",
        env=CodeEnvironment(partial=True),
    )
    assert partly.reward == 0.5


async def test_cell_over_its_limit_is_observed_and_the_state_is_kept(server: ModelServer, tmp_path: Path) -> None:
    rollout = await run_task(
        server,
        tmp_path,
        {**ADD, "timeout_seconds": 0.3},
        "<code>x = 41",
        "<code>x = 0\nwhile True: pass",
        "<code>x + 1",
        RIGHT,
    )
    first, timed_out, after = get_observations(server)
    assert first == "<result>(no output)</result>"
    assert "time_limit" in timed_out
    assert after == "<result>42</result>"
    assert rollout.reward == 1.0
    assert rollout.metrics["cells/time_limit"] == 1
    assert rollout.metrics["recovered/kept"] == 1


async def test_program_is_graded_by_its_output(server: ModelServer, tmp_path: Path) -> None:
    task = {
        "prompt": "Print the sum of the numbers.",
        "cases": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 5\n", "stdout": "10\n"}],
        "limits": {"wall": 5, "memory": 256 << 20, "turns": 4},
    }
    program = "```python\nprint(sum(map(int, input().split())))\n```"
    assert (await run_task(server, tmp_path, task, program)).reward == 1.0
    assert (await run_task(server, tmp_path, task, "```python\nprint(3)\n```")).reward == 0.0


async def test_tool_call_runs_a_cell(server: ModelServer, tmp_path: Path) -> None:
    def call(code: str) -> Answer:
        return Answer(None, calls=[("python", json.dumps({"code": code}))], finish="tool_calls")

    rollout = await run_task(
        server,
        tmp_path,
        {"prompt": "What is 6 * 7?", "answer": "42"},
        call("x = 6 * 7"),
        call("x"),
        Answer("It is 42"),
        env=CodeEnvironment(style="tool"),
    )
    assert get_observations(server) == ["(no output)", "42"]
    assert rollout.reward == 1.0


async def test_custom_grade_function(server: ModelServer, tmp_path: Path) -> None:
    async def grade(submission: str, task: Any, sandbox: Any) -> float:
        assert task.id == "mine"
        return 0.25 if "seven" in submission else 0.0

    env = CodeEnvironment(grade=grade)
    rollout = await run_task(server, tmp_path, {"id": "mine", "prompt": "x"}, "```\nseven\n```", env=env)
    assert rollout.reward == 0.25


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"timeout_seconds": "soon"}, "timeout_seconds"),
        ({"memory_limit_bytes": -5}, "memory_limit_bytes"),
        ({"limits": {"wall": 0}}, "limits.wall"),
        ({"limits": {"walls": 1}}, "walls"),
        ({"cases": [{"stdin": "x"}]}, "cases"),
        ({"tests": None}, "add"),
    ],
)
async def test_invalid_task_fails_before_anything_runs_and_names_the_field(
    server: ModelServer, tmp_path: Path, row: dict[str, Any], field: str
) -> None:
    rollout = await run_task(server, tmp_path, {**ADD, **row})
    assert isinstance(rollout.outcome, Failed)
    assert rollout.outcome.fault == "task", rollout.outcome
    assert field in rollout.outcome.detail
    assert not [request for request in server.requests if request.body]


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="default_timeout_seconds"):
        CodeEnvironment(default_timeout_seconds=-1)
    with pytest.raises(UsageError, match="default_memory_limit_bytes"):
        CodeEnvironment(default_memory_limit_bytes=5)
    with pytest.raises(UsageError, match="style"):
        CodeEnvironment(style="voice")  # type: ignore[arg-type]


async def test_reply_cut_at_its_token_limit_is_truncated_and_its_cell_does_not_run(
    server: ModelServer, tmp_path: Path
) -> None:
    rollout = await run_task(server, tmp_path, ADD, Answer("<code>x = ", finish="length"))
    assert label(rollout.outcome) == "truncated.tokens"
    assert rollout.reward == 0.0
    assert "cells" not in rollout.metrics


class ClosesSandboxBetweenCells(CodeEnvironment):
    """Closes the sandbox of one rollout between two cells of its first attempt."""

    async def cell(self, ctx: Context, code: str) -> Cell:
        if ctx.attempt.endswith(".1.1") and "worker" in ctx.state:
            await (await ctx.sandbox()).close()
        return await super().cell(ctx, code)


async def test_worker_that_cannot_be_restarted_is_infra_and_does_not_affect_the_group(
    server: ModelServer, tmp_path: Path
) -> None:
    server.default = lambda request: Answer(RIGHT if len(request.body["messages"]) > 4 else "<code>1 + 1")
    async with Engine(
        ClosesSandboxBetweenCells(),
        policy=server.url,
        out=tmp_path / "runs",
        runners=0,
        sandbox="local",
        retry=QUICK,
    ) as engine:
        (group,) = [group async for group in engine.groups([ADD], k=3)]
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 3
    assert [len(rollout.attempts) for rollout in group.rollouts] == [1, 2, 1]
    lost = group.rollouts[1].attempts[0].outcome
    assert isinstance(lost, Failed)
    assert (lost.fault, lost.cause) == ("infra", "worker.unrecoverable")


async def test_worker_lost_in_a_cell_is_restarted_and_the_rollout_continues(
    server: ModelServer, tmp_path: Path
) -> None:
    rollout = await run_task(server, tmp_path, ADD, THREAD, EXIT, "<code>1 + 1", RIGHT)
    assert (rollout.outcome, rollout.reward, len(rollout.attempts)) == (Completed(), 1.0, 1)
    assert rollout.metrics["recovered/reset"] == 1.0
    assert get_observations(server)[2] == "<result>2</result>"


async def test_policy_that_destroys_its_interpreter_twice_is_truncated(
    server: ModelServer, tmp_path: Path
) -> None:
    """The second loss on a healthy host is attributed to the policy, so it gets no free retry."""
    server.default = lambda request: Answer(EXIT if len(request.body["messages"]) % 4 == 0 else THREAD)
    retry = RetryPolicy(attempts=3, base=0.001)
    rollout = await run_task(server, tmp_path, ADD, retry=retry, limits=Limits(turns=200))
    assert (rollout.outcome, rollout.reward) == (Truncated("lost"), 0.0)
    assert [label(attempt.outcome) for attempt in rollout.attempts] == ["worker.unrecoverable"] * 2
    assert rollout.valid


async def test_embedded_policy_runs_cells(tmp_path: Path) -> None:
    env = CodeEnvironment(style="tool", system_prompt="Use python. End with the number.", max_turns=6)
    tasks = [{"prompt": f"What is {n} + {n + 3}?", "answer": 2 * n + 3} for n in range(3)]
    async with Engine(env, policy="embedded", out=tmp_path / "runs", runners=0, sandbox="local") as engine:
        rollouts = [group.rollouts[0] async for group in engine.groups(tasks)]
    assert all(rollout.valid for rollout in rollouts), [rollout.outcome for rollout in rollouts]
    assert any(rollout.metrics.get("cells") for rollout in rollouts)
    assert all(rollout.segments for rollout in rollouts)
