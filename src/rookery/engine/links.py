"""The supervisor's ends of its runners: a process behind a socket, or this very process.

Promises:
- a dead runner is noticed when it dies, with the way it died;
- stopping a runner is bounded: asked first, killed after a while;
- a runner's output goes to its own log, never to the terminal.
"""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rookery.core import CancelledReason, RookeryError
from rookery.core.blas_threads import one_blas_thread
from rookery.engine import wire
from rookery.engine.conviction import Death
from rookery.engine.executor import Executor
from rookery.environments import Environment
from rookery.gateway.client import GatewayAddress
from rookery.upstreams.protocol import PauseMode

STOP_SECONDS = 60.0
"""For attempts to tear down, while the runner still shows signs of life."""
SILENT_SECONDS = 4.0
LOG_TAIL = 8_000


class Handler(Protocol):
    """Who listens to a link: the supervisor."""

    def on_message(self, link: "Link", message: wire.FromRunner) -> None: ...

    def on_death(self, link: "Link", death: Death, detail: str) -> None: ...


class State(Protocol):
    """What a runner has to know that is born during a pause, or after a version was named."""

    mode: PauseMode | None
    named: int | None
    number: int

    @property
    def gateway(self) -> GatewayAddress | None: ...


class Link:
    """One runner as the supervisor sees it."""

    def __init__(self, name: str, handler: Handler) -> None:
        self.name = name
        self.handler = handler
        self.running: dict[str, Any] = {}
        """What the supervisor started there, by attempt."""
        self.ready = False
        self.alone = False
        """It holds one suspect and gets nothing else."""
        self.retiring = False
        """It gets nothing more and is stopped when it is empty."""
        self.stopping = False
        self.spare = False
        """Made for suspects only."""
        self.born = 0
        """The number of the pause that it was born in; 0 where there was none."""
        self.expects: list[tuple[str, int]] = []
        """What it was told will begin there: tasks by id, and how many rollouts."""
        self.images: dict[str, wire.Image] = {}
        """What it is fetching."""
        self.last_heard = 0.0
        self.blamed: str | None = None
        """The attempt that the watchdog saw blocking the loop."""
        self.block_stack = ""

    @property
    def shared(self) -> bool:
        """Whether it takes whatever comes."""
        return self.ready and not (self.retiring or self.alone or self.spare)

    def send(self, message: wire.ToRunner) -> None:
        raise NotImplementedError

    def pids(self) -> list[int]:
        return []

    async def stop(self) -> None:
        raise NotImplementedError

    def kill(self, why: Death) -> None:
        raise NotImplementedError


class LocalLink(Link):
    """`runners=0`: everything lives in one process, for notebooks, debugging and tests."""

    def __init__(
        self,
        name: str,
        handler: Handler,
        settings: wire.RunSettings,
        environment: Environment,
        gateway: GatewayAddress | None = None,
    ) -> None:
        super().__init__(name, handler)
        self._out: list[Any] = []
        self._scheduled = False
        self.executor = Executor(settings, environment, name, self._receive, gateway=gateway)

    def open(self) -> None:
        self._receive(wire.Ready(os.getpid()))

    def _receive(self, message: wire.FromRunner) -> None:
        self._out.append(message)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        try:
            self.executor.flush()
        except RookeryError as error:
            self._out = [wire.Unfit(str(error), "", disk=True)]
        out, self._out = self._out, []
        for message in out:
            self.handler.on_message(self, message)

    def send(self, message: wire.ToRunner) -> None:
        match message:
            case wire.Start():
                self.executor.start(message)
            case wire.Cancel(attempt, reason):
                self.executor.cancel(attempt, reason)
            case wire.Pause():
                self.executor.pause(message)
            case wire.Resume(version):
                self.executor.resume(version)
            case wire.Soon():
                self.executor.boxes.soon(message)

    async def stop(self, reason: CancelledReason = "shutdown") -> None:
        await self.executor.close(reason)
        self._flush()


