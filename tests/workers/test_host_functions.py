"""Host functions that cells call, and malformed frames from a hostile monitor."""

# ruff: noqa: E501  (a cell is read best as it is)

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rookery.core import ExecResult, SandboxError, SandboxSpec, Truncation
from rookery.sandbox_runtime.worker import protocol as f
from rookery.sandboxes import Command, Stream
from rookery.workers import CellLimits, HostFunction, Worker
from tests.workers.conftest import OpenWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_host_functions_survive_a_restart(open_worker: OpenWorker) -> None:
    seen: list[Any] = []

    async def search(query: str, *, top: int = 3) -> dict[str, Any]:
        seen.append((query, top))
        return {"query": query, "hits": list(range(top)), "é": None}

    def plain(x: float) -> float:
        return x * 2

    async with open_worker(functions={"search": search, "plain": plain}) as worker:
        assert (await worker.run("search('a', top=2)")).value == "{'query': 'a', 'hits': [0, 1], 'é': None}"
        assert (await worker.run("import asyncio\nawait asyncio.sleep(0)\nplain(1.5)")).value == "3.0"
        assert (await worker.run("import os\nos._exit(1)")).recovered == "kept"
        assert (await worker.run("del __builtins__.search\nplain(plain(1))")).value == "4"
        assert (await worker.run("search('b')['hits']")).value == "[0, 1, 2]"
        assert seen == [("a", 2), ("b", 3)]
        cell = await worker.run(
            "import threading\ngot = []\nts = [threading.Thread(target=lambda i=i: got.append(plain(i))) for i in range(8)]\n"
            "[t.start() for t in ts]; [t.join() for t in ts]\nsorted(got)"
        )
        assert cell.value == "[0, 2, 4, 6, 8, 10, 12, 14]"


@pytest.mark.long
async def test_host_functions_have_their_own_deadline(open_worker: OpenWorker) -> None:
    async def slow(seconds: float) -> int:
        await asyncio.sleep(seconds)
        return 1

    async def never() -> None:
        await asyncio.Event().wait()

    functions = {"slow": slow, "never": HostFunction(call=never, timeout=0.1)}
    async with open_worker(functions=functions) as worker:
        cell = await worker.run("slow(5.2)", limits=CellLimits(wall=5))
        assert (cell.status, cell.value) == ("ok", "1")
        assert cell.function_seconds >= 5.2
        assert cell.usage.wall < 5
        cell = await worker.run("try:\n    never()\nexcept TimeoutError as e:\n    print(e)")
        assert cell.ok
        assert cell.stdout.startswith("never()")
        assert " 0.1 " in cell.stdout
        cell = await worker.run("slow(0.3)\nwhile True: pass", limits=CellLimits(wall=0.2))
        assert (cell.status, cell.recovered) == ("time_limit", "kept")


@pytest.mark.long
async def test_host_functions_take_plain_data_and_raise_in_the_cell(open_worker: OpenWorker) -> None:
    def wrong() -> object:
        return object()

    def broken(*_: object) -> None:
        raise LookupError("no such thing")

    async with open_worker(functions={"wrong": wrong, "broken": broken, "same": lambda x: x}) as worker:
        cell = await worker.run("broken(1)")
        assert cell.status == "runtime"
        assert cell.error.endswith("broken(): LookupError: no such thing")
        assert "worker" not in cell.error
        assert (await worker.run("wrong()")).status == "runtime"
        for bad in ("same(object())", "same(float('nan'))", "same({1, 2})", "same('x' * (5 << 20))", "same()"):
            cell = await worker.run(bad)
            assert cell.status == "runtime", (bad, cell)
        deep = await worker.run("x = []\nfor _ in range(900): x = [x]\nsame(x) == x")
        assert deep.status in ("ok", "runtime")
        assert (
            await worker.run("import os\npid = os.fork()\nif not pid:\n    same(1)\nos.waitpid(pid, 0)[1] != 0")
        ).value == "True"
        cell = await worker.run("for i in range(1100): same(i)")
        assert cell.status == "runtime"
        assert "HostFunctionError" in cell.error
        assert (await worker.run("same([1, {'a': 'ü'}])")).value == "[1, {'a': 'ü'}]"


async def test_truncation_is_raised_to_the_caller_and_undoes_the_cell(open_worker: OpenWorker) -> None:
    def spent() -> None:
        raise Truncation("tokens")

    async with open_worker(functions={"spent": spent}) as worker:
        await worker.run("x = 1")
        with pytest.raises(Truncation):
            await worker.run("x = 2\ntry:\n    spent()\nexcept BaseException:\n    pass\nwhile True: pass")
        assert (await worker.run("x")).value == "1"


class FakeMonitorSandbox:
    """Fake sandbox whose only process writes the given bytes."""

    id = "lying"
    spec = SandboxSpec()

    def __init__(self, output: bytes) -> None:
        self._data = output

    async def start(self, _command: Command) -> "FakeMonitorSandbox":
        self.over = asyncio.Event()
        return self

    async def output(self) -> AsyncIterator[tuple[Stream, bytes]]:
        for at in range(0, len(self._data), 1000):
            yield "stdout", self._data[at : at + 1000]
            await asyncio.sleep(0)
        await self.over.wait()

    async def send(self, data: bytes, *, eof: bool = False) -> None:
        if eof:
            self.over.set()

    async def wait(self, *, timeout: float) -> ExecResult:
        async with asyncio.timeout(timeout):
            await self.over.wait()
        return ExecResult(status="exited", exit_code=0)

    async def kill(self) -> ExecResult:
        self.over.set()
        return ExecResult(status="signaled", signal=9)


def frame(kind: int, payload: bytes) -> bytes:
    return f.HEAD.pack(len(payload), kind) + payload


FRAMES = st.builds(frame, st.sampled_from([*range(11, 17), 0, 99]), st.binary(max_size=200))
HELLO = frame(f.HELLO, f.pack_texts([b"3.11", b"yes", b"yes"]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(output=st.one_of(st.binary(max_size=4000), st.lists(FRAMES, max_size=8).map(b"".join)), hello=st.booleans())
async def test_malformed_frames_neither_hang_nor_break_the_host(output: bytes, hello: bool) -> None:
    sandbox: Any = FakeMonitorSandbox((HELLO if hello else b"") + output)
    try:
        async with asyncio.timeout(60):
            worker = await Worker.open(sandbox, timeout=0.05, restarts=1)
            async with worker:
                task = asyncio.ensure_future(worker.run("1", limits=CellLimits(wall=0.001)))
                await asyncio.wait({task}, timeout=0.02)
                sandbox.over.set()
                cell = await task
                assert cell.number == 1
    except SandboxError:
        return  # refused, as it should be


async def test_too_long_frame_is_refused_early() -> None:
    sandbox: Any = FakeMonitorSandbox(f.HEAD.pack(0xFFFFFFFF, f.HELLO) + b"x" * 5000)
    with pytest.raises(SandboxError, match="4294967295"):
        await Worker.open(sandbox, timeout=60.0)
