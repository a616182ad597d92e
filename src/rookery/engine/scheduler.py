"""Decide which rollout of a stream runs next and which finished groups are delivered. Used by the supervisor.

`GroupScheduler` does no I/O and gets the current time as an argument.

- Rollouts of open groups run before new groups start, in order of admission, so that groups finish soon after they
  start. A rollout that is retried runs before rollouts that never ran.
- A slow rollout occupies one slot. Groups after its group still start.
- No group starts while the buffer of finished groups is full: a slow consumer slows the run.
- With `want` and a filter, dropped groups are replaced. The delivered groups are the first `want` kept groups in
  order of *admission*, not of completion, so oversampling does not favour short rollouts.
- Oversampling adds groups, never members of a group.
- With `start_longest_first`, rollouts of the open groups run in order of their predicted length.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import chain
from operator import itemgetter
from typing import Literal, TypeAlias

import msgspec

from rookery.core import Attempt, CancelledReason, Rollout, Task
from rookery.engine.staleness import StalenessBound

GroupState: TypeAlias = Literal["open", "kept", "dropped", "delivered"]


class Requirements(msgspec.Struct, frozen=True):
    """GPUs and labels that a node must have for an attempt. CPUs and memory are shared by attempts."""

    gpus: int = 0
    labels: frozenset[tuple[str, str]] = frozenset()
    """Names and values of labels that the node must have."""


NO_REQUIREMENTS = Requirements()


class OpenRollout(msgspec.Struct, eq=False):
    """A rollout of an open group: its attempts so far and, at the end, its final record."""

    group: "OpenGroup"
    member: int
    waiting_since: float = 0.0
    """The time at which the rollout became ready for a runner, in seconds of the event loop's clock."""
    attempts: list[Attempt] = []
    """Attempts that ended in this process of the run."""
    earlier_attempts: int = 0
    """Number of attempts that an earlier process may have started. Their numbers are not used again."""
    record: Rollout | None = None

    @property
    def id(self) -> str:
        return f"{self.group.index}.{self.member}"

    @property
    def next_attempt(self) -> int:
        """The number of the next attempt; the first one is 1."""
        return self.earlier_attempts + len(self.attempts) + 1


class OpenGroup(msgspec.Struct, eq=False):
    """A group that was started and is not delivered yet."""

    admission_index: int
    """The group's number in its scheduler, in the order in which groups were started."""
    index: int
    """Identifies the group within the run."""
    task: Task
    unfinished: int
    """Number of rollouts without a final record."""
    rollouts: list[OpenRollout] = []
    stream: str = ""
    """The name of the stream that started the group."""
    ordinal: int = 0
    """The group's position in its stream, counted from 0 over all processes of the run. Seeds are derived from
    it."""
    task_number: int = 0
    """The task's number in the journal."""
    state: GroupState = "open"
    cancelled: CancelledReason | None = None
    """The reason why the group is not needed any more, or None. Its running attempts are cancelled for this
    reason."""


