"""Count the BLAS threads of a process, and an environment that reports them from a runner."""

import ctypes
import os
import re
import sys
from pathlib import Path

import numpy as np

from rookery import Context, Environment

_GETTERS = ("openblas_get_num_threads", "scipy_openblas_get_num_threads", "MKL_Get_Max_Threads")


def blas_threads() -> list[int]:
    """Return the number of threads of each BLAS library in this process, after a first use."""
    square = np.ones((256, 256))
    assert (square @ square)[0, 0] == 256
    found = []
    libraries = set(re.findall(r"/\S*(?:blas|mkl_rt|blis)\S*\.so\S*", Path("/proc/self/maps").read_text()))
    for path in sorted(libraries):
        library = ctypes.CDLL(path)
        for getter in (f"{name}{suffix}" for name in _GETTERS for suffix in ("", "64_")):
            if hasattr(library, getter):
                found.append(int(getattr(library, getter)()))
                break
    return found


class ReportsBlasThreads(Environment):
    """Records the number of BLAS threads of its process."""

    name = "reports-blas-threads"

    def tasks(self) -> list[str]:
        return ["question"]

    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat(ctx.task.prompt)
        ctx.info |= {"blas": blas_threads(), "pid": os.getpid()}

    async def score(self, ctx: Context) -> float:
        return 1.0


if __name__ == "__main__":
    print(*blas_threads(), file=sys.stdout)
