"""One start of the stub in a sandbox: its process, its text, its frames.

Promises:
- the stub's text comes over its input, so that no length of a command line bounds it, and none shows it;
- what comes back is bounded and of its form, or the process is ended: a stub that lies cannot fill the host;
- when the process ends, whoever waits knows at once, and with what words it ended.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources

from rookery.core import ExecResult, SandboxError
from rookery.sandboxes import Command, Process, Sandbox
from rookery.workers.inside import frames as f

MODULES = ("frames", "kernel", "display", "wire", "runs", "twins", "live", "crew", "savepoints", "monitor")
PINNED = dict.fromkeys(
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
"""A thread of a library's pool, idle or not, is a thread: no savepoint of such a process is sound."""
BOOT = (
    "import os\n"
    "def take(n):\n"
    "    b = b''\n"
    "    while len(b) < n:\n"
    "        p = os.read(0, n - len(b))\n"
    "        if not p: os._exit(0)\n"
    "        b += p\n"
    "    return b\n"
    "exec(compile(take(int.from_bytes(take(4), 'little')), '<worker>', 'exec'), {'__name__': 'worker'})\n"
)
ARGV = ("python3", "-I", "-c", BOOT)
MOST_WORDS = 4_000
END_SECONDS = 10.0
_LOADER = """
import sys, builtins
from types import ModuleType
private = dict(vars(builtins))
for name, text in {modules!r}:
    module = ModuleType(name)
    module.__dict__["__builtins__"] = private
    sys.modules[name] = module
    exec(compile(text, "<worker " + name + ">", "exec", dont_inherit=True), module.__dict__)
main = module.main
for name in {names!r}:
    del sys.modules[name]
main()
"""


@cache
def stub() -> bytes:
    """The program, with its length."""
    folder = resources.files("rookery.workers.inside")
    modules = [(name, (folder / f"{name}.py").read_text("utf-8")) for name in MODULES]
    text = _LOADER.format(modules=modules, names=MODULES).encode()
    return f.SIZE.pack(len(text)) + text


class Link:
    """Frames to and from a stub that runs. `on_frame` gets each; `ended` is done when there will be no more."""

    def __init__(self, process: Process, on_frame: Callable[[int, bytes], None]) -> None:
        self._process = process
        self._on_frame = on_frame
        self._inlet = f.Inlet(f.MOST_BACK + 4096)
        self._words = bytearray()
        self.problem: BaseException | None = None
        """What it did that no stub does, or what went wrong on this side."""
        self.ended = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(
        cls, sandbox: Sandbox, cwd: str | None, env: Mapping[str, str], on_frame: Callable[[int, bytes], None]
    ) -> "Link":
        process = await sandbox.start(
            Command(argv=ARGV, cwd=cwd, env={**PINNED, "MPLBACKEND": "Agg", **env}, cpu_seconds=1e7, warm=True)
        )
        link = cls(process, on_frame)
        try:
            await link.send_raw(stub())
        except BaseException:
            await link.kill()
            raise
        return link

    async def _read(self) -> None:
        try:
            async for stream, data in self._process.output():
                if stream == "stderr":
                    self._words += data
                    del self._words[:-MOST_WORDS]
                    continue
                self._inlet.into += data
                for kind, payload in self._inlet.frames():
                    self._on_frame(kind, payload)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  (told to whoever waits for the worker)
            self.problem = error
            with contextlib.suppress(SandboxError, TimeoutError):
                await self._process.kill()

    async def send(self, kind: int, *parts: bytes) -> None:
        await self.send_raw(f.HEAD.pack(sum(map(len, parts)), kind) + b"".join(parts))

    async def send_raw(self, data: bytes) -> None:
        # A process that reads no more is dead or dying, which `ended` tells.
        with contextlib.suppress(BrokenPipeError):
            await self._process.send(data)

    @property
    def words(self) -> str:
        """The last that it wrote to its stderr: nothing, unless it broke."""
        return self._words.decode("utf-8", "replace").strip()

    async def result(self) -> ExecResult | None:
        """How the process ended; None when the sandbox does not say."""
        try:
            return await self._process.wait(timeout=END_SECONDS)
        except (SandboxError, TimeoutError):
            return None

    async def close(self) -> None:
        """Asks it to end, with all that it holds, and sees to it."""
        with contextlib.suppress(BrokenPipeError, SandboxError):
            await self._process.send(b"", eof=True)
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait(timeout=END_SECONDS)
        except (SandboxError, TimeoutError):
            pass
        await self.kill()

    async def kill(self) -> None:
        """Ends the process and everything below it, where it is not over yet."""
        try:
            with contextlib.suppress(SandboxError, TimeoutError):
                await self._process.kill()
        finally:
            self.ended.cancel()
            await asyncio.wait({self.ended}, timeout=END_SECONDS)
