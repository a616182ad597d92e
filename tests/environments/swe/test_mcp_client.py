"""MCP servers as tools: inside of a real sandbox, and over HTTP at a loopback port."""

import asyncio
import json
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
from tests.environments.swe.helpers import attempt_in, box

SOURCE = Path(__file__).with_name("mcp_server.py").read_bytes()


@asynccontextmanager
async def serving(
    tmp_path: Path, *words: str, own: bool = False, **fields: Any
) -> AsyncIterator[tuple[dict[str, Tool], Attempt, Sandbox]]:
    async with box(tmp_path) as made:
        await made.write("server.py", SOURCE)
        server = McpServer(name="small", command=("python3", "server.py", *words), **fields)
        attempt = attempt_in(made)
        servers = McpConnections()
        try:
            run, task = ((), (server,)) if own else ((server,), ())
            yield await servers.open(run, task, made, ["bash", "edit"]), attempt, made
        finally:
            await servers.close()
        left = await made.exec(Command(argv=("pgrep", "-f", "server.py")))
        assert left.stdout == b""


async def said(tools: dict[str, Tool], name: str, attempt: Attempt, limit: float = 20.0, **arguments: Any) -> str:
    tool = tools[name]
    return str(await tool.invoke(tool.parse(json.dumps(arguments)), attempt.ctx, limit))


@pytest.mark.needs("mount")
async def test_a_server_in_the_sandbox_is_tools(tmp_path: Path) -> None:
    async with serving(tmp_path, env={"WORD": "given"}, output=500) as (tools, attempt, _):
        # One clashes with ours and is told apart; one had a name that no model could call.
        assert sorted(tools) == ["die", "fails", "flood", "hang", "odd_name_x", "picture", "small_bash", "whoami"]
        assert tools["flood"].schema.parameters["required"] == ["size"]
        uid, folder, word, home = (await said(tools, "whoami", attempt)).split()
        assert (folder, word, home) == ("/work", "given", "/work")
        assert uid != "0"
        assert "bash of the server" in await said(tools, "small_bash", attempt)
        flood = await said(tools, "flood", attempt, size=100_000)
        assert "bytes cut" in flood
        assert len(flood) < 600
        assert "it went wrong" in await said(tools, "fails", attempt)
        assert "image omitted" in await said(tools, "picture", attempt)
        with pytest.raises(InvalidArguments, match="missing: size"):
            tools["flood"].parse("{}")
        for wrong in ("[1]", "{", "3"):
            with pytest.raises(InvalidArguments):
                tools["whoami"].parse(wrong)


@pytest.mark.needs("mount")
async def test_a_server_that_dies_or_hangs_or_floods_is_an_observation(tmp_path: Path) -> None:
    async with serving(tmp_path) as (tools, attempt, _):
        assert "did not respond within" in await said(tools, "hang", attempt, limit=0.3)
    async with serving(tmp_path / "b") as (tools, attempt, _):
        told = await said(tools, "die", attempt)
        assert "no longer available" in told
        assert "last words" in await said(tools, "whoami", attempt)
    async with serving(tmp_path / "c") as (tools, attempt, _):
        assert "more than 4 MB" in await said(tools, "flood", attempt, size=5 << 20)
    async with serving(tmp_path / "d", "noise") as (tools, attempt, made):
        assert "/work" in await said(tools, "whoami", attempt)
        await made.exec(Command(argv=("pkill", "-9", "-f", "server.py")))
        assert "no longer available" in await said(tools, "whoami", attempt)


@pytest.mark.needs("mount")
@pytest.mark.parametrize(
    ("words", "fields", "told"),
    [
        (("crash",), {}, "no such thing"),
        (("silent",), {"start_timeout": 0.5}, "0.5 s"),
        (("endless",), {}, "more than 128 tools"),
        ((), {"tools": ("nothing",)}, "no tool 'nothing'; it offers bash"),
    ],
)
async def test_a_server_that_does_not_start_is_the_fault_of_its_owner(
    tmp_path: Path, words: tuple[str, ...], fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(TaskError, match=told) as task:
        async with serving(tmp_path / "task", *words, own=True, **fields):
            raise AssertionError
    assert task.value.code == "task.setup"
    with pytest.raises(RookeryError, match=told) as run:
        async with serving(tmp_path / "run", *words, **fields):
            raise AssertionError
    assert (run.value.code, run.value.fault) == ("tool.unreachable", "infra")


@pytest.mark.needs("mount")
async def test_a_cancelled_opening_leaves_nothing(tmp_path: Path) -> None:
    async with box(tmp_path) as made:
        await made.write("server.py", SOURCE)
        servers = McpConnections()
        server = McpServer(name="s", command=("python3", "server.py", "silent"))
        opening = asyncio.create_task(servers.open((server,), (), made, ()))
        while not (await made.exec(Command(argv=("pgrep", "-f", "server.py")))).stdout:
            assert not opening.done()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await servers.close()
        left = await made.exec(Command(argv=("pgrep", "-f", "server.py")))
        assert left.stdout == b""


@asynccontextmanager
async def over_http() -> AsyncIterator[str]:
    """A server of the SDK's own at a loopback port."""
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
        while not web.started:
            assert not task.done()
            await asyncio.sleep(0.01)
        port = web.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        web.should_exit = web.force_exit = True
        await task


async def test_a_server_of_the_run_is_asked_over_http_and_its_loss_is_infra() -> None:
    attempt = Attempt()
    servers = McpConnections()
    try:
        async with over_http() as url:
            tools = await servers.open((McpServer(name="web", url=url),), (), None, ())
            assert await said(tools, "double", attempt, number=21) == "42"
            assert "error" in await said(tools, "double", attempt, number="many")
        with pytest.raises(RookeryError) as lost:
            await said(tools, "double", attempt, number=1)
        assert lost.value.code == "tool.unreachable"
    finally:
        await servers.close()
    with pytest.raises(RookeryError) as absent:
        await McpConnections().open((McpServer(name="web", url=url, start_timeout=5.0),), (), None, ())
    assert absent.value.code == "tool.unreachable"