class GroupScheduler:
    """Schedules the rollouts of one stream, which one call of `Engine.groups` opened."""

    def __init__(
        self,
        *,
        k: int,
        want: int | None = None,
        oversample: int = 0,
        buffer: int = 64,
        staleness: StalenessBound | None = None,
    ) -> None:
        if k < 1 or buffer < 1 or oversample < 0 or (want is not None and want < 0):
            raise ValueError(
                f"k and buffer must be at least 1, want and oversample at least 0, got k={k}, buffer={buffer}, "
                f"want={want} and oversample={oversample}"
            )
        self.k = k
        self.want = want
        self.oversample = oversample
        self.buffer = buffer
        self.staleness = staleness
        self.exhausted = False
        """True if there are no more tasks to start."""
        self.delivered = 0
        """Number of groups that were passed to the consumer's buffer."""
        self.buffered = 0
        """Number of delivered groups that the consumer has not taken yet."""
        self.groups: dict[int, OpenGroup] = {}
        """Groups that are open, or kept and not delivered, by `admission_index`."""
        self.admitted = 0
        """Number of groups that were started."""
        self._fresh: deque[OpenRollout] = deque()
        """Rollouts that never ran, in order of admission."""
        self._retries: list[tuple[int, int, OpenRollout]] = []
        """Heap of rollouts to run again, by `admission_index` of their group, and member."""
        self._waiting_for_node: dict[Requirements, deque[OpenRollout]] = {}
        """Rollouts that wait for a node that meets their requirements, so that they do not delay others."""
        self._suspects: deque[OpenRollout] = deque()
        """Rollouts that must run alone in a runner, because they may have crashed one."""
        self._delayed: list[tuple[float, int, int, OpenRollout]] = []
        """Heap of rollouts that wait for their back-off to end, by time."""
        self._sequence = 0

    @property
    def fulfilled(self) -> bool:
        """True if `want` groups were delivered."""
        return self.want is not None and self.delivered >= self.want

    @property
    def done(self) -> bool:
        """True if no rollout is left to run and no group is left to deliver."""
        return self.fulfilled or (self.exhausted and not self.groups)

    def can_start_group(self) -> bool:
        return self.startable_groups() != 0

    def startable_groups(self) -> int | None:
        """Return how many new groups may be started now, or None if the number is not limited."""
        if (
            self.exhausted
            or self.buffered >= self.buffer
            or (self.want is not None and self.delivered >= self.want)
        ):
            return 0
        outstanding = self.delivered + len(self.groups)
        bounds = [self.staleness.quota] if self.staleness is not None else []
        if self.want is not None:
            bounds.append(self.want + self.oversample)
        return max(0, min(bounds) - outstanding) if bounds else None

    def start_group(
        self, index: int, task: Task, now: float, finished: Mapping[int, Rollout] | None = None
    ) -> OpenGroup:
        """Start a group. `finished` holds the records of members that an earlier process of the run completed."""
        group = OpenGroup(self.admitted, index, task, self.k)
        group.rollouts = [OpenRollout(group, member, now) for member in range(self.k)]
        self.admitted += 1
        self.groups[group.admission_index] = group
        if self.staleness is not None:
            self.staleness.add(index)
        for rollout in group.rollouts:
            if finished and rollout.member in finished:
                rollout.record = finished[rollout.member]
                group.unfinished -= 1
            else:
                self._fresh.append(rollout)
        return group

    def start_longest_first(self, predict: Callable[[Task], float]) -> None:
        """Sort the rollouts that never ran by their predicted length, longest first.

        Rollouts of equal length keep their order, so the rollouts of a group stay together. The order of
        admission, which decides which groups are delivered, does not change.
        """
        lengths = {rollout.group.admission_index: predict(rollout.group.task) for rollout in self._fresh}
        self._fresh = deque(sorted(self._fresh, key=lambda rollout: -lengths[rollout.group.admission_index]))

    def next_rollout(self, now: float) -> OpenRollout | None:
        """Remove and return the next rollout that may run next to others in a runner, or None."""
        self._move_due(now)
        if self._retries:
            return heappop(self._retries)[2]
        return self._fresh.popleft() if self._fresh else None

    def wait_for_node(self, rollout: OpenRollout, required: Requirements) -> None:
        """Put a rollout aside until a node that meets these requirements is free."""
        self._waiting_for_node.setdefault(required, deque()).append(rollout)

    @property
    def waiting_for_node_count(self) -> int:
        return sum(map(len, self._waiting_for_node.values()))

    def awaited_requirements(self) -> list[Requirements]:
        """Return the different requirements for which rollouts wait."""
        return list(self._waiting_for_node)

    def next_waiting_for_node(self, required: Requirements) -> OpenRollout | None:
        """Remove and return the next rollout that waits for a node that meets these requirements, or None."""
        waiting = self._waiting_for_node.get(required)
        rollout = waiting.popleft() if waiting else None
        if not waiting:
            self._waiting_for_node.pop(required, None)
        return rollout

    def next_suspect(self, accepts: Callable[[Task], bool] = lambda _: True) -> OpenRollout | None:
        """Remove and return the next rollout that must run alone in a runner and is accepted by it, or None."""
        for rollout in self._suspects:
            if accepts(rollout.group.task):
                self._suspects.remove(rollout)
                return rollout
        return None

    def suspect_tasks(self) -> list[Task]:
        """Return the tasks of the rollouts that must run alone in a runner."""
        return [rollout.group.task for rollout in self._suspects]

    def queued(self) -> Iterator[OpenRollout]:
        """Yield the rollouts that are ready to run next to others in a runner, in order."""
        yield from (entry[2] for entry in sorted(self._retries, key=itemgetter(0, 1)))
        yield from self._fresh

    def _move_due(self, now: float) -> None:
        """Queue the delayed rollouts whose back-off has ended."""
        while self._delayed and self._delayed[0][0] <= now:
            due, _, _, rollout = heappop(self._delayed)
            self._queue_retry(rollout, due)

    def _queue_retry(self, rollout: OpenRollout, since: float) -> None:
        rollout.waiting_since = since
        heappush(self._retries, (rollout.group.admission_index, rollout.member, rollout))

    def requeue(self, rollout: OpenRollout, now: float, delay: float, *, alone: bool = False) -> None:
        """Queue a rollout for a new attempt.

        With `alone`, it must run alone in a runner, and `delay` is ignored. Otherwise it is ready after `delay`
        seconds, and then runs before rollouts that never ran.
        """
        if alone:
            rollout.waiting_since = now
            self._suspects.append(rollout)
        elif delay <= 0:
            self._queue_retry(rollout, now)
        else:
            self._sequence += 1
            heappush(self._delayed, (now + delay, rollout.group.admission_index, self._sequence, rollout))

    def pop_overdue(self, now: float, limit: float) -> list[OpenRollout]:
        """Remove and return the queued rollouts that have waited for a runner for more than `limit` seconds."""
        self._move_due(now)
        waiting = chain(self.queued(), *self._waiting_for_node.values(), self._suspects)
        late = [one for one in waiting if now - one.waiting_since > limit]
        if late:
            self._remove_queued(set(late))
        return late

    def exclude_wait(
        self,
        seconds: float,
        *,
        shared: bool = True,
        suspects: bool = True,
        waiting_for_node: Callable[[Requirements], bool] = lambda _: False,
    ) -> None:
        """Subtract `seconds` from the waiting time of queued rollouts.

        Used for time in which the run was paused or all slots were in use. `shared` and `suspects` select the
        rollouts that may run next to others, and those that must run alone. `waiting_for_node` selects
        further rollouts by the requirements for which they wait.
        """
        waiting = [
            rollouts
            for required, rollouts in self._waiting_for_node.items()
            if shared or waiting_for_node(required)
        ]
        queued = self.queued() if shared else ()
        for rollout in chain(queued, *waiting, self._suspects if suspects else ()):
            rollout.waiting_since += seconds

    def finish(self, rollout: OpenRollout, record: Rollout) -> bool:
        """Store the final record of a rollout. Return True if all rollouts of its group now have one."""
        if rollout.record is not None:
            raise ValueError(f"rollout {record.id} already has a final record")
        rollout.record = record
        rollout.group.unfinished -= 1
        return rollout.group.unfinished == 0

    def resolve_group(self, group: OpenGroup, *, kept: bool) -> list[OpenGroup]:
        """Apply the filter's decision `kept` to a group whose rollouts have ended. Return the groups to deliver.

        With `oversample`, groups are delivered only when it is certain that they are among the first `want` kept
        groups.
        """
        group.state = "kept" if kept else "dropped"
        if not kept:
            self._drop(group)
        return self._pop_deliverable(group)

    def _drop(self, group: OpenGroup) -> None:
        del self.groups[group.admission_index]
        if self.staleness is not None:
            self.staleness.remove(group.index)

    def _pop_deliverable(self, resolved: OpenGroup | None = None) -> list[OpenGroup]:
        """Mark the kept groups that can be delivered now as delivered, and return them.

        `resolved` is the group that the filter has just kept or dropped, if any.
        """
        ready: list[OpenGroup] = []
        if self.want is None or self.oversample == 0:
            if resolved is not None and resolved.state == "kept":
                ready.append(resolved)
        else:
            # A kept group is certain to be among the first `want` only if fewer than `want` groups before it are
            # kept or undecided. Delivered groups that were admitted after it may be counted as well: they became
            # certain with this group counted before them.
            before = self.delivered
            for other in self.groups.values():
                if other.state == "kept" and before < self.want:
                    ready.append(other)
                before += 1
                if before >= self.want:
                    break
        for out in ready:
            out.state = "delivered"
            del self.groups[out.admission_index]
            self.delivered += 1
            self.buffered += 1
        return ready

    def remove_environment(self, environment: str) -> tuple[list[OpenGroup], list[OpenGroup]]:
        """Remove the open groups of an environment and their queued rollouts.

        Return the removed groups, and the groups of other environments that can be delivered now.
        """
        removed = [
            group
            for group in self.groups.values()
            if group.state == "open" and group.task.environment == environment
        ]
        for group in removed:
            self._drop(group)
        self._remove_queued({rollout for group in removed for rollout in group.rollouts})
        return removed, self._pop_deliverable() if removed else []

    def _remove_queued(self, removed: Collection[OpenRollout]) -> None:
        """Remove rollouts from all queues."""
        self._fresh = deque(one for one in self._fresh if one not in removed)
        self._retries = [entry for entry in self._retries if entry[2] not in removed]
        heapify(self._retries)
        self._suspects = deque(one for one in self._suspects if one not in removed)
        self._delayed = [entry for entry in self._delayed if entry[3] not in removed]
        heapify(self._delayed)
        for required, waiting in list(self._waiting_for_node.items()):
            self._waiting_for_node[required] = deque(one for one in waiting if one not in removed)

    def pop_surplus(self) -> list[OpenGroup]:
        """If `want` groups are delivered, remove and return the other groups, which are not needed any more."""
        return [] if self.want is None or self.delivered < self.want else self.cancel_all()

    def cancel_all(self) -> list[OpenGroup]:
        """Remove all groups and queued rollouts, and start no more groups. Return the groups that were removed."""
        self.exhausted = True
        open_groups = list(self.groups.values())
        self.groups.clear()
        self._fresh.clear()
        self._retries.clear()
        self._waiting_for_node.clear()
        self._suspects.clear()
        self._delayed.clear()
        return open_groups

    def mark_taken(self) -> None:
        """Record that the consumer took a delivered group, which frees a place in the buffer."""
        self.buffered -= 1
