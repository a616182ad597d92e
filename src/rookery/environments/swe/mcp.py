"""MCP servers as tools.

Promises:
- a server that is a command runs inside the attempt's sandbox, as the agent's user, with nothing of this machine;
- what it sends is bounded: a line, the tools of its list, an answer; too much ends the connection, not us;
- a server in the sandbox that dies, or answers nonsense, is an observation; one of the run that this machine asks
  and cannot reach is infra's fault (`tool.unreachable`);
- a connection lives in one task of its own from its opening to its closing, and ends on every path;
- names that clash, or that no model could call, are changed, and the server still hears its own.
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
from rookery.core.errors import behind, describe
from rookery.environments.context import Context
from rookery.environments.results import clip
from rookery.environments.schemas import BadArguments, Tool
from rookery.environments.swe.mcp_config import McpServer
from rookery.sandboxes.protocol import Command, Process, Sandbox

if TYPE_CHECKING:
    from mcp import ClientSession

MAX_LINE: Final = 4 << 20
MAX_TOOLS: Final = 128
MAX_PAGES: Final = 16
MAX_SCHEMA: Final = 64 << 10
CLOSE_SECONDS: Final = 5.0
LIFETIME: Final = 7 * 86_400.0
"""Of a server's process: the sandbox ends it long before."""
_UNFIT: Final = re.compile(r"[^A-Za-z0-9_-]")


class Gone(Exception):  # noqa: N818  (an answer to the model where the server is the sandbox's)
    """The server is there no more, or never was."""


