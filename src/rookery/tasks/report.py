"""What is wrong with tasks: everything, at once, by task and field.

Promises:
- a task's problems are all there, not the first of them;
- a warning never makes a task invalid;
- the printed form is one line for each, safe to show: nothing of it moves a cursor.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from rookery.core.errors import encodable

MAX_NOTES: Final = 100
"""Kept of one task."""
MAX_WORDS: Final = 500


class TaskProblem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing about one field of one task."""

    task: str
    field: str
    problem: str
    warning: bool = False

    def __str__(self) -> str:
        kind = "warning: " if self.warning else ""
        return f"{_shown(self.task)}: {_shown(self.field)}: {kind}{_shown(self.problem)}"


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """Of a whole source."""

    source: str
    tasks: int
    problems: tuple[TaskProblem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every task can be attempted."""
        return all(one.warning for one in self.problems)

    @property
    def broken(self) -> tuple[str, ...]:
        """Ids of tasks that cannot be, in order."""
        return tuple(dict.fromkeys(one.task for one in self.problems if not one.warning))

    @property
    def warnings(self) -> int:
        return sum(one.warning for one in self.problems)

    def __str__(self) -> str:
        lines = [str(one) for one in self.problems]
        count = f"{self.tasks} task{'' if self.tasks == 1 else 's'}"
        lines.append(
            f"{_shown(self.source)}: {count}, {len(self.broken)} of them broken, "
            f"{len(self.problems) - self.warnings} problems, {self.warnings} warnings"
        )
        return "\n".join(lines)


class Notes:
    """What was found about one task while it was read."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.found: list[TaskProblem] = []

    def wrong(self, field: str, problem: str) -> None:
        self._add(field, problem, warning=False)

    def warn(self, field: str, problem: str) -> None:
        self._add(field, problem, warning=True)

    def _add(self, field: str, problem: str, *, warning: bool) -> None:
        if len(self.found) < MAX_NOTES:
            said = encodable(problem)[:MAX_WORDS]
            self.found.append(TaskProblem(self.task, encodable(field)[:200], said, warning))

    @property
    def broken(self) -> bool:
        return any(not one.warning for one in self.found)

    @property
    def words(self) -> str:
        """For `Task.invalid`."""
        return in_words(self.found)


def in_words(found: Sequence[TaskProblem]) -> str:
    return "; ".join(f"{one.field}: {one.problem}" for one in found if not one.warning)


def _shown(text: str) -> str:
    """One line that a terminal shows as it is."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()
