"""Tasks of several steps: the agent is started once for each, in the same box."""

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
from tests.environments.agent.folders import StepFolder, harbor_task, texts_of, turn
from tests.environments.agent.kit import all_of, program, scripted_engine
from tests.servers import Answer, ModelServer, Request

__all__ = ["local_sandboxes"]
pytestmark = pytest.mark.usefixtures("local_sandboxes")

OBEYS = """
import subprocess
sys.exit(subprocess.run(["sh", "-c", ask(messages)["content"]]).returncode)
"""
"""Does what the model answers, and ends as that ended."""


def says(**commands: str) -> Callable[[Request], Answer]:
    """Answers each instruction with its command; they are told apart by their first word."""

    def play(request: Request) -> Answer:
        messages = request.body["messages"]
        asked = texts_of(messages[0]["content"]).split()[0]
        return turn(sum(one["role"] == "assistant" for one in messages), commands[asked])

    return play


def steps_of(found: Rollout) -> list[Any]:
    return [found.rewards.get("s1"), found.rewards.get("s2")]


FIRST = StepFolder("First, write 1.", check="grep -qx 1 one.txt")
SECOND = StepFolder(
    "Second, copy it.",
    check="grep -qx 1 two.txt && grep -qx ready begun.txt && grep -qx given given.txt",
    reward='{"reward": 0.5}',
    files={"given.txt": "given\n", "setup.sh": "cat one.txt > seen.txt; echo ready > begun.txt"},
)


async def test_each_step_is_reported_to_an_agent_and_graded_and_files_stay(tmp_path: Path) -> None:
    tasks = [
        harbor_task(tmp_path, FIRST, SECOND, name="mean"),
        harbor_task(tmp_path, FIRST, SECOND, name="final", head='multi_step_reward_strategy = "final"'),
    ]
    env = AgentEnvironment("program", script=program(tmp_path, OBEYS))
    play = says(
        **{
            "First,": "test ! -e given.txt && echo 1 > one.txt",
            "Second,": "cat seen.txt > two.txt; test ! -e /tests",
        }
    )
    async with ModelServer(play) as server, scripted_engine(server, env, tmp_path) as made:
        rollouts = {rollout.task: rollout for rollout in await all_of(made, tasks)}
    for found in rollouts.values():
        assert label(found.outcome) == "completed", found.outcome
        assert steps_of(found) == [1.0, 0.5], json.dumps(found.info, indent=1)
        assert [one["exit_code"] for one in found.info["agents"]] == [0, 0], found.info
        assert (found.usage.turns, found.metrics["steps_graded"]) == (2, 2.0)
        assert sum(segment.trained for segment in found.segments) == found.usage.sampled_tokens == 6
    assert {name: one.reward for name, one in rollouts.items()} == {"mean": 0.75, "final": 0.5}
    asked = sorted(texts_of(one.body["messages"][0]["content"]) for one in server.requests)
    assert asked == [FIRST.instruction] * 2 + [SECOND.instruction] * 2, "each agent begins with its own step alone"


async def test_a_first_step_that_failed_ends_the_task_where_the_task_says_so(tmp_path: Path) -> None:
    styled = '{"reward": 1, "style": 0.2}'
    tasks = [
        harbor_task(tmp_path, FIRST, StepFolder("Second"), name="goes on"),
        harbor_task(
            tmp_path, StepFolder(FIRST.instruction, "false", settings="min_reward = 0.5"), SECOND, name="below"
        ),
        harbor_task(
            tmp_path,
            StepFolder(FIRST.instruction, reward=styled, settings="min_reward = { style = 0.5 }"),
            SECOND,
            name="part below",
        ),
    ]
    env = AgentEnvironment("program", script=program(tmp_path, OBEYS))
    play = says(**{"First,": "exit 3", "Second": "true", "Second,": "true"})
    async with ModelServer(play) as server, scripted_engine(server, env, tmp_path) as made:
        found = {one.task: one for one in await all_of(made, tasks)}
    assert [label(one.outcome) for one in found.values()] == ["completed"] * 3, found
    codes = {name: [each["exit_code"] for each in one.info["agents"]] for name, one in found.items()}
    assert codes == {"goes on": [3, 0], "below": [3], "part below": [3]}
    assert {name: one.reward for name, one in found.items()} == {"goes on": 0.5, "below": 0.0, "part below": 0.5}


