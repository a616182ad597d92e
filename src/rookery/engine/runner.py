"""The main module of a runner process, which executes the user's Python code for a bounded number of rollouts.

- The runner dies when the supervisor's process ends, however that happens.
- A `SystemExit` in an asyncio task of the user does not end the runner.
- A blocked event loop is reported while it is blocked, with the stack and, if it is known, the attempt.
"""

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection
from pathlib import Path

from rookery.core import JournalError, RookeryError
from rookery.core.errors import describe
from rookery.engine import processes
from rookery.engine.background_tasks import task_factory
from rookery.engine.executor import Executor
from rookery.engine.framing import FramedConnection, encode_frame
from rookery.engine.processes import die_with_parent, new_event_loop
from rookery.engine.runner_protocol import (
    Heartbeat,
    Hello,
    LoopBlocked,
    Ready,
    RunnerFailed,
    Stop,
    ToRunner,
    to_runner_decoder,
)
from rookery.environments import load_environment
from rookery.telemetry import REGISTRY, catalogue
from rookery.telemetry.logs import TEXT, set_log_format
from rookery.telemetry.tracing import start_tracing, stop_tracing

HEARTBEAT_SECONDS = 1.0
MAX_LOG = 32 << 20
MAX_STACK = 8_000


class Watchdog(threading.Thread):
    """A thread that reports to the supervisor, over a pipe, if the event loop is blocked for `warning` seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pipe: int, warning: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.loop = loop
        self.pipe = pipe
        self.warning = warning
        self.last_run = time.monotonic()
        self.attempts: Collection[str] = ()
        self._main = threading.main_thread().ident or 0

    def run(self) -> None:
        while True:
            time.sleep(self.warning / 2)  # in its own thread
            blocked = time.monotonic() - self.last_run
            if blocked > self.warning + HEARTBEAT_SECONDS:
                self._report(blocked)

    def _report(self, blocked: float) -> None:
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame)[-40:]) if frame is not None else ""
        report = encode_frame(LoopBlocked(blocked, self._current_attempt(), stack[-MAX_STACK:]))
        with contextlib.suppress(OSError):  # the supervisor is gone or does not read
            os.write(self.pipe, report)

    def _current_attempt(self) -> str | None:
        task = asyncio.current_task(self.loop)
        name = task.get_name() if task is not None else ""
        return name if name in self.attempts else None


class Runner:
    """Passes the supervisor's messages to an `Executor`, and sends results and heartbeats to the supervisor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, alarm: int) -> None:
        self.loop = loop
        self.alarm = alarm
        self.executor: Executor | None = None
        self.watchdog: Watchdog | None = None
        self.connection = FramedConnection(to_runner_decoder, self.on_message, self.on_lost, self.before_write)
        self._stopping: asyncio.Task[None] | None = None
        self.late = 0.0
        """Delay of the last heartbeat, in seconds."""

    def before_write(self) -> None:
        """Write recorded tokens to disk before the results that refer to them are sent.

        If that fails, send `RunnerFailed` instead of the queued messages.
        """
        if self.executor is None:
            return
        try:
            self.executor.flush()
        except JournalError as error:
            self.connection.drop_unsent()
            self.connection.send(RunnerFailed(str(error), "", disk=True))

    def on_lost(self, _: BaseException | None) -> None:
        # The supervisor is gone. Our sandboxes notice our exit and end as well.
        os._exit(0)

    def on_message(self, message: ToRunner) -> None:
        match message:
            case Hello():
                self.load(message)
            case Stop():
                self._stopping = self._stopping or self.loop.create_task(self.stop())
            case _ if self.executor is not None:
                self.executor.handle(message)

    def load(self, hello: Hello) -> None:
        """Load the environment and reply with `Ready`, or with `RunnerFailed`."""
        try:
            set_log_format(hello.settings.log_format, run=hello.settings.run, process=hello.writer)
            if hello.settings.traces is not None:
                start_tracing(hello.settings.traces, hello.settings.run, hello.writer)
            environment = load_environment(hello.settings.environment)
            self.executor = Executor(
                hello.settings,
                environment,
                hello.writer,
                self.connection.send,
                hello.pause,
                hello.version,
                hello.gateway,
            )
        except BaseException as error:  # noqa: BLE001  (the supervisor reports whatever the user's module raises)
            detail = str(error) if isinstance(error, RookeryError) else describe(error)
            disk = isinstance(error, JournalError)
            self.connection.send(RunnerFailed(detail, traceback.format_exc(), disk=disk))
            return
        # Objects that exist now stay for ever. A model reply creates thousands of small objects that die together:
        # with the default thresholds the collector runs after every third reply and takes a third of a rollout's
        # CPU. Objects that survive one collection wait for the next one of their generation. It must come soon, or
        # the process grows by kilobytes per rollout.
        gc.freeze()
        gc.set_threshold(20_000, 5, 10)
        self.watchdog = Watchdog(self.loop, self.alarm, hello.settings.block_warning)
        self.watchdog.attempts = self.executor.attempts.keys()
        self.watchdog.start()
        self.send_heartbeat()
        self.connection.send(Ready(os.getpid()))

    def send_heartbeat(self) -> None:
        if self.watchdog is not None:
            now = time.monotonic()
            self.late = max(0.0, now - self.watchdog.last_run - HEARTBEAT_SECONDS)
            self.watchdog.last_run = now
        self.connection.send(self.heartbeat())
        _rotate_log()
        self.loop.call_later(HEARTBEAT_SECONDS, self.send_heartbeat)

    def heartbeat(self) -> Heartbeat:
        if self.executor is None:
            return Heartbeat()
        state = self.executor.read_state()
        if not self.executor.settings.metrics:
            return Heartbeat(state)
        metrics = REGISTRY.drain()
        metrics[catalogue.LOOP_DELAY.name] = {("runner",): [self.late]}
        return Heartbeat(state, metrics)

    async def stop(self) -> None:
        if self.executor is not None:
            await self.executor.close()
            self.connection.send(self.heartbeat())
            await asyncio.to_thread(stop_tracing)
        self.connection.close()
        self.loop.stop()


def _rotate_log() -> None:
    """Start a new log file if the current one is too large. The old one gets the suffix `.log.1`."""
    if os.fstat(2).st_size < MAX_LOG:
        return
    path = Path("/proc/self/fd/2").readlink()
    path.replace(path.with_suffix(".log.1"))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def main() -> None:
    """Run as `python -m rookery.engine.runner SOCKET_FD ALARM_FD PARENT_PID`, which the supervisor starts.

    The file descriptors are the socket to the supervisor and the pipe for reports of a blocked event loop.
    """
    processes.in_runner = True
    channel, alarm, parent = (int(arg) for arg in sys.argv[1:4])
    die_with_parent(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=TEXT)
    os.set_blocking(alarm, False)
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_task_factory(task_factory)
    runner = Runner(loop, alarm)
    sock = socket.socket(fileno=channel)

    async def connect() -> None:
        await loop.create_connection(lambda: runner.connection, sock=sock)

    # Not `run_until_complete`: its last iteration can already run user code, and an exit there would end the
    # runner.
    connecting = loop.create_task(connect())
    connecting.add_done_callback(lambda task: task.result())
    while not _run_forever(loop):
        pass


def _run_forever(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt) as error:
        # A task of the user called exit. It has its exception; the event loop continues for the others.
        logging.getLogger("rookery.runner").error(
            "a task of the environment called exit, which is ignored: %r", error
        )
        return False
    return True


if __name__ == "__main__":
    main()
