"""Benchmark `demo`: the time of `rookery demo`, beside the same with one thread for matrix products.

The demonstration samples from the embedded model in several processes. If each of them started a BLAS thread per
core, the threads would compete, so the plain command must be as fast as one with `OPENBLAS_NUM_THREADS=1`.

Method: both alternate; the first run of each is a warm-up; figures are medians.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks import CHECKOUT, Progress, Result

NAME = "demo"
ROLLOUTS = 120
PEER = "one BLAS thread"
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
TIMEOUT = 600.0


def run(quick: bool, progress: Progress) -> list[Result]:
    plain = {name: value for name, value in os.environ.items() if name not in _THREAD_VARIABLES}
    times: dict[str, list[float]] = {"plain": [], PEER: []}
    for at in range(3 if quick else 8):
        progress(f"demo, {'warm-up' if at == 0 else f'round {at}'}")
        for name, env in (("plain", plain), (PEER, plain | dict.fromkeys(_THREAD_VARIABLES, "1"))):
            took = _demo_s(env)
            if at:
                times[name].append(took)
    return [
        Result(
            name="demo_s",
            unit="s",
            ours=median(times["plain"]),
            peer=PEER,
            theirs=median(times[PEER]),
            target=">= 0.87x",
            note=f"{ROLLOUTS} rollouts, no environment variable set",
        )
    ]


def _demo_s(env: dict[str, str]) -> float:
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder:
        began = time.perf_counter()
        done = subprocess.run(
            (Path(sys.executable).with_name("rookery"), "demo", "--out", folder),
            env=env,
            cwd=CHECKOUT,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
        took = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"rookery demo exited with {done.returncode}: {done.stderr[-500:]!r}")
    return took
