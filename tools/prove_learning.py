"""Show that policies learn with Rookery, also when infrastructure fails. Writes plots and a JSON summary.

    python tools/prove_learning.py seeds         the embedded policy on arithmetic, three seeds
    python tools/prove_learning.py faults        the same with 10% of the attempts killed
    python tools/prove_learning.py correlated    failures as missing data against failures as zero rewards

The last one trains two policies in an environment where the better way to answer fails more often. Failed
rollouts are missing data for Rookery, so the better way is learned. If failures are recorded as zero rewards, it
looks worse than the other one and is unlearned.
"""

import json
from pathlib import Path
from typing import Any

import click

from rookery import RetryPolicy
from rookery.trainer import TrainConfig, Trainer, read_metrics
from rookery.trainer.plot import plot_learning

ENVIRONMENTS = Path(__file__).with_name("learning_environments.py")


@click.group()
def main() -> None:
    """Run one of the proofs."""


def train(env: str, out: Path, config: TrainConfig, **options: Any) -> Path:
    """Train the embedded policy, print the progress, and return the directory of the training run."""
    trainer = Trainer(env, config=config, out=out, **options)
    shown = ("step", "reward", "eval_reward", "metric_tool", "valid", "failed", "seconds")

    def show(row: dict[str, Any]) -> None:
        click.echo(json.dumps({name: row[name] for name in shown if name in row}), err=True)

    trainer.on_row = show
    trainer.train()
    return trainer.folder.path


def report(out: Path, name: str, runs: dict[str, Path], summary: dict[str, Any]) -> None:
    plot_learning(list(runs.values()), out / name, labels=list(runs))
    (out / f"{name}.json").write_text(json.dumps(summary, indent=2))
    click.echo(json.dumps(summary))


def compare(out: Path, name: str, env: str, minutes: float, seeds: int) -> None:
    runs = {f"seed {seed}": train(env, out, TrainConfig(minutes=minutes), seed=seed) for seed in range(seeds)}
    found = {label: [row for row in read_metrics(run) if "eval_reward" in row] for label, run in runs.items()}
    summary = {
        label: {"before": rows[0]["eval_reward"], "after": rows[-1]["eval_reward"], "steps": rows[-1]["step"]}
        for label, rows in found.items()
    }
    report(out, name, runs, summary)


MINUTES = click.option("--minutes", default=15.0, show_default=True)
SEEDS = click.option("--seeds", default=3, show_default=True)
OUT = click.option("--out", type=click.Path(path_type=Path), default=Path("build/learning"), show_default=True)


@main.command()
@MINUTES
@SEEDS
@OUT
def seeds(minutes: float, seeds: int, out: Path) -> None:
    """Train on arithmetic without faults."""
    compare(out, "seeds", "arithmetic", minutes, seeds)


@main.command()
@MINUTES
@SEEDS
@OUT
def faults(minutes: float, seeds: int, out: Path) -> None:
    """Train on arithmetic while 10% of the attempts are killed."""
    compare(out, "faults", f"{ENVIRONMENTS}:FaultyArithmetic", minutes, seeds)


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
    draw_shares(curves, out / "correlated-shares")
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


def draw_shares(curves: dict[str, list[float]], target: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for label, shares in curves.items():
        axis.plot(range(1, len(shares) + 1), shares, label=label)
    axis.set(xlabel="training step", ylabel="share of the tool path", ylim=(0, 1))
    axis.set_title("The tool path earns 0.9 and fails 20% of the time; guessing earns 0.75")
    axis.grid(alpha=0.3)
    axis.legend()
    for suffix in (".png", ".svg"):
        figure.savefig(target.with_suffix(suffix), dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
