"""One problem, and a named, ordered collection of them."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rookery.core.limits import NO_LIMITS, Limits
from rookery.core.messages import Message


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is attempted: a prompt, data for scoring, files, an image, limits."""

    id: str
    prompt: tuple[Message, ...] = ()
    data: dict[str, Any] = {}
    """For the environment and its scoring; never shown to the policy by itself."""
    files: dict[str, str] = {}
    """Path inside the sandbox → text."""
    image: str | None = None
    limits: Limits = NO_LIMITS
    invalid: str = ""
    """Why the row is not a task, in words; such a task is quarantined, never attempted."""

    @property
    def text(self) -> str:
        """The prompt's user text, for environments that need only that."""
        return "\n".join(message.text for message in self.prompt if message.role == "user")


class Taskset(Sequence[Task]):
    """A named, ordered collection of tasks and where it came from. Ids are unique within it."""

    __slots__ = ("_tasks", "name", "source")

    def __init__(self, tasks: Sequence[Task], *, name: str, source: str = "") -> None:
        self._tasks = tuple(tasks)
        self.name = name
        self.source = source

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Taskset(self._tasks[index], name=self.name, source=self.source)
        return self._tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def __repr__(self) -> str:
        return f"Taskset({self.name!r}, {len(self)} tasks from {self.source or 'memory'})"
