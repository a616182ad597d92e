"""Run groups on request, for trainers that choose the task and the number of rollouts of each group."""

from collections import deque
from collections.abc import Sequence
from contextlib import closing

from rookery.core import Group, RookeryError, Task
from rookery.engine import Engine, SyncEngine


def run_groups(engine: SyncEngine, tasks: Sequence[Task], k: int, name: str) -> list[Group]:
    """Run k rollouts of each task and return the groups in the order of `tasks`. A task may occur more than once.

    `name` is the name of the stream in the run. Ctrl-C and errors cancel rollouts in flight.
    """
    waiting: dict[str, deque[int]] = {}
    for index, task in enumerate(tasks):
        waiting.setdefault(task.id, deque()).append(index)
    # An iterator, because a list must not contain a task twice.
    stream = engine.groups(iter(tasks), k=k, name=name, restart=True, buffer=max(1, len(tasks)), need_tokens=True)
    found: dict[int, Group] = {}
    with closing(stream):
        for group in stream:
            found[waiting[group.task.id].popleft()] = group
    if len(found) != len(tasks):
        raise RookeryError(f"the engine returned {len(found)} groups, but {len(tasks)} were requested")
    return [found[index] for index in range(len(tasks))]


class GroupRequests:
    """Runs groups of one engine on request. Requests run concurrently and share the engine fairly."""

    def __init__(self, engine: Engine, name: str) -> None:
        """`name` is the beginning of the names of the streams in the run."""
        self._engine = engine
        self._name = name
        self._free: list[str] = []
        self._streams = 0

    async def run(self, task: Task, k: int) -> Group:
        """Run k rollouts of a task and return them as a group, with loaded tokens. Cancelling it cancels them."""
        if not self._free:  # as many streams as requests that ever ran at the same time
            self._free.append(f"{self._name}-{self._streams}")
            self._streams += 1
        name = self._free.pop()
        try:
            stream = self._engine.groups(iter([task]), k=k, name=name, restart=True, buffer=1, need_tokens=True)
            async with stream:
                async for group in stream:
                    return group
        finally:
            self._free.append(name)
        raise RookeryError(f"the engine returned no group for the task {task.id}")
