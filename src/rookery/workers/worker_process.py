"""Start the worker program in a sandbox and exchange frames (length-prefixed messages) with it.

This module runs outside of the sandbox, in the process that opened the worker. The worker program is the monitor:
the process in the sandbox that supervises the Python interpreter.

- The program's code is sent over standard input, so the length limit of command lines does not apply and `ps` does
  not show it.
- Frames from the sandbox are limited in size and validated. A process that sends an invalid frame is killed.
- When the process ends, `WorkerProcess.ended` is done at once.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import MAGIC_NUMBER
from typing import Any

from rookery.core import ExecResult, SandboxError
from rookery.sandbox_runtime import bundle
from rookery.sandbox_runtime.worker import protocol as p
from rookery.sandboxes import Command, Process, Sandbox

_SINGLE_THREADED = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "BLIS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "RAYON_NUM_THREADS",
        "POLARS_MAX_THREADS",
    ),
    "1",
)
"""Environment variables that keep libraries from starting thread pools.

A savepoint is a fork of the interpreter, and a process with several threads cannot be forked safely.
"""
_BOOT = (
    "import os\n"
    "from _frozen_importlib_external import MAGIC_NUMBER as magic\n"
    "def take(n):\n"
    "    b = b''\n"
    "    while len(b) < n:\n"
    "        p = os.read(0, n - len(b))\n"
    "        if not p: os._exit(0)\n"
    "        b += p\n"
    "    return b\n"
    "code, source = (take(int.from_bytes(take(4), 'little')) for _ in '12')\n"
    "if magic == take(4): import marshal; program = marshal.loads(code)\n"
    "else: program = compile(source, '<worker>', 'exec')\n"
    "exec(program, {'__name__': 'worker'})\n"
)
_ARGV = ("python3", "-I", "-c", _BOOT)
MAX_STDERR = 4_000
END_SECONDS = 10.0


@cache
def _build_program() -> bytes:
    """Return the worker program as bytes: compiled code, source, and the magic number of the compiling Python.

    The sandbox's Python uses the compiled code if its magic number is the same, and the source otherwise.
    """
    build: dict[str, Any] = {"subpackage": "worker", "module": "monitor", "private_builtins": True}
    parts = (bundle.build_code(**build), bundle.build_source(**build).encode())
    return b"".join(p.SIZE.pack(len(part)) + part for part in parts) + MAGIC_NUMBER


class WorkerProcess:
    """Exchanges frames with a running monitor, the worker's process in the sandbox.

    The task `ended` is done when no more frames will come, because the process ended or sent an invalid frame.
    """

    def __init__(self, process: Process, on_frame: Callable[[int, bytes], None]) -> None:
        self._process = process
        self._on_frame = on_frame
        self._decoder = p.FrameDecoder(p.MAX_UNTRUSTED_FRAME + 4096)
        self._stderr = bytearray()
        self.problem: BaseException | None = None
        """Exception that ended the exchange: an invalid frame, or an error raised by `on_frame`."""
        self.ended = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(
        cls, sandbox: Sandbox, cwd: str | None, env: Mapping[str, str], on_frame: Callable[[int, bytes], None]
    ) -> "WorkerProcess":
        """Start the worker program in `sandbox`. `on_frame` is called with the kind and payload of each frame."""
        process = await sandbox.start(
            Command(
                argv=_ARGV,
                cwd=cwd,
                env={**_SINGLE_THREADED, "MPLBACKEND": "Agg", **env},
                cpu_seconds=1e7,
                warm=True,
            )
        )
        worker_process = cls(process, on_frame)
        try:
            await worker_process.send_raw(_build_program())
        except BaseException:
            await worker_process.kill()
            raise
        return worker_process

    async def _read(self) -> None:
        try:
            async for stream, data in self._process.output():
                if stream == "stderr":
                    self._stderr += data
                    del self._stderr[:-MAX_STDERR]
                    continue
                self._decoder.buffer += data
                for kind, payload in self._decoder.frames():
                    self._on_frame(kind, payload)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  (reported by the worker)
            self.problem = error
            with contextlib.suppress(SandboxError, TimeoutError):
                await self._process.kill()

    async def send(self, kind: int, *parts: bytes) -> None:
        await self.send_raw(p.HEAD.pack(sum(map(len, parts)), kind) + b"".join(parts))

    async def send_raw(self, data: bytes) -> None:
        # A process that does not read any more is dead or dying; `ended` reports that.
        with contextlib.suppress(BrokenPipeError):
            await self._process.send(data)

    @property
    def stderr(self) -> str:
        """The last `MAX_STDERR` bytes that the process wrote to standard error; normally empty."""
        return self._stderr.decode("utf-8", "replace").strip()

    async def result(self) -> ExecResult | None:
        """Return how the process ended; None if the sandbox does not report it within `END_SECONDS`."""
        try:
            return await self._process.wait(timeout=END_SECONDS)
        except (SandboxError, TimeoutError):
            return None

    async def close(self) -> None:
        """Ask the monitor to kill all its processes and exit. If it does not within `END_SECONDS`, kill it."""
        with contextlib.suppress(BrokenPipeError, SandboxError):
            await self._process.send(b"", eof=True)
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait(timeout=END_SECONDS)
        except (SandboxError, TimeoutError):
            pass
        await self.kill()

    async def kill(self) -> None:
        """Kill the process and all its descendants."""
        try:
            with contextlib.suppress(SandboxError, TimeoutError):
                await self._process.kill()
        finally:
            self.ended.cancel()
            await asyncio.wait({self.ended}, timeout=END_SECONDS)
