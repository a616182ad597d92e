"""Run one command in its own sandbox, connected to the standard streams of this process.

- Output is copied in order as it arrives. While the reader of this process's output does not read, the output of
  the command is not read either.
- On a terminal, control characters in the output are escaped (`\\x1b`), unless raw output is requested.
- Standard input is copied as it arrives; if it is a terminal, the command reads end of file.
- A command that writes far more than its output limit is killed, as in `Sandbox.exec`.
- The sandbox is removed on return and on exceptions. Leftovers of a killed process are removed by the next call.
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

from rookery.cli.terminal import escape_controls
from rookery.core import ExecResult, SandboxError, SandboxSpec, UsageError
from rookery.sandboxes import Command, Process, ProviderHome, open_provider
from rookery.sandboxes.jobs import OUTPUT_KILL_FACTOR
from rookery.sandboxes.protocol import ImageFetchingProvider
from rookery.sandboxes.reaper import reap_scratch, scratch_home

CHUNK = 64 << 10
_FDS = {"stdout": 1, "stderr": 2}


class Upload(msgspec.Struct, frozen=True):
    """A local file or directory and its path in the sandbox."""

    source: Path
    target: str


class SandboxCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command to run in a sandbox, with files to upload first."""

    argv: tuple[str, ...]
    uploads: tuple[Upload, ...] = ()
    copy_output: bool = True
    """If True, the output is copied to stdout and stderr of this process; if False, it is only in the result."""
    raw: bool = False
    """If True, control characters are passed to a terminal unchanged; if False, they are escaped."""


def parse_upload(text: str) -> Upload:
    """Parse `PATH` or `PATH:TARGET`. A relative target is in the working directory of the sandbox."""
    path, target = Path(text), ""
    if not path.exists() and ":" in text:
        head, _, target = text.rpartition(":")
        path = Path(head)
    try:
        # The user named this path, so a symbolic link is followed. Links inside a directory are not.
        source = path.expanduser().resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--upload {text}: {path} cannot be read: {reason}") from error
    return Upload(source, target or path.name or source.name)


class TerminalFilter:
    """Escapes control characters in a byte stream before it reaches a terminal."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._pending_cr = ""

    def feed(self, data: bytes, *, final: bool = False) -> bytes:
        """Return the escaped bytes of `data`. An incomplete character or line end is kept for the next call."""
        text = self._pending_cr + self._decoder.decode(data, final)
        self._pending_cr = "\r" if text.endswith("\r") and not final else ""
        return escape_controls(text.removesuffix(self._pending_cr).replace("\r\n", "\n")).encode()


async def run_command(spec: SandboxSpec, job: SandboxCommand) -> ExecResult:
    """Create a sandbox, run a command in it to its end, remove the sandbox and return the result."""
    await asyncio.to_thread(reap_scratch, now=time.time())  # leftovers of a killed process
    with scratch_home(f"exec-{os.getpid()}") as home:
        return await _run_in_sandbox(home, spec, job)


async def _run_in_sandbox(home: ProviderHome, spec: SandboxSpec, job: SandboxCommand) -> ExecResult:
    provider = open_provider(spec.provider, home)
    if spec.image is not None and isinstance(provider, ImageFetchingProvider):
        from rookery.cli.images import print_progress_lines

        provider.on_image_progress = print_progress_lines()
    try:
        sandbox = await provider.create(spec, attempt="exec")
        for upload in job.uploads:
            try:
                await sandbox.upload(upload.source, upload.target)
            except OSError as error:
                raise UsageError(
                    f"{upload.source} cannot be copied into the sandbox: {error.strerror or error}"
                ) from error
        process = await sandbox.start(Command(argv=job.argv, wall=spec.wall))
        copying = asyncio.ensure_future(_copy_stdin(process))
        try:
            return await _copy_output(process, spec, job)
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
    finally:
        await provider.close()


async def _copy_output(process: Process, spec: SandboxSpec, job: SandboxCommand) -> ExecResult:
    filters = {fd: TerminalFilter() for fd in _FDS.values() if not job.raw and os.isatty(fd)}
    try:
        return await _read_output(process, spec, filters, copy_output=job.copy_output)
    finally:
        for fd, one in filters.items():
            if job.copy_output and (rest := one.feed(b"", final=True)):
                await _call_in_daemon_thread(_write_all, fd, rest)


async def _read_output(
    process: Process, spec: SandboxSpec, filters: dict[int, TerminalFilter], *, copy_output: bool
) -> ExecResult:
    most = OUTPUT_KILL_FACTOR * max(spec.output, 1 << 16)
    written = {"stdout": 0, "stderr": 0}
    async for stream, data in process.output():
        written[stream] += len(data)
        if copy_output:
            fd = _FDS[stream]
            await _call_in_daemon_thread(_write_all, fd, filters[fd].feed(data) if fd in filters else data)
        if written[stream] > most:
            return _mark_output_limit(await process.kill(), most)
    return await process.wait(timeout=spec.wall + 60.0)


def _mark_output_limit(result: ExecResult, most: int) -> ExecResult:
    from msgspec.structs import replace

    return replace(result, status="output_limit", detail=f"the command was killed after writing {most} bytes")


async def _copy_stdin(process: Process) -> None:
    """Copy standard input to the command until the input ends or the command closes its end."""
    with contextlib.suppress(BrokenPipeError, SandboxError):
        if not os.isatty(0):
            while data := await _call_in_daemon_thread(_read_stdin):
                await process.send(data)
        await process.send(b"", eof=True)


def _read_stdin() -> bytes:
    try:
        return os.read(0, CHUNK)
    except OSError:
        return b""  # closed, or a directory: no input


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def _call_in_daemon_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that may block for ever in a daemon thread, which does not delay the exit of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def resolve(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def call() -> None:
        value, error = None, None
        try:
            value = function(*args)
        except OSError as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(resolve, value, error)

    threading.Thread(target=call, daemon=True).start()
    return await future
