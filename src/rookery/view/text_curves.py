"""The curves of a run as text, for terminals: one line per curve."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.journal import RunReader
from rookery.trainer.folder import read_metrics
from rookery.view.index import RunIndex
from rookery.view.series import build_series, running_mean

WIDTH: Final = 60
"""Number of characters of a curve."""
LEVELS: Final = "▁▂▃▄▅▆▇█"
LEARNING: Final = (
    "eval_reward",
    "reward",
    "entropy",
    "sampler_kl",
    "grad_norm",
    "staleness_mean",
    "tokens_per_second",
)
"""The metrics of a training run that are shown, as in its plot."""


class TextCurve(msgspec.Struct, frozen=True):
    """A curve with its range. `line` has one character per part of the curve; a space has no value."""

    name: str
    low: float
    high: float
    last: float
    line: str


def draw_curve(name: str, values: Sequence[float | None], width: int = WIDTH) -> TextCurve | None:
    """Return a curve as one line of text; None if it has no values. A long curve shows the means of its parts."""
    known = [value for value in values if value is not None and isfinite(value)]
    if not known:
        return None
    parts = min(width, len(values))
    means = [_mean(values[len(values) * at // parts : len(values) * (at + 1) // parts]) for at in range(parts)]
    shown = [mean for mean in means if mean is not None]
    low, high = min(shown), max(shown)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    line = "".join(" " if mean is None else LEVELS[round((mean - low) * scale)] for mean in means)
    return TextCurve(name, min(known), max(known), known[-1], line)


def draw_run(folder: Path) -> list[TextCurve]:
    """Return the curves of a run over time."""
    index = RunIndex()
    with RunReader(folder) as reader:
        index.update(reader)
    series = build_series(index)
    curves = [("reward so far", running_mean(series)), ("reward by interval", series["reward"])]
    curves.append(("ended rollouts", list(accumulate(series["ended"]))))
    curves += [
        (f"failed: {cause}", list(accumulate(counts))) for cause, counts in sorted(series["failed"].items())
    ]
    curves += [(f"seconds: {stage}", means) for stage, means in series["stages"].items()]
    return list(_draw(curves))


def draw_learning(folder: Path) -> list[TextCurve]:
    """Return the curves of a training run over its steps."""
    rows = read_metrics(folder)
    return list(_draw((name, [row[name] for row in rows if row.get(name) is not None]) for name in LEARNING))


def _draw(curves: Any) -> Iterator[TextCurve]:
    for name, values in curves:
        if (curve := draw_curve(name, values)) is not None:
            yield curve


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and isfinite(value)]
    return sum(known) / len(known) if known else None
