"""Drives an engine to the end of its run: progress, signals, exit code.

Promises:
- a first Ctrl-C ends everything cleanly, within seconds, and says how to go on; a second one ends us at once;
- what goes wrong before the first admission is raised, for exit code 2; later it is 4, with the summary;
- whatever ends a run, what was recorded is summed up from its journal.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rookery.cli.errors import Exit, in_words, say_error
from rookery.cli.progress import JsonLines, Progress, Start
from rookery.cli.stats import Stats
from rookery.cli.summary import Session, Summary, next_lines, read_summary, summary_lines
from rookery.cli.text import plural, tell
from rookery.core import JournalError, Rollout, RookeryError, Task
from rookery.engine import Engine, OwnBug
from rookery.engine.processes import new_event_loop
from rookery.journal import RunReader

TICK = 0.2
SLOW_START = 5.0
"""Seconds after which a start that is still under way says what it waits for."""
log = logging.getLogger("rookery.cli")
_SHOW_CURSOR = b"\x1b[?25h"


class Drive:
    """One engine, one run, one process."""

    def __init__(
        self,
        engine: Engine,
        progress: Progress,
        *,
        tasks: Sequence[Task] | None,
        k: int,
        about: Callable[[Engine], Start],
    ) -> None:
        """`tasks`: None goes on with what the journal holds."""
        self.engine = engine
        self.progress = progress
        self.tasks = tasks
        self.k = k
        self.about = about
        self.admitted = False
        self.error: RookeryError | None = None
        self.signal: signal.Signals | None = None
        self.stats = Stats()
        self._began = 0.0
        self._seconds = 0.0
        self._main: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Until the run is over, one way or another."""
        with self._signals(), asyncio.Runner(loop_factory=new_event_loop) as runner:
            try:
                runner.run(self._run())
            except asyncio.CancelledError:
                if self.signal is None:
                    raise
            except RookeryError as error:
                if not self.admitted:
                    raise
                self.error = error
            finally:
                if self._began:
                    self._seconds = self._seconds or time.monotonic() - self._began
                self.progress.close()

    async def _run(self) -> None:
        self._main = asyncio.current_task()
        if self.signal is not None:  # it came before there was anything to cancel
            raise asyncio.CancelledError
        engine = self.engine
        engine.on_record = self._record
        engine.on_event = self._event
        slow = asyncio.get_running_loop().call_later(SLOW_START, self._show, self.progress.note, _starting(engine))
        async with engine:
            slow.cancel()
            _log_into(engine)
            if self.tasks is not None:
                engine.register(self.tasks)
            self.progress.started(self.about(engine))
            self._began = time.monotonic()
            ticker = asyncio.create_task(self._tick())
            try:
                self.admitted = True
                async for group in engine.groups(self.tasks, k=self.k, load_tokens=False):
                    self._show(self.progress.group, group)
                self._seconds = time.monotonic() - self._began
            finally:
                ticker.cancel()
                await asyncio.gather(ticker, return_exceptions=True)
                self.progress.close()

    async def _tick(self) -> None:
        while True:
            self._show(self.progress.tick, await self.engine.status())
            await asyncio.sleep(TICK)

    def _record(self, record: Rollout) -> None:
        self.stats.add(record)
        self._show(self.progress.rollout, record)

    def _event(self, kind: str, payload: dict[str, Any]) -> None:
        self._show(self.progress.event, kind, payload)

    def _show(self, call: Callable[..., None], *args: Any) -> None:
        """A picture that cannot be drawn must not reach the supervisor, which calls us amid its own work."""
        try:
            call(*args)
        except Exception:
            log.exception("progress could not be shown")

    # ---- signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before: dict[signal.Signals, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup said no to it
                before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            # Runners die with us, sandboxes with them: nothing needs a further word.
            os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + b"\nkilled; `rookery resume` goes on with it\n")
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        if self._main is not None:
            # The handler may stand in the middle of anything: the loop does the rest, and is woken for it.
            self._main.get_loop().call_soon_threadsafe(self._interrupt)

    def _interrupt(self) -> None:
        assert self._main is not None
        self.progress.close()
        self.progress.note("stopping: what is under way is cancelled (once more kills at once)")
        self._main.cancel()

    # ---- the end

    @property
    def session(self) -> Session:
        return Session(
            seconds=self._seconds, rollouts=self.stats.rollouts, sampled_tokens=self.stats.sampled_tokens
        )

    def exit_code(self, summary: Summary | None) -> int:
        if self.signal is not None:
            return 128 + self.signal
        if self.error is not None:
            return Exit.BUG if isinstance(self.error, OwnBug) else Exit.STOPPED
        failed = summary.stats.failed if summary is not None else self.stats.failed
        return Exit.FAILED if failed else Exit.OK


def _starting(engine: Engine) -> str:
    """Say what a slow start waits for. Never shows a URL, which may contain credentials."""
    runners = " and the runner processes" if engine.config.runners else ""
    return f"starting: waiting for the model{runners}"


def _log_into(engine: Engine) -> None:
    """Our own log goes to the run's folder; the terminal has the progress."""
    assert engine.folder is not None
    folder = engine.folder / "logs"
    try:
        folder.mkdir(exist_ok=True)
        handler: logging.Handler = _LogFile(folder / "supervisor.log", delay=True)
    except OSError:
        handler = logging.NullHandler()  # a full disk stops the run by itself, with better words
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


class _LogFile(logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it could not even be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A disk that takes no log line stops the run by itself; a traceback for each would hide its words."""


def finish(drive: Drive, events: JsonLines | None, *, ending: Callable[[Summary], list[str]] = next_lines) -> int:
    """Sums up what the journal holds and says what to do next; returns the exit code."""
    summary = _summary(drive)
    code = drive.exit_code(summary)
    if drive.error is not None:
        say_error(in_words(drive.error))
    if drive.signal is not None and summary is not None:
        kept = plural(summary.stats.rollouts, "rollout")
        tell(f"interrupted by {drive.signal.name}: {kept} kept, {summary.left:,} left")
    elif drive.signal is not None:
        tell(f"interrupted by {drive.signal.name} before anything was admitted")
    if events is not None:
        plain = summary.plain(drive.session) if summary is not None else {}
        detail = {"error": str(drive.error)} if drive.error is not None else {}
        events.write("finished", **plain, **detail, exit_code=code)
    elif summary is not None:
        lines = ["", *summary_lines(summary, drive.session), *ending(summary)]
        tell("\n".join(lines), err=False)
    return code


def _summary(drive: Drive) -> Summary | None:
    folder = drive.engine.folder
    if folder is None or not drive.admitted:
        return None
    try:
        with RunReader(folder) as reader:
            return read_summary(reader, k=drive.k)
    except JournalError as error:
        # A full disk may keep even a reader out; the reason for the stop has been said already.
        if drive.error is None:
            drive.error = error
        return None
