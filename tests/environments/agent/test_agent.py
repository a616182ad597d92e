"""Agents in sandboxes produce scored and trainable rollouts."""

from pathlib import Path
from typing import Any

import pytest

from rookery.core import label
from rookery.environments.agent import AgentEnvironment
from tests.cli.sandbox_kit import local_sandboxes
from tests.engine_standins import standin
from tests.environments.agent.helpers import (
    agents_directory,
    run_rollouts,
    scripted_engine,
    standin_engine,
    write_program,
)
from tests.servers import ModelServer

__all__ = ["local_sandboxes"]
pytestmark = pytest.mark.usefixtures("local_sandboxes")

TURNS = """
for turn in range(3):
    messages.append(ask(messages))
    messages.append({"role": "user", "content": "go on"})
print("thinking about it")
print(42)
"""


@pytest.mark.long
@pytest.mark.parametrize("runners", [0, 2])
async def test_every_token_that_an_agent_samples_is_recorded_and_trained_once(
    runners: int, tmp_path: Path
) -> None:
    env = AgentEnvironment("program", script=write_program(tmp_path, TURNS))
    async with standin("vllm") as server, standin_engine(server, env, tmp_path, runners=runners) as engine:
        rollouts = await run_rollouts(engine, [{"prompt": "6 * 7?", "answer": answer} for answer in (42, 43)], k=2)
    assert [label(rollout.outcome) for rollout in rollouts] == ["completed"] * 4, rollouts[0]
    assert sorted(rollout.reward or 0.0 for rollout in rollouts) == [0.0, 0.0, 1.0, 1.0]
    for rollout in rollouts:
        assert rollout.usage.turns == 3
        assert sum(segment.trained for segment in rollout.segments) == rollout.usage.sampled_tokens > 0
        assert rollout.info["agents"][0]["exit_code"] == 0


SHELL = {"name": "shell", "needs": ["sh"]}


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    [
        {**SHELL, "command": ["sh", "-c", 'printf %s "$1"', "sh", "{prompt}"]},
        {**SHELL, "command": ["cat"], "prompt": "stdin"},
        {**SHELL, "command": ["cat", "{prompt_file}"], "prompt": "file"},
    ],
)
async def test_prompt_arrives_unchanged(launcher: dict[str, Any], tmp_path: Path) -> None:
    prompt = "say {model} 'and' \"$HOME\"\n" + "x" * 100_000
    env = AgentEnvironment(launcher, instructions=False, max_log=300_000)
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [{"prompt": prompt, "answer": prompt}])
    assert label(rollout.outcome) == "completed", rollout.outcome
    assert rollout.reward == 1.0
    assert rollout.info["agents"][0]["stdout"] == prompt


async def test_prompt_that_cannot_be_an_argument_is_the_tasks_fault(tmp_path: Path) -> None:
    env = AgentEnvironment({**SHELL, "command": ["echo", "{prompt}"]})
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as engine:
        rollouts = await run_rollouts(
            engine, [{"prompt": prompt, "answer": 1} for prompt in ("x" * 200_000, "a\0b")]
        )
    assert [label(rollout.outcome) for rollout in rollouts] == ["task.invalid"] * 2, rollouts
    assert all(len(rollout.attempts) == 1 for rollout in rollouts)


async def test_answer_file_is_scored_instead_of_the_output(tmp_path: Path) -> None:
    rows = [
        {"id": "file", "prompt": "6 * 7?", "answer": 42},
        {"id": "other", "prompt": "6 * 7?", "answer": 42, "submission": "deep/er/out.txt", "collect": ["log.txt"]},
        {"id": "path-in-prompt", "prompt": "7", "answer": "/work/answer.txt"},
    ]
    script = (
        "echo 41; mkdir -p deep/er; echo 42 > deep/er/out.txt; echo logged > log.txt; "
        'case "$1" in 6*) echo 42 > answer.txt;; '
        '*) echo "$1" | sed -n "s/.*file //; s/\\.$//; \\$p" > answer.txt;; esac'
    )
    env = AgentEnvironment({**SHELL, "command": ["sh", "-c", script, "sh", "{prompt}"]})
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as engine:
        rollouts = {rollout.task: rollout for rollout in await run_rollouts(engine, rows)}
    assert {name: rollout.reward for name, rollout in rollouts.items()} == {
        "file": 1.0,
        "other": 1.0,
        "path-in-prompt": 1.0,
    }, rollouts
    assert rollouts["other"].info["agents"][0]["files"] == {"log.txt": "logged\n"}