@pytest.mark.long
async def test_a_steps_own_time_ends_its_agent_and_what_is_there_is_graded(tmp_path: Path) -> None:
    timed_out = StepFolder(
        "Slow", "grep -q x slow.txt", files={"slow.txt": "x\n"}, settings="agent = { timeout_sec = 1.0 }"
    )
    tasks = [
        harbor_task(tmp_path, FIRST, timed_out, name="second"),
        harbor_task(tmp_path, timed_out, FIRST, name="first"),
    ]
    env = AgentEnvironment("program", script=program(tmp_path, OBEYS))
    play = says(**{"First,": "echo 1 > one.txt", "Slow": "exec sleep 600"})
    async with ModelServer(play) as server, scripted_engine(server, env, tmp_path) as made:
        found = {one.task: one for one in await all_of(made, tasks)}
    assert [label(one.outcome) for one in found.values()] == ["truncated.time"] * 2, found
    whys = {name: [each["why"] for each in one.info["agents"]] for name, one in found.items()}
    assert whys == {"second": ["exited", "deadline"], "first": ["deadline"]}
    assert {name: one.reward for name, one in found.items()} == {"second": 1.0, "first": 0.5}, found


ASKS_ON = """
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


async def test_a_budget_is_the_attempts_and_ends_it_in_any_step(tmp_path: Path) -> None:
    """Also where the agent ends by itself as soon as it is refused: no step begins with nothing left."""
    tasks = [
        harbor_task(tmp_path, FIRST, StepFolder("Second", "grep -q x two.txt"), name="second"),
        harbor_task(tmp_path, StepFolder("Second", "grep -q x two.txt"), StepFolder("Third"), name="first"),
    ]
    env = AgentEnvironment("program", script=program(tmp_path, ASKS_ON))
    play = says(**{"First,": "echo 1 > one.txt; echo done", "Second": "echo x > two.txt", "Third": "echo done"})
    async with (
        ModelServer(play) as server,
        scripted_engine(server, env, tmp_path, limits=Limits(turns=2)) as made,
    ):
        found = {one.task: one for one in await all_of(made, tasks)}
    assert [label(one.outcome) for one in found.values()] == ["truncated.turns"] * 2, found
    assert {name: len(one.info["agents"]) for name, one in found.items()} == {"second": 2, "first": 1}
    assert {name: one.reward for name, one in found.items()} == {"second": 1.0, "first": 0.5}, found
    assert [one.usage.turns for one in found.values()] == [2, 2]


@pytest.mark.long
async def test_every_step_has_the_tasks_servers_and_a_script_that_fails_is_the_tasks_fault(tmp_path: Path) -> None:
    """Whatever an agent before did to the file that tells of them."""
    launcher = {
        "name": "reads",
        "command": ["sh", "-c", 'cp "$1" "$0.json" && rm "$1"', "{prompt}", "{mcp_file}"],
        "mcp": {"file": "{home}/mcp.json"},
    }
    served = "[[environment.mcp_servers]]\nname = 'a'\ntransport = 'stdio'\ncommand = 'serve'"
    one, two = StepFolder("one", "grep -q serve one.json"), StepFolder("two", "grep -q serve two.json")
    broken = StepFolder("two", files={"setup.sh": "echo no; exit 7"})
    tasks = [
        harbor_task(tmp_path, one, two, name="served", settings=served),
        harbor_task(tmp_path, one, broken, name="broken", settings=served),
    ]
    async with (
        ModelServer("ok") as server,
        scripted_engine(server, AgentEnvironment(launcher), tmp_path) as made,
    ):
        found = {rollout.task: rollout for rollout in await all_of(made, tasks)}
    assert found["served"].reward == 1.0, found["served"].info
    assert label(found["broken"].outcome) == "task.setup", found["broken"].outcome
    assert "its setup of step 's2' failed" in str(found["broken"].outcome)


@pytest.mark.long
async def test_what_an_agent_did_to_its_own_directories_is_the_policys_in_the_next_step_too(
    tmp_path: Path,
) -> None:
    """It gets no other attempt by it, and its next agent is the launcher's own program."""
    home = "/tmp/rookery-agent"
    commands = {
        "Replaces": f"echo 1 > one.txt; rm -rf {home}; touch {home}",
        "Swaps": f"echo 1 > one.txt; echo 'print(7)' > {home}/agent.py; rm {home}/prompt.txt",
        "Removes": "echo 1 > one.txt; cd /; rm -rf /workspace/*",
        "Second": "echo 2 > two.txt",
    }
    second = StepFolder("Second", "grep -qx 2 two.txt")
    tasks = [
        harbor_task(tmp_path, StepFolder(word, "true"), second, name=word)
        for word in ("Replaces", "Swaps", "Removes")
    ]
    env = AgentEnvironment("program", script=program(tmp_path, OBEYS))
    async with ModelServer(says(**commands)) as server, scripted_engine(server, env, tmp_path) as made:
        found = {rollout.task: rollout for rollout in await all_of(made, tasks)}
    assert [label(one.outcome) for one in found.values()] == ["completed"] * 3, found
    assert {name: one.reward for name, one in found.items()} == {"Replaces": 0.5, "Swaps": 1.0, "Removes": 1.0}
    assert found["Replaces"].info["agents"][1]["why"] == "unstarted"
    assert all(len(one.attempts) == 1 for one in found.values())


