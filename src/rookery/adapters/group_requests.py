"""Run groups on request, for trainers that choose the task and the number of rollouts of each group."""

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby

from rookery.core import Group, RookeryError, Task
from rookery.engine import Engine, SyncEngine


def make_requests(tasks: Sequence[Task], k: int) -> list[tuple[Task, int]]:
    """Return a request (task, number of rollouts) for each series of equal tasks, with at most k rollouts each.

    For trainers that pass the prompt of a group once for each of its members.
    """
    requests: list[tuple[Task, int]] = []
    for _, part in groupby(tasks, key=lambda task: task.id):
        same = list(part)
        requests += [(same[0], len(same[at : at + k])) for at in range(0, len(same), k)]
    return requests


def run_groups(engine: SyncEngine, requests: Sequence[tuple[Task, int]], name: str) -> list[Group]:
    """Run a group for each task and number of rollouts, and return them in order. A task may occur more than once.

    `name` is the name of the stream in the run. Ctrl-C and errors cancel rollouts in flight.
    """
    found: dict[int, Group] = {}
    for k in sorted({size for _, size in requests}, reverse=True):  # a stream has groups of one size
        waiting: dict[str, deque[int]] = {}
        for index, (task, size) in enumerate(requests):
            if size == k:
                waiting.setdefault(task.id, deque()).append(index)
        tasks = [task for task, size in requests if size == k]
        # An iterator, because a list must not contain a task twice.
        stream = engine.groups(iter(tasks), k=k, name=name, restart=True, buffer=len(tasks), need_tokens=True)
        with closing(stream):
            for group in stream:
                found[waiting[group.task.id].popleft()] = group
    if len(found) != len(requests):
        raise RookeryError(f"the engine returned {len(found)} groups, but {len(requests)} were requested")
    return [found[index] for index in range(len(requests))]


class GroupRequests:
    """Runs groups of one engine on request. Requests run concurrently and share the engine fairly."""

    def __init__(self, name: str) -> None:
        """`name` is the beginning of the names of the streams in the run."""
        self._name = name
        self._free: list[str] = []
        self._streams = 0

    async def run(self, engine: Engine, task: Task, k: int) -> Group:
        """Run k rollouts of a task and return them as a group, with loaded tokens. Cancelling it cancels them."""
        if not self._free:  # as many streams as requests that ever ran at the same time
            self._free.append(f"{self._name}-{self._streams}")
            self._streams += 1
        name = self._free.pop()
        try:
            stream = engine.groups(iter([task]), k=k, name=name, restart=True, buffer=1, need_tokens=True)
            async with stream:
                async for group in stream:
                    return group
        finally:
            self._free.append(name)
        raise RookeryError(f"the engine returned no group for the task {task.id}")
