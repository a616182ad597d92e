"""MCP servers as tools: in a real sandbox, and over HTTP at a loopback port."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rookery.core import RookeryError, TaskError
from rookery.environments.swe.mcp_client import McpConnections
from rookery.environments.swe.mcp_servers import McpServer
from rookery.environments.tools import InvalidArguments, Tool
from rookery.sandboxes.protocol import Command, Sandbox
from tests.environments.helpers import Attempt
from tests.environments.swe.helpers import make_attempt, open_local_sandbox
from tests.waiting import wait_until

SOURCE = Path(__file__).with_name("mcp_server.py").read_bytes()


@asynccontextmanager
async def run_server(
    tmp_path: Path, *words: str, of_task: bool = False, **fields: Any
) -> AsyncIterator[tuple[dict[str, Tool], Attempt, Sandbox]]:
    async with open_local_sandbox(tmp_path) as sandbox:
        await sandbox.write("server.py", SOURCE)
        server = McpServer(name="small", command=("python3", "server.py", *words), **fields)
        attempt = make_attempt(sandbox)
        servers = McpConnections()
        try:
            run, task = ((), (server,)) if of_task else ((server,), ())
            yield await servers.open(run, task, sandbox, ["bash", "edit"]), attempt, sandbox
        finally:
            await servers.close()
        leftovers = await sandbox.exec(Command(argv=("pgrep", "-f", "server.py")))
        assert leftovers.stdout == b""


async def run_tool(
    tools: dict[str, Tool], name: str, attempt: Attempt, limit: float = 20.0, **arguments: Any
) -> str:
    tool = tools[name]
    return str(await tool.invoke(tool.parse(json.dumps(arguments)), attempt.ctx, limit))


@pytest.mark.needs("mount")
async def test_server_in_the_sandbox_provides_tools(tmp_path: Path) -> None:
    async with run_server(tmp_path, env={"WORD": "given"}, output=500) as (tools, attempt, _):
        # One name clashed with a built-in tool; another one was invalid for models.
        assert sorted(tools) == ["die", "fails", "flood", "hang", "odd_name_x", "picture", "small_bash", "whoami"]
        assert tools["flood"].schema.parameters["required"] == ["size"]
        uid, folder, word, home = (await run_tool(tools, "whoami", attempt)).split()
        assert (folder, word, home) == ("/work", "given", "/work")
        assert uid != "0"
        assert "bash of the server" in await run_tool(tools, "small_bash", attempt)
        flood = await run_tool(tools, "flood", attempt, size=100_000)
        assert re.search(r"… [\d,]+ .*…", flood)
        assert len(flood) < 600
        assert "it went wrong" in await run_tool(tools, "fails", attempt)
        assert "image" in await run_tool(tools, "picture", attempt)
        with pytest.raises(InvalidArguments, match="size"):
            tools["flood"].parse("{}")
        for wrong in ("[1]", "{", "3"):
            with pytest.raises(InvalidArguments):
                tools["whoami"].parse(wrong)


@pytest.mark.long
@pytest.mark.needs("mount")
async def test_server_that_dies_hangs_or_floods_is_an_observation(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (tools, attempt, _):
        assert "0.3" in await run_tool(tools, "hang", attempt, limit=0.3)
    async with run_server(tmp_path / "b") as (tools, attempt, _):
        assert "small" in await run_tool(tools, "die", attempt)
        assert "last words" in await run_tool(tools, "whoami", attempt)
    async with run_server(tmp_path / "c") as (tools, attempt, _):
        assert "4 MB" in await run_tool(tools, "flood", attempt, size=5 << 20)
    async with run_server(tmp_path / "d", "noise") as (tools, attempt, sandbox):
        assert "/work" in await run_tool(tools, "whoami", attempt)
        await sandbox.exec(Command(argv=("pkill", "-9", "-f", "server.py")))
        assert "/work" not in await run_tool(tools, "whoami", attempt)


@pytest.mark.long
@pytest.mark.needs("mount")
@pytest.mark.parametrize(
    ("options", "fields", "named"),
    [
        (("crash",), {}, "no such thing"),
        (("silent",), {"start_timeout": 0.5}, r"\b0\.5\b"),
        (("endless",), {}, r"\b128\b"),
        ((), {"tools": ("nothing",)}, "'nothing'.*bash"),
    ],
)
async def test_server_that_does_not_start_is_the_fault_of_its_owner(
    tmp_path: Path, options: tuple[str, ...], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(TaskError, match=named) as task:
        async with run_server(tmp_path / "task", *options, of_task=True, **fields):
            raise AssertionError
    assert task.value.code == "task.setup"
    with pytest.raises(RookeryError, match=named) as run:
        async with run_server(tmp_path / "run", *options, **fields):
            raise AssertionError
    assert (run.value.code, run.value.fault) == ("tool.unreachable", "infra")


@pytest.mark.needs("mount")
async def test_cancelled_opening_leaves_no_process(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        await sandbox.write("server.py", SOURCE)
        servers = McpConnections()
        server = McpServer(name="s", command=("python3", "server.py", "silent"))
        opening = asyncio.create_task(servers.open((server,), (), sandbox, ()))
        while not (await sandbox.exec(Command(argv=("pgrep", "-f", "server.py")))).stdout:
            assert not opening.done()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await servers.close()
        leftovers = await sandbox.exec(Command(argv=("pgrep", "-f", "server.py")))
        assert leftovers.stdout == b""


@asynccontextmanager
async def run_http_server() -> AsyncIterator[str]:
    """Run a server of the SDK at a loopback port."""
    import uvicorn
    from mcp.server import MCPServer

    server = MCPServer("http-server")

    @server.tool()
    def double(number: int) -> int:
        """Doubles a number."""
        return 2 * number

    config = uvicorn.Config(server.streamable_http_app(), host="127.0.0.1", port=0, log_level="error")
    web = uvicorn.Server(config)
    task = asyncio.create_task(web.serve())
    try:
        await wait_until(lambda: web.started or task.done())
        port = web.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        web.should_exit = web.force_exit = True
        await task


async def test_http_server_of_the_run_provides_tools_and_its_loss_is_infra() -> None:
    attempt = Attempt()
    servers = McpConnections()
    try:
        async with run_http_server() as url:
            tools = await servers.open((McpServer(name="web", url=url),), (), None, ())
            assert await run_tool(tools, "double", attempt, number=21) == "42"
            assert "error" in await run_tool(tools, "double", attempt, number="many")
        with pytest.raises(RookeryError) as lost:
            await run_tool(tools, "double", attempt, number=1)
        assert lost.value.code == "tool.unreachable"
    finally:
        await servers.close()
    with pytest.raises(RookeryError) as absent:
        await McpConnections().open((McpServer(name="web", url=url, start_timeout=5.0),), (), None, ())
    assert absent.value.code == "tool.unreachable"
