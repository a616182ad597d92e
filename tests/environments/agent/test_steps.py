"""Tasks with several steps: the agent is started once for each, in the same sandbox."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Limits, Rollout, label
from rookery.environments.agent import AgentEnvironment, task_kinds
from rookery.environments.swe.grading_slots import GradingSlots
from rookery.scoring.swe import SweGrader
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent.helpers import run_rollouts, scripted_engine, write_program
from tests.environments.agent.task_directories import StepDirectory, get_text, harbor_task, make_turn
from tests.servers import Answer, ModelServer, Request

__all__ = ["local_sandboxes"]
pytestmark = pytest.mark.usefixtures("local_sandboxes")

RUN_REPLY = """
import subprocess
sys.exit(subprocess.run(["sh", "-c", ask(messages)["content"]]).returncode)
"""
"""Runs the model's reply as a shell command and exits with its exit code."""


def model_that_runs(**commands: str) -> Callable[[Request], Answer]:
    """Return a model that answers each instruction, identified by its first word, with a command."""

    def model(request: Request) -> Answer:
        messages = request.body["messages"]
        instructions = get_text(messages[0]["content"]).split()[0]
        return make_turn(sum(one["role"] == "assistant" for one in messages), commands[instructions])

    return model


def get_step_rewards(rollout: Rollout) -> list[Any]:
    return [rollout.rewards.get("s1"), rollout.rewards.get("s2")]


FIRST = StepDirectory("First, write 1.", check="grep -qx 1 one.txt")
SECOND = StepDirectory(
    "Second, copy it.",
    check="grep -qx 1 two.txt && grep -qx ready begun.txt && grep -qx given given.txt",
    reward='{"reward": 0.5}',
    files={"given.txt": "given\n", "setup.sh": "cat one.txt > seen.txt; echo ready > begun.txt"},
)


@pytest.mark.long
async def test_each_step_gets_an_agent_and_a_grade_and_files_persist(tmp_path: Path) -> None:
    tasks = [
        harbor_task(tmp_path, FIRST, SECOND, name="mean"),
        harbor_task(tmp_path, FIRST, SECOND, name="final", head='multi_step_reward_strategy = "final"'),
    ]
    env = AgentEnvironment("program", script=write_program(tmp_path, RUN_REPLY))
    model = model_that_runs(
        **{
            "First,": "test ! -e given.txt && echo 1 > one.txt",
            "Second,": "cat seen.txt > two.txt; test ! -e /tests",
        }
    )
    async with ModelServer(model) as server, scripted_engine(server, env, tmp_path) as engine:
        rollouts = {rollout.task: rollout for rollout in await run_rollouts(engine, tasks)}
    for rollout in rollouts.values():
        assert label(rollout.outcome) == "completed", rollout.outcome
        assert get_step_rewards(rollout) == [1.0, 0.5], json.dumps(rollout.info, indent=1)
        assert [agent["exit_code"] for agent in rollout.info["agents"]] == [0, 0], rollout.info
        assert (rollout.usage.turns, rollout.metrics["steps_graded"]) == (2, 2.0)
        assert sum(segment.trained for segment in rollout.segments) == rollout.usage.sampled_tokens == 6
    assert {name: rollout.reward for name, rollout in rollouts.items()} == {"mean": 0.75, "final": 0.5}
    instructions = sorted(get_text(one.body["messages"][0]["content"]) for one in server.requests)
    assert instructions == [FIRST.instruction] * 2 + [SECOND.instruction] * 2, (
        "each agent starts with the instruction of its step only"
    )


async def test_task_ends_after_a_step_below_its_minimum_reward(tmp_path: Path) -> None:
    styled = '{"reward": 1, "style": 0.2}'
    tasks = [
        harbor_task(tmp_path, FIRST, StepDirectory("Second"), name="goes on"),
        harbor_task(
            tmp_path, StepDirectory(FIRST.instruction, "false", settings="min_reward = 0.5"), SECOND, name="below"
        ),
        harbor_task(
            tmp_path,
            StepDirectory(FIRST.instruction, reward=styled, settings="min_reward = { style = 0.5 }"),
            SECOND,
            name="part below",
        ),
    ]
    env = AgentEnvironment("program", script=write_program(tmp_path, RUN_REPLY))
    model = model_that_runs(**{"First,": "exit 3", "Second": "true", "Second,": "true"})
    async with ModelServer(model) as server, scripted_engine(server, env, tmp_path) as engine:
        rollouts = {rollout.task: rollout for rollout in await run_rollouts(engine, tasks)}
    assert [label(rollout.outcome) for rollout in rollouts.values()] == ["completed"] * 3, rollouts
    codes = {name: [each["exit_code"] for each in rollout.info["agents"]] for name, rollout in rollouts.items()}
    assert codes == {"goes on": [3, 0], "below": [3], "part below": [3]}
    assert {name: rollout.reward for name, rollout in rollouts.items()} == {
        "goes on": 0.5,
        "below": 0.0,
        "part below": 0.5,
    }


