"""Detect that the import of an environment's module hangs.

Runs in the supervisor and in runners, around the import of user code. An import counts as hung if no further
module was imported for `IDLE_SECONDS` while the process used almost no CPU time, or for `BUSY_SECONDS` in any
case. The check runs in a handler of SIGALRM in the main thread. Imports in other threads, and imports while the
process uses the timer for something else, are not watched.
"""

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from rookery.core import UsageError

IDLE_SECONDS: Final = 20.0
BUSY_SECONDS: Final = 180.0
WARN_SECONDS: Final = 5.0
"""Seconds after which a warning says that the import is slow."""
TICK: Final = 0.5
IDLE_CPU_SHARE: Final = 0.02
"""If an import uses less than this share of one CPU, it counts as idle."""

log = logging.getLogger("rookery.environments")


class ImportHangError(UsageError):
    """Raised if the import of an environment's module makes no progress."""


@contextmanager
def import_watchdog(source: str) -> Iterator[None]:
    """Raise `ImportHangError` inside the block if the import of `source`, which runs there, hangs.

    An import hangs after `IDLE_SECONDS` without progress and almost without CPU use, or after `BUSY_SECONDS`
    without progress.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    watchdog = _Watchdog(source)
    previous = signal.signal(signal.SIGALRM, watchdog.on_alarm)
    signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class _Watchdog:
    def __init__(self, source: str) -> None:
        self._source = source
        self._started = time.monotonic()
        self._warned = False
        self._modules = len(sys.modules)
        self._last_progress = self._started
        self._cpu = time.process_time()

    def on_alarm(self, _: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if len(sys.modules) != self._modules:
            self._modules, self._last_progress, self._cpu = len(sys.modules), now, time.process_time()
        stalled = now - self._last_progress
        if not self._warned and now - self._started > WARN_SECONDS:
            self._warned = True
            log.warning("the import of the environment %s takes long; it is at %s", self._source, _locate(frame))
        is_idle = time.process_time() - self._cpu < IDLE_CPU_SHARE * stalled
        if stalled > BUSY_SECONDS or (is_idle and stalled > IDLE_SECONDS):
            self._last_progress, self._cpu = now, time.process_time()
            raise ImportHangError(
                f"the import of {self._source} hangs: it made no progress for {stalled:.0f} seconds at "
                f"{_locate(frame)}. Move slow or waiting code out of the module, for example into `setup`"
            )


def _locate(frame: FrameType | None) -> str:
    """Return the file and line of the innermost frame that is not in the standard library, if there is one."""
    innermost = frame
    library = str(Path(threading.__file__).parent)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", library)):
            return f"{file}, line {frame.f_lineno}"
        frame = frame.f_back
    if innermost is None:
        return "an unknown line"
    return f"{innermost.f_code.co_filename}, line {innermost.f_lineno}"
