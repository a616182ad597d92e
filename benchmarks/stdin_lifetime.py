"""Run a command for as long as standard input is open: `python -m benchmarks.stdin_lifetime COMMAND…`.

A benchmark starts its servers this way and holds the other end of the pipe, so that no server survives it.

Guarantees:
- when standard input is closed, because the parent closed it or died, the command gets SIGTERM, and after five
  seconds it and all its descendants are killed, including those that left the process group or lost their parent;
- when the command exits, this program exits with the same status, and kills all descendants that are left.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

from benchmarks.process_usage import process_tree

TERM_SECONDS = 5.0
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphaned descendants become our children


def run_while_stdin_open(command: list[str]) -> int:
    """Run the command and return its exit status, or 1 if it had to be stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as child:
        try:
            descriptor = os.pidfd_open(child.pid)
            try:
                ready, _, _ = select.select([0, descriptor], [], [])
                if descriptor not in ready:
                    with suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGTERM)
                    select.select([descriptor], [], [], TERM_SECONDS)
            finally:
                os.close(descriptor)
        finally:
            status = child.poll()
            _kill_descendants()
    return 1 if status is None else status


def _kill_descendants() -> None:
    """Kill all descendants. Repeat, because the children of a killed process become ours."""
    while descendants := process_tree([os.getpid()]) - {os.getpid()}:
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


if __name__ == "__main__":
    sys.exit(run_while_stdin_open(sys.argv[1:]))
