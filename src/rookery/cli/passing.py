"""Run one command in a sandbox of its own, connected to this process's standard streams.

- Output is handed on in order, as it comes. While our reader does not read, nothing is taken from the command.
- On a terminal, control characters in the output are written out (`\\x1b`), unless raw output is asked for.
- Standard input is handed in as it comes, unless it is a terminal: then the command finds its end.
- A command that writes far more than is kept of it is ended, as it would be by `Sandbox.exec`.
- The sandbox is gone when this returns, however it returns. What a killed process left, the next one removes.
"""

import asyncio
import codecs
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rookery.cli.text import clean
from rookery.core import ExecResult, SandboxError, SandboxSpec, UsageError
from rookery.sandboxes import Command, Home, Process, open_provider
from rookery.sandboxes.jobs import HARD_OUTPUT
from rookery.sandboxes.protocol import Fetching
from rookery.sandboxes.reaper import reap_scratch, scratch

CHUNK = 64 << 10
_FDS = {"stdout": 1, "stderr": 2}


class Upload(msgspec.Struct, frozen=True):
    """A file or folder of this machine, and its path in the sandbox."""

    source: Path
    target: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The command to run in the sandbox."""

    argv: tuple[str, ...]
    uploads: tuple[Upload, ...] = ()
    passing: bool = True
    """True to copy the output to our own stdout and stderr, False to only keep it."""
    raw: bool = False
    """True to pass control characters to a terminal unchanged."""


def upload_of(text: str) -> Upload:
    """Read `PATH` or `PATH:TARGET`. A relative target lies in the sandbox's working folder."""
    path, target = Path(text), ""
    if not path.exists() and ":" in text:
        head, _, target = text.rpartition(":")
        path = Path(head)
    try:
        # The user named this path, so a link is followed. Links inside of a folder never are.
        source = path.expanduser().resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--upload {text}: {path} cannot be read: {reason}") from error
    return Upload(source, target or path.name or source.name)


class TerminalFilter:
    """Writes out control characters of a stream of bytes, so that they do not reach a terminal as such."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""

    def feed(self, data: bytes, *, final: bool = False) -> bytes:
        """Return what can be shown by now. The beginning of a character or of a line's end waits for the rest."""
        text = self._held + self._decoder.decode(data, final)
        self._held = "\r" if text.endswith("\r") and not final else ""
        return clean(text.removesuffix(self._held).replace("\r\n", "\n")).encode()


async def command(spec: SandboxSpec, job: Job) -> ExecResult:
    """Run a command to its end."""
    await asyncio.to_thread(reap_scratch, now=time.time())  # what an earlier one left that was killed
    with scratch(f"exec-{os.getpid()}") as home:
        return await _in(home, spec, job)


async def _in(home: Home, spec: SandboxSpec, job: Job) -> ExecResult:
    provider = open_provider(spec.provider, home)
    if spec.image is not None and isinstance(provider, Fetching):
        from rookery.cli.images import lines

        provider.on_image = lines()
    try:
        box = await provider.create(spec, attempt="exec")
        for upload in job.uploads:
            try:
                await box.upload(upload.source, upload.target)
            except OSError as error:
                raise UsageError(
                    f"{upload.source} cannot be copied into the sandbox: {error.strerror or error}"
                ) from error
        process = await box.start(Command(argv=job.argv, wall=spec.wall))
        feeding = asyncio.ensure_future(_feed(process))
        try:
            return await _followed(process, spec, job)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
    finally:
        await provider.close()


async def _followed(process: Process, spec: SandboxSpec, job: Job) -> ExecResult:
    filters = {fd: TerminalFilter() for fd in _FDS.values() if not job.raw and os.isatty(fd)}
    try:
        return await _passed_on(process, spec, filters, passing=job.passing)
    finally:
        for fd, one in filters.items():
            if job.passing and (rest := one.feed(b"", final=True)):
                await _aside(_write_all, fd, rest)


async def _passed_on(
    process: Process, spec: SandboxSpec, filters: dict[int, TerminalFilter], *, passing: bool
) -> ExecResult:
    most = HARD_OUTPUT * max(spec.output, 1 << 16)
    written = {"stdout": 0, "stderr": 0}
    async for stream, data in process.output():
        written[stream] += len(data)
        if passing:
            fd = _FDS[stream]
            await _aside(_write_all, fd, filters[fd].feed(data) if fd in filters else data)
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
