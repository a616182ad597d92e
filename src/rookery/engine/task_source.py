"""Find the groups that a stream has to run: from tasks, from a cursor, or from the journal of an earlier process.

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
"""Up to this many tasks of a list are written to the journal when the stream opens; the others when they start."""


class TaskRegistry:
    """Numbers the tasks of a run and writes each of them to the journal once.

    A resumed run passes the `numbers` of the earlier process.
    """

    def __init__(self, journal: Journal, numbers: Mapping[str, int] | None = None) -> None:
        self._journal = journal
        self._numbers = dict(numbers or {})

    def number(self, task: Task) -> int:
        """Return the task's number; register the task if it has none."""
        number = self._numbers.get(task.id)
        if number is None:
            number = self._numbers[task.id] = len(self._numbers)
            self._journal.add_tasks([task], start=number)
        return number

    def register(self, tasks: Sequence[Task]) -> None:
        """Write all new tasks to the journal at once, so that a resume knows those that never started."""
        fresh = [task for task in tasks if task.id not in self._numbers]
        start = len(self._numbers)
        self._numbers.update((task.id, start + at) for at, task in enumerate(fresh))
        self._journal.add_tasks(fresh, start=start)


def plan_groups(
    tasks: Iterable[Task], epochs: int | None, number: Callable[[Task], int], cursor: "StreamCursor | None"
) -> Iterator[PlannedGroup]:
    """Yield the groups to run from a cursor on: first those to run again, then those that never started."""
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
    """Return True if the cause is a selector or starts with one (`upstream` matches `upstream.error`)."""
    return any(cause == one or cause.startswith(f"{one}.") for one in selectors)


class RemainingWork(msgspec.Struct, frozen=True):
    """What a resume runs: members without a usable record, and failed rollouts that run again."""

    unfinished: Unfinished
    failed: list[FailedRollout]


def find_remaining(reader: RunReader, *, failed: bool, causes: Collection[str] = ()) -> RemainingWork:
    """Find what a resume has to run. With `failed` also failed rollouts, and records whose tokens are corrupt."""
    if not failed:
        return RemainingWork(reader.unfinished(), [])
    again = [one for one in reader.failed_rollouts() if not causes or cause_matches(one.cause, causes)]
    checksums = not causes or cause_matches(UNREADABLE_TOKENS, causes)
    return RemainingWork(reader.unfinished(checksums=checksums, again={one.id for one in again}), again)


class ResumePlan(msgspec.Struct, frozen=True):
    """What an earlier process left to do."""

    groups: list[PlannedGroup]
    """Groups with missing members, then tasks that never started."""
    next_group: int
    task_numbers: dict[str, int]
    quarantined: dict[str, str]
    """The reason for each quarantined task, by ID."""


def plan_resume(
    folder: Path, journal: Journal, *, failed: bool = False, causes: Collection[str] = ()
) -> ResumePlan:
    """Read the journal of a run and plan what is left to run.

    Rollouts whose token data is gone run again, and so do failed rollouts with `failed`: all of them, or those
    with one of `causes`. Their new records supersede the earlier ones, which stay in the journal.
    """
    with RunReader(folder) as reader:
        remaining = find_remaining(reader, failed=failed, causes=causes)
        lost, again = remaining.unfinished.lost, remaining.failed
        for rollout_id in lost:
            journal.discard(rollout_id, "its token data cannot be read")
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
    """Plan the missing members of a group. `ended`: rollouts whose earlier attempts have all ended."""
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
