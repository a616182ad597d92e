# ruff: noqa: T201  (a program: its output is for people)
"""Train the embedded policy from scratch by imitation: `python tools/train_embedded.py --device cuda`.

Guarantees:
- on the CPU, the same seed and steps give the same file, byte for byte, on the same kind of machine and version of
  torch; on a GPU, sums have no fixed order, and the weights differ a little each time;
- the evaluated weights are the written ones: they are rounded first; the tasks are held out;
- weights and training record are written completely or not at all, also after Ctrl-C.

Needs torch beside Rookery. The record is a `.json` file beside the weights.
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

# On a busy machine, threads that spin at a barrier block the thread they wait for: 230 s instead of 15 s were
# measured. The variable must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import msgspec
import torch
from embedded.evaluation import evaluate
from embedded.model import SHAPE, Llama
from embedded.training import Plan, Report, train

from rookery.environments.arithmetic import LEVELS, Arithmetic

THREADS: Final = 2
"""Fixed, because another number of threads adds in another order and gives other weights."""
OUT: Final = Path(__file__).parent.parent / "src/rookery/upstreams/embedded/policy.safetensors"
LOSS_POINTS: Final = 25
"""Approximate number of recorded losses."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    torch.set_num_threads(THREADS)
    began = time.monotonic()
    try:
        print(
            f"Llama with {SHAPE.parameters:,} parameters, seed {options.seed}, {options.steps:,} steps"
            f"{f' or {options.seconds:g} s' if options.seconds else ''}, "
            f"torch {torch.__version__} on {options.device}",
            flush=True,
        )
        record = train_and_write(options)
    except KeyboardInterrupt:
        print(f"stopped after {time.monotonic() - began:.0f} s: nothing was written", file=sys.stderr)
        return 130
    print(f"{options.out}: sha256 {record['sha256']}")
    return 0


def train_and_write(options: argparse.Namespace) -> dict[str, Any]:
    """Train, evaluate and write the weights; return the training record."""
    plan = Plan(
        seed=options.seed,
        steps=options.steps,
        seconds=options.seconds,
        batch=options.batch,
        rate=options.rate,
        device=options.device,
    )
    reports: list[Report] = []
    began, cpu = time.monotonic(), time.process_time()

    def on_report(report: Report) -> None:
        reports.append(report)
        print(
            f"step {report.step:>5}  {report.tokens / 1e6:5.2f} M tokens  loss {report.loss:.4f}  "
            f"{report.seconds:4.0f} s, {report.left:.0f} s left",
            flush=True,
        )

    model = train(plan, on_report, every=max(1, options.steps // LOSS_POINTS))
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu
    weights = model.export()
    model.load(weights)
    data = weights.to_bytes("F16")
    last = reports[-1] if reports else None
    record = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "seed": plan.seed,
        "steps": last.step if last else 0,
        "tokens": last.tokens if last else 0,
        "loss": round(last.loss, 5) if last else None,
        "losses": [[report.step, round(report.loss, 5)] for report in reports],
        "held_out": evaluate_model(model, options.evaluate) if options.evaluate else None,
        "held_out_greedy": evaluate_model(model, options.evaluate, temperature=0.0) if options.evaluate else None,
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


def evaluate_model(model: Llama, count: int, temperature: float = 1.0) -> dict[str, Any]:
    """Return how many held-out tasks are solved, in total and by level. Temperature 0 takes the likeliest."""
    env = Arithmetic("held-out", size=count)
    began = time.monotonic()
    rollouts = evaluate(model, env, env.tasks(), temperature=temperature)
    by_level = {level: [one.passed for one in rollouts if one.task.data["level"] == level] for level in LEVELS}
    rates = {str(level): {"n": len(results), "passed": sum(results)} for level, results in by_level.items()}
    passed = sum(one.passed for one in rollouts)
    print(
        f"{passed / count:.1%} of {count:,} held-out tasks pass at temperature {temperature:g}; by level: ", end=""
    )
    print(
        ", ".join(f"{level} {sum(results) / max(1, len(results)):.0%}" for level, results in by_level.items()),
        end="",
    )
    print(f" ({time.monotonic() - began:.0f} s)", flush=True)
    return {
        "temperature": temperature,
        "seed": 0,
        "n": count,
        "passed": passed,
        "rate": passed / count,
        "levels": rates,
    }


def _write(out: Path, weights: bytes, record: bytes) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    pending: list[tuple[str, Path]] = []
    try:
        for path, data in ((out, weights), (out.with_suffix(".json"), record)):
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            pending.append((name, path))
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).chmod(0o644)
        # Ctrl-C is blocked here, so that both files are replaced or none.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for name, path in pending:
                Path(name).replace(path)
        finally:
            signal.signal(signal.SIGINT, before)
    except BaseException:
        for name, _ in pending:
            Path(name).unlink(missing_ok=True)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the embedded policy from scratch.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=_positive(int), default=Plan().steps)
    parser.add_argument("--batch", type=_positive(int), default=Plan().batch, help="tokens per step")
    parser.add_argument("--rate", type=float, default=Plan().rate, help="learning rate of the matrices")
    parser.add_argument("--device", default=Plan().device, help="device of torch: cpu or cuda")
    parser.add_argument(
        "--seconds",
        type=_positive(float),
        help="end the schedule after this time instead of --steps (not reproducible)",
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help="file for the weights; the record is a .json file beside it"
    )
    parser.add_argument(
        "--evaluate",
        type=_positive(int, least=0),
        default=1_000,
        metavar="N",
        help="evaluate on N held-out tasks at the end (0: none)",
    )
    return parser


def _positive(kind: type, least: float = 1) -> Any:
    def convert(text: str) -> Any:
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least {least:g}, not {text}")
        return value

    convert.__name__ = kind.__name__
    return convert


if __name__ == "__main__":
    raise SystemExit(main())
