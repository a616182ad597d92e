"""The kinds of faults of the fault campaign: how many rollouts have each, and how those rollouts must end."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.fault_environment import expected_reward
from rookery.core import Completed, Failed, Outcome, Rollout, Truncated

FRACTION = 0.1
"""The fraction of rollouts that have a fault."""
HANG_LIMIT = 3.0
NONE = "none"


def _completed(rollout: Rollout) -> bool:
    return rollout.outcome == Completed() and rollout.reward == expected_reward(rollout.seed)


def _failed(fault: str, cause: str) -> Callable[[Rollout], bool]:
    def check(rollout: Rollout) -> bool:
        end: Outcome = rollout.outcome
        return isinstance(end, Failed) and (end.fault, end.cause) == (fault, cause) and rollout.reward is None

    return check


def _limited(*statuses: str) -> Callable[[Rollout], bool]:
    def check(rollout: Rollout) -> bool:
        if rollout.outcome == Truncated("lost"):  # the program took its whole sandbox with it
            return rollout.reward == 0.0
        return _completed(rollout) and rollout.info.get("status") in statuses

    return check


class FaultKind(NamedTuple):
    """One kind of fault. `expected` says how its rollouts may end; `slow` kinds get fewer rollouts."""

    name: str
    expected: str
    check: Callable[[Rollout], bool]
    slow: bool = False


KINDS = (
    FaultKind("environment raises", "bug.environment", _failed("bug", "bug.environment")),
    FaultKind("environment exits", "bug.exit", _failed("bug", "bug.exit")),
    FaultKind("environment hangs", "bug.hung", _failed("bug", "bug.hung"), slow=True),
    FaultKind("environment blocks", "bug.blocked", _failed("bug", "bug.blocked"), slow=True),
    FaultKind("runner crashes", "bug.crashed", _failed("bug", "bug.crashed"), slow=True),
    FaultKind("reward not a number", "bug.reward", _failed("bug", "bug.reward")),
    FaultKind("reward out of range", "bug.reward", _failed("bug", "bug.reward")),
    FaultKind("grader crashes", "bug.scoring", _failed("bug", "bug.scoring")),
    FaultKind("sandbox memory", "completed", _limited("memory_limit", "signaled")),
    FaultKind("sandbox spin", "completed", _limited("time_limit")),
    FaultKind("sandbox fork bomb", "completed", _limited("process_limit", "time_limit", "exited", "memory_limit")),
    FaultKind("sandbox output", "completed", _limited("output_limit", "exited")),
    FaultKind("sandbox lost", "completed", _completed),
    FaultKind("upstream 5xx", "completed", _completed),
    FaultKind("upstream reset", "completed", _completed),
    FaultKind("upstream garbage", "completed", _completed),
    FaultKind("upstream hang", "completed", _completed, slow=True),
    FaultKind("upstream slow", "completed", _completed),
)
NO_FAULT = FaultKind(NONE, "completed", _completed)
BY_NAME = {kind.name: kind for kind in (NO_FAULT, *KINDS)}


def plan_faults(rollouts: int, seed: int) -> list[str]:
    """Return the name of the fault of each rollout by its number; `none` for 90% of them."""
    rng = random.Random(seed)  # noqa: S311
    faulted = rng.sample(range(rollouts), round(FRACTION * rollouts))
    plan = [NONE] * rollouts
    slow = [kind.name for kind in KINDS if kind.slow]
    quick = [kind.name for kind in KINDS if not kind.slow]
    for position, number in enumerate(faulted):
        few = position < max(len(slow), len(faulted) // 20)
        plan[number] = slow[position % len(slow)] if few else quick[position % len(quick)]
    return plan


def build_tasks(plan: list[str]) -> list[dict[str, Any]]:
    """Return the tasks of a campaign."""
    tasks: list[dict[str, Any]] = []
    for number, fault in enumerate(plan):
        task = {"id": f"c-{number}", "prompt": f"{number} 0 {fault}", "data": {"n": number, "fault": fault}}
        tasks.append(task | ({"limits": {"run": HANG_LIMIT}} if fault == "environment hangs" else {}))
    return tasks
