"""A task's MCP servers: used by real agents in sandboxes, and rendered as configuration files."""

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import TaskError, label
from rookery.environments import Log
from rookery.environments.agent import AgentEnvironment, find_launcher
from rookery.environments.agent.mcp_config import render_mcp_config
from rookery.tasks.swe import SweStep, SweTask
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent.helpers import (
    agents_directory,
    assert_trainable,
    get_agents_dir,
    require_agent,
    run_rollouts,
    scripted_engine,
)
from tests.environments.agent.task_directories import (
    SERVER,
    START,
    UNLOCKED,
    StepDirectory,
    harbor_task,
    model_that_calls,
    stdio_server,
)
from tests.servers import ModelServer

__all__ = ["local_sandboxes"]
STEP = StepDirectory(
    "Ask the vault.", check=f"grep -qx '{UNLOCKED} /workspace' heard.txt", files={"server.py": SERVER}
)
POLICY = model_that_calls("mcp_vault__unlock", ("shell", "command"))
HTTP = """
python3 -I {start} server.py 8765 > server.log 2>&1 &
python3 - <<'END'
import socket, time
for _ in range(600):
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8765)) == 0:
            break
    time.sleep(0.05)
else:
    raise SystemExit(open("server.log").read())
END
"""


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
@pytest.mark.timeout(900)  # importing the agent takes long on a busy machine
async def test_openai_agents_calls_a_tool_of_the_tasks_server(tmp_path: Path) -> None:
    require_agent("openai-agents")
    task = harbor_task(
        tmp_path, STEP, settings=stdio_server("python3", "-I", START, "/workspace/server.py", "stdio")
    )
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment("openai-agents")
        async with ModelServer(POLICY) as server, scripted_engine(server, env, tmp_path) as engine:
            (rollout,) = await run_rollouts(engine, [task])
        offered = sorted(tool["function"]["name"] for tool in server.requests[0].body["tools"])
    assert rollout.reward == 1.0, json.dumps(rollout.info, indent=1)
    assert_trainable(rollout, 3)
    assert offered == ["mcp_vault__unlock", "shell"]


@pytest.mark.usefixtures("local_sandboxes")
@pytest.mark.long
async def test_openai_agents_calls_a_server_that_the_tasks_setup_started(tmp_path: Path) -> None:
    require_agent("openai-agents")
    files = {**STEP.files, "setup.sh": HTTP.format(start=START)}
    step = StepDirectory(STEP.instruction, check=STEP.check, files=files)
    servers = "env = { WORD = 'of the task' }\n[[environment.mcp_servers]]\nname = 'vault'\n"
    servers += "transport = 'streamable-http'\nurl = 'http://127.0.0.1:8765/mcp'"
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment("openai-agents")
        async with ModelServer(POLICY) as server, scripted_engine(server, env, tmp_path) as engine:
            (rollout,) = await run_rollouts(engine, [harbor_task(tmp_path, step, settings=servers)])
    assert rollout.reward == 1.0, json.dumps(rollout.info, indent=1)
    assert_trainable(rollout, 3)


# ---- configuration files


def make_task(*servers: dict[str, Any], env: dict[str, str] | None = None) -> SweTask:
    step = SweStep(instruction="x")
    return SweTask(id="t", format="harbor", folder="/none", steps=(step,), mcp=servers, env=env or {})


def read_config(name: str, task: SweTask, logged: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the servers in the configuration file for this launcher's agent."""
    log = Log(lambda _, fields: (logged if logged is not None else []).append(fields))
    launcher = find_launcher(name)
    text = render_mcp_config(launcher, task, log)
    assert launcher.mcp is not None
    config = tomllib.loads(text) if launcher.mcp.format == "toml" else json.loads(text)
    entries: dict[str, Any] = config["mcp_servers" if launcher.mcp.format == "toml" else "mcpServers"]
    return entries


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@given(arguments=st.lists(WORDS, max_size=3), env=st.dictionaries(WORDS.filter(bool), WORDS, max_size=3))
def test_configuration_preserves_commands_and_variables(arguments: list[str], env: dict[str, str]) -> None:
    task = make_task({"name": "a", "command": "serve", "args": arguments, "env": env}, env={"OF_TASK": "x", **env})
    for name in ("claude-code", "codex", "openai-agents"):
        entry = read_config(name, task)["a"]
        assert (entry["command"], entry.get("args", [])) == ("serve", arguments)
        assert entry["env"] == {"OF_TASK": "x", **env}


def test_invalid_server_names_are_changed_and_stay_unique() -> None:
    names = ("my server", "my.server", "my_server_2", "ä" * 60)
    task = make_task(*({"name": name, "command": f"serve {number}"} for number, name in enumerate(names)))
    for name in ("claude-code", "codex"):
        entries = read_config(name, task)
        assert list(entries) == ["my_server", "my_server_2", "my_server_2_2", "_" * 40]
        assert [entry["args"] for entry in entries.values()] == [["0"], ["1"], ["2"], ["3"]]


def test_codex_configuration_has_timeouts_and_tools() -> None:
    task = make_task({"name": "a", "command": "x", "tools": ["one"], "timeout": 3, "start_timeout": 9})
    entry = read_config("codex", task)["a"]
    assert (entry["startup_timeout_sec"], entry["tool_timeout_sec"], entry["enabled_tools"]) == (
        9.0,
        3.0,
        ["one"],
    )


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/mcp", "http://localhost/mcp", "http://[::1]:9/"])
def test_loopback_urls_are_passed_to_the_agent(url: str) -> None:
    task = make_task({"name": "a", "url": url, "transport": "streamable-http"})
    assert read_config("claude-code", task)["a"] == {"type": "http", "url": url}
    assert read_config("codex", task)["a"] == {"url": url, "startup_timeout_sec": 60.0}


@pytest.mark.parametrize("url", ["http://10.0.0.1/mcp", "http://127.0.0.1.example/mcp", "http://sidecar:8000/mcp"])
def test_other_urls_are_the_tasks_fault(url: str) -> None:
    with pytest.raises(TaskError):
        read_config("claude-code", make_task({"name": "a", "url": url}))


@pytest.mark.usefixtures("local_sandboxes")
async def test_server_outside_of_the_sandbox_fails_the_task_before_the_agent_starts(tmp_path: Path) -> None:
    step = StepDirectory("x")
    settings = "[[environment.mcp_servers]]\nname = 'remote'\ntransport = 'sse'\nurl = 'http://remote/sse'"
    env = AgentEnvironment({"name": "idle", "command": ["true", "{prompt}"]})
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as engine:
        (rollout,) = await run_rollouts(engine, [harbor_task(tmp_path, step, settings=settings)])
    assert label(rollout.outcome) == "task.invalid", rollout.outcome
    assert "agents" not in rollout.info


def test_server_starts_in_its_own_directory(tmp_path: Path) -> None:
    entry = read_config("claude-code", make_task({"name": "a", "command": "pwd", "cwd": str(tmp_path)}))["a"]
    done = subprocess.run([entry["command"], *entry["args"]], capture_output=True, check=True, cwd="/")
    assert done.stdout.decode().strip() == str(tmp_path)


def test_agent_without_mcp_support_gets_a_warning_and_no_configuration() -> None:
    logged: list[dict[str, Any]] = []
    task = make_task({"name": "a", "command": "x"})
    assert (
        render_mcp_config(find_launcher("mini-swe-agent"), task, Log(lambda _, fields: logged.append(fields)))
        == ""
    )
    assert [fields["launcher"] for fields in logged] == ["mini-swe-agent"]
