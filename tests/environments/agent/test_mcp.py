"""A task's MCP servers, live, behind real agents in boxes whose only network is the gateway."""

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
from tests.environments.agent.folders import SAID, SERVER, START, StepFolder, asks_a_server, harbor_task, stdio
from tests.environments.agent.kit import agents_at, all_of, get_agents_dir, real_agent, scripted_engine, trainable
from tests.servers import ModelServer

__all__ = ["local_sandboxes"]
HEARD = StepFolder("Ask the vault.", check=f"grep -qx '{SAID} /workspace' heard.txt", files={"server.py": SERVER})
POLICY = asks_a_server("mcp_vault__unlock", ("shell", "command"))
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


@pytest.mark.usefixtures("local_sandboxes")
async def test_openai_agents_calls_a_tool_of_the_tasks_server(tmp_path: Path) -> None:
    real_agent("openai-agents")
    task = harbor_task(tmp_path, HEARD, settings=stdio("python3", "-I", START, "/workspace/server.py", "stdio"))
    with agents_at(get_agents_dir()):
        env = AgentEnvironment("openai-agents")
        async with ModelServer(POLICY) as server, scripted_engine(server, env, tmp_path) as made:
            (found,) = await all_of(made, [task])
        offered = sorted(tool["function"]["name"] for tool in server.requests[0].body["tools"])
    assert found.reward == 1.0, json.dumps(found.info, indent=1)
    trainable(found, 3)
    assert offered == ["mcp_vault__unlock", "shell"]


@pytest.mark.usefixtures("local_sandboxes")
@pytest.mark.long
async def test_a_server_that_the_tasks_setup_started_is_asked_at_the_sandboxs_loopback(tmp_path: Path) -> None:
    real_agent("openai-agents")
    files = {**HEARD.files, "setup.sh": HTTP.format(start=START)}
    step = StepFolder(HEARD.instruction, check=HEARD.check, files=files)
    served = "env = { WORD = 'of the task' }\n[[environment.mcp_servers]]\nname = 'vault'\n"
    served += "transport = 'streamable-http'\nurl = 'http://127.0.0.1:8765/mcp'"
    with agents_at(get_agents_dir()):
        env = AgentEnvironment("openai-agents")
        async with ModelServer(POLICY) as server, scripted_engine(server, env, tmp_path) as made:
            (found,) = await all_of(made, [harbor_task(tmp_path, step, settings=served)])
    assert found.reward == 1.0, json.dumps(found.info, indent=1)
    trainable(found, 3)


# ---- what agents read


def served(*servers: dict[str, Any], env: dict[str, str] | None = None) -> SweTask:
    step = SweStep(instruction="x")
    return SweTask(id="t", format="harbor", folder="/none", steps=(step,), mcp=servers, env=env or {})


def told(name: str, task: SweTask, lines: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The servers as this launcher's agent reads of them."""
    log = Log(lambda _, fields: (lines if lines is not None else []).append(fields))
    launcher = find_launcher(name)
    text = render_mcp_config(launcher, task, log)
    assert launcher.mcp is not None
    found = tomllib.loads(text) if launcher.mcp.format == "toml" else json.loads(text)
    entries: dict[str, Any] = found["mcp_servers" if launcher.mcp.format == "toml" else "mcpServers"]
    return entries


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@given(arguments=st.lists(WORDS, max_size=3), env=st.dictionaries(WORDS.filter(bool), WORDS, max_size=3))
def test_each_agent_reads_a_servers_command_and_variables_as_the_task_says_them(
    arguments: list[str], env: dict[str, str]
) -> None:
    task = served({"name": "a", "command": "serve", "args": arguments, "env": env}, env={"OF_TASK": "x", **env})
    for name in ("claude-code", "codex", "openai-agents"):
        found = told(name, task)["a"]
        assert (found["command"], found.get("args", [])) == ("serve", arguments)
        assert found["env"] == {"OF_TASK": "x", **env}


def test_names_that_no_agent_could_take_are_changed_and_stay_apart() -> None:
    names = ("my server", "my.server", "my_server_2", "ä" * 60)
    task = served(*({"name": name, "command": f"serve {number}"} for number, name in enumerate(names)))
    for name in ("claude-code", "codex"):
        found = told(name, task)
        assert list(found) == ["my_server", "my_server_2", "my_server_2_2", "_" * 40]
        assert [one["args"] for one in found.values()] == [["0"], ["1"], ["2"], ["3"]]


def test_codex_is_reported_of_times_and_tools() -> None:
    task = served({"name": "a", "command": "x", "tools": ["one"], "timeout": 3, "start_timeout": 9})
    found = told("codex", task)["a"]
    assert (found["startup_timeout_sec"], found["tool_timeout_sec"], found["enabled_tools"]) == (9.0, 3.0, ["one"])


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/mcp", "http://localhost/mcp", "http://[::1]:9/"])
def test_an_address_of_the_sandboxs_own_loopback_is_passed_on(url: str) -> None:
    task = served({"name": "a", "url": url, "transport": "streamable-http"})
    assert told("claude-code", task)["a"] == {"type": "http", "url": url}
    assert told("codex", task)["a"] == {"url": url, "startup_timeout_sec": 60.0}


@pytest.mark.parametrize("url", ["http://10.0.0.1/mcp", "http://127.0.0.1.example/mcp", "http://sidecar:8000/mcp"])
def test_an_address_elsewhere_is_the_tasks_fault(url: str) -> None:
    with pytest.raises(TaskError, match="its MCP server 'a' has a URL"):
        told("claude-code", served({"name": "a", "url": url}))


@pytest.mark.usefixtures("local_sandboxes")
async def test_what_is_no_server_of_the_sandbox_is_the_tasks_fault_before_the_agent_starts(tmp_path: Path) -> None:
    step = StepFolder("x")
    settings = "[[environment.mcp_servers]]\nname = 'far'\ntransport = 'sse'\nurl = 'http://far/sse'"
    env = AgentEnvironment({"name": "idle", "command": ["true", "{prompt}"]})
    async with ModelServer("ok") as server, scripted_engine(server, env, tmp_path) as made:
        (found,) = await all_of(made, [harbor_task(tmp_path, step, settings=settings)])
    assert label(found.outcome) == "task.invalid", found.outcome
    assert "agents" not in found.info


def test_a_directory_of_a_servers_own_is_where_it_starts(tmp_path: Path) -> None:
    found = told("claude-code", served({"name": "a", "command": "pwd", "cwd": str(tmp_path)}))["a"]
    done = subprocess.run([found["command"], *found["args"]], capture_output=True, check=True, cwd="/")
    assert done.stdout.decode().strip() == str(tmp_path)


def test_an_agent_that_does_not_support_mcp_is_started_without_and_that_is_reported() -> None:
    lines: list[dict[str, Any]] = []
    task = served({"name": "a", "command": "x"})
    assert (
        render_mcp_config(find_launcher("mini-swe-agent"), task, Log(lambda _, fields: lines.append(fields))) == ""
    )
    assert "without the task's servers" in lines[0]["message"]
