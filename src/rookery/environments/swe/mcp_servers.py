"""Parse descriptions of MCP (Model Context Protocol) servers in the configuration of a run and in a task.

A server is a command, which runs inside the sandbox, or a URL, to which this machine connects. Only the run's
configuration may contain URLs: task data must never make this machine connect anywhere. In the `agent`
environment, where the agent in the sandbox connects, a task may also name a URL at the sandbox's loopback address.
"""

import shlex
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from rookery.core import TaskError, UsageError

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_ALIASES: Final = {"transport": "type"}


class McpServer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Description of one MCP server: either a command that runs in the sandbox, or a URL."""

    name: str
    command: tuple[str, ...] = ()
    """Command of a server that runs in the sandbox and communicates over stdin and stdout."""
    env: dict[str, str] = {}
    """Environment variables of a server that runs in the sandbox."""
    cwd: str | None = None
    """Working directory of a server that runs in the sandbox. None means that of the task."""
    url: str = ""
    """URL of a server with the transport "streamable HTTP", to which this machine connects."""
    headers_env: dict[str, str] = {}
    """HTTP headers for `url`: header name → name of the environment variable, on this machine, with the value.
    This keeps secrets out of configuration files."""
    tools: tuple[str, ...] | None = None
    """Names of the server's tools that the policy may call. None means all."""
    start_timeout: float = 60.0
    """Time limit in seconds for starting the server and listing its tools."""
    timeout: float | None = None
    """Time limit of one tool call in seconds. None means the rollout's `limits.call`."""
    output: int = 16_384
    """Maximum bytes of a tool's result; longer results are cut in the middle."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(f"the MCP server {self.name!r} needs either a command or a url")
        if self.url and urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"the MCP server {self.name!r}: {self.url!r} is not an http URL")
        if not self.name.strip():
            raise ValueError("an MCP server needs a name")
        if not 0 < self.start_timeout < float("inf") or self.output < 64:
            raise ValueError(
                f"the MCP server {self.name!r}: start_timeout must be above 0 and output at least 64, not "
                f"{self.start_timeout!r} and {self.output!r}"
            )


def parse_servers(entries: Any) -> tuple[McpServer, ...]:
    """Parse the MCP servers of a run's configuration; raise `UsageError` if one is invalid."""
    if entries is None:
        return ()
    if not isinstance(entries, list | tuple):
        raise UsageError(f"mcp must be a list of servers, not {entries!r:.80}")
    try:
        servers = tuple(_parse_server(entry) for entry in entries)
    except (msgspec.ValidationError, ValueError) as error:
        fields = ", ".join(McpServer.__struct_fields__)
        raise UsageError(f"mcp: {error}; the keys of a server are {fields}") from None
    _check_unique_names(servers, UsageError)
    return servers


def parse_task_servers(
    task: str, entries: tuple[dict[str, Any], ...], *, allow_loopback: bool = False
) -> tuple[McpServer, ...]:
    """Parse a task's MCP servers; raise `TaskError` if one is invalid or not in the sandbox.

    `task` is the task's ID. If `allow_loopback`, a server may have a URL at the loopback address, to which an
    agent in the sandbox connects. Otherwise every server must be a command.
    """
    try:
        servers = tuple(_parse_server(entry) for entry in entries)
    except (msgspec.ValidationError, ValueError) as error:
        raise TaskError(f"task {task}: mcp: {error}") from None
    for server in servers:
        if server.url and not (allow_loopback and urlsplit(server.url).hostname in LOOPBACK):
            advice = (
                f"a URL is allowed only at the sandbox's loopback address 127.0.0.1, not {server.url!r:.200}"
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
            raise kind(f"two MCP servers are named {name!r}: rename one")


def _parse_server(entry: Any) -> McpServer:
    if isinstance(entry, McpServer):
        return entry
    if not isinstance(entry, dict):
        raise ValueError(f"an MCP server must be a table, not {entry!r:.80}")  # noqa: TRY004
    fields = {_ALIASES.get(name, name.replace("-", "_")): value for name, value in entry.items()}
    kind = fields.pop("type", None)
    if kind not in (None, "stdio", "http", "streamable-http", "streamable_http"):
        raise ValueError(f"the transport {kind!r:.40} of an MCP server is unknown; use stdio or streamable-http")
    command, args = fields.pop("command", ()), fields.pop("args", None)
    if isinstance(command, str):
        # With `args`, the string is the name of a program. Without, it is a command line with shell quoting.
        command = [command] if args is not None else shlex.split(command)
    fields["command"] = [*command, *(args or ())]
    return msgspec.convert(fields, McpServer)
