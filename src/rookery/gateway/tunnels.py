"""SSH tunnels through which another machine reaches a gateway on this one. Runs in the supervisor.

Guarantees:
- a tunnel that is lost is opened again, with the same URL, until it is closed;
- connections through a tunnel continue after its SSH connection broke, if that can be opened again within
  30 seconds (`tunnel_process`);
- a tunnel ends when this process ends, even if it is killed;
- an invalid destination raises `UsageError` when the tunnel is created.
"""

import asyncio
import contextlib
import logging
import re
import shutil
import sys
from collections import deque
from typing import Final, Protocol

from rookery.core import RookeryError, UsageError
from rookery.core.child_processes import end_with_parent
from rookery.core.lifetimes import detached_context
from rookery.sandboxes.ssh_provider import check_destination

log = logging.getLogger("rookery.gateway")

SSH: Final = "ssh:"
CONNECT_SECONDS: Final = 60.0
MIN_WAIT: Final = 0.2
"""Delay before a lost tunnel is opened again. It doubles after each failure, up to `MAX_WAIT`."""
MAX_WAIT: Final = 5.0
CLOSE_SECONDS: Final = 5.0
_ALLOCATED = re.compile(rb"the remote port is (\d+)|Allocated port (\d+) for remote forward")
_FORWARDED = re.compile(rb"remote forward success for: listen")


class Tunnel(Protocol):
    """A tunnel through which another machine reaches a port on this machine. Open it once and close it once."""

    url: str
    """URL at which the other machine reaches the port. Set by `open`; does not change afterwards."""

    async def open(self) -> None:
        """Open the tunnel, or raise `RookeryError`."""
        ...

    async def close(self) -> None:
        """Close the tunnel."""
        ...


class SshTunnel:
    """Forwards a loopback port of another machine to a loopback port of this machine, over SSH."""

    def __init__(self, destination: str, port: int) -> None:
        check_destination(destination)
        if shutil.which("ssh") is None:
            raise UsageError("an SSH tunnel needs the program ssh, which is not installed: install an SSH client")
        self.destination = destination
        self.url = ""
        self.restarts = 0
        self._port = port
        self._remote_port = 0
        self._process: asyncio.subprocess.Process | None = None
        self._keeper_task: asyncio.Task[None] | None = None
        self._stderr: deque[bytes] = deque(maxlen=8)
        self._forwarding = asyncio.Event()

    async def open(self) -> None:
        """Start the tunnel and wait until it forwards the port. Raises `RookeryError` if that fails."""
        try:
            await self._launch()
        except BaseException:
            await self._terminate()
            raise
        self.url = f"http://127.0.0.1:{self._remote_port}"
        self._keeper_task = asyncio.get_running_loop().create_task(self._keep_open(), context=detached_context())

    async def _launch(self) -> None:
        ports = (str(self._port), str(self._remote_port))
        program = [sys.executable, "-P", "-m", "rookery.gateway.tunnel_process", self.destination, *ports]
        self._process = await asyncio.create_subprocess_exec(
            *end_with_parent(program),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only this process, which closes its tunnels in order
        )
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._wait_forwarded(self._process)
        except TimeoutError:
            raise RookeryError(
                f"the tunnel to {self.destination} did not open in {CONNECT_SECONDS:g} s{self._stderr_suffix()}"
            ) from None
        self._forwarding.set()

    async def _wait_forwarded(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # a line longer than the buffer
                continue
            if not line:
                await process.wait()
                raise RookeryError(f"the SSH tunnel to {self.destination} cannot be opened{self._stderr_suffix()}")
            if not line.startswith(b"debug1:"):
                self._stderr.append(line.strip())
            if match := _ALLOCATED.search(line):
                self._remote_port = int(match[1] or match[2])
                return
            if _FORWARDED.search(line) and self._remote_port:
                return

    def _stderr_suffix(self) -> str:
        """Return the last lines that the tunnel wrote to standard error, as the end of an error message."""
        text = b"; ".join(line for line in self._stderr if line).decode("utf-8", "replace")[-500:]
        return f": {text}" if text else ""

    async def _keep_open(self) -> None:
        """Open the tunnel again whenever its process ends, until cancelled."""
        wait = MIN_WAIT
        while True:
            process = self._process
            assert process is not None
            assert process.stderr is not None
            with contextlib.suppress(ValueError):
                while await process.stderr.read(1 << 16):
                    pass  # drain the pipe, so that the process does not block
            await process.wait()
            self._forwarding.clear()
            self.restarts += 1
            log.warning(
                "the SSH tunnel to %s ended (exit status %s) and is opened again",
                self.destination,
                process.returncode,
            )
            while not self._forwarding.is_set():
                await asyncio.sleep(wait)
                self._stderr.clear()
                try:
                    await self._launch()
                    wait = MIN_WAIT
                except (RookeryError, OSError) as error:
                    log.warning("%s", error)
                    await self._terminate()
                    wait = min(MAX_WAIT, 2 * wait)

    async def close(self) -> None:
        """Close the tunnel. Closing twice is allowed."""
        task, self._keeper_task = self._keeper_task, None
        try:
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        finally:
            await self._terminate()

    async def _terminate(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def make_tunnel(destination: str, port: int) -> Tunnel:
    """Return a tunnel from a destination `ssh:USER@HOST` to a port of this machine.

    Raises `UsageError` for any other destination.
    """
    if destination.startswith(SSH):
        return SshTunnel(destination.removeprefix(SSH), port)
    raise UsageError(f"the public address {destination!r:.100} is neither a URL nor ssh:USER@HOST")
