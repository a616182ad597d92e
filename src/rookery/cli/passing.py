"""One command in a sandbox of its own, with our input and output in its place.

Promises:
- what it writes is handed on in order, as it comes; while our reader does not read, nothing is taken from it;
- what we are given on stdin is handed in as it comes, unless it is a terminal; then the command finds its end;
- a command that writes far more than is kept of it is ended, as it would be by `Sandbox.exec`;
- the sandbox is gone when this returns, however it returns; one that was killed is cleaned after by the next.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.sandboxes import Command, Home, Process, open_provider
from rookery.sandboxes.jobs import HARD_OUTPUT
from rookery.sandboxes.protocol import Fetching
from rookery.sandboxes.reaper import reap_scratch, scratch

CHUNK = 64 << 10
_FDS = {"stdout": 1, "stderr": 2}


async def command(spec: SandboxSpec, argv: tuple[str, ...], *, passing: bool) -> ExecResult:
    """Runs it to its end. With `passing` its output goes to ours, else it is only kept."""
    await asyncio.to_thread(reap_scratch, now=time.time())  # what an earlier one left that was killed
    with scratch(f"exec-{os.getpid()}") as home:
        return await _in(home, spec, argv, passing=passing)


async def _in(home: Home, spec: SandboxSpec, argv: tuple[str, ...], *, passing: bool) -> ExecResult:
    provider = open_provider(spec.provider, home)
    if spec.image is not None and isinstance(provider, Fetching):
        from rookery.cli.images import lines

        provider.on_image = lines()
    try:
        box = await provider.create(spec, attempt="exec")
        process = await box.start(Command(argv=argv, wall=spec.wall))
        feeding = asyncio.ensure_future(_feed(process))
        try:
            return await _followed(process, spec, passing=passing)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
    finally:
        await provider.close()


async def _followed(process: Process, spec: SandboxSpec, *, passing: bool) -> ExecResult:
    most = HARD_OUTPUT * max(spec.output, 1 << 16)
    written = {"stdout": 0, "stderr": 0}
    async for stream, data in process.output():
        written[stream] += len(data)
        if passing:
            await _aside(_write_all, _FDS[stream], data)
        if written[stream] > most:
            return _flooded(await process.kill(), most)
    return await process.wait(timeout=spec.wall + 60.0)


def _flooded(result: ExecResult, most: int) -> ExecResult:
    from msgspec.structs import replace

    return replace(result, status="output_limit", detail=f"killed after writing {most} bytes")


async def _feed(process: Process) -> None:
    """Our input, until it ends or the command wants no more."""
    with contextlib.suppress(BrokenPipeError, SandboxError):
        if not os.isatty(0):
            while data := await _aside(_read_some):
                await process.send(data)
        await process.send(b"", eof=True)


def _read_some() -> bytes:
    try:
        return os.read(0, CHUNK)
    except OSError:
        return b""  # closed, or a folder: no input


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def _aside(work: Callable[..., Any], *args: Any) -> Any:
    """Calls what may block for ever, on a thread that nobody waits for at the end of the process."""
    loop = asyncio.get_running_loop()
    promise: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if promise.done():
            return
        if error is None:
            promise.set_result(value)
        else:
            promise.set_exception(error)

    def call() -> None:
        value, error = None, None
        try:
            value = work(*args)
        except OSError as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=call, daemon=True).start()
    return await promise
