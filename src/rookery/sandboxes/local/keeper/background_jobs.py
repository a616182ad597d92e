"""Slow work of the keeper (unpacking, copying, comparing), done in a forked process per job.

A job ends with the keeper and can be cancelled at any time. Its callback is called exactly once, in the keeper.
"""

from __future__ import annotations

import os
import resource

from rookery.sandbox_runtime import processes, syscalls
from rookery.sandbox_runtime.lightweight import _signal, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    OnDone = Callable[[int, str], None]
    """Called with a file descriptor of the result, valid during the call, and an error message or ""."""

MAX_RESULT = 64 << 20


class BackgroundJob:
    """A forked process that works on something."""

    __slots__ = ("cancelled", "errors", "on_done", "pid", "result")

    def __init__(self, pid: int, result: int, errors: int, on_done: OnDone) -> None:
        self.pid = pid
        self.result = result
        self.errors = errors
        self.on_done = on_done
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, _signal.SIGKILL)


class BackgroundJobs:
    """Starts jobs and calls their callbacks when the keeper has reaped them."""

    def __init__(self) -> None:
        self._by_pid: dict[int, BackgroundJob] = {}

    def __len__(self) -> int:
        return len(self._by_pid)

    def start(
        self, work: Callable[[int], None], on_done: OnDone, inherited_fds: tuple[int, ...] = ()
    ) -> BackgroundJob:
        """Fork a process that calls `work` with a file descriptor for its result."""
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
                syscalls.die_with_parent()
                if os.getppid() == parent:
                    _close_all_except({0, 1, 2, result, errors, *inherited_fds})
                    processes.lower_limit(resource.RLIMIT_CORE, 0)
                    work(result)
                    code = 0
            except BaseException as error:
                os.write(errors, (f"{error}" or type(error).__name__).encode("utf-8", "replace")[:2000])
            finally:
                os._exit(code)
        job = BackgroundJob(pid, result, errors, on_done)
        self._by_pid[pid] = job
        return job

    def on_child_reaped(self, pid: int, status: int) -> bool:
        """Finish the job of a reaped child. Return whether it was one."""
        job = self._by_pid.pop(pid, None)
        if job is None:
            return False
        try:
            error = "it was cancelled" if job.cancelled else ""
            if status and not error:
                error = os.pread(job.errors, 2000, 0).decode("utf-8", "replace") or f"wait status {status}"
            elif os.fstat(job.result).st_size > MAX_RESULT:
                error = f"its result is longer than {MAX_RESULT} bytes"
            job.on_done(job.result, error)
        finally:
            os.close(job.result)
            os.close(job.errors)
        return True

    def cancel_all(self) -> None:
        for job in self._by_pid.values():
            job.cancel()


def _close_all_except(fds: set[int]) -> None:
    """Close inherited descriptors: a job must not hold a connection open after its sandbox or owner is gone."""
    last = 2
    for fd in sorted(fds):
        if fd > last + 1:
            syscalls.close_range(last + 1, fd - 1)
        last = max(last, fd)
    syscalls.close_range(last + 1)
