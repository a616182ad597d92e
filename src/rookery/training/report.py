"""Report which rollouts are missing, and whether missing rollouts differ from valid ones.

A rollout is valid if it has a reward, and missing otherwise. If failures hit long rollouts more often than short
ones, the training data is biased. No baseline corrects that bias, so the report shows it.

Guarantees:
- Every rollout is counted once, and each missing rollout under its cause.
- Durations of valid and missing rollouts are reported side by side, with the probability that a missing rollout
  took longer than a valid one.
- The report is plain data, and can be formatted as text.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rookery.core import Cancelled, Failed, Group, Rollout, Truncated, label
from rookery.core.estimates import RewardEstimate
from rookery.training.advantages import is_informative

MAX_LINES = 8


class Distribution(msgspec.Struct, frozen=True):
    """Summary statistics of a list of numbers; all are 0 if the list is empty."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    """Median of the numbers."""
    p95: float = 0.0
    """95th percentile of the numbers."""
    maximum: float = 0.0
    """Largest of the numbers."""


class MissingByCause(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts that have no reward for one cause."""

    fault: str
    """The fault: `infra`, `task` or `bug`; `cancelled` for rollouts that were cancelled, and `none` for
    ungraded ones."""
    rollouts: int
    share: float
    """Their share of all rollouts, from 0 to 1."""
    seconds: Distribution
    """Their durations in seconds."""


class EnvironmentCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of rollouts of one environment."""

    rollouts: int
    missing: int
    """Number of rollouts without a reward."""
    share: float
    """Share of the environment's rollouts that are missing, from 0 to 1."""
    causes: dict[str, int]
    """Number of missing rollouts by cause, most frequent first."""
    reward: float | None = None
    """Mean reward of the valid rollouts, or None if there are none."""


class DurationBand(msgspec.Struct, frozen=True, kw_only=True):
    """One of up to four ranges of duration that hold about a quarter of the rollouts each."""

    up_to: float
    """Upper bound of the duration in seconds."""
    rollouts: int
    missing: int
    """Number of rollouts in this range without a reward."""
    share: float
    """Share of the rollouts in this range that are missing, from 0 to 1."""


class TruncatedRollouts(msgspec.Struct, frozen=True, kw_only=True):
    """Valid rollouts that were truncated for one reason."""

    rollouts: int
    share: float
    """Their share of all valid rollouts, from 0 to 1."""
    reward: float
    """Their mean reward."""


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Age of the sampled tokens of valid rollouts, in policy versions behind the current one."""

    current: int
    """The policy version that the tokens are compared with."""
    tokens: dict[int, int]
    """Number of sampled tokens of valid rollouts, by the policy version that sampled them."""
    mean: float
    """Mean lag of these tokens, in versions."""
    maximum: int
    """Largest lag of these tokens, in versions."""
    mixed: int
    """Number of valid rollouts with tokens of more than one version."""


class TaskEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Mean over tasks of a per-task estimate, such as `pass@4`."""

    mean: float | None
    standard_error: float | None
    tasks: int
    """Number of tasks in the mean."""
    tasks_left_out: int
    """Number of tasks with too few valid rollouts for this estimate."""


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the valid rollouts (with a reward) and missing rollouts (without one) of some groups."""

    groups: int
    informative: int
    """Number of groups with at least two rewards that differ."""
    uniform: int
    """Number of groups with at least two rewards that are all equal."""
    short: int
    """Number of groups with one valid rollout."""
    failed: int
    """Number of groups without a valid rollout."""
    rollouts: int
    valid: int
    reward: float
    """Mean reward of the valid rollouts; 0 if no rollout is valid."""
    standard_error: float | None
    """Standard error of `reward`, clustered by task; None if fewer than two tasks have a valid rollout."""
    interval95: tuple[float, float] | None
    """95% confidence interval of `reward`, clustered by task."""
    per_task: dict[str, TaskEstimate]
    """The estimates `avg@k` and, if all rewards are 0 or 1, `pass@k`; empty for groups of one rollout."""
    truncated: dict[str, TruncatedRollouts]
    """Valid rollouts that were truncated, by reason."""
    missing: dict[str, MissingByCause]
    """Missing rollouts by cause, most frequent first."""
    retried: dict[str, int]
    """Number of failed attempts by cause, for rollouts that are valid after a retry."""
    environments: dict[str, EnvironmentCounts]
    """Numbers of rollouts by environment."""
    valid_seconds: Distribution
    """Durations of valid rollouts in seconds."""
    missing_seconds: Distribution
    """Durations of missing rollouts in seconds."""
    chance_missing_longer: float | None
    """Probability that a missing rollout took longer than a valid one; 0.5 means that failures do not depend on
    duration. None if no rollout is missing or none is valid."""
    by_duration: tuple[DurationBand, ...]
    """Shares of missing rollouts in up to four ranges of duration, shortest first."""
    staleness: Staleness | None
    """Age of the policy versions of the sampled tokens; None if no token has a version."""
    metrics: dict[str, Distribution]
    """Statistics of each metric that environments recorded, over the valid rollouts."""

    def plain(self) -> dict[str, Any]:
        """Return the report as data that can be encoded as JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return found

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        return _format_report(self)


