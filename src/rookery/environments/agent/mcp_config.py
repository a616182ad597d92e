"""Render a task's MCP servers as the configuration file of an agent.

Only servers inside the sandbox are allowed: programs, and URLs at the sandbox's loopback address. An agent without
MCP support is started without the servers, with a warning in the attempt's log.
"""

import json
import re
from typing import Any, Final

from rookery.environments.agent.launchers import Launcher
from rookery.environments.context import Log
from rookery.environments.swe.mcp_servers import McpServer, parse_task_servers
from rookery.tasks.swe import SweTask

_INVALID_CHARACTERS: Final = re.compile(r"[^A-Za-z0-9_-]")
CHANGE_DIRECTORY: Final = 'cd -- "$0" && exec "$@"'
"""Shell script that changes to the directory `$0` and executes the command `$@`.

Configuration files of agents have no setting for the working directory of an MCP server.
"""


def render_mcp_config(launcher: Launcher, task: SweTask, log: Log) -> str:
    """Return the text of the agent's MCP configuration file.

    Return an empty string if the task has no servers or the agent does not support MCP.
    """
    servers = parse_task_servers(task.id, task.mcp, allow_loopback=True)
    if not servers:
        return ""
    if launcher.mcp is None:
        log.warning(
            "the agent does not support MCP: it is started without the task's servers", launcher=launcher.name
        )
        return ""
    entries = {name: _make_entry(server, task) for name, server in zip(_make_names(servers), servers, strict=True)}
    if launcher.mcp.format == "json":
        return json.dumps({"mcpServers": entries}, indent=1)
    pairs = zip(entries.items(), servers, strict=True)
    return "\n".join(_render_table(name, entry, server) for (name, entry), server in pairs)


def _make_entry(server: McpServer, task: SweTask) -> dict[str, Any]:
    if server.url:
        return {"type": "http", "url": server.url}
    command = list(server.command)
    if server.cwd is not None:
        command = ["sh", "-c", CHANGE_DIRECTORY, server.cwd, *command]
    env = {**task.env, **server.env}  # agents start servers with few of their own environment variables
    return {"type": "stdio", "command": command[0], "args": command[1:], "env": env}


def _make_names(servers: tuple[McpServer, ...]) -> list[str]:
    """Return a unique name for each server, of about 40 letters, digits, '_' and '-' at most.

    Agents derive the names of the servers' tools from them.
    """
    names: list[str] = []
    for server in servers:
        base = _INVALID_CHARACTERS.sub("_", server.name)[:40]
        name, number = base, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names


def _render_table(name: str, entry: dict[str, Any], server: McpServer) -> str:
    fields = {key: value for key, value in entry.items() if key != "type" and value not in ([], {})}
    fields["startup_timeout_sec"] = server.start_timeout
    if server.timeout is not None:
        fields["tool_timeout_sec"] = server.timeout
    if server.tools is not None:
        fields["enabled_tools"] = list(server.tools)
    lines = (f"{key} = {_render_toml(value)}" for key, value in fields.items())
    return "\n".join((f"[mcp_servers.{name}]", *lines, ""))


def _render_toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{_render_toml(key)} = {_render_toml(item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_render_toml, value))}]"
    if isinstance(value, str):
        # A JSON string is a TOML string, except for U+007F and escaped surrogate pairs.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(float(value))