async def test_a_tasks_own_keys_do_not_lead_an_agent_away_from_its_session(tmp_path: Path) -> None:
    task = harbor_task(
        tmp_path,
        StepFolder("First", "grep -qx mine one.txt"),
        settings="env = { OPENAI_BASE_URL = 'http://elsewhere', OPENAI_API_KEY = 'x', OWN = 'mine' }",
    )
    env = AgentEnvironment("program", script=program(tmp_path, OBEYS))
    play = says(First='echo "$OWN" > one.txt')
    async with ModelServer(play) as server, scripted_engine(server, env, tmp_path) as made:
        (found,) = await all_of(made, [task])
    assert found.reward == 1.0, found.info


@pytest.mark.long
@pytest.mark.long
async def test_no_more_sandboxes_are_graded_at_once_than_the_machine_has_slots_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between steps too; what waits, waits off the clock of its session as well."""
    inside: list[int] = []
    now = 0
    grade = SweGrader.grade

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal now
        now += 1
        inside.append(now)
        try:
            return await grade(*args, **options)
        finally:
            now -= 1

    monkeypatch.setattr(SweGrader, "grade", counted)
    gate = GradingSlots(1, f"test-{os.getpid()}")
    monkeypatch.setattr(task_kinds, "_grading_slots", lambda: gate)
    env = AgentEnvironment("program", script=program(tmp_path, OBEYS))
    play = says(**{"First,": "echo 1 > one.txt", "Second": "true"})
    async with ModelServer(play) as server, scripted_engine(server, env, tmp_path) as made:
        found = await all_of(made, [harbor_task(tmp_path, FIRST, StepFolder("Second"))], k=3)
    assert [one.reward for one in found] == [1.0] * 3, found
    assert inside == [1] * 6


@pytest.mark.long
async def test_an_agent_that_removes_its_working_directory_is_graded_anyway(tmp_path: Path) -> None:
    """It is the policy's, and no fault of the task or its image."""
    task = harbor_task(
        tmp_path, StepFolder("Removes"), StepFolder("Second"), settings="workdir = '/work/deep/app'"
    )
    env = AgentEnvironment("program", script=program(tmp_path, OBEYS))
    play = says(Removes="cd /; rm -r /work/deep; test ! -e /work/deep", Second="true")
    async with ModelServer(play) as server, scripted_engine(server, env, tmp_path) as made:
        (found,) = await all_of(made, [task])
    assert label(found.outcome) == "completed", found.outcome
    assert found.info["agents"][0]["exit_code"] == 0, found.info
    assert (found.reward, len(found.attempts)) == (0.0, 1), found.info
