"""The configuration of tools and MCP servers."""

from pathlib import Path
from typing import Any

import pytest

from rookery.core import SandboxSpec, TaskError, UsageError
from rookery.environments import load_environment
from rookery.environments.swe import PRESETS, McpServer, SweEnvironment, parse_tool_config
from rookery.environments.swe.mcp_servers import parse_servers, parse_task_servers
from rookery.environments.swe.tool_config import MARKER
from rookery.environments.tools import tool
from tests.environments.swe.helpers import small_task


@tool
async def lookup(word: str) -> str:
    """Looks a word up."""
    return word


def plain(number: int) -> int:
    """Doubles."""
    return 2 * number


def names(env: SweEnvironment) -> list[str]:
    return [schema.name for schema in env.tools()]


def test_presets_and_overrides() -> None:
    assert names(SweEnvironment()) == ["bash", "edit", "submit"]
    env = SweEnvironment(tool_config={"preset": "open-instruct"})
    assert names(env) == ["execute_bash", "str_replace_editor", "submit"]
    schemas = {schema.name: schema for schema in env.tools()}
    assert list(schemas["execute_bash"].parameters["properties"]) == ["command"]
    assert "undo_edit" in schemas["str_replace_editor"].parameters["properties"]["command"]["enum"]
    marked = SweEnvironment(tool_config={"preset": "open-instruct-marker", "bash": {"name": "sh", "output": 100}})
    assert names(marked) == ["sh", "str_replace_editor"]
    assert marked.tool_config.marker == MARKER
    assert marked.tool_config.bash.output == 100
    assert MARKER in marked.tools()[0].description
    assert parse_tool_config(None, {"output": 500, "edit": {"output": 900}}).bash.output == 500
    assert parse_tool_config(None, {"output": 500, "edit": {"output": 900}}).edit.output == 900
    for preset in PRESETS:
        SweEnvironment(tool_config={"preset": preset})


def test_custom_tools_by_name_and_as_functions() -> None:
    here = __name__
    env = SweEnvironment(["bash", "submit", f"{here}:lookup", f"{here}:plain"])
    assert names(env) == ["bash", "submit", "lookup", "plain"]
    renamed = SweEnvironment(
        ["bash", "submit", f"{here}:plain"], tool_config={f"{here}:plain": {"name": "double", "description": "2x"}}
    )
    assert names(renamed) == ["bash", "submit", "double"]
    assert renamed.tools()[2].description == "2x"
    assert names(SweEnvironment([lookup])) == ["bash", "edit", "submit", "lookup"]
    assert names(SweEnvironment(["bash", "submit", "python"]))[2] == "python"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tools": ["bsah", "submit"]}, "'bsah'.*bash, edit, submit, python"),
        ({"tools": ["bash"]}, "submit"),
        ({"tools": []}, "tools"),
        ({"tools": ["bash", "bash", "submit"]}, "'bash'"),
        ({"tools": ["no_such_module:f", "submit"]}, "no_such_module"),
        ({"tools": [f"{__name__}:nothing", "submit"]}, "nothing"),
        ({"tools": [f"{__name__}:MARKER", "submit"]}, MARKER),
        ({"tool_config": {"preset": "closed-instruct"}}, "rookery, open-instruct"),
        ({"tool_config": {"bsah": {}}}, "'bsah'"),
        ({"tool_config": {"bash": {"outptu": 1}}}, "outptu"),
        ({"tool_config": {"bash": {"output": 3}}}, "output"),
        ({"tool_config": {"bash": {"timeout": -1}}}, "timeout"),
        ({"tool_config": {"bash": {"name": "submit"}}}, "'submit'"),
        ({"tool_config": {"bash": {"name": "a b"}}}, "'a b'"),
        ({"tool_config": {"bash": 3}}, "tool_config.bash"),
        ({"tool_config": "/no/such/file.toml"}, "/no/such/file.toml"),
        ({"network": "maybe"}, "network"),
        ({"nudges": -1}, "nudges"),
        ({"mcp": {"name": "x"}}, "mcp"),
        ({"mcp": [{"name": "x"}]}, "'x'"),
        ({"mcp": [{"name": "x", "url": "file:///etc/passwd"}]}, "passwd"),
        ({"mcp": [{"name": "x", "command": "a"}, {"name": "x", "command": "b"}]}, "'x'"),
        ({"mcp": [{"name": "x", "command": "a", "prot": 1}]}, "prot"),
    ],
)
def test_invalid_configuration_is_refused_at_construction(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        SweEnvironment(**arguments)


def test_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "tools.toml"
    file.write_text('preset = "open-instruct"\n[bash]\nname = "terminal"\n')
    env = load_environment("swe", tool_config=str(file))
    assert isinstance(env, SweEnvironment)
    assert names(env) == ["terminal", "str_replace_editor", "submit"]


def test_server_commands_are_split_and_task_servers_have_no_url() -> None:
    (server,) = parse_servers([{"name": "s", "command": "python3 -m 'a b'"}])
    assert server.command == ("python3", "-m", "a b")
    (server,) = parse_servers([{"name": "s", "command": "py thon", "args": ["x"], "transport": "stdio"}])
    assert server.command == ("py thon", "x")
    assert parse_servers([McpServer(name="s", url="http://127.0.0.1:1/mcp")])[0].url
    with pytest.raises(TaskError):
        parse_task_servers("t", ({"name": "s", "url": "http://10.0.0.1/"},))


def test_task_settings_override_the_sandbox_of_the_run(tmp_path: Path) -> None:
    task = small_task(
        tmp_path,
        image="debian:12",
        memory=1 << 30,
        cpus=2.0,
        disk=1 << 31,
        network="allow",
        allow=("example.org",),
        user="root",
        env={"A": "task"},
    )
    spec = SandboxSpec(provider="local", env={"A": "run", "B": "run"}, pids=99)
    made = SweEnvironment().sandbox_for(task, spec)
    assert (made.image, made.memory, made.cpus, made.disk) == ("debian:12", 1 << 30, 2.0, 1 << 31)
    assert (made.network, made.allow, made.user) == ("allow", ("example.org",), "root")
    assert made.env == {"A": "task", "B": "run"}
    assert (made.provider, made.pids) == ("local", 99)
    closed = SweEnvironment(network="run").sandbox_for(task, spec)
    assert (closed.network, closed.allow) == ("none", ())
