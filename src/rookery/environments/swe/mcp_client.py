"""MCP client: offers the tools of MCP (Model Context Protocol) servers to the policy.

Runs in a runner process. A server that is a command runs in the attempt's sandbox as the agent's user. A server
that sends too long a message is disconnected. If a server in the sandbox dies, calls of its tools return a message
that says so. If a server of the run's configuration, named by a URL, is unreachable, the attempt fails with the
cause `tool.unreachable`, an infrastructure failure. Each connection is used by one asyncio task, from opening to
closing. Tool names that clash with others, or contain characters that models cannot use, are changed.
"""

import asyncio
import contextlib
import json
import os
import re
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, Final

from rookery.core import RookeryError, TaskError, ToolSchema, UsageError
from rookery.core.errors import describe, unwrap_group
from rookery.environments.context import Context
from rookery.environments.swe.mcp_servers import McpServer
from rookery.environments.text import clip
from rookery.environments.tools import InvalidArguments, Tool
from rookery.sandboxes.protocol import Command, Process, Sandbox

if TYPE_CHECKING:
    from mcp import ClientSession

MAX_LINE: Final = 4 << 20
MAX_TOOLS: Final = 128
MAX_PAGES: Final = 16
MAX_SCHEMA: Final = 64 << 10
CLOSE_SECONDS: Final = 5.0
LIFETIME: Final = 7 * 86_400.0
"""Time limit of a server's process in the sandbox, in seconds. In effect none: sandboxes end much earlier."""
_INVALID_CHARACTERS: Final = re.compile(r"[^A-Za-z0-9_-]")


class ServerGone(Exception):  # noqa: N818  (an observation if the server runs in the sandbox)
    """Raised if an MCP server has ended, does not start, or exceeds a limit. Callers add the server's name."""


