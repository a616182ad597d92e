"""Draw learning curves from the metrics of training runs. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rookery.core import UsageError
from rookery.trainer.folder import read_metrics

_PANELS = (
    ("reward", "mean reward of sampled rollouts"),
    ("entropy", "entropy"),
    ("sampler_kl", "KL between sampler and trainer"),
    ("grad_norm", "gradient norm"),
    ("staleness_mean", "staleness in versions"),
    ("tokens_per_second", "trained tokens/s"),
)
"""The metrics in the small panels, with their titles. The large panel shows the held-out reward."""


def import_pyplot() -> Any:
    """Return `matplotlib.pyplot`, without a display; raise `UsageError` if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise UsageError("plots need matplotlib: pip install 'rookery-rl[plot]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save_figure(figure: Any, target: Path) -> list[Path]:
    """Write a figure as `TARGET.png` and `TARGET.svg`, close it, and return the two paths."""
    paths = [target.with_name(f"{target.name}{suffix}") for suffix in (".png", ".svg")]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            figure.savefig(path, dpi=120)
    except OSError as error:
        raise UsageError(f"the plot {target} cannot be written: {error.strerror}") from error
    finally:
        import_pyplot().close(figure)
    return paths


def plot_learning(folders: Sequence[Path], target: Path, *, labels: Sequence[str] | None = None) -> list[Path]:
    """Write `TARGET.png` and `TARGET.svg` with the curves of these training runs; return the two paths.

    `labels` name the runs; by default they are the names of the directories.
    """
    plt = import_pyplot()
    runs = [read_metrics(folder) for folder in folders]
    names = labels or [folder.name for folder in folders]
    figure, axes = plt.subplot_mosaic(
        [["held-out", "held-out", "held-out"], ["reward", "entropy", "sampler_kl"],
         ["grad_norm", "staleness_mean", "tokens_per_second"]],
        figsize=(12, 9), height_ratios=(2, 1, 1), layout="constrained",
    )  # fmt: skip
    for rows, name in zip(runs, names, strict=True):
        _draw_held_out(axes["held-out"], rows, name)
        for metric, title in _PANELS:
            points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
            if points:
                axes[metric].plot(*zip(*points, strict=True), linewidth=1)
            axes[metric].set_title(title, fontsize=9)
            axes[metric].grid(alpha=0.3)
    axes["held-out"].set_title("held-out reward, with 95% intervals clustered by task")
    axes["held-out"].set_xlabel("training step")
    axes["held-out"].grid(alpha=0.3)
    axes["held-out"].legend(fontsize=8)
    return save_figure(figure, target)


def _draw_held_out(axis: Any, rows: list[dict[str, Any]], name: str) -> None:
    found = [row for row in rows if row.get("eval_reward") is not None]
    if not found:
        return
    steps, rewards = [row["step"] for row in found], [row["eval_reward"] for row in found]
    (line,) = axis.plot(steps, rewards, marker="o", markersize=3, label=name)
    bounds = [row.get("eval_interval95") or (row["eval_reward"], row["eval_reward"]) for row in found]
    axis.fill_between(
        steps, [low for low, _ in bounds], [high for _, high in bounds], alpha=0.15, color=line.get_color()
    )
