"""Command lines of child processes that end with their parent."""

import os
import sys
from collections.abc import Sequence

# Sets PR_SET_PDEATHSIG to SIGTERM, then runs the program.
_PROGRAM = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


def end_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` and ends it when this process ends, even if it is killed."""
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), *command]
