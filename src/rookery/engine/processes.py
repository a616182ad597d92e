"""Small matters of processes: an end together with the parent, and the event loop we use."""

import asyncio
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

in_runner = False
"""Whether this is a runner process; not a variable, which programs started from an environment would inherit."""


def die_with_parent(parent: int) -> None:
    """The kernel kills us when the parent thread ends. Elsewhere than on Linux the closed wire has to do."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before we asked
        os._exit(0)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: a third of the CPU of a rollout is the loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