async def test_programs_are_graded_in_fresh_sandboxes(tmp_path: Path) -> None:
    """A file that the agent left in its sandbox is not visible to the graded program."""
    cases = [{"stdin": "4", "stdout": "8"}]
    right = "print(2 * int(input()))"
    rows = [
        {"id": "right", "prompt": right, "cases": cases},
        {"id": "wrong", "prompt": "print(9)", "cases": cases},
        {"id": "none", "prompt": "", "cases": cases},
        {"id": "looks", "prompt": f"import os\nif not os.path.exists('/work/left'): {right}", "cases": cases},
    ]
    rows[2]["prompt"] = "exit"
    script = 'touch left; [ "$1" = exit ] || printf %s "$1" > solution.py'
    env = AgentEnvironment({**SHELL, "command": ["sh", "-c", script, "sh", "{prompt}"]}, instructions=False)
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as engine:
        rollouts = {rollout.task: rollout for rollout in await run_rollouts(engine, rows)}
    assert {name: rollout.reward for name, rollout in rollouts.items()} == {
        "right": 1.0,
        "wrong": 0.0,
        "none": 0.0,
        "looks": 1.0,
    }, rollouts


async def test_task_that_cannot_be_scored_fails_before_anything_starts(tmp_path: Path) -> None:
    env = AgentEnvironment({**SHELL, "command": ["echo", "{prompt}"]})
    rows = [{"prompt": "x"}, {"prompt": "x", "answer": 1, "submission": "../../etc/passwd"}]
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as engine:
        rollouts = await run_rollouts(engine, rows)
    assert [label(rollout.outcome) for rollout in rollouts] == ["task.invalid", "task.invalid"], rollouts
    assert all("agents" not in rollout.info for rollout in rollouts[:1])


async def test_missing_program_is_named(tmp_path: Path) -> None:
    env = AgentEnvironment({**SHELL, "command": ["frobnicate", "{prompt}"], "needs": ["sh", "frobnicate"]})
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [{"prompt": "x", "answer": 1}])
    assert label(rollout.outcome) == "agent.missing", rollout.outcome
    assert "frobnicate" in str(rollout.outcome)


async def test_agent_runs_without_recorded_tokens(tmp_path: Path) -> None:
    """The inference engine returns no token IDs."""
    env = AgentEnvironment("program", script=write_program(tmp_path, "print(ask(messages)['content'])"))
    async with ModelServer("42") as server, scripted_engine(server, env, tmp_path, record="plain") as engine:
        (rollout,) = await run_rollouts(engine, [{"prompt": "6 * 7?", "answer": 42}])
    assert label(rollout.outcome) == "completed", rollout.outcome
    assert (rollout.reward, rollout.usage.turns) == (1.0, 1)
    assert not sum(segment.trained for segment in rollout.segments)


async def test_installed_agent_is_mounted_read_only_in_every_sandbox(tmp_path: Path) -> None:
    launcher = {
        **SHELL,
        "command": ["sh", "-c", "echo no > {agent}/x; cat {agent}/x > answer.txt", "sh", "{prompt}"],
        "install": {"commands": [["sh", "-c", f"echo x >> {tmp_path}/count; echo yes > x"]]},
    }
    with agents_directory(tmp_path / "agents"):
        env = AgentEnvironment(launcher)
        async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as engine:
            rollouts = await run_rollouts(engine, [{"prompt": "x", "answer": "yes"}], k=6)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 6, rollouts
    assert (tmp_path / "count").read_text() == "x\n"
