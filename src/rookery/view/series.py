"""Curves of a run over time: rewards, outcomes, failures by cause and durations of stages, in equal intervals."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rookery.view.index import STAGES, RunIndex

INTERVALS: Final = 100
SHOWN_STAGES: Final = tuple(stage for stage in STAGES if stage != "paused")


def build_series(index: RunIndex, intervals: int = INTERVALS) -> dict[str, Any]:
    """Return the curves of a run as plain data, with one value per interval of time.

    A rollout counts in the interval in which its last attempt ended. A mean over no rollouts is None.
    """
    columns = {name: np.frombuffer(values) for name, values in index.numbers.items() if len(values)}
    known = np.flatnonzero(columns["ended"]) if columns else np.zeros(0, dtype=np.int64)
    if not len(known):
        return {"start": 0.0, "seconds": 0.0, "ended": [], "valid": [], "reward": [], "failed": {}, "stages": {}}
    ends, starts = columns["ended"][known], columns["started"]
    first = min(float(ends.min()), float(starts[starts > 0].min(initial=np.inf)))
    width = max(float(ends.max()) - first, 1e-6) / intervals
    at = np.minimum(((ends - first) / width).astype(np.int64), intervals - 1)

    def add_up(rows: npt.NDArray[np.bool_], values: npt.NDArray[np.float64] | None = None) -> list[float]:
        weights = None if values is None else values[rows]
        found: list[float] = np.bincount(at[rows], weights=weights, minlength=intervals).tolist()
        return found

    everything = np.ones(len(known), dtype=np.bool_)
    rewards = columns["reward"][known]
    labels = np.frombuffer(index.label)[known]
    valid = ~np.isnan(rewards)
    counts = {name: add_up(labels == number) for name, number in index.labels.items() if name in index.failed}
    ended, with_reward = add_up(everything), add_up(valid)
    sums = {stage: add_up(everything, columns[stage][known]) for stage in SHOWN_STAGES}
    return {
        "start": first,
        "seconds": width,
        "ended": ended,
        "valid": with_reward,
        "reward": _means(add_up(valid, rewards), with_reward),
        "failed": counts,
        "stages": {stage: _means(values, ended) for stage, values in sums.items() if any(values)},
    }


def running_mean(series: dict[str, Any]) -> list[float | None]:
    """Return the mean reward of all valid rollouts that had ended by the end of each interval."""
    found: list[float | None] = []
    total, count = 0.0, 0
    for mean, valid in zip(series["reward"], series["valid"], strict=True):
        total, count = total + (mean or 0.0) * valid, count + valid
        found.append(total / count if count else None)
    return found


def _means(totals: list[float], counts: list[float]) -> list[float | None]:
    return [total / count if count else None for total, count in zip(totals, counts, strict=True)]
