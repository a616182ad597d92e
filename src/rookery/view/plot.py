"""Draw the curves of runs as PNG and SVG. Needs matplotlib."""

from collections.abc import Sequence
from itertools import accumulate
from math import isnan
from pathlib import Path
from typing import Any

from rookery.core import UsageError
from rookery.journal import RunReader
from rookery.trainer.plot import import_pyplot, save_figure
from rookery.view.comparison import Comparison
from rookery.view.index import RunIndex
from rookery.view.series import build_series, running_mean


def plot_runs(folders: Sequence[Path], target: Path) -> list[Path]:
    """Write `TARGET.png` and `TARGET.svg` with the curves of these runs; return the two paths."""
    plt = import_pyplot()
    figure, axes = plt.subplot_mosaic(
        [["reward", "reward"], ["rewards", "ended"], ["failed", "stages"]],
        figsize=(12, 9), height_ratios=(1.4, 1, 1), layout="constrained",
    )  # fmt: skip
    for folder in folders:
        _draw_run(axes, folder, single=len(folders) == 1)
    titles = {
        "reward": "mean reward of valid rollouts: all so far (line) and by interval (dots)",
        "rewards": "rewards of valid rollouts",
        "ended": "ended rollouts",
        "failed": "failed rollouts",
        "stages": "mean seconds per rollout and stage",
    }
    for name, title in titles.items():
        axes[name].set_title(title, fontsize=9)
        axes[name].grid(alpha=0.3)
        if name != "rewards":
            axes[name].set_xlabel("seconds since the first attempt", fontsize=8)
        if axes[name].get_legend_handles_labels()[0]:
            axes[name].legend(fontsize=7)
    return save_figure(figure, target)


def plot_comparison(found: Comparison, target: Path) -> list[Path]:
    """Write `TARGET.png` and `TARGET.svg` with a comparison of two runs; return the two paths."""
    if found.difference is None:
        raise UsageError("the runs have no task in common: there is nothing to draw")
    plt = import_pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    left.plot([0, 1], [0, 1], transform=left.transAxes, color="grey", linewidth=0.8)
    left.scatter([pair.a for pair in found.pairs], [pair.b for pair in found.pairs], s=16, alpha=0.5)
    low = min(min(pair.a, pair.b) for pair in found.pairs)
    high = max(max(pair.a, pair.b) for pair in found.pairs)
    margin = 0.05 * (high - low or 1.0)
    left.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin), xlabel="A", ylabel="B")
    left.set_title("mean reward of each task: above the line, B is better", fontsize=9)
    right.bar(range(len(found.pairs)), [pair.difference for pair in found.pairs], width=1.0)
    right.axhline(found.difference, color="black", linewidth=1)
    if found.interval95 is not None:
        right.axhspan(*found.interval95, alpha=0.2, color="black")
    right.set(xlabel="tasks, ordered by difference", ylabel="B - A")
    right.set_title(f"difference by task, mean {found.difference:+.4g} with its 95% interval", fontsize=9)
    figure.suptitle(f"A: {found.a}    B: {found.b}", fontsize=9)
    return save_figure(figure, target)


def _draw_run(axes: Any, folder: Path, *, single: bool) -> None:
    index = RunIndex()
    with RunReader(folder) as reader:
        index.update(reader)
    series = build_series(index)
    times = [series["seconds"] * (at + 1) for at in range(len(series["ended"]))]
    (line,) = axes["reward"].plot(*_known(times, running_mean(series)), label=folder.name)
    axes["reward"].plot(*_known(times, series["reward"]), ".", markersize=3, alpha=0.5, color=line.get_color())
    rewards = [reward for reward in index.numbers["reward"] if not isnan(reward)]
    if rewards:
        axes["rewards"].hist(rewards, bins=20, alpha=0.6, color=line.get_color())
    axes["ended"].plot(times, list(accumulate(series["ended"])), color=line.get_color())
    for cause, counts in sorted(series["failed"].items(), key=lambda pair: -sum(pair[1]))[:8]:
        axes["failed"].plot(
            times, list(accumulate(counts)), label=cause if single else f"{folder.name} {cause}", linewidth=1
        )
    if single:
        for stage, means in series["stages"].items():
            axes["stages"].plot(*_known(times, means), label=stage, linewidth=1)
    elif "run" in series["stages"]:
        axes["stages"].plot(*_known(times, series["stages"]["run"]), label=f"{folder.name} run", linewidth=1)


def _known(times: list[float], values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Return the points of a curve, without the intervals that have no value."""
    points = [(time, value) for time, value in zip(times, values, strict=True) if value is not None]
    return [time for time, _ in points], [value for _, value in points]
