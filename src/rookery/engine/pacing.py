"""How far sampling may run ahead of training: a pure controller for one stream of groups.

Promises:
- with every version trained on at least once, no group is ever too old: what is admitted fits into the steps that
  come before it would be;
- no group is dropped for its age, and so slow tasks train as often as quick ones: a step waits for slow groups
  where they, with all that are as old, would not fit into the steps that are left to them, and for no others;
- among those that are finished, the oldest go first;
- between two steps nothing is admitted but what takes the place of groups that a filter dropped.

A group's mark is the version it was admitted under: none of its tokens is older.
"""

from collections.abc import Sequence

from rookery.core import Group


def oldest(group: Group) -> int | None:
    """The oldest version that sampled a trained token of it; None where none was."""
    versions = (
        span.version for rollout in group.rollouts for segment in rollout.segments for span in segment.versions
    )
    return min(versions, default=None)


class Pace:
    """Groups come in steps of `size`. A step at version v trains nothing that is older than version v - `lag`."""

    def __init__(self, size: int, lag: int) -> None:
        if size < 1 or lag < 0:
            raise ValueError("a step has at least 1 group, and its lag is at least 0")
        self.size = size
        self.lag = lag
        self.version = 0
        self.quota = 0
        """How many groups may have been admitted in all, those that a filter dropped not counted."""
        self.marks: dict[int, int] = {}
        """By group: of those that nobody has taken."""

    def begins(self, version: int, taken: int) -> None:
        """A step is asked for, after this many groups in all.

        So many may be ahead as this step and `lag` more can take: each is then trained at its mark's version plus
        `lag` at the latest. More, as soon as the step has taken its own, would be one step too many for the last.
        """
        self.version = version
        self.quota = taken + (self.lag + 1) * self.size

    def admitted(self, group: int, mark: int | None = None) -> None:
        self.marks[group] = self.version if mark is None else mark

    def gone(self, group: int) -> None:
        """It was taken or dropped."""
        self.marks.pop(group, None)

    def chosen(self, ready: Sequence[int], count: int, *, ending: bool = False) -> list[int]:
        """The groups of a step, out of those that are finished; none while it has to wait.

        At the end of the stream a step is as long as what is left."""
        order = sorted(ready, key=lambda group: self.marks.get(group, self.version))
        if len(order) < count:
            return order if ending else []
        chosen = order[:count]
        taken, finished = set(chosen), set(ready)
        first = self.version - self.lag  # where versions were jumped over, nothing saves those before it
        left = sorted(mark for group, mark in self.marks.items() if mark >= first and group not in taken)
        # What is left must fit into the steps to come, one for each version, oldest first. A quick young group in
        # the place of a slow old one is not missed at once, but when the last of the old ones are due.
        late = max((mark for at, mark in enumerate(left) if self._step(at) > mark + self.lag), default=first - 1)
        if any(first <= mark <= late and group not in finished for group, mark in self.marks.items()):
            return []
        return chosen

    def _step(self, at: int) -> int:
        """The version of the step that takes what is at this place, after the one that is chosen now."""
        return self.version + 1 + at // self.size
