"""Benchmarks of Rookery beside other systems, measured in one run: `python -m benchmarks NAME` in a checkout.

A benchmark is a module of this package with a top-level `NAME = "..."` and a function `run(quick, progress) ->
list[Result]`, sync or async. Adding one needs no other change. With `STRICT = True` in its module, a target that
is not met makes the command fail; with `TOLERANCE = 0.15` only one that is missed by more than 15%.

Guarantees:
- a ratio says how many times better than the peer Rookery is: above 1 is better, whatever the unit;
- a missing peer is reported by name, without a figure, a ratio or a verdict on the ratio;
- a figure of Rookery's own that cannot be measured here is reported as missing in the same way;
- verdicts use the measured figures, not the rounded ones;
- there is one row per name, peer and target;
- listing the benchmarks imports none of them, so a benchmark that cannot be imported does not affect the others.
"""

import inspect
import math
import os
import platform
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec

import rookery
from rookery.core import UsageError

CHECKOUT = Path(__file__).resolve().parent.parent
"""Working directory of the processes that benchmarks start with `python -m benchmarks.MODULE`."""

Progress = Callable[[str], None]

_NAME = re.compile(r"^NAME(?:\s*:[^=\n]+)?\s*=\s*[\"']([a-z0-9-]+)[\"']", re.MULTILINE)
_TARGET = re.compile(r"(<=|>=|<|>) (\d+(?:\.\d+)?)(x?)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda value, bound: value <= bound,
    ">=": lambda value, bound: value >= bound,
    "<": lambda value, bound: value < bound,
    ">": lambda value, bound: value > bound,
}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a report. Target `<= 0.45` is about our figure, target `>= 20x` about the ratio to the peer."""

    name: str
    unit: str
    ours: float | None
    peer: str | None = None
    theirs: float | None = None
    target: str | None = None
    lower_is_better: bool = True
    note: str = ""

    def __post_init__(self) -> None:
        for figure in (self.ours, self.theirs):
            if figure is not None and not math.isfinite(figure):
                raise ValueError(f"{self.name}: {figure} is not a finite figure")
        if self.theirs is not None and self.peer is None:
            raise ValueError(f"{self.name}: a peer's figure needs the peer's name")
        if self.target is not None:
            parsed = _TARGET.fullmatch(self.target)
            if parsed is None:
                raise ValueError(f"{self.name}: the target {self.target!r} must look like '<= 0.45' or '>= 20x'")
            if parsed[3] and self.peer is None:
                raise ValueError(f"{self.name}: the target {self.target!r} needs a peer")

    @property
    def ratio(self) -> float | None:
        """Factor by which Rookery is better than the peer; None without two positive figures."""
        if self.ours is None or self.theirs is None or self.ours <= 0 or self.theirs <= 0:
            return None
        ratio = self.theirs / self.ours if self.lower_is_better else self.ours / self.theirs
        return ratio if math.isfinite(ratio) else None

    @property
    def met(self) -> bool | None:
        """True if the target is met; None without a target or if the ratio it needs is missing."""
        parsed = _TARGET.fullmatch(self.target) if self.target is not None else None
        if parsed is None:
            return None
        value = self.ratio if parsed[3] else self.ours
        return None if value is None else _COMPARE[parsed[1]](value, float(parsed[2]))

    @property
    def shortfall(self) -> float | None:
        """Distance to the target as a share of the target; 0 if it is met, None without a verdict."""
        parsed = _TARGET.fullmatch(self.target) if self.target is not None else None
        if parsed is None or self.met is None:
            return None
        value, bound = self.ratio if parsed[3] else self.ours, float(parsed[2])
        assert value is not None
        return 0.0 if self.met else abs(value - bound) / bound if bound else math.inf

    def row(self) -> dict[str, Any]:
        """Return the row for the JSON report. `note` is present only if it is not empty."""
        row = {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "peer": self.peer,
            "theirs": self.theirs,
            "ratio": self.ratio,
            "target": self.target,
            "met": self.met,
        }
        return row | {"note": self.note} if self.note else row


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of a benchmark, and the machine on which it ran."""

    bench: str
    machine: dict[str, Any]
    results: tuple[Result, ...]

    def __post_init__(self) -> None:
        seen: set[tuple[str, str | None, str | None]] = set()
        for result in self.results:
            key = (result.name, result.peer, result.target)
            if key in seen:
                raise ValueError(f"two rows for {key}")
            seen.add(key)

    def to_json(self) -> bytes:
        """Return the report as one JSON object on one line, without a newline."""
        return msgspec.json.encode(
            {
                "bench": self.bench,
                "machine": self.machine,
                "results": [result.row() for result in self.results],
            }
        )


