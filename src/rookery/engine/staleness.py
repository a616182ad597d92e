"""Bound how far sampling may run ahead of training. Used by the supervisor, for one stream of groups.

`StalenessBound` decides without I/O how many groups may be admitted and which ones a training step takes. The age
of a group is counted from the policy version at its admission, so none of its tokens is older. A group admitted at
version v has to train at version v + `lag` at the latest.

- If every version trains at least one step, no group becomes too old: each step raises the number of admitted
  groups to what this step and the next `lag` steps can take.
- No group is dropped for its age, so slow tasks train as often as fast ones. A step waits for a slow group only if
  that group, together with all groups of the same age, would no longer fit into the remaining steps.
- Among finished groups the oldest train first.
- Once that number of groups is admitted, only replacements for groups that a filter dropped are admitted until the
  next step.
"""

from collections.abc import Sequence

from rookery.core import Group


def oldest_version(group: Group) -> int | None:
    """Return the oldest policy version that sampled a trained token of the group, or None if no token trains."""
    versions = (
        span.version for rollout in group.rollouts for segment in rollout.segments for span in segment.versions
    )
    return min(versions, default=None)


class StalenessBound:
    """Decides which groups train in which step, so that no group is too old.

    Each step trains `size` groups. A step at policy version v contains no group that was admitted before version
    v - `lag`, unless the trainer skips versions.
    """

    def __init__(self, size: int, lag: int) -> None:
        if size < 1 or lag < 0:
            raise ValueError(f"a step needs at least 1 group and a lag of at least 0, got {size} and {lag}")
        self.size = size
        self.lag = lag
        self.version = 0
        self.quota = 0
        """Number of groups that may be admitted in total until the next step. Groups that a filter dropped do not
        count."""
        self.versions: dict[int, int] = {}
        """The policy version at admission, by group index, of groups that the consumer has not taken."""

    def start_step(self, version: int, taken: int) -> None:
        """Start a step at policy version `version`, after `taken` groups were taken, and raise the quota.

        This step and the next `lag` steps take `(lag + 1) * size` groups, so each of those groups trains at the
        version of its admission plus `lag` at the latest. With one group more, the last one would be one step too
        late.
        """
        self.version = version
        self.quota = taken + (self.lag + 1) * self.size

    def add(self, group: int, version: int | None = None) -> None:
        """Record that a group was admitted, at the current policy version unless `version` is passed."""
        self.versions[group] = self.version if version is None else version

    def remove(self, group: int) -> None:
        """Record that a group was taken by the consumer or dropped by a filter."""
        self.versions.pop(group, None)

    def choose(self, ready: Sequence[int], count: int, *, ending: bool = False) -> list[int]:
        """Return `count` of the finished groups to train on now, or an empty list if the step has to wait.

        If the stream is `ending`, fewer than `count` groups may be returned.
        """
        order = sorted(ready, key=lambda group: self.versions.get(group, self.version))
        if len(order) < count:
            return order if ending else []
        chosen = order[:count]
        taken, finished = set(chosen), set(ready)
        first = self.version - self.lag  # older groups are too late anyway: versions were skipped
        left = sorted(
            version for group, version in self.versions.items() if version >= first and group not in taken
        )
        # The groups that are left must fit into the steps to come, one per version, oldest first. A fast young
        # group that takes the place of a slow old one does no harm now, but when the last of the old groups are
        # due.
        late = max(
            (version for at, version in enumerate(left) if self._step_version(at) > version + self.lag),
            default=first - 1,
        )
        if any(first <= version <= late and group not in finished for group, version in self.versions.items()):
            return []
        return chosen

    def _step_version(self, at: int) -> int:
        """Return the policy version at which the group at position `at` of the waiting groups trains.

        The next step trains at the current policy version plus 1, and every step takes `size` groups.
        """
        return self.version + 1 + at // self.size
