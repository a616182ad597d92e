"""Run an engine in the process of a command, with a progress display, signal handling and an exit code.

Guarantees:
- the first Ctrl-C stops the run cleanly within seconds and says how to resume; the second exits at once;
- an error before the first rollout is raised (exit code 2); a later error is reported with the summary (exit code
  4);
- however a run ends, the summary is computed from its journal.
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

from rookery.cli.errors import Exit, describe_error, print_error
from rookery.cli.progress import JsonLines, ProgressDisplay, RunStart
from rookery.cli.summary import format_next_steps, format_summary
from rookery.cli.terminal import plural, write_line
from rookery.core import JournalError, Rollout, RookeryError, Task
from rookery.engine import Engine, InternalError
from rookery.engine.processes import new_event_loop
from rookery.journal import RunReader
from rookery.telemetry.logs import make_formatter, open_log_file
from rookery.view.stats import Stats
from rookery.view.summary import Summary, Throughput, read_summary

TICK = 0.2
SLOW_START = 5.0
"""If the start takes longer than this many seconds, a message says what it waits for."""
log = logging.getLogger("rookery.cli")
_SHOW_CURSOR = b"\x1b[?25h"


class ForegroundRun:
    """One execution of an engine in this process, from its start to its end or an interruption."""

    def __init__(
        self,
        engine: Engine,
        progress: ProgressDisplay,
        *,
        tasks: Sequence[Task] | None,
        k: int,
        about: Callable[[Engine], RunStart],
    ) -> None:
        """Prepare to run `tasks` with `k` rollouts each. If `tasks` is None, a resumed run continues.

        `about` is called when the engine is open, and returns what the progress display shows at the start.
        """
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
        """Run until all groups are finished, the engine fails, or a signal interrupts the run."""
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
        if self.signal is not None:  # the signal came before the task existed
            raise asyncio.CancelledError
        engine = self.engine
        engine.on_record = self._record
        engine.on_event = self._event
        slow = asyncio.get_running_loop().call_later(
            SLOW_START, self._show, self.progress.note, _describe_start(engine)
        )
        async with engine:
            slow.cancel()
            _open_run_log(engine)
            if self.tasks is not None:
                engine.register(self.tasks)
            self.progress.started(self.about(engine))
            if engine.metrics_url:
                self._show(self.progress.note, f"metrics at {engine.metrics_url}")
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
        """Update the progress display. An error of the display is logged, because it must not reach the engine."""
        try:
            call(*args)
        except Exception:
            log.exception("the progress display failed; the run continues")

    # ---- signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before: dict[signal.Signals, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored by nohup
                before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            # Runners and sandboxes die with this process.
            os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + b"\nkilled; continue with `rookery resume`\n")
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        if self._main is not None:
            # A signal handler may interrupt any code, so the event loop does the rest.
            self._main.get_loop().call_soon_threadsafe(self._interrupt)

    def _interrupt(self) -> None:
        assert self._main is not None
        self.progress.close()
        self.progress.note("stopping: cancelling the running rollouts (press again to exit at once)")
        self._main.cancel()

    # ---- the end

    @property
    def session(self) -> Throughput:
        return Throughput(
            seconds=self._seconds, rollouts=self.stats.rollouts, sampled_tokens=self.stats.sampled_tokens
        )

    def exit_code(self, summary: Summary | None) -> int:
        if self.signal is not None:
            return 128 + self.signal
        if self.error is not None:
            return Exit.BUG if isinstance(self.error, InternalError) else Exit.STOPPED
        failed = summary.stats.failed if summary is not None else self.stats.failed
        return Exit.FAILED if failed else Exit.OK


def _describe_start(engine: Engine) -> str:
    """Return a message that says what a slow start waits for. It contains no URL, which may hold credentials."""
    runners = " and the runner processes" if engine.config.runners else ""
    return f"starting: waiting for the model{runners}"


def _open_run_log(engine: Engine) -> None:
    """Write the log of this process to `logs/supervisor.log` in the directory of the run.

    An engine with JSON logs does so itself.
    """
    assert engine.folder is not None
    if engine.config.log_format == "text":
        path = engine.folder / "logs" / "supervisor.log"
        logging.getLogger().addHandler(open_log_file(path, make_formatter("text")))


def report_run(
    run: ForegroundRun, events: JsonLines | None, *, ending: Callable[[Summary], list[str]] = format_next_steps
) -> int:
    """Print a summary of the run's journal and suggested commands; return the exit code.

    With `events`, write a JSON event instead. `ending` returns the lines with the suggested commands.
    """
    summary = _read_final_summary(run)
    code = run.exit_code(summary)
    if run.error is not None:
        print_error(describe_error(run.error))
    if run.signal is not None and summary is not None:
        kept = plural(summary.stats.rollouts, "rollout")
        write_line(f"interrupted by {run.signal.name}: {kept} recorded, {summary.left:,} left")
    elif run.signal is not None:
        write_line(f"interrupted by {run.signal.name} before the first rollout")
    if events is not None:
        plain = summary.plain(run.session) if summary is not None else {}
        detail = {"error": str(run.error)} if run.error is not None else {}
        events.write("finished", **plain, **detail, exit_code=code)
    elif summary is not None:
        lines = ["", *format_summary(summary, run.session), *ending(summary)]
        write_line("\n".join(lines), err=False)
    return code


def _read_final_summary(run: ForegroundRun) -> Summary | None:
    folder = run.engine.folder
    if folder is None or not run.admitted:
        return None
    try:
        with RunReader(folder) as reader:
            return read_summary(reader, k=run.k)
    except JournalError as error:
        # On a full disk the journal may be unreadable. The reason for the stop is printed already.
        if run.error is None:
            run.error = error
        return None
