"""Benchmark `all`: every figure that must not get worse, with its target. A regression guard.

It runs the other benchmarks one after the other and keeps the rows listed in `GUARDED`. A target that is missed by
more than 15% makes the command fail. A figure that cannot be measured on this machine is reported as missing.
"""

import time
from collections.abc import Mapping

from benchmarks import Progress, Result, run_bench

NAME = "all"
STRICT = True
TOLERANCE = 0.15

GUARDED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "demo": (("demo_s", ">= 0.87x"),),
    "sandbox": (
        ("runs_per_s", ">= 3x"),
        ("cold_python_ms", ">= 2x"),
        ("idle_exec_ratio", "<= 1.5"),
        ("kill_bomb_wall_ms", "<= 50"),
        ("idle_pss_mb", "<= 1.5"),
    ),
    "programs": (("programs_per_s", ">= 2x"),),
    "core-scaling": (("runs_16_cores", ">= 6x"),),
    "gateway": (
        ("rps_c16_32k", ">= 1.2x"),
        ("stream_rps_c16", ">= 1x"),
        ("rps_c64", ">= 0.5x"),
        ("turn_2_cpu_us", ">= 0.5x"),
        ("long_prompt_turn_growth", "<= 1.2"),
    ),
    "engine": (("rollout_cpu_ms", ">= 0.74x"),),
    "swe": (("rollout_overhead_ms", "<= 75"),),
    "docker": (("life_ms", ">= 0.91x"),),
}
"""Names and targets of the guarded rows, by benchmark."""


def run(quick: bool, progress: Progress) -> list[Result]:
    results: list[Result] = []
    for bench, guarded in GUARDED.items():
        began = time.perf_counter()
        report = run_bench(bench, quick=quick, progress=progress)
        progress(f"{bench}: {time.perf_counter() - began:.0f} s")
        results += select_guarded(bench, report.results, guarded)
    return results


def select_guarded(bench: str, results: tuple[Result, ...], guarded: tuple[tuple[str, str], ...]) -> list[Result]:
    """Return the guarded rows of a report, in the order of the guard. Raise `LookupError` if one is not there."""
    rows = {(result.name, result.target): result for result in results}
    if missing := [key for key in guarded if key not in rows]:
        raise LookupError(f"the benchmark {bench} has no row {missing}")
    return [rows[key] for key in guarded]
