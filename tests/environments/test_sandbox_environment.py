"""The environment `sandbox`: its tools in a real sandbox, MCP servers, and every way to grade."""

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Message, Task, UsageError
from rookery.environments import Score, ToolEnvironment, Ungraded
from rookery.environments.sandbox_environment import SandboxEnvironment
from rookery.environments.tools import find_tool
from rookery.journal import RunReader
from tests.cli.helpers import runs
from tests.cli.sandbox_kit import run_cli
from tests.environments.helpers import Attempt, calls
from tests.environments.swe.helpers import open_local_sandbox
from tests.environments.swe.test_mcp_client import SOURCE
from tests.servers import Answer, ModelServer, Request


def make_task(**data: Any) -> Task:
    files = {"notes.txt": "one\n", "server.py": SOURCE.decode()}
    return Task(id="t", prompt=(Message("user", "Do it."),), data=data, files=files)


@pytest.mark.needs("mount")
@pytest.mark.parametrize(
    ("data", "score"),
    [
        ({"check": "grep -q two notes.txt"}, Score(1.0, metrics={"check_ended": 1.0})),
        ({"check": "read answer; test $answer = 41"}, Score(0.0, metrics={"check_ended": 1.0})),
        ({"answer": 42}, Score(1.0)),
        ({}, Ungraded()),
    ],
    ids=["check", "failed check", "answer", "none"],
)
async def test_policy_works_in_the_sandbox_and_any_scorer_grades(
    data: Any, score: Score | Ungraded, tmp_path: Path
) -> None:
    edit = {"command": "replace", "path": "notes.txt", "old_str": "one", "new_str": "two"}
    script = [
        calls(("edit", json.dumps(edit)), ("bash", json.dumps({"command": "x=$(cat notes.txt)"}))),
        calls(("bash", json.dumps({"command": "echo $x"})), ("whoami", "{}")),
        "42",
    ]
    env = SandboxEnvironment(mcp=[{"name": "small", "command": "python3 server.py", "env": {"WORD": "given"}}])
    assert env.needs_sandbox
    async with open_local_sandbox(tmp_path) as sandbox:

        async def open_sandbox(spec: Any) -> Any:
            return sandbox

        attempt = Attempt(script, task=make_task(**data), open_sandbox=open_sandbox)
        await env.setup(attempt.ctx)
        await env.run(attempt.ctx)
        assert await env.score(attempt.ctx) == score
        await env.teardown(attempt.ctx)
    assert attempt.observations[2] == "two\n[exit code 0]"
    assert "given" in attempt.observations[3]
    assert "whoami" in {schema.name for schema in attempt.upstream.requests[0].tools.schemas}


def test_sandbox_tools_are_found_by_name_and_sent_to_runners() -> None:
    class Mine(ToolEnvironment):
        toolset = ("bash", "edit", "python")

    env = Mine()
    assert [schema.name for schema in env.tools()] == ["bash", "edit", "python"]
    assert env.needs_sandbox
    for name in ("bash", "edit", "python"):
        tool = find_tool(name)
        assert pickle.loads(pickle.dumps(tool)) is tool
        assert pickle.loads(pickle.dumps(tool.with_timeout(3))).sandbox
    with pytest.raises(UsageError):
        ToolEnvironment(["basch"])


def test_scorer_of_an_environment_adds_its_roles() -> None:
    assert ToolEnvironment(scorer={"name": "judge", "calls": 1}).roles == ("judge",)
    assert ToolEnvironment(scorer="exact").roles == ()
    with pytest.raises(UsageError):
        ToolEnvironment(scorer="exakt")


def _reply(request: Request) -> Answer:
    if request.body["messages"][0]["content"].startswith("Grade"):
        return Answer("SCORE: 0.5")
    if any(message["role"] == "tool" for message in request.body["messages"]):
        return Answer("Four.")
    return Answer(None, calls=[("bash", '{"command": "echo $((2 + 2)) > n; cat n"}')])


@pytest.mark.long
@pytest.mark.needs("mount")
async def test_run_sandbox_with_a_judge_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2 + 2?", "answer": "4"}\n')
    async with ModelServer(_reply) as server:
        urls = (
            "--policy",
            server.url,
            "--model",
            "test-model",
            "--role",
            f"judge={server.url}",
            "--role-model",
            "judge=test-model",
        )
        scorer = ("--scorer", "judge", "--scorer-arg", "max_tokens=9", "--runners", "1")
        args = ("run", "sandbox", "--tasks", "tasks.jsonl", *urls, *scorer)
        done = await asyncio.to_thread(run_cli, *args, cwd=tmp_path)
    assert done.code == 0, done.err
    with RunReader(runs(tmp_path)[0]) as reader:
        (record,) = reader.iter_rollouts()
        roles = [turn.role for turn in reader.turns(record)]
    assert (record.reward, roles) == (0.5, ["policy", "policy", "judge"])
    assert "judge" in record.usage.others
    refused = run_cli("run", "sandbox", "--tasks", "tasks.jsonl", *urls[:4], "--scorer", "judge", cwd=tmp_path)
    refused.assert_refused("judge")