class ProcessLink(Link):
    """A runner process."""

    def __init__(self, name: str, handler: Handler, settings: wire.RunSettings) -> None:
        super().__init__(name, handler)
        self.settings = settings
        self.log = Path(settings.folder) / "logs" / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._wire = wire.Wire(wire.from_runner, self._on_message, self._on_lost)
        self._pidfd = -1
        self._alarm = -1
        self._alarm_data = bytearray()
        self._killed_for: Death | None = None
        self._dead: asyncio.Event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._lost = False
        self._greeted = False

    async def open(self, state: State) -> None:
        """Starts the process; it says `Ready` when its environment is loaded."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        alarm, alarm_in = os.pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self.process = subprocess.Popen(  # noqa: ASYNC220  (vfork: about a millisecond)
                [
                    sys.executable,
                    "-m",
                    "rookery.engine.runner",
                    str(theirs.fileno()),
                    str(alarm_in),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), alarm_in),
                start_new_session=True,  # Ctrl-C is for the supervisor, which ends runners in order
                # The embedded policy computes here: a BLAS pool in every runner would oversubscribe the cores.
                env={**os.environ, **one_blas_thread(os.environ)},
            )
        except BaseException:
            ours.close()
            os.close(alarm)
            raise
        finally:
            theirs.close()
            os.close(alarm_in)
            os.close(log)
        self._alarm = alarm
        os.set_blocking(alarm, False)
        self._loop.add_reader(alarm, self._on_alarm)
        self._pidfd = os.pidfd_open(self.process.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)
        self.last_heard = self._loop.time()
        ours.setblocking(False)
        await self._loop.create_unix_connection(lambda: self._wire, sock=ours)
        self.born = state.number if state.mode is not None else 0
        self._wire.send(wire.Hello(self.settings, self.name, state.mode, state.named, state.gateway))
        self._greeted = True

    def pids(self) -> list[int]:
        return [self.process.pid] if self.process is not None and not self._dead.is_set() else []

    def send(self, message: wire.ToRunner) -> None:
        if not self._greeted and isinstance(message, wire.Pause | wire.Resume):
            return  # its `Hello` will say it
        self._wire.send(message)

    def _on_message(self, message: wire.FromRunner) -> None:
        self.last_heard = self._loop.time()
        self.handler.on_message(self, message)

    def _on_lost(self, _: BaseException | None) -> None:
        # The process's end is noticed by its pidfd; a closed wire of a live process is no use to anyone.
        self._lost = True
        if not self._dead.is_set() and self.process is not None and not self.retiring:
            self._loop.call_later(0.5, self._kill_if_alive)

    def _kill_if_alive(self) -> None:
        if not self._dead.is_set():
            self.kill("crashed")

    def _on_alarm(self) -> None:
        try:
            data = os.read(self._alarm, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._alarm)
            return
        self._alarm_data += data
        while len(self._alarm_data) >= 4:
            (length,) = struct.unpack_from("<I", self._alarm_data)
            if length > 1 << 20:
                self._alarm_data.clear()
                return
            if len(self._alarm_data) < 4 + length:
                return
            frame = bytes(self._alarm_data[4 : 4 + length])
            del self._alarm_data[: 4 + length]
            try:
                message = wire.from_runner.decode(frame)
            except msgspec.DecodeError:
                return  # a torn alarm; the next one tells the same
            self.handler.on_message(self, message)

    def _on_exit(self) -> None:
        assert self.process is not None
        code = self.process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._loop.remove_reader(self._alarm)
        os.close(self._alarm)
        self._wire.close()
        self._dead.set()
        death: Death = self._killed_for or ("killed" if code == -signal.SIGKILL else "crashed")
        self.handler.on_death(self, death, f"runner {self.name} {_ending(code)}{self._last_words()}")

    def _last_words(self) -> str:
        """The end of its log: a crash leaves its stack there."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - LOG_TAIL))
                tail = file.read(LOG_TAIL).decode(errors="replace").strip()
        except OSError:
            return ""
        return f"; the end of its log:\n{tail}" if tail else ""

    def kill(self, why: Death) -> None:
        if self._dead.is_set() or self.process is None:
            return
        self._killed_for = self._killed_for or why
        if why == "blocked":
            # Also a loop stuck in C with the GIL held writes its stack to the log on this signal.
            os.kill(self.process.pid, signal.SIGUSR1)
            self._loop.call_later(0.3, self._sigkill)
        else:
            self._sigkill()

    def _sigkill(self) -> None:
        if not self._dead.is_set() and self.process is not None:
            self.process.kill()

    async def stop(self) -> None:
        self.retiring = True
        if self.process is None or self._dead.is_set():
            return
        if not self._lost:
            self.send(wire.Stop())
        asked = self._loop.time()
        try:
            while not self._dead.is_set():
                try:
                    async with asyncio.timeout(0.5):
                        await self._dead.wait()
                except TimeoutError:
                    now = self._loop.time()
                    if now - asked > STOP_SECONDS or now - max(asked, self.last_heard) > SILENT_SECONDS:
                        self.kill("killed")
        except asyncio.CancelledError:
            self.kill("killed")
            raise


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
