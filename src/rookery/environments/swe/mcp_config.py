"""Which MCP servers there are: of the run, and of a task.

Promises:
- a server is either a command, which runs inside the sandbox, or a URL, which this machine asks;
- only the run's own configuration may name a URL: what task data names never makes this machine connect, and is
  taken for the sandbox's own loopback alone, where a program in the sandbox connects;
- what is wrong with an entry is said with its name and field, before anything starts.
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
    """A program of the sandbox that speaks over stdin and stdout."""
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str = ""
    """A server that speaks HTTP ("streamable HTTP"), asked from this machine."""
    headers_env: dict[str, str] = {}
    """Headers for it, by the name of the variable that holds each: a secret stands in no configuration."""
    tools: tuple[str, ...] | None = None
    """Those that the policy gets; None: all."""
    start_timeout: float = 60.0
    timeout: float | None = None
    """Seconds for one call; None: the rollout's `limits.call`."""
    output: int = 16_384

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(f"the MCP server {self.name!r} needs either a command or a url")
        if self.url and urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"the MCP server {self.name!r}: {self.url!r} is no http address")
        if not self.name.strip():
            raise ValueError("an MCP server needs a name")
        if not 0 < self.start_timeout < float("inf") or self.output < 64:
            raise ValueError(f"the MCP server {self.name!r}: start_timeout must be above 0, output at least 64")


def servers_of(given: Any) -> tuple[McpServer, ...]:
    """The run's servers; `UsageError` says what is wrong with which."""
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise UsageError(f"mcp must be a list of servers, not {given!r:.80}")
    try:
        found = tuple(_server(entry) for entry in given)
    except (msgspec.ValidationError, ValueError) as error:
        fields = ", ".join(McpServer.__struct_fields__)
        raise UsageError(f"mcp: {error}; a server has {fields}") from None
    _single(found, UsageError)
    return found


def servers_of_task(
    task: str, given: tuple[dict[str, Any], ...], *, inside: bool = False
) -> tuple[McpServer, ...]:
    """A task's own servers; `TaskError` for what is no server, or one that would not be inside the sandbox.

    `inside`: they are asked by a program in the sandbox, so that a URL may name its loopback.
    """
    try:
        found = tuple(_server(entry) for entry in given)
    except (msgspec.ValidationError, ValueError) as error:
        raise TaskError(f"task {task}: mcp: {error}") from None
    for server in found:
        if server.url and not (inside and urlsplit(server.url).hostname in LOOPBACK):
            other = (
                f"a URL there begins with http://127.0.0.1, not {server.url!r:.200}"
                if inside
                else "One that this machine may ask is named in the run's own `mcp`"
            )
            raise TaskError(
                f"task {task}: its MCP server {server.name!r} is named by a URL; a task's servers run in its own "
                f"sandbox and need a command. {other}"
            )
    _single(found, TaskError)
    return found


def _single(servers: tuple[McpServer, ...], kind: type[UsageError] | type[TaskError]) -> None:
    names = [server.name for server in servers]
    for name in names:
        if names.count(name) > 1:
            raise kind(f"two MCP servers are named {name!r}")


def _server(entry: Any) -> McpServer:
    if isinstance(entry, McpServer):
        return entry
    if not isinstance(entry, dict):
        raise ValueError(f"a server must be a table, not {entry!r:.80}")  # noqa: TRY004
    plain = {_ALIASES.get(name, name.replace("-", "_")): value for name, value in entry.items()}
    kind = plain.pop("type", None)
    if kind not in (None, "stdio", "http", "streamable-http", "streamable_http"):
        raise ValueError(f"the transport {kind!r:.40} is not known; there are stdio and streamable-http")
    command, args = plain.pop("command", ()), plain.pop("args", None)
    if isinstance(command, str):
        # With its arguments apart it is one program's name; alone it is a line as one would type it.
        command = [command] if args is not None else shlex.split(command)
    plain["command"] = [*command, *(args or ())]
    return msgspec.convert(plain, McpServer)
