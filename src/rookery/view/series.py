"""Curves of a run over time: rewards, outcomes, failures by cause and durations of stages, in equal intervals."""

from typing import Any, Final

from rookery.view.index import STAGES, RunIndex

INTERVALS: Final = 100
SHOWN_STAGES: Final = tuple(stage for stage in STAGES if stage != "paused")


def build_series(index: RunIndex, intervals: int = INTERVALS) -> dict[str, Any]:
    """Return the curves of a run as plain data, with one value per interval of time.

    A rollout counts in the interval in which its last attempt ended. A mean over no rollouts is None.
    """
    ends = index.numbers["ended"]
    known = [end for end in ends if end]
    if not known:
        return {"start": 0.0, "seconds": 0.0, "ended": [], "valid": [], "reward": [], "failed": {}, "stages": {}}
    first, last = min(known), max(known)
    starts = [start for start in index.numbers["started"] if start]
    first = min(first, min(starts, default=first))
    width = max(last - first, 1e-6) / intervals
    ended, valid, rewards = [0] * intervals, [0] * intervals, [0.0] * intervals
    failed: dict[str, list[int]] = {}
    sums = {stage: [0.0] * intervals for stage in SHOWN_STAGES}
    labels = list(index.labels)
    for row, end in enumerate(ends):
        if not end:
            continue
        at = min(int((end - first) / width), intervals - 1)
        ended[at] += 1
        reward = index.numbers["reward"][row]
        if reward is not None:
            valid[at] += 1
            rewards[at] += reward
        name = labels[index.label[row]]
        if name in index.failed:
            failed.setdefault(name, [0] * intervals)[at] += 1
        for stage in SHOWN_STAGES:
            sums[stage][at] += index.numbers[stage][row] or 0.0
    return {
        "start": first,
        "seconds": width,
        "ended": ended,
        "valid": valid,
        "reward": _means(rewards, valid),
        "failed": failed,
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


def _means(totals: list[float], counts: list[int]) -> list[float | None]:
    return [total / count if count else None for total, count in zip(totals, counts, strict=True)]