class Connection:
    """One server, for one attempt."""

    def __init__(self, server: McpServer, box: Sandbox | None, folder: str | None = None) -> None:
        self.server = server
        self._box = box
        self._folder = server.cwd or folder
        """Where a server of the sandbox begins; None: where its programs do."""
        self._closing = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[list[Any]] = loop.create_future()
        self._session: ClientSession | None = None
        self._words: deque[bytes] = deque(maxlen=20)
        """The last of its stderr."""
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> list[Any]:
        """Its tools. `Gone` when it cannot be had."""
        self._task = asyncio.create_task(self._live(), name=f"mcp {self.server.name}")
        try:
            async with asyncio.timeout(self.server.start_timeout):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            await self.close()
            raise Gone(f"it did not answer within {self.server.start_timeout:g} s{self._last_words()}") from None
        except BaseException:
            await self.close()
            raise

    async def reopen(self) -> None:
        """A server of the sandbox, started again: grading ended it. `Gone` when it cannot be had any more."""
        await self.close()
        self._closing = asyncio.Event()
        self._ready = asyncio.get_running_loop().create_future()
        self._trouble = ""
        self._words.clear()
        await self.open()

    async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> Any:
        """The server's answer to a call of a tool; `Gone` when there is no server any more."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        if self._session is None or self._task is None or self._task.done():
            raise Gone(self._trouble or f"it has ended{self._last_words()}")
        try:
            return await self._session.call_tool(name, arguments, read_timeout_seconds=seconds)
        except MCPError as error:
            # The answer of a living server is an answer; a closed connection is its end.
            if error.code == CONNECTION_CLOSED:
                raise Gone(self._trouble or f"it has ended{self._last_words()}") from error
            raise

    async def close(self) -> None:
        """Ends it; bounded, whatever it does."""
        self._closing.set()
        task = self._task
        if task is None:
            return
        # One that is not ready listens to its server alone.
        done, _ = (
            await asyncio.wait({task}, timeout=CLOSE_SECONDS) if self._session is not None else (set(), {task})
        )
        if not done:
            task.cancel()
            await asyncio.wait({task}, timeout=CLOSE_SECONDS)

    def _last_words(self) -> str:
        said = " ".join(b"".join(self._words).decode(errors="replace").split())[-300:]
        return f": {said}" if said else ""

    async def _live(self) -> None:
        """From its opening to its end, in one task: the SDK's scopes cannot be left in another."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                read, write = await stack.enter_async_context(self._transport())
                await self._serve(stack, read, write)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  (whatever the SDK, the server or the sandbox raise: it is gone)
            single = behind(error)
            typed = single if isinstance(single, RookeryError | Gone) else None
            self._fail(typed or Gone(f"{describe(single)}{self._last_words()}"))
        finally:
            self._session = None
            self._fail(Gone(self._trouble or f"it has ended{self._last_words()}"))

    async def _serve(self, stack: contextlib.AsyncExitStack, read: Any, write: Any) -> None:
        from mcp import ClientSession

        session = await stack.enter_async_context(ClientSession(read, write))
        await session.initialize()
        tools = await _listed(session)
        self._session = session
        if not self._ready.done():
            self._ready.set_result(tools)
        await self._closing.wait()

    def _fail(self, error: Exception) -> None:
        if not self._trouble:
            self._trouble = str(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # perhaps nobody waits any more

    def _transport(self) -> contextlib.AbstractAsyncContextManager[tuple[Any, Any]]:
        return self._over_http() if self.server.url else self._in_box()

    @contextlib.asynccontextmanager
    async def _over_http(self) -> AsyncIterator[tuple[Any, Any]]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {name: os.environ.get(variable, "") for name, variable in self.server.headers_env.items()}
        # How long a call may take is said with each: an answer may come late, and its stream may be silent.
        timeout = httpx2.Timeout(self.server.start_timeout, read=None)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as client,
            streamable_http_client(self.server.url, http_client=client) as streams,
        ):
            yield streams[0], streams[1]

    @contextlib.asynccontextmanager
    async def _in_box(self) -> AsyncIterator[tuple[Any, Any]]:
        import anyio

        assert self._box is not None
        server = self.server
        process = await self._box.start(
            Command(argv=server.command, env=server.env, cwd=self._folder, wall=LIFETIME)
        )
        try:
            into, read = anyio.create_memory_object_stream[Any](0)
            write, out_of = anyio.create_memory_object_stream[Any](0)
            async with into, read, write, out_of, anyio.create_task_group() as group:
                group.start_soon(self._hear, process, into)
                group.start_soon(self._say, process, out_of, into)
                try:
                    yield read, write
                finally:
                    group.cancel_scope.cancel()
        finally:
            with contextlib.suppress(RookeryError, TimeoutError):
                await process.kill()

    async def _hear(self, process: Process, into: Any) -> None:
        """Its stdout, line by line, into the session; the end of it closes the session's ear."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        line = bytearray()
        async with into:
            async for stream, data in process.output():
                if stream == "stderr":
                    self._words.append(data[-2000:])
                    continue
                line += data
                *whole, rest = line.split(b"\n")
                line = rest
                if len(line) > MAX_LINE or any(len(one) > MAX_LINE for one in whole):
                    self._trouble = f"it sent a message of more than {MAX_LINE >> 20} MB"
                    return
                for one in whole:
                    if not one.strip():
                        continue
                    try:
                        message: Any = SessionMessage(
                            jsonrpc_message_adapter.validate_json(bytes(one), by_name=False)
                        )
                    except ValueError as error:
                        message = error  # the session takes it as what it is
                    try:
                        await into.send(message)
                    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                        return

    @staticmethod
    async def _say(process: Process, out_of: Any, into: Any) -> None:
        async with out_of:
            async for message in out_of:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                try:
                    await process.send(text.encode() + b"\n")
                except (BrokenPipeError, OSError, RookeryError):
                    await into.aclose()
                    return


async def _listed(session: "ClientSession") -> list[Any]:
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
        raise Gone(f"it offers more than {MAX_TOOLS} tools")
    return found


class McpTool(Tool):
    """A tool of a server; what the policy writes is checked by the server, apart from its being an object."""

    def __init__(self, name: str, listed: Any, connection: Connection) -> None:
        self.name = self.__name__ = self.__qualname__ = name
        self.theirs: str = listed.name
        self._connection = connection
        self.timeout = connection.server.timeout
        self.blocking = self.method = False
        self._context_name, self._limit_name = None, "limit"
        parameters = dict(listed.input_schema or {})
        if len(json.dumps(parameters, default=str)) > MAX_SCHEMA:
            raise Gone(f"the schema of its tool {listed.name!r:.80} is larger than {MAX_SCHEMA >> 10} KB")
        parameters.setdefault("type", "object")
        parameters.setdefault("properties", {})
        self._shown = clip(json.dumps(parameters, default=str), 1000)
        self.schema = ToolSchema(name, clip(listed.description or "", 4096), parameters)
        self.function = self._called

    def parse(self, arguments: str) -> dict[str, Any]:
        text = arguments if arguments.strip() else "{}"
        said = "they must be a JSON object with the arguments by name"
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            found, said = None, f"they are not valid JSON ({clip(describe(error), 300)})"
        missing = [
            name for name in self.parameters.get("required", ()) if isinstance(found, dict) and name not in found
        ]
        if missing:
            said = f"missing: {', '.join(map(str, missing))}"
        if not isinstance(found, dict) or missing:
            raise BadArguments(
                f"The arguments of {self.name} are wrong: {said}.\n"
                f"They must be one JSON object of this schema: {self._shown}"
            )
        return found

    def invoke(self, arguments: dict[str, Any], ctx: Context, limit: float) -> Any:  # noqa: ARG002
        return self._called(arguments, limit)

    async def _called(self, arguments: dict[str, Any], limit: float) -> str:
        from mcp.shared.exceptions import MCPError

        server = self._connection.server
        try:
            async with asyncio.timeout(limit):
                answer = await self._connection.call(self.theirs, arguments, limit)
        except TimeoutError:
            return f"{self.name} did not answer within its {limit:.3g} s."
        except Gone as gone:
            if server.url:
                raise RookeryError(
                    f"the MCP server {server.name!r} at its URL is gone: {gone}", cause="tool.unreachable"
                ) from gone
            return f"{self.name} is not there any more: the MCP server {server.name!r} in the sandbox: {gone}."
        except (MCPError, RuntimeError, ValueError) as error:
            return f"{self.name} failed: {clip(describe(error), server.output)}"
        return clip(_shown(answer), server.output)


def _shown(answer: Any) -> str:
    """A call's answer as text."""
    parts = []
    for block in answer.content:
        kind = getattr(block, "type", "")
        if kind == "text":
            parts.append(str(block.text))
        elif kind == "resource" and getattr(block.resource, "text", None) is not None:
            parts.append(str(block.resource.text))
        else:
            size = len(getattr(block, "data", "") or "")
            parts.append(f"[{kind or 'something'} that is no text, {size} bytes, left out]")
    structured = getattr(answer, "structured_content", None)
    if not parts and structured is not None:
        parts.append(json.dumps(structured, ensure_ascii=False, default=str))
    text = "\n".join(parts) or "(no output)"
    return f"The tool says that it failed: {text}" if answer.is_error else text


