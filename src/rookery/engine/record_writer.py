"""Write final records to the journal and deliver groups after they are committed. Runs in the supervisor.

- Every admitted rollout gets exactly one final record.
- A group always has k records, in order, of one shape.
- A group is delivered only after its records are committed.
- A rollout that cannot be loaded gets a `Failed` record; the journal keeps its first record as superseded.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from rookery.core import Failed, Group, JournalError, Outcome, Rollout, RookeryError, mark_failed
from rookery.engine.group_channel import GroupChannel, PlannedGroup
from rookery.engine.scheduler import OpenGroup, OpenRollout
from rookery.journal import Journal, UnencodableError

log = logging.getLogger("rookery.engine")


class RecordWriter:
    """The only writer of a run's records. Calls `fail` if the journal cannot be written."""

    def __init__(self, journal: Journal, fail: Callable[[RookeryError], None]) -> None:
        self.journal = journal
        self.quarantined: dict[str, Failed] = {}
        """Broken tasks by ID. Their rollouts are not attempted any more."""
        self.on_record: Callable[[Rollout], None] | None = None
        self.on_event: Callable[[str, dict[str, Any]], None] | None = None
        self._fail = fail
        self._unloadable: set[str] = set()
        """Rollouts whose record was replaced because loading failed."""

    def write(self, put: Callable[[], None]) -> None:
        """Call a function that writes to the journal; report a `JournalError` to `fail`."""
        try:
            put()
        except JournalError as error:
            self._fail(error)

    def record_event(self, kind: str, payload: dict[str, Any]) -> None:
        self.write(lambda: self.journal.event(kind, payload))
        if self.on_event is not None:
            self.on_event(kind, payload)

    def record_group(self, channel: GroupChannel, index: int, planned: PlannedGroup) -> None:
        """Record the admission of a new group."""
        self.write(
            lambda: self.journal.add_group(
                index,
                stream=channel.name,
                position=planned.ordinal,
                task=planned.task_number,
                k=channel.scheduler.k,
            )
        )

    def quarantine(self, group: OpenGroup, outcome: Failed) -> None:
        """Exclude the task of a group from further attempts."""
        if group.task.id not in self.quarantined:
            self.quarantined[group.task.id] = outcome
            self.write(lambda: self.journal.quarantine(group.task_number, f"{outcome.cause}: {outcome.detail}"))
            payload = {"task": group.task.id, "cause": outcome.cause, "detail": outcome.detail}
            self.record_event("task.quarantined", payload)

    @staticmethod
    def build_bare_record(rollout: OpenRollout, outcome: Outcome) -> Rollout:
        """Return the record of a rollout that ends without an attempt, or between two attempts."""
        return Rollout(
            id=rollout.id,
            group=rollout.group.index,
            member=rollout.member,
            task=rollout.group.task.id,
            outcome=outcome,
            attempts=tuple(rollout.attempts),
        )

    def record(self, channel: GroupChannel, rollout: OpenRollout, record: Rollout) -> bool:
        """Store the final record of a rollout, and only here. Return True if its group is complete."""
        try:
            self.journal.add_rollout(record)
        except UnencodableError as error:  # fails this rollout alone; drop what may be the reason
            failed = mark_failed(record, error, cause="bug.rookery")
            record = msgspec.structs.replace(failed, info={}, metrics={}, rewards={}, attempts=())
            self.write(lambda: self.journal.add_rollout(record))
        except JournalError as error:
            self._fail(error)
        if self.on_record is not None:
            self.on_record(record)
        return channel.scheduler.finish(rollout, record)

    def complete(self, channel: GroupChannel, group: OpenGroup) -> list[OpenGroup]:
        """Filter a complete group and queue it for delivery; return groups that are not needed any more."""
        if group.cancelled is not None:
            self.write(lambda: self.journal.set_group(group.index, "surplus"))
            return []
        kept = True
        if channel.keep is not None:
            try:
                kept = channel.keep(channel.build_group(group))
            except Exception as error:  # noqa: BLE001  (the consumer's own function: the consumer gets its error)
                channel.fail(error)
                kept = False
        if not kept:  # a kept group needs no status: it has all its records
            self.write(lambda: self.journal.set_group(group.index, "filtered"))
            channel.untaken.pop(group.index, None)
        for out in channel.scheduler.resolve_group(group, kept=kept):
            channel.pending.append((self.journal.put_count, channel.build_group(out)))
        surplus = channel.scheduler.pop_surplus()
        if channel.done:
            channel.notify()
        return surplus

    def record_load_failures(self, before: Group, after: Group) -> None:
        """Replace the records of rollouts that failed while a group was loaded."""
        for old, new in zip(before.rollouts, after.rollouts, strict=True):
            if old.valid and isinstance(new.outcome, Failed) and new.id not in self._unloadable:
                self._unloadable.add(new.id)
                self._replace_record(new, new.outcome)

    def _replace_record(self, record: Rollout, outcome: Failed) -> None:
        log.error(
            "rollout %s could not be loaded: %s: %s\n%s",
            record.id,
            outcome.cause,
            outcome.detail,
            outcome.traceback,
        )
        self.write(lambda: self.journal.replace_rollout(record, outcome.detail))
        payload = {"id": record.id, "cause": outcome.cause, "detail": outcome.detail}
        self.record_event("rollout.load_failed", payload)

    def mark_taken(self, channel: GroupChannel, index: int) -> None:
        """Note that the consumer took a group. The journal records it only for groups with segments."""
        channel.scheduler.mark_taken()
        channel.taken += 1
        channel.untaken.pop(index, None)
        if channel.loads_segments:
            self.write(lambda: self.journal.set_group(index, "consumed"))

    def deliver_committed(self, channels: Iterable[GroupChannel]) -> None:
        """Deliver the groups whose records are on disk."""
        done = self.journal.done_count
        for channel in channels:
            moved = False
            while channel.pending and channel.pending[0][0] <= done:
                channel.ready.append(channel.pending.popleft()[1])
                moved = True
            if moved:
                channel.notify()
