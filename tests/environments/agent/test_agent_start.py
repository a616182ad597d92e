"""An agent that cannot start fails the rollout; it never counts as a policy that scored zero."""

import json
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Failed, RookeryError, UsageError, label
from rookery.environments.agent import AgentEnvironment
from tests.cli.sandbox_kit import local_sandboxes, run_cli
from tests.environments.agent.helpers import (
    agents_directory,
    run_rollouts,
    scripted_engine,
    scripted_model,
    write_program,
)
from tests.servers import Answer, ModelServer

__all__ = ["local_sandboxes"]
pytestmark = pytest.mark.usefixtures("local_sandboxes")

ROW = {"prompt": "6 * 7?", "answer": 42}
SHELL = {"name": "shell", "needs": ["sh"]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "error_text"),
    [
        ("import nosuchmodule", "nosuchmodule"),
        ("print(42); sys.exit(3)", " 3"),
        ("def broken(:", "SyntaxError"),
        ("os.abort()", " 6"),
    ],
)
async def test_agent_that_fails_before_its_first_model_call_is_agent_start(
    text: str, error_text: str, tmp_path: Path
) -> None:
    env = AgentEnvironment("program", script=write_program(tmp_path, text))
    async with ModelServer(scripted_model("ok")) as server, scripted_engine(server, env, tmp_path) as engine:
        rollouts = await run_rollouts(engine, [ROW], k=2)
    for rollout in rollouts:
        assert isinstance(rollout.outcome, Failed), rollout.outcome
        assert (rollout.outcome.cause, rollout.outcome.fault) == ("agent.start", "bug")
        assert error_text in rollout.outcome.detail
        assert rollout.reward is None
        assert not rollout.segments
        assert len(rollout.attempts) == 1
        assert rollout.info["agents"][0]["reason"] == "exited", "its output stays in the record"


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    [
        {**SHELL, "command": ["/nowhere/agent", "{prompt}"]},
        {**SHELL, "command": ["no-such-agent", "{prompt}"]},
        {**SHELL, "command": ["/etc/passwd", "{prompt}"]},
        {**SHELL, "command": ["/", "{prompt}"]},
        {**SHELL, "command": ["{script}", "{prompt}"], "script": True},
        {**SHELL, "command": ["sh", "-c", "no-such-agent", "{prompt}"]},
    ],
)
async def test_program_that_is_missing_or_not_executable_is_agent_start(
    launcher: dict[str, Any], tmp_path: Path
) -> None:
    script = write_program(tmp_path, "no interpreter line", prefix="") if launcher.get("script") else None
    env = AgentEnvironment(launcher, script=script)
    async with ModelServer(scripted_model("ok")) as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [ROW])
    assert isinstance(rollout.outcome, Failed), rollout.outcome
    assert (rollout.outcome.cause, rollout.outcome.fault) == ("agent.start", "bug")


async def test_failed_installation_stops_the_run_before_the_first_rollout(tmp_path: Path) -> None:
    launcher = {
        **SHELL,
        "command": ["{agent}/x", "{prompt}"],
        "install": {"commands": [["sh", "-c", "echo nothing there; exit 3"]]},
    }
    with agents_directory(tmp_path / "agents"):
        env = AgentEnvironment(launcher)
        async with ModelServer("ok") as server:
            with pytest.raises(RookeryError) as error:
                async with scripted_engine(server, env, tmp_path):
                    pass
    assert (error.value.code, error.value.fault) == ("agent.start", "infra")


@pytest.mark.long
async def test_agent_that_never_calls_a_model_until_its_deadline_is_agent_start(tmp_path: Path) -> None:
    env = AgentEnvironment("program", script=write_program(tmp_path, "while True: time.sleep(60)"), timeout=1.0)
    async with ModelServer(scripted_model("ok")) as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [ROW])
    assert isinstance(rollout.outcome, Failed), rollout.outcome
    assert (rollout.outcome.cause, rollout.outcome.fault) == ("agent.start", "bug")


@pytest.mark.long
async def test_agent_that_fails_because_its_model_call_failed_is_an_upstream_failure(tmp_path: Path) -> None:
    """This holds even after earlier calls succeeded: the policy did not decide to stop."""
    text = "messages.append(ask(messages))\nask(messages)\nprint(42)"
    env = AgentEnvironment("program", script=write_program(tmp_path, text))
    async with ModelServer(Answer(status=500)) as server, scripted_engine(server, env, tmp_path) as engine:
        server.then(Answer("ok"))
        (rollout,) = await run_rollouts(engine, [ROW])
    assert isinstance(rollout.outcome, Failed), rollout.outcome
    assert (rollout.outcome.cause, rollout.outcome.fault) == ("upstream.error", "infra")
    assert rollout.reward is None


@pytest.mark.long
async def test_agent_that_recovers_from_a_failed_call_keeps_its_exit_code_as_result(tmp_path: Path) -> None:
    text = """
while True:
    try:
        ask(messages)
        break
    except urllib.error.HTTPError:
        time.sleep(0.1)
sys.exit(3)
"""
    env = AgentEnvironment("program", script=write_program(tmp_path, text))
    async with ModelServer(scripted_model("ok")) as server, scripted_engine(server, env, tmp_path) as engine:
        server.then(*[Answer(status=500)] * 8)
        (rollout,) = await run_rollouts(engine, [ROW])
    assert label(rollout.outcome) == "completed", rollout.outcome
    assert rollout.reward == 0.0


async def test_script_that_disappears_during_the_run_is_agent_start(tmp_path: Path) -> None:
    script = write_program(tmp_path, "ask(messages)")
    env = AgentEnvironment("program", script=script)
    script.unlink()
    async with ModelServer(scripted_model("ok")) as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [ROW])
    assert label(rollout.outcome) == "agent.start", rollout.outcome
    with pytest.raises(UsageError):
        AgentEnvironment("program", script=script)


@pytest.mark.long
def test_run_of_an_agent_that_cannot_start_exits_with_3_and_names_the_cause(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "agent.py").write_text("import nosuchmodule\n")
    args = ("run", "agent", "--launcher", "program", "--arg", "script=agent.py", "--tasks", "tasks.jsonl")
    done = run_cli(
        *(*args, "--policy", "embedded", "-k", "8", "--record", "plain", "--sandbox", "local", "--runners", "1"),
        cwd=tmp_path,
    )
    assert done.code == 3, done
    assert all(text in done.out for text in ("0 valid", "8 failed", "agent.start"))
    assert "nosuchmodule" in done.err