@pytest.mark.long
async def test_step_timeout_kills_its_agent_and_the_files_are_graded(tmp_path: Path) -> None:
    timed_out = StepDirectory(
        "Slow", "grep -q x slow.txt", files={"slow.txt": "x\n"}, settings="agent = { timeout_sec = 20.0 }"
    )
    tasks = [
        harbor_task(tmp_path, FIRST, timed_out, name="second"),
        harbor_task(tmp_path, timed_out, FIRST, name="first"),
    ]
    env = AgentEnvironment("program", script=write_program(tmp_path, RUN_REPLY))
    model = model_that_runs(**{"First,": "echo 1 > one.txt", "Slow": "exec sleep 600"})
    async with ModelServer(model) as server, scripted_engine(server, env, tmp_path) as engine:
        rollouts = {rollout.task: rollout for rollout in await run_rollouts(engine, tasks)}
    assert [label(rollout.outcome) for rollout in rollouts.values()] == ["truncated.time"] * 2, rollouts
    reasons = {name: [each["reason"] for each in rollout.info["agents"]] for name, rollout in rollouts.items()}
    assert reasons == {"second": ["exited", "deadline"], "first": ["deadline"]}
    assert {name: rollout.reward for name, rollout in rollouts.items()} == {"second": 1.0, "first": 0.5}, rollouts


RUN_REPLIES = """
import subprocess
while True:
    try:
        reply = ask(messages)
    except urllib.error.HTTPError:
        sys.exit(4)
    subprocess.run(["sh", "-c", reply["content"]])
    messages += [reply, {"role": "user", "content": "go on"}]
    if "done" in reply["content"]:
        break
"""


async def test_exhausted_budget_ends_the_attempt_in_any_step(tmp_path: Path) -> None:
    """Even if the agent exits by itself when a call is refused, no further step begins."""
    tasks = [
        harbor_task(tmp_path, FIRST, StepDirectory("Second", "grep -q x two.txt"), name="second"),
        harbor_task(tmp_path, StepDirectory("Second", "grep -q x two.txt"), StepDirectory("Third"), name="first"),
    ]
    env = AgentEnvironment("program", script=write_program(tmp_path, RUN_REPLIES))
    model = model_that_runs(
        **{"First,": "echo 1 > one.txt; echo done", "Second": "echo x > two.txt", "Third": "echo done"}
    )
    async with (
        ModelServer(model) as server,
        scripted_engine(server, env, tmp_path, limits=Limits(turns=2)) as engine,
    ):
        rollouts = {rollout.task: rollout for rollout in await run_rollouts(engine, tasks)}
    assert [label(rollout.outcome) for rollout in rollouts.values()] == ["truncated.turns"] * 2, rollouts
    assert {name: len(rollout.info["agents"]) for name, rollout in rollouts.items()} == {"second": 2, "first": 1}
    assert {name: rollout.reward for name, rollout in rollouts.items()} == {"second": 1.0, "first": 0.5}, rollouts
    assert [rollout.usage.turns for rollout in rollouts.values()] == [2, 2]


@pytest.mark.long
async def test_every_step_has_the_mcp_configuration_and_a_failed_setup_is_the_tasks_fault(tmp_path: Path) -> None:
    """The first agent deletes the configuration file."""
    launcher = {
        "name": "reads",
        "command": ["sh", "-c", 'cp "$1" "$0.json" && rm "$1"', "{prompt}", "{mcp_file}"],
        "mcp": {"file": "{home}/mcp.json"},
    }
    served = "[[environment.mcp_servers]]\nname = 'a'\ntransport = 'stdio'\ncommand = 'serve'"
    one, two = StepDirectory("one", "grep -q serve one.json"), StepDirectory("two", "grep -q serve two.json")
    broken = StepDirectory("two", files={"setup.sh": "echo no; exit 7"})
    tasks = [
        harbor_task(tmp_path, one, two, name="served", settings=served),
        harbor_task(tmp_path, one, broken, name="broken", settings=served),
    ]
    async with (
        ModelServer("ok") as server,
        scripted_engine(server, AgentEnvironment(launcher), tmp_path) as engine,
    ):
        rollouts = {rollout.task: rollout for rollout in await run_rollouts(engine, tasks)}
    assert rollouts["served"].reward == 1.0, rollouts["served"].info
    assert label(rollouts["broken"].outcome) == "task.setup", rollouts["broken"].outcome
    assert "'s2'" in str(rollouts["broken"].outcome)


