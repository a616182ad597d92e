"""A task's MCP servers, as agents read of them.

Promises:
- only servers that run in the box are handed over: a box reaches nothing else;
- an agent that knows no MCP is started without, and that is said once for each attempt.
"""

import json

from rookery.core import TaskError
from rookery.environments.agent.launchers import Launcher
from rookery.environments.context import Log
from rookery.tasks.swe import SweTask


def mcp_text(launcher: Launcher, task: SweTask, log: Log) -> str:
    """The text of the agent's own configuration; empty where there is nothing to say."""
    if launcher.mcp is None:
        log.warning("the agent knows no MCP: it is started without the task's servers", launcher=launcher.name)
        return ""
    from rookery.environments.swe.mcp_config import servers_of_task

    servers = servers_of_task(task.id, task.mcp)
    if launcher.mcp.format == "json":
        entries = {
            one.name: {"type": "stdio", "command": one.command[0], "args": list(one.command[1:]), "env": one.env}
            for one in servers
        }
        return json.dumps({"mcpServers": entries}, indent=1)
    return "\n".join(_table(task, one.name, one.command, one.env) for one in servers)


def _table(task: SweTask, name: str, command: tuple[str, ...], env: dict[str, str]) -> str:
    if not name.isascii() or "\n" in name:
        raise TaskError(f"task {task.id}: the MCP server {name!r:.80} needs a name in ASCII for this agent")
    # A JSON text is a TOML text too, and a list of them a list.
    lines = [f"[mcp_servers.{json.dumps(name)}]", f"command = {json.dumps(command[0])}"]
    lines.append(f"args = {json.dumps(list(command[1:]))}")
    if env:
        pairs = ", ".join(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in env.items())
        lines.append(f"env = {{ {pairs} }}")
    return "\n".join(lines) + "\n"