def build_report(
    groups: Iterable[Group], *, environment: str | Callable[[Group], str] = "", current: int | None = None
) -> GroupReport:
    """Report which rollouts of some groups are missing, and whether they differ from the valid ones.

    `environment` is the name of the groups' environment, or a function that returns it for each group; by default,
    it is the name in a mixture, `Group.environment`. `current`
    is the current policy version; the default is the newest version that sampled a token.
    """
    all_groups = list(groups)
    records = [rollout for group in all_groups for rollout in group.rollouts]
    valid = [rollout for rollout in records if rollout.valid]
    lost = [rollout for rollout in records if not rollout.valid]
    kinds = Counter(_get_group_kind(group) for group in all_groups)
    valid_durations, missing_durations = _get_durations(valid), _get_durations(lost)
    estimate = RewardEstimate()
    for rollout in valid:
        estimate.add(rollout.task, rollout.reward or 0.0)
    return GroupReport(
        groups=len(all_groups),
        informative=kinds["informative"],
        uniform=kinds["uniform"],
        short=kinds["short"],
        failed=kinds["failed"],
        rollouts=len(records),
        valid=len(valid),
        reward=estimate.mean,
        standard_error=estimate.standard_error,
        interval95=estimate.interval95,
        per_task=_estimate_per_task(estimate, records),
        truncated=_count_truncated(valid),
        missing=_count_missing(lost, len(records)),
        retried=_count_retried(valid),
        environments=_count_environments(all_groups, environment),
        valid_seconds=get_distribution(valid_durations),
        missing_seconds=get_distribution(missing_durations),
        chance_missing_longer=_chance_missing_longer(missing_durations, valid_durations),
        by_duration=_make_duration_bands(valid_durations, missing_durations),
        staleness=_measure_staleness(valid, current),
        metrics=_summarize_metrics(valid),
    )


def _estimate_per_task(estimate: RewardEstimate, records: list[Rollout]) -> dict[str, TaskEstimate]:
    tasks = len({rollout.task for rollout in records})
    k = max((rollout.member + 1 for rollout in records), default=0)
    return {
        name: TaskEstimate(
            mean=one.mean,
            standard_error=one.standard_error,
            tasks=one.tasks,
            tasks_left_out=tasks - one.tasks,
        )
        for name, one in estimate.per_task(k).items()
    }


def get_duration(rollout: Rollout) -> float:
    """Return the duration of a rollout's last attempt in seconds. Earlier attempts are not included."""
    if rollout.attempts and rollout.attempts[-1].ended:
        return max(0.0, rollout.attempts[-1].ended - rollout.attempts[-1].started)
    timing = rollout.timing
    return timing.setup + timing.run + timing.score


def get_distribution(values: npt.ArrayLike) -> Distribution:
    """Return summary statistics of a list of numbers."""
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers):
        return Distribution()
    p50, p95 = np.quantile(numbers, [0.5, 0.95]).tolist()
    return Distribution(len(numbers), float(numbers.mean()), p50, p95, float(numbers.max()))


