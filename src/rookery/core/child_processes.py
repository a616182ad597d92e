"""Command lines and environment variables of child processes.

OpenBLAS, MKL and OpenMP start a thread per core in every process. They read the variables that limit it once, when
the library is loaded, so the variables have to be in the environment of a process before it imports numpy.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

# Sets PR_SET_PDEATHSIG to SIGTERM, then runs the program.
_PROGRAM = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


def end_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` and ends it when this process ends, even if it is killed."""
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), *command]


THREAD_VARIABLES: Final[dict[str, tuple[str, ...]]] = {
    "OMP_NUM_THREADS": (),
    "OPENBLAS_NUM_THREADS": ("GOTO_NUM_THREADS", "OMP_NUM_THREADS"),
    "MKL_NUM_THREADS": ("OMP_NUM_THREADS",),
    "BLIS_NUM_THREADS": ("OMP_NUM_THREADS",),
    "NUMEXPR_NUM_THREADS": ("OMP_NUM_THREADS",),
    "VECLIB_MAXIMUM_THREADS": (),
}
"""The variable that sets each library's thread count, and the variables that the library reads if it is unset."""


def one_blas_thread(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to `environ` so that a process has one BLAS thread.

    A library whose variable is already set in `environ` is left alone. The same holds if a variable is set that
    the library falls back to: with `OMP_NUM_THREADS=4` nothing is added for OpenBLAS, because
    `OPENBLAS_NUM_THREADS=1` would override the user's four threads.
    """
    return {
        name: "1"
        for name, fallbacks in THREAD_VARIABLES.items()
        if not any(environ.get(known) for known in (name, *fallbacks))
    }
