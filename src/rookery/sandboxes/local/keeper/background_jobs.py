"""Background jobs of the keeper: slow work (unpacking, copying, comparing) in one forked process per job.

The keeper is the daemon that creates local sandboxes. A job dies with the keeper and can be cancelled at any time.
Its callback is called exactly once, in the keeper, unless the keeper dies first.
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
    """Called when a job has ended, with a file descriptor of its result and an error message ("" on success).

    The descriptor is closed after the call."""

MAX_RESULT = 64 << 20


class BackgroundJob:
    """A forked process that does one piece of slow work for the keeper."""

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
    """Starts background jobs, and calls their callbacks when the keeper has reaped their processes."""

    def __init__(self) -> None:
        self._by_pid: dict[int, BackgroundJob] = {}

    def __len__(self) -> int:
        return len(self._by_pid)

    def start(
        self, work: Callable[[int], None], on_done: OnDone, inherited_fds: tuple[int, ...] = ()
    ) -> BackgroundJob:
        """Fork a process that calls `work` with a file descriptor to which it writes its result.

        `on_done` is called in the keeper when the process has ended. Of the keeper's other descriptors, the
        process keeps only `inherited_fds`.
        """
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
        """If the reaped child `pid` was a job, call the job's callback. Return whether it was a job."""
        job = self._by_pid.pop(pid, None)
        if job is None:
            return False
        try:
            error = "the job was cancelled" if job.cancelled else ""
            if status and not error:
                error = os.pread(job.errors, 2000, 0).decode("utf-8", "replace") or f"wait status {status}"
            elif os.fstat(job.result).st_size > MAX_RESULT:
                error = f"the result of the job is longer than {MAX_RESULT} bytes"
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
