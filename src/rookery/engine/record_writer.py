"""Write final records to the journal and deliver groups to consumers. Runs in the supervisor's process.

- Every admitted rollout gets exactly one final record.
- A group always has k records, in order, of one shape.
- A group is delivered only after its records are committed to the journal.
- A rollout whose tokens cannot be loaded gets a `Failed` record; the journal keeps its first record as superseded.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from rookery.core import Failed, Group, JournalError, Outcome, Rollout, RookeryError, mark_failed
from rookery.engine.group_channel import GroupChannel, PlannedGroup
from rookery.engine.scheduler import OpenGroup, OpenRollout
from rookery.journal import Journal, UnencodableError
from rookery.telemetry import catalogue

log = logging.getLogger("rookery.engine")


class RecordWriter:
    """Writes all records and events of a run. Calls `fail` with the error if the journal cannot be written."""

    def __init__(self, journal: Journal, fail: Callable[[RookeryError], None]) -> None:
        self.journal = journal
        self.quarantined: dict[str, Failed] = {}
        """The failure of each broken task, by task ID. Further rollouts of these tasks fail without an attempt."""
        self.on_record: Callable[[Rollout], None] | None = None
        self.on_event: Callable[[str, dict[str, Any]], None] | None = None
        self._fail = fail
        self._unloadable: set[str] = set()
        """IDs of rollouts whose record was replaced because their tokens could not be loaded."""

    def write(self, put: Callable[[], None]) -> None:
        """Call `put`, which writes to the journal, and pass a `JournalError` to the `fail` callback."""
        try:
            put()
        except JournalError as error:
            self._fail(error)

    def record_event(self, kind: str, payload: dict[str, Any]) -> None:
        self.write(lambda: self.journal.event(kind, payload))
        if self.on_event is not None:
            self.on_event(kind, payload)

    def record_group(self, channel: GroupChannel, index: int, planned: PlannedGroup) -> None:
        """Write to the journal that a new group was started, with its stream, its position there and its task."""
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
        """Mark the task of a group as broken, so that no further rollout of it is attempted."""
        if group.task.id not in self.quarantined:
            self.quarantined[group.task.id] = outcome
            self.write(lambda: self.journal.quarantine(group.task_number, f"{outcome.cause}: {outcome.detail}"))
            payload = {"task": group.task.id, "cause": outcome.cause, "detail": outcome.detail}
            self.record_event("task.quarantined", payload)

    @staticmethod
    def build_bare_record(rollout: OpenRollout, outcome: Outcome) -> Rollout:
        """Return the record of a rollout that ends while no attempt at it is running."""
        return Rollout(
            id=rollout.id,
            group=rollout.group.index,
            member=rollout.member,
            task=rollout.group.task.id,
            environment=rollout.group.task.environment,
            outcome=outcome,
            attempts=tuple(rollout.attempts),
        )

    def record(self, channel: GroupChannel, rollout: OpenRollout, record: Rollout) -> bool:
        """Write the final record of a rollout. Return True if all rollouts of its group now have one.

        No other method writes a first final record.
        """
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
        """Apply the stream's filter to a group whose rollouts have all ended, and queue a kept group for delivery.

        Return the open groups that are not needed any more, because enough groups are delivered.
        """
        if group.cancelled is not None:
            catalogue.GROUPS.add("surplus")
            channel.versions.pop(group.index, None)
            self.write(lambda: self.journal.set_group(group.index, "surplus"))
            return []
        kept = True
        if channel.keep is not None or channel.order is not None:
            built = channel.build_group(group)
            try:
                if channel.order is not None:
                    channel.order.record(built)
                kept = channel.keep is None or channel.keep(built)
            except Exception as error:  # noqa: BLE001  (the consumer's own function: the consumer gets its error)
                channel.fail(error)
                kept = False
        catalogue.GROUPS.add("kept" if kept else "filtered")
        if not kept:  # a kept group needs no status: it has all its records
            self.write(lambda: self.journal.set_group(group.index, "filtered"))
            channel.remove_untaken(group.index)
        self.deliver(channel, channel.scheduler.resolve_group(group, kept=kept))
        surplus = channel.scheduler.pop_surplus()
        if channel.done:
            channel.notify()
        return surplus

    def deliver(self, channel: GroupChannel, groups: Iterable[OpenGroup]) -> None:
        """Queue groups for delivery after their records are committed."""
        for group in groups:
            channel.pending.append((self.journal.queued_count, channel.build_group(group)))

    def record_load_failures(self, before: Group, after: Group) -> None:
        """Replace the records of rollouts that are valid in `before` and `Failed` in `after`.

        `after` is the group after its tokens were loaded or it was encoded for another process.
        """
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
        """Count a group as taken by the consumer.

        The journal records this only if the stream delivers groups with segments.
        """
        channel.scheduler.mark_taken()
        channel.taken += 1
        channel.remove_untaken(index)
        if channel.loads_segments:
            self.write(lambda: self.journal.set_group(index, "consumed"))

    def deliver_committed(self, channels: Iterable[GroupChannel]) -> None:
        """Make the finished groups available to their consumers whose records are committed to the journal."""
        done = self.journal.done_count
        for channel in channels:
            moved = False
            while channel.pending and channel.pending[0][0] <= done:
                channel.ready.append(channel.pending.popleft()[1])
                moved = True
            if moved:
                channel.notify()