def _get_group_kind(group: Group) -> str:
    rewards = [rollout.reward for rollout in group.valid]
    return (
        ("failed", "short")[len(rewards)]
        if len(rewards) < 2
        else "informative"
        if is_informative(rewards)
        else "uniform"
    )


def _get_cause(rollout: Rollout) -> tuple[str, str]:
    """Return cause and fault of a rollout without a reward."""
    match rollout.outcome:
        case Failed(fault, cause):
            return cause, fault
        case Cancelled():
            return label(rollout.outcome), "cancelled"
        case _:
            return "ungraded", "none"


def _get_durations(rollouts: list[Rollout]) -> npt.NDArray[np.float64]:
    return np.array([get_duration(rollout) for rollout in rollouts], dtype=np.float64)


def _count_missing(lost: list[Rollout], rollouts: int) -> dict[str, MissingByCause]:
    by_cause: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in lost:
        by_cause.setdefault(_get_cause(rollout), []).append(rollout)
    return {
        cause: MissingByCause(
            fault=fault,
            rollouts=len(members),
            share=len(members) / rollouts,
            seconds=get_distribution(_get_durations(members)),
        )
        for (cause, fault), members in sorted(by_cause.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    }


def _count_retried(valid: list[Rollout]) -> dict[str, int]:
    labels = Counter(
        label(attempt.outcome)
        for rollout in valid
        for attempt in rollout.attempts[:-1]
        if isinstance(attempt.outcome, Failed)
    )
    return dict(sorted(labels.items(), key=lambda pair: (-pair[1], pair[0])))


def _count_truncated(valid: list[Rollout]) -> dict[str, TruncatedRollouts]:
    by_reason: dict[str, list[float]] = {}
    for rollout in valid:
        if isinstance(rollout.outcome, Truncated):
            by_reason.setdefault(rollout.outcome.reason, []).append(rollout.reward or 0.0)
    return {
        reason: TruncatedRollouts(
            rollouts=len(rewards), share=len(rewards) / len(valid), reward=float(np.mean(rewards))
        )
        for reason, rewards in sorted(by_reason.items())
    }


def _count_environments(
    groups: list[Group], environment: str | Callable[[Group], str]
) -> dict[str, EnvironmentCounts]:
    by_name: dict[str, list[Rollout]] = {}
    for group in groups:
        name = (environment or group.environment) if isinstance(environment, str) else environment(group)
        by_name.setdefault(name, []).extend(group.rollouts)
    counts = {}
    for name, rollouts in sorted(by_name.items()):
        causes = Counter(_get_cause(rollout)[0] for rollout in rollouts if not rollout.valid)
        missing = causes.total()
        share = missing / len(rollouts) if rollouts else 0.0
        rewards = [rollout.reward for rollout in rollouts if rollout.valid and rollout.reward is not None]
        counts[name] = EnvironmentCounts(
            rollouts=len(rollouts),
            missing=missing,
            share=share,
            causes=dict(causes.most_common()),
            reward=float(np.mean(rewards)) if rewards else None,
        )
    return counts


def _chance_missing_longer(missing: npt.NDArray[np.float64], valid: npt.NDArray[np.float64]) -> float | None:
    """Return the probability that a missing rollout took longer than a valid one; ties count half.

    It is computed from the Mann-Whitney U statistic. Return None if one of the lists is empty.
    """
    if not len(missing) or not len(valid):
        return None
    ordered = np.sort(valid)
    below = np.searchsorted(ordered, missing, side="left")
    ties = np.searchsorted(ordered, missing, side="right") - below
    return float((below + ties / 2).mean() / len(valid))


def _make_duration_bands(
    valid: npt.NDArray[np.float64], missing_times: npt.NDArray[np.float64]
) -> tuple[DurationBand, ...]:
    """Divide all rollouts into quarters by duration; return the share of missing rollouts in each."""
    durations = np.concatenate([valid, missing_times])
    if not len(durations):
        return ()
    bounds = np.unique(np.quantile(durations, [0.25, 0.5, 0.75, 1.0]))
    valid_bands, missing_bands = np.searchsorted(bounds, valid), np.searchsorted(bounds, missing_times)
    bands = []
    for at, bound in enumerate(bounds.tolist()):
        missing = int((missing_bands == at).sum())
        rollouts = missing + int((valid_bands == at).sum())
        if rollouts:
            bands.append(DurationBand(up_to=bound, rollouts=rollouts, missing=missing, share=missing / rollouts))
    return tuple(bands)


def _measure_staleness(valid: list[Rollout], current: int | None) -> Staleness | None:
    tokens: Counter[int] = Counter()
    mixed = 0
    for rollout in valid:
        by_version = Counter[int]()
        for segment in rollout.segments:
            for span in segment.versions:
                by_version[span.version] += span.end - span.start
        tokens += by_version
        mixed += len(by_version) > 1
    if not tokens:
        return None
    now = max(tokens) if current is None else current
    lags = {version: now - version for version in tokens}
    return Staleness(
        current=now,
        tokens=dict(sorted(tokens.items())),
        mean=sum(lags[version] * count for version, count in tokens.items()) / tokens.total(),
        maximum=max(lags.values()),
        mixed=mixed,
    )


def _summarize_metrics(valid: list[Rollout]) -> dict[str, Distribution]:
    by_name: dict[str, list[float]] = {}
    for rollout in valid:
        for name, value in rollout.metrics.items():
            if np.isfinite(value):
                by_name.setdefault(name, []).append(value)
    return {name: get_distribution(values) for name, values in sorted(by_name.items())}


def _format_report(report: GroupReport) -> list[str]:
    lines = [
        (
            f"groups    {report.groups}: {report.informative} informative, {report.uniform} uniform, "
            f"{report.short} with one valid rollout, {report.failed} with none"
        ),
        (
            f"rollouts  {report.rollouts}: {report.valid} valid, mean reward "
            f"{report.reward:.3f}{_format_error(report.standard_error)}"
        ),
    ]
    for name, one in report.per_task.items():
        if one.mean is not None:
            left_out = f", {one.tasks_left_out} left out" if one.tasks_left_out else ""
            lines.append(
                f"{name:<9} {one.mean:.3f}{_format_error(one.standard_error)}, over {one.tasks} tasks{left_out}"
            )
    for reason, part in report.truncated.items():
        lines.append(
            f"truncated {reason}: {part.rollouts} ({part.share:.1%} of valid), mean reward {part.reward:.3f}"
        )
    for cause, part_missing in list(report.missing.items())[:MAX_LINES]:
        lines.append(
            f"missing   {cause} ({part_missing.fault}): {part_missing.rollouts} ({part_missing.share:.1%}), "
            f"{_format_distribution(part_missing.seconds)}"
        )
    rest = list(report.missing.values())[MAX_LINES:]
    if rest:
        lines.append(f"missing   {sum(one.rollouts for one in rest)} of {len(rest)} more causes")
    lines += [f"retried   {cause}: {count} attempts" for cause, count in list(report.retried.items())[:MAX_LINES]]
    if report.missing:
        lines += [
            f"missing   in {name}: {counts.missing} of {counts.rollouts} ({counts.share:.1%})"
            for name, counts in list(report.environments.items())[:MAX_LINES]
            if name
        ]
        lines.append(
            f"duration  valid {_format_distribution(report.valid_seconds)}; "
            f"missing {_format_distribution(report.missing_seconds)}"
        )
        bands = ", ".join(f"{band.share:.1%} up to {band.up_to:.3g} s" for band in report.by_duration)
        lines.append(f"duration  missing by quartile of duration: {bands}")
    if report.chance_missing_longer is not None:
        lines.append(
            "duration  a missing rollout took longer than a valid one with chance "
            f"{report.chance_missing_longer:.2f} (0.50: failures do not depend on duration)"
        )
    if report.staleness is not None:
        stale = report.staleness
        lines.append(
            f"versions  {stale.mean:.2f} behind {stale.current} on average, {stale.maximum} at most; "
            f"{stale.mixed} rollouts with tokens of more than one version"
        )
    return lines


def _format_error(error: float | None) -> str:
    return f" ± {error:.2g}" if error is not None else ""


def _format_distribution(spread: Distribution) -> str:
    return f"mean {spread.mean:.3g} s, p50 {spread.p50:.3g} s, p95 {spread.p95:.3g} s"
