"""Agents in boxes, to scored and trainable rollouts."""

from pathlib import Path
from typing import Any

import pytest

from rookery.core import label
from rookery.environments.agent import AgentEnvironment
from tests.cli.sandbox_kit import local_sandboxes
from tests.engine_standins import standin
from tests.environments.agent.kit import agents_at, all_of, program, scripted_engine, standin_engine
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


@pytest.mark.parametrize("runners", [0, 2])
async def test_every_token_that_an_agent_sampled_is_its_attempts_and_trains_once(
    runners: int, tmp_path: Path
) -> None:
    env = AgentEnvironment("program", script=program(tmp_path, TURNS))
    async with standin("vllm") as server, standin_engine(server, env, tmp_path, runners=runners) as made:
        found = await all_of(made, [{"prompt": "6 * 7?", "answer": answer} for answer in (42, 43)], k=2)
    assert [label(one.outcome) for one in found] == ["completed"] * 4, found[0]
    assert sorted(one.reward or 0.0 for one in found) == [0.0, 0.0, 1.0, 1.0]
    for one in found:
        assert one.usage.turns == 3
        assert sum(segment.trained for segment in one.segments) == one.usage.sampled_tokens > 0
        assert one.info["agents"][0]["exit_code"] == 0


SHELL = {"name": "shell", "needs": ["sh"]}


@pytest.mark.parametrize(
    "launcher",
    [
        {**SHELL, "command": ["sh", "-c", 'printf %s "$1"', "sh", "{prompt}"]},
        {**SHELL, "command": ["cat"], "prompt": "stdin"},
        {**SHELL, "command": ["cat", "{prompt_file}"], "prompt": "file"},
    ],
)
async def test_a_prompt_arrives_as_it_is(launcher: dict[str, Any], tmp_path: Path) -> None:
    prompt = "say {model} 'and' \"$HOME\"\n" + "x" * 100_000
    env = AgentEnvironment(launcher, instructions=False, max_log=300_000)
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as made:
        (found,) = await all_of(made, [{"prompt": prompt, "answer": prompt}])
    assert label(found.outcome) == "completed", found.outcome
    assert found.reward == 1.0
    assert found.info["agents"][0]["stdout"] == prompt


async def test_a_prompt_that_no_argument_can_hold_is_the_tasks_fault(tmp_path: Path) -> None:
    env = AgentEnvironment({**SHELL, "command": ["echo", "{prompt}"]})
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as made:
        found = await all_of(made, [{"prompt": one, "answer": 1} for one in ("x" * 200_000, "a\0b")])
    assert [label(one.outcome) for one in found] == ["task.invalid"] * 2, found
    assert all(len(one.attempts) == 1 for one in found)


async def test_what_an_agent_writes_into_its_file_is_scored_and_not_what_it_prints(tmp_path: Path) -> None:
    rows = [
        {"id": "file", "prompt": "6 * 7?", "answer": 42},
        {"id": "other", "prompt": "6 * 7?", "answer": 42, "submission": "deep/er/out.txt", "collect": ["log.txt"]},
        {"id": "told", "prompt": "7", "answer": "/work/answer.txt"},
    ]
    script = (
        "echo 41; mkdir -p deep/er; echo 42 > deep/er/out.txt; echo logged > log.txt; "
        'case "$1" in 6*) echo 42 > answer.txt;; '
        '*) echo "$1" | sed -n "s/.*file //; s/\\.$//; \\$p" > answer.txt;; esac'
    )
    env = AgentEnvironment({**SHELL, "command": ["sh", "-c", script, "sh", "{prompt}"]})
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as made:
        found = {one.task: one for one in await all_of(made, rows)}
    assert {name: one.reward for name, one in found.items()} == {"file": 1.0, "other": 1.0, "told": 1.0}, found
    assert found["other"].info["agents"][0]["files"] == {"log.txt": "logged\n"}


async def test_programs_are_graded_in_sandsandboxes_that_no_agent_was_in(tmp_path: Path) -> None:
    """And have neither the agent's packages nor a way to the gateway."""
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
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as made:
        found = {one.task: one for one in await all_of(made, rows)}
    assert {name: one.reward for name, one in found.items()} == {
        "right": 1.0,
        "wrong": 0.0,
        "none": 0.0,
        "looks": 1.0,
    }, found


async def test_a_task_that_cannot_be_scored_is_the_tasks_fault_before_anything_starts(tmp_path: Path) -> None:
    env = AgentEnvironment({**SHELL, "command": ["echo", "{prompt}"]})
    rows = [{"prompt": "x"}, {"prompt": "x", "answer": 1, "submission": "../../etc/passwd"}]
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as made:
        found = await all_of(made, rows)
    assert [label(one.outcome) for one in found] == ["task.invalid", "task.invalid"], found
    assert all("agents" not in one.info for one in found[:1])


async def test_a_program_that_a_sandbox_lacks_is_named(tmp_path: Path) -> None:
    env = AgentEnvironment({**SHELL, "command": ["frobnicate", "{prompt}"], "needs": ["sh", "frobnicate"]})
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as made:
        (found,) = await all_of(made, [{"prompt": "x", "answer": 1}])
    assert label(found.outcome) == "agent.missing", found.outcome
    assert "frobnicate" in str(found.outcome)


async def test_without_recording_the_same_environment_evaluates(tmp_path: Path) -> None:
    """At any endpoint: this one tells no tokens."""
    env = AgentEnvironment("program", script=program(tmp_path, "print(ask(messages)['content'])"))
    async with ModelServer("42") as server, scripted_engine(server, env, tmp_path, record="plain") as made:
        (found,) = await all_of(made, [{"prompt": "6 * 7?", "answer": 42}])
    assert label(found.outcome) == "completed", found.outcome
    assert (found.reward, found.usage.turns) == (1.0, 1)
    assert not sum(segment.trained for segment in found.segments)


async def test_an_installed_agent_is_there_in_every_sandbox_and_cannot_be_changed(tmp_path: Path) -> None:
    launcher = {
        **SHELL,
        "command": ["sh", "-c", "echo no > {agent}/x; cat {agent}/x > answer.txt", "sh", "{prompt}"],
        "install": {"commands": [["sh", "-c", f"echo x >> {tmp_path}/count; echo yes > x"]]},
    }
    with agents_at(tmp_path / "agents"):
        env = AgentEnvironment(launcher)
        async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as made:
            found = await all_of(made, [{"prompt": "x", "answer": "yes"}], k=6)
    assert [one.reward for one in found] == [1.0] * 6, found
    assert (tmp_path / "count").read_text() == "x\n"
