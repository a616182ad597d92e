"""A connection made of the standard input and output of a program, such as ssh. Runs in the owner's process."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence

from rookery.core import SandboxError
from rookery.core.child_processes import end_with_parent

CLOSE_SECONDS = 5.0


class ProcessConnection:
    """A connection to the standard input and output of a child process.

    What the process writes to standard error is kept for error messages.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._stderr: deque[bytes] = deque(maxlen=8)
        self._stderr_task = asyncio.get_running_loop().create_task(self._read_stderr())

    @classmethod
    async def open(
        cls, command: Sequence[str], *, env: Mapping[str, str] | None = None, outlives_parent: bool = False
    ) -> "ProcessConnection":
        """Start a program. Raise `SandboxError` if that fails.

        The program is killed when this process dies. With `outlives_parent` it is not; its standard input ends.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(command if outlives_parent else end_with_parent(command)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only this process, which closes its connections in order
                env=env,
            )
        except OSError as error:
            raise SandboxError(f"{command[0]} cannot be started: {error}", cause="sandbox.host") from error
        return cls(process)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(4096):
            self._stderr.append(data)

    async def describe_end(self) -> str:
        """Return what the process wrote to standard error last; wait for its end for at most a second."""
        await asyncio.wait({self._stderr_task}, timeout=1.0)
        return b"".join(self._stderr).decode("utf-8", "replace").strip()[-500:]

    async def read(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(1 << 18)

    async def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def close(self) -> None:
        """Close the program's standard input and wait for its end; end it after a few seconds."""
        process = self._process
        assert process.stdin is not None
        process.stdin.close()
        try:
            for stop in (None, process.terminate, process.kill):
                if stop is not None and process.returncode is None:
                    stop()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await self._drain()
                        await process.wait()
                        return
        finally:
            self._stderr_task.cancel()
            await asyncio.wait({self._stderr_task})

    async def _drain(self) -> None:
        assert self._process.stdout is not None
        while await self._process.stdout.read(1 << 18):
            pass
