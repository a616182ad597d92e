"""Notice an environment whose import hangs.

Runs in the supervisor and in runners, around the import of user code. An import counts as hung when nothing more
was imported for a while: for `IDLE_SECONDS` if it also used no processor, for `BUSY_SECONDS` if it did. A hung
import raises `ImportHangsError` with the line it stands at. The check runs in a signal handler of the main thread;
imports in other threads are not watched.
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
TOLD_SECONDS: Final = 5.0
"""After which the log says that the import takes long."""
TICK: Final = 0.5
IDLE_SHARE: Final = 0.02
"""Share of a processor below which an import only waits."""

log = logging.getLogger("rookery.environments")


class ImportHangsError(UsageError):
    """The import of an environment's module does not come to an end."""


@contextmanager
def import_watch(what: str, idle: float = IDLE_SECONDS, busy: float = BUSY_SECONDS) -> Iterator[None]:
    """Raise `ImportHangsError` inside the block when the import of `what` hangs."""
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    watch = _Watch(what, idle, busy)
    before = signal.signal(signal.SIGALRM, watch.on_alarm)
    signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Watch:
    def __init__(self, what: str, idle: float, busy: float) -> None:
        self._what = what
        self._idle = idle
        self._busy = busy
        self._began = time.monotonic()
        self._told = False
        self._modules = len(sys.modules)
        self._since = self._began
        self._cpu = time.process_time()

    def on_alarm(self, _: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if len(sys.modules) != self._modules:
            self._modules, self._since, self._cpu = len(sys.modules), now, time.process_time()
        stood = now - self._since
        if not self._told and now - self._began > TOLD_SECONDS:
            self._told = True
            log.warning("still importing %s: it stands at %s", self._what, _place(frame))
        waits = time.process_time() - self._cpu < IDLE_SHARE * stood
        if stood > self._busy or (waits and stood > self._idle):
            self._since, self._cpu = now, time.process_time()
            raise ImportHangsError(
                f"the import of {self._what} hangs: it has stood at {_place(frame)} for {stood:.0f} seconds. Move "
                "what waits or takes long out of the module, for example into `setup`"
            )


def _place(frame: FrameType | None) -> str:
    """The innermost line outside of the standard library, else the innermost line."""
    innermost = frame
    library = str(Path(threading.__file__).parent)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", library)):
            return f"{file}, line {frame.f_lineno}"
        frame = frame.f_back
    return (
        f"{innermost.f_code.co_filename}, line {innermost.f_lineno}"
        if innermost is not None
        else "an unknown line"
    )
