# ruff: noqa: T201  (a program: its output is for people)
"""Trains the embedded policy from scratch, by imitation, on two CPU threads: `python tools/train_embedded.py`.

Promises:
- the same seed and steps give the same file, byte for byte, on the same kind of machine and torch;
- what is measured is what is written: the weights are rounded first, and the tasks are held-out ones;
- the weights and the record of how they came about appear whole or not at all, also after Ctrl-C.

Needs `pip install torch==2.13.0` beside Rookery. The record lies beside the weights, as `.json`.
"""

import argparse
import hashlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

# Threads that spin at a barrier take the core from the one they wait for wherever the machine does something
# else as well: 230 s instead of 15 s were measured. It must be said before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import msgspec
import torch
from embedded.model import SHAPE, Llama
from embedded.play import play
from embedded.training import Plan, Report, train

from rookery.environments.arithmetic import LEVELS, Arithmetic

THREADS: Final = 2
"""Fixed: another number of threads adds up in another order, and ends in other weights."""
OUT: Final = Path(__file__).parent.parent / "src/rookery/upstreams/embedded/policy.safetensors"
CURVE: Final = 25
"""About how many points of the loss are recorded."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    torch.set_num_threads(THREADS)
    began = time.monotonic()
    try:
        print(
            f"a Llama of {SHAPE.parameters:,} parameters, seed {options.seed}, {options.steps:,} steps"
            f"{f' or {options.seconds:g} s' if options.seconds else ''}, "
            f"torch {torch.__version__} on {THREADS} threads",
            flush=True,
        )
        record = made(options)
    except KeyboardInterrupt:
        print(f"stopped after {time.monotonic() - began:.0f} s: nothing was written", file=sys.stderr)
        return 130
    print(f"{options.out}: sha256 {record['sha256']}")
    return 0


def made(options: argparse.Namespace) -> dict[str, Any]:
    """Trains, measures and writes; returns the record."""
    plan = Plan(seed=options.seed, steps=options.steps, seconds=options.seconds)
    reports: list[Report] = []
    began, cpu = time.monotonic(), time.process_time()

    def told(report: Report) -> None:
        reports.append(report)
        print(
            f"step {report.step:>5}  {report.tokens / 1e6:5.2f} M tokens  loss {report.loss:.4f}  "
            f"{report.seconds:4.0f} s, {report.left:.0f} s left",
            flush=True,
        )

    model = train(plan, told, every=max(1, options.steps // CURVE))
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu
    weights = model.export()
    model.take(weights)
    data = weights.to_bytes("F16")
    last = reports[-1] if reports else None
    record = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "seed": plan.seed,
        "steps": last.step if last else 0,
        "tokens": last.tokens if last else 0,
        "loss": round(last.loss, 5) if last else None,
        "losses": [[report.step, round(report.loss, 5)] for report in reports],
        "held_out": measured(model, options.evaluate) if options.evaluate else None,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "threads": THREADS,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "plan": plan._asdict(),
        "parameters": SHAPE.parameters,
        "shape": msgspec.to_builtins(SHAPE),
    }
    _write(options.out, data, json.dumps(record, indent=1).encode() + b"\n")
    return record


def measured(model: Llama, count: int) -> dict[str, Any]:
    """How often held-out tasks are solved at temperature 1, over all and by level."""
    env = Arithmetic("held-out", size=count)
    began = time.monotonic()
    played = play(model, env, env.tasks())
    by_level = {level: [one.passed for one in played if one.task.data["level"] == level] for level in LEVELS}
    rates = {str(level): {"n": len(ends), "passed": sum(ends)} for level, ends in by_level.items()}
    passed = sum(one.passed for one in played)
    print(f"{passed / count:.1%} of {count:,} held-out tasks pass at temperature 1; by level: ", end="")
    print(", ".join(f"{level} {sum(ends) / max(1, len(ends)):.0%}" for level, ends in by_level.items()), end="")
    print(f" ({time.monotonic() - began:.0f} s)", flush=True)
    return {"temperature": 1.0, "seed": 0, "n": count, "passed": passed, "rate": passed / count, "levels": rates}


def _write(out: Path, weights: bytes, record: bytes) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    waiting: list[tuple[str, Path]] = []
    try:
        for path, data in ((out, weights), (out.with_suffix(".json"), record)):
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            waiting.append((name, path))
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).chmod(0o644)
        # Both or none: between the two, Ctrl-C waits.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for name, path in waiting:
                Path(name).replace(path)
        finally:
            signal.signal(signal.SIGINT, before)
    except BaseException:
        for name, _ in waiting:
            Path(name).unlink(missing_ok=True)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains the embedded policy from scratch on the CPU.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=_positive(int), default=Plan().steps)
    parser.add_argument(
        "--seconds",
        type=_positive(float),
        help="learn by the clock instead: the schedule ends then, wherever it is (not reproducible)",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the weights; the record lies beside it, as .json")
    parser.add_argument(
        "--evaluate",
        type=_positive(int, least=0),
        default=1_000,
        metavar="N",
        help="play N held-out tasks at the end (0: none)",
    )
    return parser


def _positive(kind: type, least: float = 1) -> Any:
    def checked(text: str) -> Any:
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least {least:g}, not {text}")
        return value

    checked.__name__ = kind.__name__
    return checked


if __name__ == "__main__":
    raise SystemExit(main())
