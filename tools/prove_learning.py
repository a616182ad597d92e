"""Show that policies learn with Rookery, also when infrastructure fails. Writes plots and a JSON summary.

    python tools/prove_learning.py seeds         the embedded policy on arithmetic, three seeds
    python tools/prove_learning.py faults        the same with 10% of the attempts killed
    python tools/prove_learning.py correlated    failures as missing data against failures as zero rewards
    python tools/prove_learning.py curves        draw a metric of several training runs, one curve per label

The last one trains two policies in an environment where the better way to answer fails more often. Failed
rollouts are missing data for Rookery, so the better way is learned. If failures are recorded as zero rewards, it
looks worse than the other one and is unlearned.
"""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from rookery import RetryPolicy
from rookery.trainer import TrainConfig, Trainer, read_metrics
from rookery.trainer.plot import plot_learning

ENVIRONMENTS = Path(__file__).with_name("learning_environments.py")
SETTINGS = Path(__file__).with_name("learn.toml")
"""Settings of the trainings on arithmetic, which `make learn` uses, too."""


@click.group()
def main() -> None:
    """Run one of the proofs."""


def train(env: str, out: Path, config: TrainConfig, **options: Any) -> Path:
    """Train the embedded policy, print the progress, and return the directory of the training run."""
    trainer = Trainer(env, config=config, out=out, **options)
    shown = ("step", "reward", "eval_pass_rate", "metric_tool", "valid", "failed", "seconds")

    def show(row: dict[str, Any]) -> None:
        click.echo(json.dumps({name: row[name] for name in shown if name in row}), err=True)

    trainer.on_row = show
    trainer.train()
    return trainer.folder.path


def report(out: Path, name: str, runs: dict[str, Path], summary: dict[str, Any]) -> None:
    plot_learning(list(runs.values()), out / name, labels=list(runs))
    (out / f"{name}.json").write_text(json.dumps(summary, indent=2))
    click.echo(json.dumps(summary))


def compare(out: Path, name: str, env: str, minutes: float, seeds: Sequence[int]) -> None:
    config = TrainConfig.from_mapping(tomllib.loads(SETTINGS.read_text())["train"] | {"minutes": minutes})
    runs = {f"seed {seed}": train(env, out, config, seed=seed) for seed in seeds}
    found = {label: [row for row in read_metrics(run) if "eval_pass_rate" in row] for label, run in runs.items()}
    summary = {
        label: {
            "before": rows[0]["eval_pass_rate"],
            "after": rows[-1]["eval_pass_rate"],
            "interval95": rows[-1]["eval_pass_rate_interval95"],
            "steps": rows[-1]["step"],
        }
        for label, rows in found.items()
    }
    report(out, name, runs, summary)


MINUTES = click.option("--minutes", default=15.0, show_default=True)
SEEDS = click.option("--seed", "seeds", multiple=True, type=int, default=(0, 1, 2), show_default=True)
OUT = click.option("--out", type=click.Path(path_type=Path), default=Path("build/learning"), show_default=True)


@main.command()
@MINUTES
@SEEDS
@OUT
def seeds(minutes: float, seeds: tuple[int, ...], out: Path) -> None:
    """Train on arithmetic without faults."""
    compare(out, "seeds", "arithmetic", minutes, seeds)


@main.command()
@MINUTES
@SEEDS
@OUT
def faults(minutes: float, seeds: tuple[int, ...], out: Path) -> None:
    """Train on arithmetic while 10% of the attempts are killed."""
    compare(out, "faults", f"{ENVIRONMENTS}:FaultyArithmetic", minutes, seeds)


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="LABEL=RUN…")
@click.option("--metric", default="eval_pass_rate", show_default=True)
@click.option("--window", default=1, show_default=True, help="Number of steps to average.")
@click.option("--title", default="")
@click.option("--target", type=click.Path(path_type=Path), required=True, help="File name without suffix.")
def curves(runs: tuple[str, ...], metric: str, window: int, title: str, target: Path) -> None:
    """Draw a metric of training runs over the steps. Runs with the same label have the same colour."""
    drawn: list[tuple[str, list[int], list[float]]] = []
    for run in runs:
        label, _, folder = run.partition("=")
        rows = [row for row in read_metrics(Path(folder)) if row.get(metric) is not None]
        values = [row[metric] for row in rows]
        means = [fmean(values[max(0, at + 1 - window) : at + 1]) for at in range(len(values))]
        drawn.append((label, [row["step"] for row in rows], means))
    draw_curves(drawn, target, title, metric.replace("_", " "))


@main.command()
@click.option("--steps", default=150, show_default=True)
@OUT
def correlated(steps: int, out: Path) -> None:
    """Train where the better path fails more often: failures as missing data, and as zero rewards."""
    # Zero rewards make the tool path worse by only 0.03, so the noise is averaged over many small updates.
    config = TrainConfig(
        steps=steps,
        groups=8,
        group_size=16,
        lag=0,
        refill=False,
        learning_rate=1e-5,
        decay=0,
        minibatches=1,
        eval_tasks=0,
    )
    runs = {
        f"failures {how}": train(
            f"{ENVIRONMENTS}:Detour",
            out,
            config,
            arguments={"failures": how},
            retry=RetryPolicy(attempts=1),
            breaker=None,
            runners=0,
        )
        for how in ("zero", "missing")
    }
    curves = {label: [get_tool_share(row) for row in read_metrics(run)] for label, run in runs.items()}
    title = "The tool path earns 0.9 and fails 20% of the time; guessing earns 0.75"
    drawn = [(label, list(range(1, len(shares) + 1)), shares) for label, shares in curves.items()]
    draw_curves(drawn, out / "correlated-shares", title, "share of the tool path")
    tail = max(1, steps // 10)
    summary = {
        label: {"before": sum(shares[:3]) / 3, "after": sum(shares[-tail:]) / tail}
        for label, shares in curves.items()
    }
    report(out, "correlated", runs, summary)


def get_tool_share(row: dict[str, Any]) -> float:
    """Return the share of rollouts that took the tool path. All failed rollouts did."""
    failed = sum(row["failed"].values())
    return float((row.get("metric_tool", 0.0) * row["valid"] + failed) / max(1, row["rollouts"]))


def draw_curves(curves: list[tuple[str, list[int], list[float]]], target: Path, title: str, metric: str) -> None:
    """Draw curves, each a label with steps and values, as PNG and SVG. Curves with one label have one colour."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    labels = list(dict.fromkeys(label for label, _, _ in curves))
    for number, (label, steps, values) in enumerate(curves):
        shown = label if all(label != other for other, _, _ in curves[:number]) else None
        axis.plot(
            steps, values, label=shown, color=f"C{labels.index(label)}", marker="." if len(steps) < 20 else None
        )
    axis.set(xlabel="training step", ylabel=metric, ylim=(0, 1), title=title)
    axis.grid(alpha=0.3)
    axis.legend()
    for suffix in (".png", ".svg"):
        figure.savefig(target.with_suffix(suffix), dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
