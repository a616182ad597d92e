"""Plan the groups that a stream runs: from tasks, from an earlier position, or from the journal of a resumed run.

Runs in the supervisor's process, when a stream is opened or a run is resumed.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rookery.core import Task
from rookery.engine.group_channel import PlannedGroup
from rookery.journal import UNREADABLE_TOKENS, FailedRollout, Journal, MissingRollouts, RunReader, Unfinished

if TYPE_CHECKING:
    from rookery.engine.checkpoint import StreamCursor

MAX_REGISTERED = 200_000
"""A list of up to this many tasks is written to the journal when its stream is opened. The tasks of a longer list
are written one by one when they start."""


class TaskRegistry:
    """Numbers the tasks of a run and writes each of them to the journal once.

    A resumed run passes `numbers`: the task numbers of the earlier process, by task ID.
    """

    def __init__(self, journal: Journal, numbers: Mapping[str, int] | None = None) -> None:
        self._journal = journal
        self._numbers = dict(numbers or {})

    def number(self, task: Task) -> int:
        """Return the task's number. A task without a number gets one and is written to the journal."""
        number = self._numbers.get(task.id)
        if number is None:
            number = self._numbers[task.id] = len(self._numbers)
            self._journal.add_tasks([task], start=number)
        return number

    def register(self, tasks: Sequence[Task]) -> None:
        """Write all new tasks to the journal at once, so that a resume also knows the tasks that never started."""
        fresh = [task for task in tasks if task.id not in self._numbers]
        start = len(self._numbers)
        self._numbers.update((task.id, start + at) for at, task in enumerate(fresh))
        self._journal.add_tasks(fresh, start=start)


def plan_groups(
    tasks: Iterable[Task], epochs: int | None, number: Callable[[Task], int], cursor: "StreamCursor | None"
) -> Iterator[PlannedGroup]:
    """Yield the groups that a stream runs, in order of their position.

    Without a cursor, these are all groups. With a cursor, groups that were started before are left out, unless the
    cursor says that they run again. `number` returns the number of a task in the journal.
    """
    again = set(cursor.ordinals) if cursor else set()
    skip = cursor.admitted if cursor else 0
    for ordinal, task in enumerate(_repeat_epochs(tasks, epochs)):
        if ordinal >= skip or ordinal in again:
            yield PlannedGroup(ordinal, number(task), task)


def _repeat_epochs(tasks: Iterable[Task], epochs: int | None) -> Iterator[Task]:
    if epochs == 1:
        yield from tasks
        return
    seen: list[Task] = []
    if epochs is None or epochs > 0:
        for task in tasks:  # one at a time: a generator may be slow
            seen.append(task)
            yield task
    done = 1
    while seen and (epochs is None or done < epochs):
        yield from seen
        done += 1


def cause_matches(cause: str, selectors: Collection[str]) -> bool:
    """Return True if the cause is one of the selectors or begins with one and a dot.

    For example, `upstream` matches `upstream.error`.
    """
    return any(cause == one or cause.startswith(f"{one}.") for one in selectors)


class RemainingWork(msgspec.Struct, frozen=True):
    """The work of a resume: rollouts without a usable record, and failed rollouts that run again."""

    unfinished: Unfinished
    failed: list[FailedRollout]


def find_remaining(reader: RunReader, *, failed: bool, causes: Collection[str] = ()) -> RemainingWork:
    """Find the rollouts that a resume has to run.

    With `failed`, failed rollouts are included, and so are rollouts whose recorded tokens are corrupt: all of
    them, or those with one of `causes`.
    """
    if not failed:
        return RemainingWork(reader.unfinished(), [])
    again = [one for one in reader.failed_rollouts() if not causes or cause_matches(one.cause, causes)]
    checksums = not causes or cause_matches(UNREADABLE_TOKENS, causes)
    return RemainingWork(reader.unfinished(checksums=checksums, again={one.id for one in again}), again)


class ResumePlan(msgspec.Struct, frozen=True):
    """The work of a resumed run, and its knowledge about the earlier process."""

    groups: list[PlannedGroup]
    """Groups with missing rollouts, then groups for tasks that never started."""
    next_group: int
    task_numbers: dict[str, int]
    quarantined: dict[str, str]
    """The reasons why tasks are quarantined (known to be broken and not attempted), by task ID."""


def plan_resume(
    folder: Path, journal: Journal, *, failed: bool = False, causes: Collection[str] = ()
) -> ResumePlan:
    """Read the journal of a run and plan what is left to run.

    Rollouts whose recorded tokens are missing run again. With `failed`, failed rollouts run again too: all of
    them, or those with one of `causes`. The records of all these rollouts are marked as superseded; they stay in
    the journal.
    """
    with RunReader(folder) as reader:
        remaining = find_remaining(reader, failed=failed, causes=causes)
        lost, again = remaining.unfinished.lost, remaining.failed
        for rollout_id in lost:
            journal.discard(rollout_id, "its recorded tokens cannot be read")
        for one in again:
            journal.discard(one.id, f"run again after {one.cause}")
        if lost or again:
            journal.flush()  # from now on they are unfinished, even if this process dies
        rows = list(reader.task_rows())
        tasks = dict(zip((row.idx for row in rows), reader.tasks(), strict=True))
        rerun_groups = {one.group for one in again}
        started: set[int] = set()
        lifted: set[int] = set()
        """Tasks that are not quarantined any more, because rollouts of them run again."""
        next_group = ordinal = 0
        for group in reader.groups():
            started.add(group.task_idx)
            next_group = max(next_group, group.idx + 1)
            ordinal = max(ordinal, group.position + 1)
            if group.idx in rerun_groups:
                lifted.add(group.task_idx)
        ended = {one.id for one in again}
        groups = [
            _plan_missing(reader, missing, tasks[missing.group.task_idx], ended)
            for missing in remaining.unfinished.groups
        ]
        for row in rows:
            if row.idx in lifted and row.status == "quarantined":
                journal.lift_quarantine(row.idx)
    for idx, task in tasks.items():
        if idx not in started:
            groups.append(PlannedGroup(ordinal, idx, task))
            ordinal += 1
    return ResumePlan(
        groups,
        next_group,
        {task.id: idx for idx, task in tasks.items()},
        {
            row.id: row.detail
            for row in rows
            if row.status == "quarantined" and row.idx not in lifted and not tasks[row.idx].invalid
        },
    )


def _plan_missing(reader: RunReader, missing: MissingRollouts, task: Task, ended: Collection[str]) -> PlannedGroup:
    """Return a plan for the missing rollouts of a group.

    `ended` are IDs of rollouts whose earlier attempts have all ended.
    """
    group = missing.group
    finished = {
        member: record
        for member in range(group.k)
        if member not in missing.members and (record := reader.rollout(f"{group.idx}.{member}")) is not None
    }
    # One attempt more than the journal has: an attempt that was running when the process died is not recorded.
    attempts = {
        member: (f"{group.idx}.{member}" not in ended)
        + max((attempt.number for attempt in reader.attempts(f"{group.idx}.{member}")), default=0)
        for member in missing.members
    }
    return PlannedGroup(
        group.position,
        group.task_idx,
        task,
        stream=group.stream,
        index=group.idx,
        finished=finished,
        attempts=attempts,
    )