class McpConnection:
    """The connection of one attempt to one MCP server."""

    def __init__(self, server: McpServer, sandbox: Sandbox | None, folder: str | None = None) -> None:
        self.server = server
        self._sandbox = sandbox
        self._folder = server.cwd or folder
        """Working directory of a server that runs in the sandbox; None means the sandbox's default directory."""
        self._closing = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[list[Any]] = loop.create_future()
        self._session: ClientSession | None = None
        self._stderr: deque[bytes] = deque(maxlen=20)
        """The last chunks of the server's stderr, which error messages quote."""
        self._failure = ""
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> list[Any]:
        """Start or connect to the server and return its tool definitions; raise `ServerGone` on failure."""
        self._task = asyncio.create_task(self._run(), name=f"mcp {self.server.name}")
        try:
            async with asyncio.timeout(self.server.start_timeout):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            await self.close()
            raise ServerGone(
                f"it did not respond within {self.server.start_timeout:g} s{self._quote_stderr()}"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def reopen(self) -> None:
        """Restart a server that runs in the sandbox; raise `ServerGone` on failure.

        Grading a step kills all processes in the sandbox, including MCP servers.
        """
        await self.close()
        self._closing = asyncio.Event()
        self._ready = asyncio.get_running_loop().create_future()
        self._failure = ""
        self._stderr.clear()
        await self.open()

    async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> Any:
        """Call a tool and return the server's response; raise `ServerGone` if the server has ended."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        if self._session is None or self._task is None or self._task.done():
            raise ServerGone(self._failure or f"it has ended{self._quote_stderr()}")
        try:
            return await self._session.call_tool(name, arguments, read_timeout_seconds=seconds)
        except MCPError as error:
            # An error response is a result; a closed connection means that the server ended.
            if error.code == CONNECTION_CLOSED:
                raise ServerGone(self._failure or f"it has ended{self._quote_stderr()}") from error
            raise

    async def close(self) -> None:
        """Close the connection and end a server in the sandbox. Wait for that at most twice `CLOSE_SECONDS`."""
        self._closing.set()
        task = self._task
        if task is None:
            return
        # Before the session is ready, the task does not check `_closing`.
        done, _ = (
            await asyncio.wait({task}, timeout=CLOSE_SECONDS) if self._session is not None else (set(), {task})
        )
        if not done:
            task.cancel()
            await asyncio.wait({task}, timeout=CLOSE_SECONDS)

    def _quote_stderr(self) -> str:
        text = " ".join(b"".join(self._stderr).decode(errors="replace").split())[-300:]
        return f": {text}" if text else ""

    async def _run(self) -> None:
        """Run the connection from opening to closing, as one task.

        The MCP SDK uses cancel scopes, which must be entered and left in the same task.
        """
        try:
            async with contextlib.AsyncExitStack() as stack:
                read, write = await stack.enter_async_context(self._transport())
                await self._serve(stack, read, write)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  (whatever is raised, the server is gone)
            cause = unwrap_group(error)
            known = cause if isinstance(cause, RookeryError | ServerGone) else None
            self._fail(known or ServerGone(f"{describe(cause)}{self._quote_stderr()}"))
        finally:
            self._session = None
            self._fail(ServerGone(self._failure or f"it has ended{self._quote_stderr()}"))

    async def _serve(self, stack: contextlib.AsyncExitStack, read: Any, write: Any) -> None:
        from mcp import ClientSession

        session = await stack.enter_async_context(ClientSession(read, write))
        await session.initialize()
        tools = await _list_tools(session)
        self._session = session
        if not self._ready.done():
            self._ready.set_result(tools)
        await self._closing.wait()

    def _fail(self, error: Exception) -> None:
        if not self._failure:
            self._failure = str(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # mark it as retrieved

    def _transport(self) -> contextlib.AbstractAsyncContextManager[tuple[Any, Any]]:
        return self._over_http() if self.server.url else self._in_sandbox()

    @contextlib.asynccontextmanager
    async def _over_http(self) -> AsyncIterator[tuple[Any, Any]]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {name: os.environ.get(variable, "") for name, variable in self.server.headers_env.items()}
        # Each call has its own time limit, so the stream may be silent for any time.
        timeout = httpx2.Timeout(self.server.start_timeout, read=None)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as client,
            streamable_http_client(self.server.url, http_client=client) as streams,
        ):
            yield streams[0], streams[1]

    @contextlib.asynccontextmanager
    async def _in_sandbox(self) -> AsyncIterator[tuple[Any, Any]]:
        import anyio

        assert self._sandbox is not None
        server = self.server
        process = await self._sandbox.start(
            Command(argv=server.command, env=server.env, cwd=self._folder, wall=LIFETIME)
        )
        try:
            to_session, read = anyio.create_memory_object_stream[Any](0)
            write, from_session = anyio.create_memory_object_stream[Any](0)
            async with to_session, read, write, from_session, anyio.create_task_group() as group:
                group.start_soon(self._read_output, process, to_session)
                group.start_soon(self._write_input, process, from_session, to_session)
                try:
                    yield read, write
                finally:
                    group.cancel_scope.cancel()
        finally:
            with contextlib.suppress(RookeryError, TimeoutError):
                await process.kill()

    async def _read_output(self, process: Process, to_session: Any) -> None:
        """Forward the messages on the server's stdout, one per line, to the MCP session until stdout ends."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        buffer = bytearray()
        async with to_session:
            async for stream, data in process.output():
                if stream == "stderr":
                    self._stderr.append(data[-2000:])
                    continue
                buffer += data
                *lines, buffer = buffer.split(b"\n")
                if len(buffer) > MAX_LINE or any(len(line) > MAX_LINE for line in lines):
                    self._failure = f"it sent a message of more than {MAX_LINE >> 20} MB"
                    return
                for line in lines:
                    if not line.strip():
                        continue
                    try:
                        message: Any = SessionMessage(
                            jsonrpc_message_adapter.validate_json(bytes(line), by_name=False)
                        )
                    except ValueError as error:
                        message = error  # the session handles exceptions
                    try:
                        await to_session.send(message)
                    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                        return

    @staticmethod
    async def _write_input(process: Process, from_session: Any, to_session: Any) -> None:
        async with from_session:
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                try:
                    await process.send(text.encode() + b"\n")
                except (BrokenPipeError, OSError, RookeryError):
                    await to_session.aclose()
                    return


async def _list_tools(session: "ClientSession") -> list[Any]:
    from mcp_types import PaginatedRequestParams

    found: list[Any] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        found += page.tools
        cursor = page.next_cursor
        if not cursor or len(found) > MAX_TOOLS:
            break
    if len(found) > MAX_TOOLS or cursor:
        raise ServerGone(f"it offers more than {MAX_TOOLS} tools")
    return found


class McpTool(Tool):
    """A tool of an MCP server.

    The server validates the arguments. Here they only have to be a JSON object with all required arguments.
    """

    def __init__(self, name: str, definition: Any, connection: McpConnection) -> None:
        self.name = self.__name__ = self.__qualname__ = name
        self.server_name: str = definition.name
        self._connection = connection
        self.timeout = connection.server.timeout
        self.blocking = self.method = False
        self._context_name, self._limit_name = None, "limit"
        parameters = dict(definition.input_schema or {})
        if len(json.dumps(parameters, default=str)) > MAX_SCHEMA:
            raise ServerGone(
                f"the schema of its tool {definition.name!r:.80} is larger than {MAX_SCHEMA >> 10} KB"
            )
        parameters.setdefault("type", "object")
        parameters.setdefault("properties", {})
        self._schema_text = clip(json.dumps(parameters, default=str), 1000)
        self.schema = ToolSchema(name, clip(definition.description or "", 4096), parameters)
        self.function = self._call

    def parse(self, arguments: str) -> dict[str, Any]:
        text = arguments if arguments.strip() else "{}"
        problem = "they must be a JSON object with the arguments by name"
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            found, problem = None, f"they are not valid JSON ({clip(describe(error), 300)})"
        missing = [
            name for name in self.parameters.get("required", ()) if isinstance(found, dict) and name not in found
        ]
        if missing:
            problem = f"missing: {', '.join(map(str, missing))}"
        if not isinstance(found, dict) or missing:
            raise InvalidArguments(
                f"The arguments of {self.name} are wrong: {problem}.\n"
                f"They must be one JSON object of this schema: {self._schema_text}"
            )
        return found

    def invoke(self, arguments: dict[str, Any], ctx: Context, limit: float) -> Any:  # noqa: ARG002
        return self._call(arguments, limit)

    async def _call(self, arguments: dict[str, Any], limit: float) -> str:
        from mcp.shared.exceptions import MCPError

        server = self._connection.server
        try:
            async with asyncio.timeout(limit):
                response = await self._connection.call(self.server_name, arguments, limit)
        except TimeoutError:
            return f"{self.name} did not respond within its {limit:.3g} s."
        except ServerGone as error:
            if server.url:
                raise RookeryError(
                    f"the MCP server {server.name!r} is unreachable: {error}", cause="tool.unreachable"
                ) from error
            return f"{self.name} is no longer available: the MCP server {server.name!r} has ended: {error}."
        except (MCPError, RuntimeError, ValueError) as error:
            return f"{self.name} failed: {clip(describe(error), server.output)}"
        return clip(_render_response(response), server.output)


def _render_response(response: Any) -> str:
    """Render an MCP server's response to a tool call as text for the model."""
    parts = []
    for block in response.content:
        kind = getattr(block, "type", "")
        if kind == "text":
            parts.append(str(block.text))
        elif kind == "resource" and getattr(block.resource, "text", None) is not None:
            parts.append(str(block.resource.text))
        else:
            size = len(getattr(block, "data", "") or "")
            parts.append(f"[{kind or 'something'} omitted: not text, {size} bytes]")
    structured = getattr(response, "structured_content", None)
    if not parts and structured is not None:
        parts.append(json.dumps(structured, ensure_ascii=False, default=str))
    text = "\n".join(parts) or "(no output)"
    return f"The tool reported an error: {text}" if response.is_error else text


class McpConnections:
    """The connections to all MCP servers of an attempt."""

    def __init__(self) -> None:
        self._open: list[McpConnection] = []

    async def open(
        self,
        run: Iterable[McpServer],
        task: Iterable[McpServer],
        sandbox: Sandbox | None,
        taken_names: Iterable[str],
        folder: str | None = None,
    ) -> dict[str, Tool]:
        """Start or connect to the servers in `run` and `task`, and return their tools by name.

        The servers of `run` are those of the run's configuration, those of `task` the task's own. `taken_names`
        are names that the tools must not have. `folder` is the default working directory of servers in the
        sandbox. If a server does not start, raise `TaskError` for a server of the task and `RookeryError` with the
        cause `tool.unreachable` for one of the run.
        """
        names = set(taken_names)
        found: dict[str, Tool] = {}
        for server, of_task in [*((server, False) for server in run), *((server, True) for server in task)]:
            connection = McpConnection(server, sandbox, folder)
            self._open.append(connection)
            try:
                definitions = await connection.open()
                for name, tool in _make_tools(server, definitions, connection, names).items():
                    found[name] = tool
                    names.add(name)
            except ServerGone as error:
                text = f"the MCP server {server.name!r} could not be started: {error}"
                if of_task:
                    raise TaskError(text, cause="task.setup") from error
                raise RookeryError(text, cause="tool.unreachable") from error
        return found

    async def reopen(self) -> list[str]:
        """Restart the servers that run in the sandbox, and return a message for each that does not start.

        Calls of the tools of such a server then return a message that says so.
        """
        failures = []
        for connection in self._open:
            if connection.server.command:
                try:
                    await connection.reopen()
                except ServerGone as error:
                    failures.append(f"{connection.server.name}: {error}")
        return failures

    async def close(self) -> None:
        """Close all connections concurrently."""
        opened, self._open = self._open, []
        if opened:
            await asyncio.gather(*(connection.close() for connection in opened))


def _make_tools(
    server: McpServer, definitions: list[Any], connection: McpConnection, taken_names: set[str]
) -> dict[str, Tool]:
    offered = {tool.name for tool in definitions}
    if server.tools is not None and (missing := sorted(set(server.tools) - offered)):
        raise ServerGone(f"it has no tool {missing[0]!r}; it offers {', '.join(sorted(offered))[:300] or 'none'}")
    found: dict[str, Tool] = {}
    for tool in definitions:
        if server.tools is not None and tool.name not in server.tools:
            continue
        name = _INVALID_CHARACTERS.sub("_", tool.name)[:64] or "tool"
        if name in taken_names or name in found:
            name = _INVALID_CHARACTERS.sub("_", f"{server.name}_{tool.name}")[:64]
        number = 2
        while name in taken_names or name in found:
            name = f"{name[:60]}_{number}"
            number += 1
        found[name] = McpTool(name, tool, connection)
    return found


def check_mcp_sdk() -> None:
    """Raise `UsageError` if the MCP SDK is not installed."""
    try:
        import mcp  # noqa: F401
        import mcp_types  # noqa: F401
    except ImportError as error:
        raise UsageError(f"MCP servers need the `mcp` package: pip install 'rookery-rl[mcp]' ({error})") from None
