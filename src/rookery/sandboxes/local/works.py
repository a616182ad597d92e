"""Work of the keeper that would keep it from its loop: done by forks of it, one for each piece. Stand-alone.

Promises:
- whoever asked is told exactly once how it ended;
- a piece of work dies with the keeper, and at once when it is given up;
- what it says is bounded.
"""

from __future__ import annotations

import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Ended = Callable[[int, str], None]
    """Told: a descriptor of what it wrote, to be used at once, and what went wrong; empty where nothing did."""

if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes import procs
    from rookery.sandboxes.local import kernel as k
    from rookery.sandboxes.small import _signal, suppress
else:
    import kernel as k
    import procs
    from small import _signal, suppress

MAX_SAID = 64 << 20
"""Bytes of a result."""


class Work:
    __slots__ = ("ended", "errors", "given_up", "pid", "result")

    def __init__(self, pid: int, result: int, errors: int, ended: Ended) -> None:
        self.pid = pid
        self.result = result
        self.errors = errors
        self.ended = ended
        self.given_up = False

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self.given_up = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, _signal.SIGKILL)


class Works:
    def __init__(self) -> None:
        self._by_pid: dict[int, Work] = {}

    def __len__(self) -> int:
        return len(self._by_pid)

    def start(self, do: Callable[[int], None], ended: Ended, keep: tuple[int, ...] = ()) -> Work:
        """`do` gets a descriptor to write its result to. `keep`: descriptors that it needs."""
        result = os.memfd_create("result", os.MFD_CLOEXEC)
        errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _signal.set_wakeup_fd(-1)
                for number in (_signal.SIGCHLD, _signal.SIGTERM):
                    _signal.signal(number, _signal.SIG_DFL)
                k.die_with_parent()
                if os.getppid() == parent:
                    _close_but({0, 1, 2, result, errors, *keep})
                    procs.lower(resource.RLIMIT_CORE, 0)
                    do(result)
                    code = 0
            except BaseException as error:
                os.write(errors, (f"{error}" or type(error).__name__).encode("utf-8", "replace")[:2000])
            finally:
                os._exit(code)
        work = Work(pid, result, errors, ended)
        self._by_pid[pid] = work
        return work

    def reaped(self, pid: int, status: int) -> bool:
        """Whether it was one of ours that ended."""
        work = self._by_pid.pop(pid, None)
        if work is None:
            return False
        try:
            why = "it was given up" if work.given_up else ""
            if status and not why:
                why = os.pread(work.errors, 2000, 0).decode("utf-8", "replace") or f"wait status {status}"
            elif os.fstat(work.result).st_size > MAX_SAID:
                why = "the result is too long"
            work.ended(work.result, why)
        finally:
            os.close(work.result)
            os.close(work.errors)
        return True

    def close(self) -> None:
        for work in self._by_pid.values():
            work.give_up()


def _close_but(kept: set[int]) -> None:
    """No line to a box or to an owner may be held open by work that goes on after they are gone."""
    last = 2
    for fd in sorted(kept):
        if fd > last + 1:
            k.close_range(last + 1, fd - 1)
        last = max(last, fd)
    k.close_range(last + 1)
