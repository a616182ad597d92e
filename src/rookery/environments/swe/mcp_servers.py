"""Parse the MCP servers in the configuration of a run and in a task.

A server is a command, which runs inside the sandbox, or a URL, to which this machine connects. Only the run's
configuration may contain URLs: task data must never make this machine connect anywhere. For agents in the
sandbox, a task may name a URL at the sandbox's loopback address.
"""

import shlex
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from rookery.core import TaskError, UsageError

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_ALIASES: Final = {"transport": "type"}


class McpServer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One MCP server."""

    name: str
    command: tuple[str, ...] = ()
    """Command of a server that runs in the sandbox and communicates over stdin and stdout."""
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str = ""
    """URL of a "streamable HTTP" server, to which this machine connects."""
    headers_env: dict[str, str] = {}
    """HTTP headers: header name → environment variable with its value, so that no secret is in a configuration."""
    tools: tuple[str, ...] | None = None
    """Names of the tools to offer. None means all."""
    start_timeout: float = 60.0
    timeout: float | None = None
    """Time limit of one call in seconds. None means the rollout's `limits.call`."""
    output: int = 16_384

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(f"the MCP server {self.name!r} needs either a command or a url")
        if self.url and urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"the MCP server {self.name!r}: {self.url!r} is not an http URL")
        if not self.name.strip():
            raise ValueError("an MCP server needs a name")
        if not 0 < self.start_timeout < float("inf") or self.output < 64:
            raise ValueError(f"the MCP server {self.name!r}: start_timeout must be above 0, output at least 64")


def parse_servers(entries: Any) -> tuple[McpServer, ...]:
    """Parse the run's servers; raise `UsageError` for an invalid one."""
    if entries is None:
        return ()
    if not isinstance(entries, list | tuple):
        raise UsageError(f"mcp must be a list of servers, not {entries!r:.80}")
    try:
        servers = tuple(_parse_server(entry) for entry in entries)
    except (msgspec.ValidationError, ValueError) as error:
        fields = ", ".join(McpServer.__struct_fields__)
        raise UsageError(f"mcp: {error}; a server has {fields}") from None
    _check_unique_names(servers, UsageError)
    return servers


def parse_task_servers(
    task: str, entries: tuple[dict[str, Any], ...], *, allow_loopback: bool = False
) -> tuple[McpServer, ...]:
    """Parse a task's servers; raise `TaskError` for an invalid one, or one outside of the sandbox.

    If `allow_loopback`, a URL may name the loopback address: an agent in the sandbox connects to it.
    """
    try:
        servers = tuple(_parse_server(entry) for entry in entries)
    except (msgspec.ValidationError, ValueError) as error:
        raise TaskError(f"task {task}: mcp: {error}") from None
    for server in servers:
        if server.url and not (allow_loopback and urlsplit(server.url).hostname in LOOPBACK):
            advice = (
                f"a URL there begins with http://127.0.0.1, not {server.url!r:.200}"
                if allow_loopback
                else "configure a server to which this machine connects in the `mcp` of the run"
            )
            raise TaskError(
                f"task {task}: its MCP server {server.name!r} has a URL, but a task's servers run in its "
                f"sandbox and need a command: {advice}"
            )
    _check_unique_names(servers, TaskError)
    return servers


def _check_unique_names(servers: tuple[McpServer, ...], kind: type[UsageError] | type[TaskError]) -> None:
    names = [server.name for server in servers]
    for name in names:
        if names.count(name) > 1:
            raise kind(f"two MCP servers are named {name!r}")


def _parse_server(entry: Any) -> McpServer:
    if isinstance(entry, McpServer):
        return entry
    if not isinstance(entry, dict):
        raise ValueError(f"an MCP server must be a table, not {entry!r:.80}")  # noqa: TRY004
    fields = {_ALIASES.get(name, name.replace("-", "_")): value for name, value in entry.items()}
    kind = fields.pop("type", None)
    if kind not in (None, "stdio", "http", "streamable-http", "streamable_http"):
        raise ValueError(f"the transport {kind!r:.40} is not known; there are stdio and streamable-http")
    command, args = fields.pop("command", ()), fields.pop("args", None)
    if isinstance(command, str):
        # Together with `args` it is a program's name; alone it is a shell-like command line.
        command = [command] if args is not None else shlex.split(command)
    fields["command"] = [*command, *(args or ())]
    return msgspec.convert(fields, McpServer)
