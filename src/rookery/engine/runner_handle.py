"""Handles through which the supervisor controls its runners: a child process, or the supervisor's own process.

- The death of a runner process is noticed at once, through its pidfd, with its exit status.
- A runner that is stopped gets a request first. It is killed after `STOP_SECONDS`, or if it stops sending
  messages.
- The output of a runner goes to its own log file, never to the terminal.
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
from rookery.engine.crash_attribution import DeathKind
from rookery.engine.executor import Executor
from rookery.engine.framing import FramedConnection
from rookery.engine.runner_protocol import (
    FromRunner,
    Hello,
    ImageUpdate,
    Pause,
    Ready,
    Resume,
    RunnerFailed,
    RunSettings,
    Stop,
    ToRunner,
    from_runner_decoder,
)
from rookery.environments import Environment
from rookery.gateway.client import GatewayAddress
from rookery.upstreams.pause import PauseCoordinator

STOP_SECONDS = 60.0
"""Seconds after which a runner that was asked to stop is killed. Until then its attempts can tear down."""
SILENT_SECONDS = 4.0
"""A runner that was asked to stop is killed if it sends no message for this many seconds."""
STACK_SECONDS = 0.3
"""Seconds that a blocked runner gets to write its stack to the log before it is killed."""
LOG_TAIL = 8_000
MAX_ALARM = 1 << 20


class RunnerListener(Protocol):
    """Receives the messages and the death of a runner. Implemented by `RunnerPool`."""

    def on_message(self, runner: "RunnerHandle", message: FromRunner) -> None: ...

    def on_death(self, runner: "RunnerHandle", death: DeathKind, detail: str) -> None: ...


class RunnerHandle:
    """The supervisor's view of a runner, with the methods to control it."""

    def __init__(self, name: str, listener: RunnerListener) -> None:
        self.name = name
        self.listener = listener
        self.running: dict[str, Any] = {}
        """The attempts that were sent to the runner, by ID."""
        self.ready = False
        self.alone = False
        """True while it runs a single rollout that is suspected of crashing runners. It gets no other attempt."""
        self.retiring = False
        """True if it gets no more attempts and is stopped when it has none."""
        self.stopping = False
        self.spare = False
        """True if it was created only for rollouts that are suspected of crashing runners."""
        self.pause_number = 0
        """The number of the pause during which it was created, or 0 if the run was not paused."""
        self.prewarmed: list[tuple[str, int]] = []
        """The `counts` of the last `PrewarmRequest`: task IDs and numbers of rollouts."""
        self.images: dict[str, ImageUpdate] = {}
        """The progress of the images that it is fetching, by image."""
        self.last_message = 0.0
        self.blamed: str | None = None
        """ID of the attempt that was seen blocking the event loop, if it is known."""
        self.block_stack = ""

    @property
    def is_shared(self) -> bool:
        """True if the runner is ready and accepts any attempt."""
        return self.ready and not (self.retiring or self.alone or self.spare)

    def send(self, message: ToRunner) -> None:
        raise NotImplementedError

    def pids(self) -> list[int]:
        return []

    async def stop(self) -> None:
        raise NotImplementedError

    def kill(self, why: DeathKind) -> None:
        raise NotImplementedError


class LocalRunner(RunnerHandle):
    """A runner in the supervisor's process (`runners=0`), for notebooks, debuggers and tests."""

    def __init__(
        self,
        name: str,
        listener: RunnerListener,
        settings: RunSettings,
        environment: Environment,
        gateway: GatewayAddress | None = None,
    ) -> None:
        super().__init__(name, listener)
        self._received: list[FromRunner] = []
        self._flush_scheduled = False
        self.executor = Executor(settings, environment, name, self._receive, gateway=gateway)

    def open(self) -> None:
        self._receive(Ready(os.getpid()))

    def _receive(self, message: FromRunner) -> None:
        self._received.append(message)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        try:
            self.executor.flush()
        except RookeryError as error:
            self._received = [RunnerFailed(str(error), "", disk=True)]
        received, self._received = self._received, []
        for message in received:
            self.listener.on_message(self, message)

    def send(self, message: ToRunner) -> None:
        self.executor.handle(message)

    async def stop(self, reason: CancelledReason = "shutdown") -> None:
        await self.executor.close(reason)
        self._flush()


