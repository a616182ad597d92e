"""Data types for the problems that are found while tasks are loaded, by task and field.

Guarantees:
- All problems of a task are reported, up to `MAX_PROBLEMS`, not only the first.
- A warning never makes a task invalid.
- The printed form has one line per problem and contains no control characters.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from rookery.core.errors import escape_surrogates

MAX_PROBLEMS: Final = 100
"""Maximum number of problems stored for one task."""
MAX_PROBLEM_LENGTH: Final = 500


class TaskProblem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A problem with one field of one task."""

    task: str
    """ID of the task."""
    field: str
    """Name of the field, file or directory that has the problem."""
    problem: str
    """Description of the problem, as a phrase whose subject is the field, such as "is not a directory"."""
    warning: bool = False
    """True if the task can be attempted in spite of the problem."""

    def __str__(self) -> str:
        kind = "warning: " if self.warning else ""
        return (
            f"{_make_printable(self.task)}: {_make_printable(self.field)}: {kind}{_make_printable(self.problem)}"
        )


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """The problems of all tasks of a source, such as a file or directory."""

    source: str
    tasks: int
    """Number of tasks, valid or not."""
    problems: tuple[TaskProblem, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every task is valid, so that it can be attempted. Warnings do not count."""
        return all(one.warning for one in self.problems)

    @property
    def broken(self) -> tuple[str, ...]:
        """IDs of the invalid tasks, in the order in which their problems were reported."""
        return tuple(dict.fromkeys(one.task for one in self.problems if not one.warning))

    @property
    def warnings(self) -> int:
        """Number of warnings."""
        return sum(one.warning for one in self.problems)

    def __str__(self) -> str:
        lines = [str(one) for one in self.problems]
        count = f"{self.tasks} task{'' if self.tasks == 1 else 's'}"
        lines.append(
            f"{_make_printable(self.source)}: {count}, {len(self.broken)} of them broken, "
            f"{len(self.problems) - self.warnings} problems, {self.warnings} warnings"
        )
        return "\n".join(lines)


class ProblemCollector:
    """Collects the problems of one task while it is read."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.items: list[TaskProblem] = []

    def error(self, field: str, problem: str) -> None:
        """Report a problem that makes the task invalid."""
        self._add(field, problem, warning=False)

    def warn(self, field: str, problem: str) -> None:
        """Report a problem that does not make the task invalid."""
        self._add(field, problem, warning=True)

    def _add(self, field: str, problem: str, *, warning: bool) -> None:
        if len(self.items) < MAX_PROBLEMS:
            text = escape_surrogates(problem)[:MAX_PROBLEM_LENGTH]
            self.items.append(TaskProblem(self.task, escape_surrogates(field)[:200], text, warning))

    @property
    def has_errors(self) -> bool:
        """True if a reported problem makes the task invalid."""
        return any(not one.warning for one in self.items)

    @property
    def summary(self) -> str:
        """All problems that make the task invalid, in one string for `Task.invalid`. Warnings are left out."""
        return summarize_problems(self.items)


def summarize_problems(problems: Sequence[TaskProblem]) -> str:
    """Return all problems that are not warnings, in one string."""
    return "; ".join(f"{one.field}: {one.problem}" for one in problems if not one.warning)


def _make_printable(text: str) -> str:
    """Return the text with backslash escapes for characters that are not printable."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()
