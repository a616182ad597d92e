"""What is missing, and whether what is missing differs from what is there.

A failure that strikes long rollouts more often than short ones biases what trains, whatever the baseline is. No
estimator repairs that; it has to be seen.

Promises:
- every rollout is counted once, and each missing one under its cause;
- durations of valid and missing rollouts stand side by side, with the chance that a missing one was longer;
- it is plain data, and lines for people.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rookery.core import Cancelled, Failed, Group, Rollout, Truncated, label
from rookery.core.estimates import RewardEstimate
from rookery.training.advantages import informative

MAX_LINES = 8


class Spread(msgspec.Struct, frozen=True):
    """Of some numbers. All 0 where there are none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    most: float = 0.0


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts without a reward, of one cause."""

    fault: str
    """`infra`, `task`, `bug`, or `cancelled`."""
    rollouts: int
    share: float
    """Of all rollouts."""
    seconds: Spread


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One environment's rollouts."""

    rollouts: int
    missing: int
    share: float
    """Missing, of its own rollouts."""
    causes: dict[str, int]


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """A quarter of the rollouts, by duration."""

    upto: float
    """Seconds."""
    rollouts: int
    missing: int
    share: float


class TruncatedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Valid rollouts that a budget ended, of one reason."""

    rollouts: int
    share: float
    """Of the valid rollouts."""
    reward: float
    """The mean of theirs."""


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """How far behind the policy the trained tokens are, in versions."""

    current: int
    tokens: dict[int, int]
    """Sampled tokens of valid rollouts, by version."""
    mean: float
    most: int
    mixed: int
    """Rollouts with tokens of more than one version."""


class PerTask(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of one estimate per task."""

    mean: float | None
    standard_error: float | None
    tasks: int
    tasks_left_out: int
    """Tasks with too few valid rollouts for this estimate."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What some groups hold and what they lack."""

    groups: int
    informative: int
    """Groups with at least two valid rewards that differ."""
    uniform: int
    short: int
    """Groups with one valid rollout."""
    failed: int
    """Groups with none."""
    rollouts: int
    valid: int
    reward: float
    """The mean over valid rollouts; 0 without any."""
    standard_error: float | None
    """Of `reward`, clustered by task; None with fewer than two tasks that have a valid rollout."""
    interval95: tuple[float, float] | None
    """Of `reward`, clustered by task."""
    per_task: dict[str, PerTask]
    """`avg@k` and, for rewards of 0 and 1, `pass@k`; empty for groups of one."""
    truncated: dict[str, TruncatedPart]
    missing: dict[str, Missing]
    """By cause, the most frequent first."""
    retried: dict[str, int]
    """Attempts that failed, by cause, of rollouts that then came to a reward."""
    environments: dict[str, Place]
    valid_seconds: Spread
    missing_seconds: Spread
    longer: float | None
    """The chance that a missing rollout took longer than a valid one: 0.5 where duration does not matter."""
    by_duration: tuple[Band, ...]
    staleness: Staleness | None
    metrics: dict[str, Spread]
    """Of valid rollouts, by name."""

    def plain(self) -> dict[str, Any]:
        """As data that encodes as JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return found

    def lines(self) -> list[str]:
        """For people."""
        return _lines(self)


def report(
    groups: Iterable[Group], *, environment: str | Callable[[Group], str] = "", current: int | None = None
) -> Report:
    """A report of these groups.

    `environment` names theirs, or tells it for each group where there are several. `current` is the policy's
    version now; without it, the newest one seen.
    """
    given = list(groups)
    records = [rollout for group in given for rollout in group.rollouts]
    valid = [rollout for rollout in records if rollout.valid]
    lost = [rollout for rollout in records if not rollout.valid]
    kinds = Counter(_kind(group) for group in given)
    there, gone = _seconds(valid), _seconds(lost)
    estimate = RewardEstimate()
    for rollout in valid:
        estimate.add(rollout.task, rollout.reward or 0.0)
    return Report(
        groups=len(given),
        informative=kinds["informative"],
        uniform=kinds["uniform"],
        short=kinds["short"],
        failed=kinds["failed"],
        rollouts=len(records),
        valid=len(valid),
        reward=estimate.mean,
        standard_error=estimate.standard_error,
        interval95=estimate.interval95,
        per_task=_per_task(estimate, records),
        truncated=_truncated(valid),
        missing=_missing(lost, len(records)),
        retried=_retried(valid),
        environments=_environments(given, environment),
        valid_seconds=spread_of(there),
        missing_seconds=spread_of(gone),
        longer=_longer(gone, there),
        by_duration=_bands(there, gone),
        staleness=_staleness(valid, current),
        metrics=_metrics(valid),
    )


def _per_task(estimate: RewardEstimate, records: list[Rollout]) -> dict[str, PerTask]:
    tasks = len({rollout.task for rollout in records})
    k = max((rollout.member + 1 for rollout in records), default=0)
    return {
        name: PerTask(
            mean=one.mean,
            standard_error=one.standard_error,
            tasks=one.tasks,
            tasks_left_out=tasks - one.tasks,
        )
        for name, one in estimate.per_task(k).items()
    }


def duration(rollout: Rollout) -> float:
    """Seconds of the last attempt: what a rollout of this kind takes, without what was tried before it."""
    if rollout.attempts and rollout.attempts[-1].ended:
        return max(0.0, rollout.attempts[-1].ended - rollout.attempts[-1].started)
    timing = rollout.timing
    return timing.setup + timing.run + timing.score


def spread_of(values: npt.ArrayLike) -> Spread:
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers):
        return Spread()
    p50, p95 = np.quantile(numbers, [0.5, 0.95]).tolist()
    return Spread(len(numbers), float(numbers.mean()), p50, p95, float(numbers.max()))


def _kind(group: Group) -> str:
    rewards = [rollout.reward for rollout in group.valid]
    return (
        ("failed", "short")[len(rewards)]
        if len(rewards) < 2
        else "informative"
        if informative(rewards)
        else "uniform"
    )


def _cause(rollout: Rollout) -> tuple[str, str]:
    """Cause and fault of a rollout without a reward."""
    match rollout.outcome:
        case Failed(fault, cause):
            return cause, fault
        case Cancelled():
            return label(rollout.outcome), "cancelled"
        case _:  # scored, says its outcome, and yet without a reward
            return "unscored", "bug"


def _seconds(rollouts: list[Rollout]) -> npt.NDArray[np.float64]:
    return np.array([duration(rollout) for rollout in rollouts], dtype=np.float64)


def _missing(lost: list[Rollout], rollouts: int) -> dict[str, Missing]:
    found: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in lost:
        found.setdefault(_cause(rollout), []).append(rollout)
    return {
        cause: Missing(
            fault=fault, rollouts=len(some), share=len(some) / rollouts, seconds=spread_of(_seconds(some))
        )
        for (cause, fault), some in sorted(found.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    }


def _retried(valid: list[Rollout]) -> dict[str, int]:
    found = Counter(
        label(attempt.outcome)
        for rollout in valid
        for attempt in rollout.attempts[:-1]
        if isinstance(attempt.outcome, Failed)
    )
    return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


def _truncated(valid: list[Rollout]) -> dict[str, TruncatedPart]:
    found: dict[str, list[float]] = {}
    for rollout in valid:
        if isinstance(rollout.outcome, Truncated):
            found.setdefault(rollout.outcome.reason, []).append(rollout.reward or 0.0)
    return {
        reason: TruncatedPart(
            rollouts=len(rewards), share=len(rewards) / len(valid), reward=float(np.mean(rewards))
        )
        for reason, rewards in sorted(found.items())
    }


def _environments(groups: list[Group], environment: str | Callable[[Group], str]) -> dict[str, Place]:
    found: dict[str, list[Rollout]] = {}
    for group in groups:
        name = environment if isinstance(environment, str) else environment(group)
        found.setdefault(name, []).extend(group.rollouts)
    places = {}
    for name, rollouts in sorted(found.items()):
        causes = Counter(_cause(rollout)[0] for rollout in rollouts if not rollout.valid)
        gone = causes.total()
        share = gone / len(rollouts) if rollouts else 0.0
        places[name] = Place(rollouts=len(rollouts), missing=gone, share=share, causes=dict(causes.most_common()))
    return places


def _longer(gone: npt.NDArray[np.float64], there: npt.NDArray[np.float64]) -> float | None:
    """By ranks (Mann and Whitney), a tie counting half."""
    if not len(gone) or not len(there):
        return None
    ordered = np.sort(there)
    below = np.searchsorted(ordered, gone, side="left")
    ties = np.searchsorted(ordered, gone, side="right") - below
    return float((below + ties / 2).mean() / len(there))


def _bands(there: npt.NDArray[np.float64], gone: npt.NDArray[np.float64]) -> tuple[Band, ...]:
    """Quarters of all rollouts by duration, and how much of each is missing."""
    together = np.concatenate([there, gone])
    if not len(together):
        return ()
    bounds = np.unique(np.quantile(together, [0.25, 0.5, 0.75, 1.0]))
    of_there, of_gone = np.searchsorted(bounds, there), np.searchsorted(bounds, gone)
    found = []
    for at, bound in enumerate(bounds.tolist()):
        missing = int((of_gone == at).sum())
        rollouts = missing + int((of_there == at).sum())
        if rollouts:
            found.append(Band(upto=bound, rollouts=rollouts, missing=missing, share=missing / rollouts))
    return tuple(found)


def _staleness(valid: list[Rollout], current: int | None) -> Staleness | None:
    tokens: Counter[int] = Counter()
    mixed = 0
    for rollout in valid:
        own = Counter[int]()
        for segment in rollout.segments:
            for span in segment.versions:
                own[span.version] += span.end - span.start
        tokens += own
        mixed += len(own) > 1
    if not tokens:
        return None
    now = max(tokens) if current is None else current
    lags = {version: now - version for version in tokens}
    return Staleness(
        current=now,
        tokens=dict(sorted(tokens.items())),
        mean=sum(lags[version] * count for version, count in tokens.items()) / tokens.total(),
        most=max(lags.values()),
        mixed=mixed,
    )


def _metrics(valid: list[Rollout]) -> dict[str, Spread]:
    found: dict[str, list[float]] = {}
    for rollout in valid:
        for name, value in rollout.metrics.items():
            if np.isfinite(value):
                found.setdefault(name, []).append(value)
    return {name: spread_of(values) for name, values in sorted(found.items())}


def _lines(found: Report) -> list[str]:
    lines = [
        (
            f"groups    {found.groups}: {found.informative} informative, {found.uniform} uniform, "
            f"{found.short} with one valid rollout, {found.failed} with none"
        ),
        (
            f"rollouts  {found.rollouts}: {found.valid} valid, mean reward "
            f"{found.reward:.3f}{_error(found.standard_error)}"
        ),
    ]
    for name, one in found.per_task.items():
        if one.mean is not None:
            left_out = f", {one.tasks_left_out} left out" if one.tasks_left_out else ""
            lines.append(f"{name:<9} {one.mean:.3f}{_error(one.standard_error)}, over {one.tasks} tasks{left_out}")
    for reason, part in found.truncated.items():
        lines.append(
            f"truncated {reason}: {part.rollouts} ({part.share:.1%} of valid), mean reward {part.reward:.3f}"
        )
    for cause, part_missing in list(found.missing.items())[:MAX_LINES]:
        lines.append(
            f"missing   {cause} ({part_missing.fault}): {part_missing.rollouts} ({part_missing.share:.1%}), "
            f"{_spread(part_missing.seconds)}"
        )
    rest = list(found.missing.values())[MAX_LINES:]
    if rest:
        lines.append(f"missing   {sum(one.rollouts for one in rest)} of {len(rest)} more causes")
    lines += [f"retried   {cause}: {count} attempts" for cause, count in list(found.retried.items())[:MAX_LINES]]
    if found.missing:
        lines += [
            f"missing   in {name}: {place.missing} of {place.rollouts} ({place.share:.1%})"
            for name, place in list(found.environments.items())[:MAX_LINES]
            if name
        ]
        lines.append(f"duration  valid {_spread(found.valid_seconds)}; missing {_spread(found.missing_seconds)}")
        bands = ", ".join(f"{band.share:.1%} up to {band.upto:.3g} s" for band in found.by_duration)
        lines.append(f"duration  missing by quarter: {bands}")
    if found.longer is not None:
        lines.append(
            f"duration  a missing rollout took longer than a valid one with chance {found.longer:.2f} "
            "(0.50: duration has nothing to do with it)"
        )
    if found.staleness is not None:
        stale = found.staleness
        lines.append(
            f"versions  {stale.mean:.2f} behind {stale.current} on average, {stale.most} at most; "
            f"{stale.mixed} rollouts of more than one"
        )
    return lines


def _error(error: float | None) -> str:
    return f" ± {error:.2g}" if error is not None else ""


def _spread(spread: Spread) -> str:
    return f"mean {spread.mean:.3g} s, p50 {spread.p50:.3g} s, p95 {spread.p95:.3g} s"
