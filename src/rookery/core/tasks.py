"""Tasks and tasksets."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rookery.core.limits import NO_LIMITS, Limits
from rookery.core.messages import NO_SAMPLING, Message, Sampling


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One problem: a prompt, data for scoring, files, an image, limits."""

    id: str
    prompt: tuple[Message, ...] = ()
    data: dict[str, Any] = {}
    """Data for the environment and its scoring. The policy does not see it."""
    files: dict[str, str] = {}
    """The text of files that the task needs, by path in the sandbox."""
    image: str | None = None
    limits: Limits = NO_LIMITS
    sampling: Sampling = NO_SAMPLING
    """Sampling parameters of the policy for this task; they override those of the run. A server sets them if its
    client sends parameters with each request."""
    node_labels: dict[str, str] = {}
    """Labels that a node of a cluster must have to run this task. Without a cluster they are ignored."""
    environment: str = ""
    """Name of the environment in a mixture to which the task belongs; empty in a run of one environment."""
    invalid: str = ""
    """The reason why the row of the data set is not a valid task; empty for a valid task. An invalid task is never
    attempted: its rollouts fail with cause `task.invalid`."""

    @property
    def text(self) -> str:
        """The text of the prompt's user messages."""
        return "\n".join(message.text for message in self.prompt if message.role == "user")


class Taskset(Sequence[Task]):
    """A named, ordered collection of tasks. `source` is the path or name that it was loaded from, if any."""

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