@cache
def find_modules() -> dict[str, str]:
    """Map benchmark names to modules by reading the source files, without importing them."""
    found: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem != "__init__" and (match := _NAME.search(path.read_text(encoding="utf-8"))):
            found[match[1]] = f"{__name__}.{path.stem}"
    return found


def bench_names() -> list[str]:
    """Return the names of all benchmarks, sorted."""
    return sorted(find_modules())


def run_bench(name: str, *, quick: bool, progress: Progress, **options: str | int) -> BenchReport:
    """Run one benchmark and return its report. `options` are further arguments that only some of them take."""
    if name not in find_modules():
        raise UsageError(f"there is no benchmark {name!r}; choose one of: {', '.join(bench_names())}")
    run = import_module(find_modules()[name]).run
    if unknown := sorted(options.keys() - inspect.signature(run).parameters.keys()):
        raise UsageError(f"the benchmark {name} has no option --{unknown[0]}")
    about = describe_machine()  # before the benchmark starts, so that the reported load is not its own
    outcome = run(quick, progress, **options)
    results = _run_async(outcome) if inspect.isawaitable(outcome) else outcome
    return BenchReport(bench=name, machine=about, results=tuple(cast("list[Result]", results)))


def find_misses(report: BenchReport) -> list[Result]:
    """Return the rows that make the command fail: those of a strict benchmark beyond its tolerance."""
    module = import_module(find_modules()[report.bench])
    if not getattr(module, "STRICT", False):
        return []
    tolerance: float = getattr(module, "TOLERANCE", 0.0)
    return [result for result in report.results if (result.shortfall or 0.0) > tolerance]


def _run_async(outcome: Awaitable[list[Result]]) -> list[Result]:
    import asyncio

    import uvloop

    async def main() -> list[Result]:
        return await outcome

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def describe_machine() -> dict[str, Any]:
    """Return processor, usable cores, memory, kernel, Python version and load of this machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "rookery": rookery.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def percentiles(times: Sequence[float]) -> str:
    """Return the number of measurements and their 10th and 90th percentiles, for a note."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return f"{len(ordered)} times, p10 {ordered[tenth]:.2f}, p90 {ordered[-1 - tenth]:.2f}"


def render(report: BenchReport) -> None:
    """Print the report as a table on stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Eight columns have to fit into a terminal of 80 characters.
    table = Table(title=f"benchmark {report.bench}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("name", "unit", "ours", "peer", "theirs", "ratio", "target", "met"):
        numeric = column in {"ours", "theirs", "ratio"}
        table.add_column(column, justify="right" if numeric else "left", no_wrap=column != "peer", overflow="fold")
    for result in report.results:
        missing = result.peer is not None and result.theirs is None
        verdict = {True: Text("yes", "green"), False: Text("no", "red"), None: Text("")}[result.met]
        table.add_row(
            Text(result.name),
            Text(result.unit),
            Text("missing", "yellow") if result.ours is None else Text(_figure(result.ours)),
            Text(result.peer or ""),
            Text("missing", "yellow") if missing else Text(_figure(result.theirs)),
            Text("" if result.ratio is None else f"{_figure(result.ratio)}x"),
            Text(result.target or ""),
            verdict,
        )
    console = Console(width=shutil.get_terminal_size((120, 24)).columns)
    console.print(table)
    for note in dict.fromkeys(f"{result.name}: {result.note}" for result in report.results if result.note):
        console.print(Text(note, "dim"))
    console.print(Text(", ".join(f"{key} {value}" for key, value in report.machine.items()), "dim"))


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