class Servers:
    """All MCP servers of an attempt."""

    def __init__(self) -> None:
        self._open: list[Connection] = []

    async def open(
        self,
        run: Iterable[McpServer],
        task: Iterable[McpServer],
        box: Sandbox | None,
        taken: Iterable[str],
        folder: str | None = None,
    ) -> dict[str, Tool]:
        """Their tools by name. A server that does not start is the task's fault where it is the task's own."""
        names = set(taken)
        found: dict[str, Tool] = {}
        for server, own in [*((one, False) for one in run), *((one, True) for one in task)]:
            connection = Connection(server, box, folder)
            self._open.append(connection)
            try:
                listed = await connection.open()
                for name, tool in _named(server, listed, connection, names).items():
                    found[name] = tool
                    names.add(name)
            except Gone as gone:
                said = f"the MCP server {server.name!r} could not be started: {gone}"
                if own:
                    raise TaskError(said, cause="task.setup") from gone
                raise RookeryError(said, cause="tool.unreachable") from gone
        return found

    async def reopen(self) -> list[str]:
        """Those of the sandbox, again; what is said of those that did not come. Their tools stay, and say so."""
        said = []
        for connection in self._open:
            if connection.server.command:
                try:
                    await connection.reopen()
                except Gone as gone:
                    said.append(f"{connection.server.name}: {gone}")
        return said

    async def close(self) -> None:
        """Ends them all, side by side."""
        opened, self._open = self._open, []
        if opened:
            await asyncio.gather(*(connection.close() for connection in opened))


def _named(server: McpServer, listed: list[Any], connection: Connection, taken: set[str]) -> dict[str, Tool]:
    offered = {tool.name for tool in listed}
    if server.tools is not None and (missing := sorted(set(server.tools) - offered)):
        raise Gone(f"it has no tool {missing[0]!r}; it offers {', '.join(sorted(offered))[:300] or 'none'}")
    found: dict[str, Tool] = {}
    for tool in listed:
        if server.tools is not None and tool.name not in server.tools:
            continue
        name = _UNFIT.sub("_", tool.name)[:64] or "tool"
        if name in taken or name in found:
            name = _UNFIT.sub("_", f"{server.name}_{tool.name}")[:64]
        number = 2
        while name in taken or name in found:
            name = f"{name[:60]}_{number}"
            number += 1
        found[name] = McpTool(name, tool, connection)
    return found


def check_sdk() -> None:
    """`UsageError` where the SDK is not installed."""
    try:
        import mcp  # noqa: F401
        import mcp_types  # noqa: F401
    except ImportError as error:
        raise UsageError(f"MCP servers need the `mcp` package: pip install 'rookery-rl[mcp]' ({error})") from None
