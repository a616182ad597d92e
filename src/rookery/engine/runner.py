"""A runner process: the user's Python, a bounded number of rollouts.

Promises:
- it dies with its supervisor, however that dies;
- a `SystemExit` out of any task of the user's does not end it;
- a blocked loop is reported while it is blocked, with the stack and, where it can be told, the attempt.
"""

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Collection
from pathlib import Path

from rookery.core import JournalError, RookeryError
from rookery.core.errors import describe
from rookery.engine import processes, wire
from rookery.engine.executor import Executor
from rookery.engine.loose import task_factory
from rookery.engine.processes import die_with_parent, new_event_loop
from rookery.environments import load_environment

BEAT = 1.0
MAX_LOG = 32 << 20


class Watchdog(threading.Thread):
    """Sees from outside of the loop that the loop stands still."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pipe: int, warning: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.loop = loop
        self.pipe = pipe
        self.warning = warning
        self.turned = time.monotonic()
        self.attempts: Collection[str] = ()
        self._main = threading.main_thread().ident or 0

    def run(self) -> None:
        while True:
            time.sleep(self.warning / 2)  # its own thread; nothing waits for it
            still = time.monotonic() - self.turned
            if still > self.warning + BEAT:
                self._report(still)

    def _report(self, still: float) -> None:
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame)[-40:]) if frame is not None else ""
        data = wire.encoder.encode(wire.Blocked(still, self._attempt(), stack[-8_000:]))
        with contextlib.suppress(OSError):  # the supervisor is gone or does not read: it will end us anyway
            os.write(self.pipe, struct.pack("<I", len(data)) + data)

    def _attempt(self) -> str | None:
        task = asyncio.current_task(self.loop)
        name = task.get_name() if task is not None else ""
        return name if name in self.attempts else None


class Runner:
    """Connects the wire to an executor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, alarm: int) -> None:
        self.loop = loop
        self.alarm = alarm
        self.executor: Executor | None = None
        self.watchdog: Watchdog | None = None
        self.wire = wire.Wire(wire.to_runner, self.on_message, self.on_lost, self.before_write)
        self._stopping: asyncio.Task[None] | None = None

    def before_write(self) -> None:
        if self.executor is None:
            return
        try:
            self.executor.flush()
        except JournalError as error:
            self.wire.unsend()
            self.wire.send(wire.Unfit(str(error), "", disk=True))

    def on_lost(self, _: BaseException | None) -> None:
        # The supervisor is gone. Sandboxes see our end and go too; there is nobody left to report to.
        os._exit(0)

    def on_message(self, message: wire.ToRunner) -> None:
        executor = self.executor
        match message:
            case wire.Hello():
                self.hello(message)
            case wire.Start() if executor is not None:
                executor.start(message)
            case wire.Cancel(attempt, reason) if executor is not None:
                executor.cancel(attempt, reason)
            case wire.Pause() if executor is not None:
                executor.pause(message)
            case wire.Resume(version) if executor is not None:
                executor.resume(version)
            case wire.Soon() if executor is not None:
                executor.boxes.soon(message)
            case wire.Stop():
                self._stopping = self._stopping or self.loop.create_task(self.stop())

    def hello(self, hello: wire.Hello) -> None:
        try:
            environment = load_environment(hello.settings.environment)
            self.executor = Executor(
                hello.settings,
                environment,
                hello.writer,
                self.wire.send,
                hello.pause,
                hello.version,
                hello.gateway,
            )
        except BaseException as error:  # noqa: BLE001  (whatever the user's module raises, the supervisor hears it)
            detail = str(error) if isinstance(error, RookeryError) else describe(error)
            self.wire.send(wire.Unfit(detail, traceback.format_exc(), disk=isinstance(error, JournalError)))
            return
        # What is here now stays. Replies come as thousands of small objects that die together: the default
        # thresholds collect after every third one, for a third of a rollout's CPU. What was under way at a
        # collection and is garbage since waits for the next one of its generation: that must come soon, or the
        # process grows by kilobytes a rollout.
        gc.freeze()
        gc.set_threshold(20_000, 5, 10)
        self.watchdog = Watchdog(self.loop, self.alarm, hello.settings.block_warning)
        self.watchdog.attempts = self.executor.lives.keys()
        self.watchdog.start()
        self.beat()
        self.wire.send(wire.Ready(os.getpid()))

    def beat(self) -> None:
        if self.watchdog is not None:
            self.watchdog.turned = time.monotonic()
        self.wire.send(wire.Beat())
        _bound_log()
        self.loop.call_later(BEAT, self.beat)

    async def stop(self) -> None:
        if self.executor is not None:
            await self.executor.close()
        self.wire.close()
        self.loop.stop()


def _bound_log() -> None:
    """Whatever the user prints goes to our log; past its bound the file starts again, the old one kept once."""
    if os.fstat(2).st_size < MAX_LOG:
        return
    path = Path("/proc/self/fd/2").readlink()
    path.replace(path.with_suffix(".log.1"))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def main() -> None:
    """`python -m rookery.engine.runner SOCKET_FD ALARM_FD PARENT_PID`."""
    processes.in_runner = True
    channel, alarm, parent = (int(arg) for arg in sys.argv[1:4])
    die_with_parent(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    os.set_blocking(alarm, False)
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_task_factory(task_factory)
    runner = Runner(loop, alarm)
    sock = socket.socket(fileno=channel)

    async def connect() -> None:
        await loop.create_unix_connection(lambda: runner.wire, sock=sock)

    # Not `run_until_complete`: its last turn can already run the user's code, and an exit there would be ours.
    connecting = loop.create_task(connect())
    connecting.add_done_callback(lambda task: task.result())
    while not _run(loop):
        pass


def _run(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt) as error:
        # A task of the user's called exit. The task has its exception; the others' loop goes on.
        logging.getLogger("rookery.runner").error("a task called exit: %r", error)
        return False
    return True


if __name__ == "__main__":
    main()
