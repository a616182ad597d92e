"""Which tasks a run knows, each with its number in the journal.

Promises:
- a task is written once, at its first use or with the whole list it came in;
- a resume finds the numbers that the run before it gave.
"""

from collections.abc import Mapping, Sequence

from rookery.core import Task
from rookery.journal import Journal

REGISTERED = 200_000
"""Tasks of a list are written into the journal when its stream opens, up to so many; others as they are begun."""


class TaskBook:
    """The tasks of a run."""

    def __init__(self, journal: Journal, numbers: Mapping[str, int] | None = None) -> None:
        self._journal = journal
        self._numbers = dict(numbers or {})

    def number(self, task: Task) -> int:
        """The task's number, given to it now where it has none."""
        number = self._numbers.get(task.id)
        if number is None:
            number = self._numbers[task.id] = len(self._numbers)
            self._journal.add_tasks([task], start=number)
        return number

    def register(self, tasks: Sequence[Task]) -> None:
        """Writes all tasks at once, so that a resume knows those not yet begun."""
        fresh = [task for task in tasks if task.id not in self._numbers]
        start = len(self._numbers)
        self._numbers.update((task.id, start + at) for at, task in enumerate(fresh))
        self._journal.add_tasks(fresh, start=start)
