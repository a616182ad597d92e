"""Mean rewards and pass rates with standard errors and intervals that are clustered by task.

The k rollouts of a task share its difficulty, so they are not k independent observations. Every estimate here
treats tasks as the independent units. Only valid rollouts (scored ones) are added, so a failed or cancelled
rollout is in no denominator.

Memory grows with the number of tasks, not with the number of rollouts.
"""

from math import comb, inf, sqrt
from typing import Final

Z95: Final = 1.959963984540054


class TaskRewards:
    """Sums over the valid rollouts of one task. A rollout passed if its reward is 1."""

    def __init__(self) -> None:
        self.valid = 0
        self.passed = 0
        self.total = 0.0
        self.best = -inf
        """The highest reward."""


class RewardEstimate:
    """Mean, standard error, interval and pass rates of rewards that are added one rollout at a time."""

    def __init__(self) -> None:
        self.tasks: dict[str, TaskRewards] = {}
        self.valid = 0
        self.passed = 0
        self.binary = True
        """True while every reward is 0 or 1, so that their mean is a pass rate."""
        self._total = 0.0

    def add(self, task: str, reward: float) -> None:
        """Add the reward of one valid rollout."""
        rewards = self.tasks.get(task)
        if rewards is None:
            rewards = self.tasks[task] = TaskRewards()
        rewards.valid += 1
        rewards.total += reward
        rewards.best = max(rewards.best, reward)
        self.valid += 1
        self._total += reward
        self.binary = self.binary and reward in (0.0, 1.0)
        if reward == 1.0:
            rewards.passed += 1
            self.passed += 1

    @property
    def mean(self) -> float:
        """The mean reward over all valid rollouts, or 0 if there are none."""
        return self._total / self.valid if self.valid else 0.0

    @property
    def standard_error(self) -> float | None:
        """Standard error of `mean`, robust to clustering by task. It is None with fewer than two tasks.

        With one rollout per task, it equals the usual standard error of a mean.
        """
        clusters = len(self.tasks)
        if clusters < 2:
            return None
        mean = self.mean
        squares = sum((task.total - task.valid * mean) ** 2 for task in self.tasks.values())
        return sqrt(clusters / (clusters - 1) * squares) / self.valid

    @property
    def interval95(self) -> tuple[float, float] | None:
        """95% confidence interval of `mean`, or None with fewer than two tasks.

        For a pass rate (all rewards are 0 or 1), it is Wilson's interval for the effective number of independent
        rollouts. That is the number of rollouts divided by the design effect, with the correction of Korn and
        Graubard for few tasks. For other rewards, it is Student's t interval from `standard_error`.
        """
        error = self.standard_error
        if error is None:
            return None
        if self.binary:
            return wilson(self.mean, self._effective_rollouts(error))
        half = t_quantile_975(len(self.tasks) - 1) * error
        return self.mean - half, self.mean + half

    def _effective_rollouts(self, error: float) -> float:
        clusters = len(self.tasks)
        if self.passed in (0, self.valid):
            return clusters  # no variance to measure: count each task once
        independent = self.mean * (1 - self.mean) / (self.valid - 1)
        clustered = error * error
        if clusters < self.valid:
            clustered *= (t_quantile_975(clusters - 1) / t_quantile_975(self.valid - 1)) ** 2
        return self.valid * min(1.0, independent / clustered) if clustered > 0 else self.valid

    def average(self) -> "TaskMean":
        """avg@k: the mean over tasks of each task's mean reward over its valid rollouts."""
        return TaskMean([task.total / task.valid for task in self.tasks.values()])

    def pass_at(self, k: int) -> "TaskMean":
        """pass@k: the mean over tasks of the probability that at least one of k rollouts passes.

        Uses the unbiased estimator of Chen et al. (2021) for each task. A task with fewer than k valid rollouts
        has no unbiased estimate and is left out, so `tasks` of the result can be smaller than the number of tasks.
        """
        return TaskMean([pass_at_k(task.valid, task.passed, k) for task in self.tasks.values() if task.valid >= k])

    def best_of(self, k: int) -> "TaskMean":
        """best@k: the mean over tasks of the highest reward of a task's k rollouts.

        A task that does not have exactly k valid rollouts is left out, because the highest of fewer rewards is
        lower. For rewards of 0 and 1 this is pass@k.
        """
        return TaskMean([task.best for task in self.tasks.values() if task.valid == k])

    def per_task(self, k: int) -> "dict[str, TaskMean]":
        """Return the estimates `avg@k`, and `pass@2`, `pass@4`, … `pass@k` or `best@k`, by name.

        The pass rates are returned if all rewards are 0 or 1, and `best@k`, the mean of the highest rewards,
        otherwise.

        `k` is the number of rollouts per group. The result is empty if `k` is 1 or if there is no valid rollout.
        """
        if k < 2 or not self.valid:
            return {}
        found = {f"avg@{k}": self.average()}
        if self.binary:
            return found | {f"pass@{one}": self.pass_at(one) for one in shown_ks(k)}
        return found | {f"best@{k}": self.best_of(k)}


class TaskMean:
    """The mean of one value per task, its standard error, and the number of tasks.

    `mean` is None without values, and `standard_error` is None with fewer than two.
    """

    def __init__(self, values: list[float]) -> None:
        self.tasks = len(values)
        self.mean: float | None = sum(values) / self.tasks if values else None
        self.standard_error: float | None = None
        if self.mean is not None and self.tasks > 1:
            squares = sum((value - self.mean) ** 2 for value in values)
            self.standard_error = sqrt(squares / (self.tasks - 1) / self.tasks)

    def interval95(self, *, rate: bool = False) -> tuple[float, float] | None:
        """Return the 95% confidence interval of `mean`, or None with fewer than two tasks.

        It is Student's t interval. If the values are probabilities (`rate`), it is Wilson's interval for the
        number of observations that would have this standard error, so that it stays within 0 and 1.
        """
        if self.mean is None or self.standard_error is None:
            return None
        if rate:
            variance = self.standard_error**2
            return wilson(self.mean, self.mean * (1 - self.mean) / variance if variance > 0 else self.tasks)
        half = t_quantile_975(self.tasks - 1) * self.standard_error
        return self.mean - half, self.mean + half


def pass_at_k(valid: int, passed: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k rollouts of a task passes.

    `passed` of the task's `valid` rollouts passed. Raises `ValueError` if k is larger than `valid`.
    """
    if not 1 <= k <= valid:
        raise ValueError(f"pass@{k} needs at least {k} valid rollouts of a task, and there are {valid}")
    return 1.0 - comb(valid - passed, k) / comb(valid, k)


def shown_ks(k: int) -> list[int]:
    """Return the values for which pass@… is reported if groups have `k` rollouts: 2, 4, 8, … and `k` itself."""
    return sorted({*(1 << at for at in range(1, k.bit_length()) if 1 << at <= k), k} - {1}) if k > 1 else []


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95% confidence interval of the rate `share` over `count` independent observations.

    The interval stays within 0 and 1 and is accurate for rates near both.
    """
    if count <= 0:
        return 0.0, 1.0
    z2 = Z95 * Z95
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def t_quantile_975(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t distribution with `freedom` degrees of freedom, to about 0.1%."""
    if freedom < 3:
        return {1: 12.706204736432095, 2: 4.302652729696142}[freedom]
    z, n = Z95, freedom
    # Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5).
    return (
        z
        + (z**3 + z) / 4 / n
        + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / n**2
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / n**3
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160 / n**4
    )
