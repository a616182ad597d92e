"""`swe` rollouts end to end: a real engine, real sandboxes, real grading and a scripted model."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine
from rookery.core import Completed, Failed, Limits, Rollout, Task, Truncated
from rookery.engine.retry import RetryPolicy
from rookery.environments.swe import SweEnvironment
from tests.environments.swe.helpers import (
    INSTRUCTION,
    SUBMIT,
    bash,
    call,
    get_observations,
    scripted_model,
    small_task,
)
from tests.servers import Answer, ModelServer

pytestmark = pytest.mark.needs("mount")
FIX = call("edit", command="replace", path="add.sh", old_str="-", new_str="+")


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer() as made:
        yield made


async def run_task(
    server: ModelServer,
    tmp_path: Path,
    task: Task,
    *answers: Answer | str,
    env: SweEnvironment | None = None,
    **options: Any,
) -> Rollout:
    server.default = scripted_model(*answers)
    settings: dict[str, Any] = {"runners": 0, "sandbox": "local", "retry": RetryPolicy(attempts=2, base=0.001)}
    async with Engine(
        env or SweEnvironment(), policy=server.url, out=tmp_path / "runs", **{**settings, **options}
    ) as engine:
        (group,) = [group async for group in engine.groups([task])]
        return group.rollouts[0]


async def test_policy_that_fixes_the_bug_and_submits_gets_the_reward(server: ModelServer, tmp_path: Path) -> None:
    rollout = await run_task(
        server,
        tmp_path,
        small_task(tmp_path),
        bash("pwd; ls; bash add.sh 2 3"),
        FIX,
        bash("bash add.sh 2 3"),
        SUBMIT,
    )
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0), rollout
    first = server.requests[0].body
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert "/workspace" in first["messages"][0]["content"]
    assert "submit" in first["messages"][0]["content"]
    assert first["messages"][1]["content"] == INSTRUCTION
    assert [tool["function"]["name"] for tool in first["tools"]] == ["bash", "edit", "submit"]
    looked, edited, tried = get_observations(server.requests[-1])
    assert looked == "/workspace\nadd.sh\n-1\n[exit code 0]"
    assert "add.sh" in edited
    assert tried == "5\n[exit code 0]"
    assert rollout.metrics["bash_calls"] == 2


async def test_submitting_nothing_or_giving_up_scores_zero(server: ModelServer, tmp_path: Path) -> None:
    rollout = await run_task(server, tmp_path, small_task(tmp_path, "a"), SUBMIT)
    assert (rollout.outcome, rollout.reward) == (Completed(), 0.0)
    rollout = await run_task(server, tmp_path, small_task(tmp_path, "b"), "I cannot do this.")
    assert (rollout.outcome, rollout.reward) == (Completed(), 0.0)


async def test_reply_without_a_call_gets_a_reminder(server: ModelServer, tmp_path: Path) -> None:
    rollout = await run_task(
        server,
        tmp_path,
        small_task(tmp_path),
        "Let me think.",
        FIX,
        "Done, I guess.",
        env=SweEnvironment(nudges=1),
    )
    assert rollout.reward == 1.0
    reminder = server.requests[1].body["messages"][-1]
    assert (reminder["role"], "submit" in reminder["content"]) == ("user", True)


@pytest.mark.long
async def test_truncated_rollout_is_graded(server: ModelServer, tmp_path: Path) -> None:
    looping = (FIX, bash("true"))
    rollout = await run_task(server, tmp_path, small_task(tmp_path, "a"), *looping, limits=Limits(turns=4))
    assert (rollout.outcome, rollout.reward) == (Truncated("turns"), 1.0)
    rollout = await run_task(
        server,
        tmp_path,
        small_task(tmp_path, "b"),
        *looping,
        limits=Limits(turns=4),
        env=SweEnvironment(grade_truncated=False),
    )
    assert (rollout.outcome, rollout.reward) == (Truncated("turns"), 0.0)
    # The files are correct from the start, so the result does not depend on the machine's speed.
    right = {"add.sh": "echo $(($1 + $2))\n"}
    step = small_task(tmp_path, "c", files=right, step={"timeout": 1.0})
    rollout = await run_task(server, tmp_path, step, bash("sleep 60"))
    assert (rollout.outcome, rollout.reward) == (Truncated("time"), 1.0)
    whole = small_task(tmp_path, "d", files=right)
    rollout = await run_task(server, tmp_path, whole, bash("sleep 60"), limits=Limits(run=1.0, turns=10))
    assert (rollout.outcome, rollout.reward) == (Truncated("time"), 1.0)


async def test_failed_setup_is_the_tasks_fault_with_its_output(server: ModelServer, tmp_path: Path) -> None:
    rollout = await run_task(
        server, tmp_path, small_task(tmp_path, setup="echo no compiler here; exit 9\n"), SUBMIT
    )
    assert isinstance(rollout.outcome, Failed)
    assert (rollout.outcome.fault, rollout.outcome.cause) == ("task", "task.setup")
    assert "no compiler here" in rollout.outcome.detail
    assert not server.requests


async def test_steps_run_one_after_another_in_the_same_sandbox(server: ModelServer, tmp_path: Path) -> None:
    more = (("Now print the word done as well.", "bash add.sh 2 3 | grep -qx done\n"),)

    def play(fixes: bool) -> tuple[Answer, ...]:
        first = FIX if fixes else bash("true")
        return first, SUBMIT, bash("echo 'echo done' >> add.sh"), SUBMIT

    rollout = await run_task(server, tmp_path, small_task(tmp_path, "a", steps=more), *play(True))
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0)
    assert rollout.rewards == {"s0": 1.0, "s1": 1.0}
    asked = server.requests[-1].body["messages"]
    assert [m["content"] for m in asked if m["role"] == "user"][1] == "Now print the word done as well."
    # Below its minimum reward, the next step does not begin and counts as zero.
    before = len(server.requests)
    cut = await run_task(
        server, tmp_path, small_task(tmp_path, "b", steps=more, step={"min_reward": 0.5}), *play(False)
    )
    assert (cut.outcome, cut.reward, cut.rewards) == (Completed(), 0.0, {"s0": 0.0, "s1": 0.0})
    assert len(server.requests) - before == 2
    # Giving up on the second step gives the mean of both rewards.
    part = await run_task(
        server, tmp_path, small_task(tmp_path, "c", steps=more), FIX, SUBMIT, "no", limits=Limits(turns=3)
    )
    assert (part.reward, part.rewards) == (0.5, {"s0": 1.0, "s1": 0.0})


async def test_invalid_calls_are_observed_and_the_rollout_continues(server: ModelServer, tmp_path: Path) -> None:
    bad = [
        Answer(None, calls=[(name, arguments)], finish="tool_calls")
        for name, arguments in (
            ("bash", "{not json"),
            ("bash", "[]"),
            ("bash", '{"cmd": "ls"}'),
            ("edit", '{"command": "explode", "path": "x"}'),
            ("nothing", "{}"),
            ("submit", '{"why": 1}'),
        )
    ]
    several = Answer(None, calls=[("submit", "{}"), ("bash", '{"command": "rm add.sh"}')], finish="tool_calls")
    rollout = await run_task(server, tmp_path, small_task(tmp_path), *bad, FIX, several)
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0)
    answers = get_observations(server.requests[-1])
    assert "JSON" in answers[0]
    assert "JSON" in answers[1]
    assert re.search(r"\bcommand\b.*\bcmd\b", answers[2])
    assert "explode" in answers[3]
    assert "bash, edit, submit" in answers[4]
    assert re.search(r"\bwhy\b", answers[5])
    assert rollout.metrics["bad_tool_calls"] == 6


async def test_preset_of_open_instruct_with_marker(server: ModelServer, tmp_path: Path) -> None:
    env = SweEnvironment(tool_config={"preset": "open-instruct-marker"})
    rollout = await run_task(
        server,
        tmp_path,
        small_task(tmp_path),
        call("str_replace_editor", command="str_replace", path="/workspace/add.sh", old_str="-", new_str="+"),
        call("execute_bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        env=env,
    )
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0)
    assert len(server.requests) == 2


async def test_mcp_server_of_the_task_provides_tools(server: ModelServer, tmp_path: Path) -> None:
    source = Path(__file__).with_name("mcp_server.py").read_text()
    task = small_task(
        tmp_path,
        files={"add.sh": "echo $(($1 - $2))\n", "server.py": source},
        mcp=({"name": "small", "command": "python3", "args": ["/workspace/server.py"]},),
    )
    rollout = await run_task(server, tmp_path, task, call("whoami"), call("die"), call("whoami"), FIX, SUBMIT)
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0)
    names = [tool["function"]["name"] for tool in server.requests[0].body["tools"]]
    assert names[:3] == ["bash", "edit", "submit"]
    assert {"whoami", "small_bash"} <= set(names)
    answers = get_observations(server.requests[-1])
    assert "/workspace" in answers[0]
    assert "/workspace" not in answers[2]


async def test_mcp_server_is_restarted_for_the_next_step(server: ModelServer, tmp_path: Path) -> None:
    source = Path(__file__).with_name("mcp_server.py").read_text()
    task = small_task(
        tmp_path,
        files={"add.sh": "echo $(($1 - $2))\n", "server.py": source},
        steps=(("Once more.", "true\n"),),
        mcp=({"name": "small", "command": "python3", "args": ["/workspace/server.py"]},),
    )
    rollout = await run_task(server, tmp_path, task, FIX, SUBMIT, call("whoami"), SUBMIT)
    assert (rollout.outcome, rollout.reward) == (Completed(), 1.0)
    assert "/work" in get_observations(server.requests[-1])[-1]