@pytest.mark.long
async def test_damage_to_the_agents_own_directories_does_not_fail_the_attempt(
    tmp_path: Path,
) -> None:
    """The policy gets no second attempt, and the next agent is the launcher's unmodified program."""
    home = "/tmp/rookery-agent"
    commands = {
        "Replaces": f"echo 1 > one.txt; rm -rf {home}; touch {home}",
        "Swaps": f"echo 1 > one.txt; echo 'print(7)' > {home}/agent.py; rm {home}/prompt.txt",
        "Removes": "echo 1 > one.txt; cd /; rm -rf /workspace/*",
        "Second": "echo 2 > two.txt",
    }
    second = StepDirectory("Second", "grep -qx 2 two.txt")
    tasks = [
        harbor_task(tmp_path, StepDirectory(word, "true"), second, name=word)
        for word in ("Replaces", "Swaps", "Removes")
    ]
    env = AgentEnvironment("program", script=write_program(tmp_path, RUN_REPLY))
    async with (
        ModelServer(model_that_runs(**commands)) as server,
        scripted_engine(server, env, tmp_path) as engine,
    ):
        rollouts = {rollout.task: rollout for rollout in await run_rollouts(engine, tasks)}
    assert [label(rollout.outcome) for rollout in rollouts.values()] == ["completed"] * 3, rollouts
    assert {name: rollout.reward for name, rollout in rollouts.items()} == {
        "Replaces": 0.5,
        "Swaps": 1.0,
        "Removes": 1.0,
    }
    assert rollouts["Replaces"].info["agents"][1]["reason"] == "unstarted"
    assert all(len(rollout.attempts) == 1 for rollout in rollouts.values())


async def test_session_variables_override_those_of_the_task(tmp_path: Path) -> None:
    task = harbor_task(
        tmp_path,
        StepDirectory("First", "grep -qx mine one.txt"),
        settings="env = { OPENAI_BASE_URL = 'http://elsewhere', OPENAI_API_KEY = 'x', OWN = 'mine' }",
    )
    env = AgentEnvironment("program", script=write_program(tmp_path, RUN_REPLY))
    model = model_that_runs(First='echo "$OWN" > one.txt')
    async with ModelServer(model) as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [task])
    assert rollout.reward == 1.0, rollout.info


@pytest.mark.long
async def test_concurrent_gradings_are_limited_by_the_grading_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit also holds between steps, and the wait does not count as time."""
    counts: list[int] = []
    running = 0
    grade = SweGrader.grade

    async def count_grading(*args: Any, **options: Any) -> Any:
        nonlocal running
        running += 1
        counts.append(running)
        try:
            return await grade(*args, **options)
        finally:
            running -= 1

    monkeypatch.setattr(SweGrader, "grade", count_grading)
    slots = GradingSlots(1, f"test-{os.getpid()}")
    monkeypatch.setattr(task_kinds, "get_grading_slots", lambda: slots)
    env = AgentEnvironment("program", script=write_program(tmp_path, RUN_REPLY))
    model = model_that_runs(**{"First,": "echo 1 > one.txt", "Second": "true"})
    async with ModelServer(model) as server, scripted_engine(server, env, tmp_path) as engine:
        rollouts = await run_rollouts(engine, [harbor_task(tmp_path, FIRST, StepDirectory("Second"))], k=3)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 3, rollouts
    assert counts == [1] * 6


@pytest.mark.long
async def test_agent_that_removes_its_working_directory_is_graded(tmp_path: Path) -> None:
    """The policy caused it, so neither the task nor its image is at fault."""
    task = harbor_task(
        tmp_path, StepDirectory("Removes"), StepDirectory("Second"), settings="workdir = '/work/deep/app'"
    )
    env = AgentEnvironment("program", script=write_program(tmp_path, RUN_REPLY))
    model = model_that_runs(Removes="cd /; rm -r /work/deep; test ! -e /work/deep", Second="true")
    async with ModelServer(model) as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [task])
    assert label(rollout.outcome) == "completed", rollout.outcome
    assert rollout.info["agents"][0]["exit_code"] == 0, rollout.info
    assert (rollout.reward, len(rollout.attempts)) == (0.0, 1), rollout.info
