"""A task's MCP servers, as agents read of them.

Promises:
- only servers that run in the box are handed over: programs, and addresses at the box's own loopback;
- what is no such server is the task's fault, before the agent is started;
- a server has the task's variables and its own folder, whichever agent starts it;
- a name that an agent could not take is changed, and stays apart from the others;
- an agent that knows no MCP is started without, and that is said once for each attempt.
"""

import json
import re
from typing import Any, Final

from rookery.environments.agent.launchers import Launcher
from rookery.environments.context import Log
from rookery.tasks.swe import SweTask

_UNFIT: Final = re.compile(r"[^A-Za-z0-9_-]")
IN_FOLDER: Final = 'cd -- "$0" && exec "$@"'
"""For agents that cannot be told where a server starts."""


def mcp_text(launcher: Launcher, task: SweTask, log: Log) -> str:
    """The text of the agent's own configuration; empty where there is nothing to say."""
    from rookery.environments.swe.mcp_config import servers_of_task

    servers = servers_of_task(task.id, task.mcp, inside=True)
    if not servers:
        return ""
    if launcher.mcp is None:
        log.warning("the agent knows no MCP: it is started without the task's servers", launcher=launcher.name)
        return ""
    entries = {name: _entry(one, task) for name, one in zip(_names(servers), servers, strict=True)}
    if launcher.mcp.format == "json":
        return json.dumps({"mcpServers": entries}, indent=1)
    return "\n".join(_table(name, entry, one) for (name, entry), one in zip(entries.items(), servers, strict=True))


def _entry(server: Any, task: SweTask) -> dict[str, Any]:
    if server.url:
        return {"type": "http", "url": server.url}
    command = list(server.command)
    if server.cwd is not None:
        command = ["sh", "-c", IN_FOLDER, server.cwd, *command]
    env = {**task.env, **server.env}  # agents start servers with few of their own variables
    return {"type": "stdio", "command": command[0], "args": command[1:], "env": env}


def _names(servers: tuple[Any, ...]) -> list[str]:
    """Letters, digits, '_' and '-', at most 40 of them: agents make a tool's name of it, and models read that."""
    names: list[str] = []
    for server in servers:
        plain = _UNFIT.sub("_", server.name)[:40]
        name, number = plain, 2
        while name in names:
            name, number = f"{plain}_{number}", number + 1
        names.append(name)
    return names


def _table(name: str, entry: dict[str, Any], server: Any) -> str:
    said = {key: value for key, value in entry.items() if key != "type" and value not in ([], {})}
    said["startup_timeout_sec"] = server.start_timeout
    if server.timeout is not None:
        said["tool_timeout_sec"] = server.timeout
    if server.tools is not None:
        said["enabled_tools"] = list(server.tools)
    return "\n".join((f"[mcp_servers.{name}]", *(f"{key} = {_toml(value)}" for key, value in said.items()), ""))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_toml(key)} = {_toml(one)}' for key, one in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        # A JSON text is a TOML text, but for a character of 127 and for pairs that stand for one.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(float(value))