class ProcessRunner(RunnerHandle):
    """A runner process, connected by a socket and, for reports of a blocked event loop, by a pipe."""

    def __init__(self, name: str, listener: RunnerListener, settings: RunSettings) -> None:
        super().__init__(name, listener)
        self.settings = settings
        self.log = Path(settings.folder) / "logs" / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._connection = FramedConnection(from_runner_decoder, self._on_message, self._on_lost)
        self._pidfd = -1
        self._alarm = -1
        """The reading end of the pipe over which the runner reports a blocked event loop."""
        self._alarm_data = bytearray()
        self._killed_for: DeathKind | None = None
        self._dead: asyncio.Event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._lost = False
        self._hello_sent = False

    async def open(self, pauses: PauseCoordinator, gateway: GatewayAddress | None) -> None:
        """Start the process. It sends `Ready` when its environment is loaded."""
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
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops the runners
                # The embedded policy computes here: a BLAS thread pool in every runner would oversubscribe the
                # cores.
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
        self.last_message = self._loop.time()
        ours.setblocking(False)
        await self._loop.create_unix_connection(lambda: self._connection, sock=ours)
        self.pause_number = pauses.number if pauses.mode is not None else 0
        self._connection.send(Hello(self.settings, self.name, pauses.mode, pauses.policy_version, gateway))
        self._hello_sent = True

    def pids(self) -> list[int]:
        return [self.process.pid] if self.process is not None and not self._dead.is_set() else []

    def send(self, message: ToRunner) -> None:
        if not self._hello_sent and isinstance(message, Pause | Resume):
            return  # `Hello` will contain it
        self._connection.send(message)

    def _on_message(self, message: FromRunner) -> None:
        self.last_message = self._loop.time()
        self.listener.on_message(self, message)

    def _on_lost(self, _: BaseException | None) -> None:
        # The pidfd reports the end of the process. A process without a connection is useless.
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
            if length > MAX_ALARM:
                self._alarm_data.clear()
                return
            if len(self._alarm_data) < 4 + length:
                return
            frame = bytes(self._alarm_data[4 : 4 + length])
            del self._alarm_data[: 4 + length]
            try:
                message = from_runner_decoder.decode(frame)
            except msgspec.DecodeError:
                return  # a partial write of the watchdog; it reports again
            self.listener.on_message(self, message)

    def _on_exit(self) -> None:
        assert self.process is not None
        code = self.process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._loop.remove_reader(self._alarm)
        os.close(self._alarm)
        self._connection.close()
        self._dead.set()
        death: DeathKind = self._killed_for or ("killed" if code == -signal.SIGKILL else "crashed")
        self.listener.on_death(self, death, f"runner {self.name} {_describe_exit(code)}{self._read_log_tail()}")

    def _read_log_tail(self) -> str:
        """Return the end of the runner's log, where a crash leaves its stack, as text for an error message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - LOG_TAIL))
                tail = file.read(LOG_TAIL).decode(errors="replace").strip()
        except OSError:
            return ""
        return f"; the end of its log:\n{tail}" if tail else ""

    def kill(self, why: DeathKind) -> None:
        if self._dead.is_set() or self.process is None:
            return
        self._killed_for = self._killed_for or why
        if why == "blocked":
            # faulthandler writes the stack to the log, even if the event loop is stuck in C code with the GIL.
            os.kill(self.process.pid, signal.SIGUSR1)
            self._loop.call_later(STACK_SECONDS, self._sigkill)
        else:
            self._sigkill()

    def _sigkill(self) -> None:
        if not self._dead.is_set() and self.process is not None:
            self.process.kill()

    async def stop(self) -> None:
        """Ask the runner to cancel its attempts and exit. Kill it if it takes too long or sends no messages."""
        self.retiring = True
        if self.process is None or self._dead.is_set():
            return
        if not self._lost:
            self.send(Stop())
        began = self._loop.time()
        try:
            while not self._dead.is_set():
                try:
                    async with asyncio.timeout(0.5):
                        await self._dead.wait()
                except TimeoutError:
                    now = self._loop.time()
                    if now - began > STOP_SECONDS or now - max(began, self.last_message) > SILENT_SECONDS:
                        self.kill("killed")
        except asyncio.CancelledError:
            self.kill("killed")
            raise


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
