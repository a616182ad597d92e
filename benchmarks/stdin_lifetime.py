"""A leash: runs a program for as long as its own standard input is open.

Promises:
- when standard input ends, because who started it closed it or died, the program is asked to end, and after five
  seconds made to, with everything below it, also what left its process group or lost its parent;
- it ends when the program does, with its status; nothing that the program started is left then either.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

from benchmarks.process_usage import family

PATIENCE = 5.0
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: what lost its parent below us becomes our child


def leash(words: list[str]) -> int:
    """Runs the words; their status, or 1 when they were made to end."""
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True) as child:
        try:
            descriptor = os.pidfd_open(child.pid)
            try:
                ready, _, _ = select.select([0, descriptor], [], [])
                if descriptor not in ready:
                    with suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGTERM)
                    select.select([descriptor], [], [], PATIENCE)
            finally:
                os.close(descriptor)
        finally:
            status = child.poll()
            _end_all()
    return 1 if status is None else status


def _end_all() -> None:
    """Kills what is below us until nothing is; who dies leaves children that become ours."""
    while below := family([os.getpid()]) - {os.getpid()}:
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


if __name__ == "__main__":
    sys.exit(leash(sys.argv[1:]))
