"""Records and groups on their way into the journal and out to the consumer.

Promises:
- every admitted rollout gets exactly one terminal record;
- a group always returns k records, in order, of one shape;
- a group is handed out only after its records are committed;
- a rollout that cannot be loaded gets a `Failed` record; the journal keeps its first one as superseded.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from rookery.core import Failed, Group, JournalError, Outcome, Rollout, RookeryError, failed_record
from rookery.engine.channel import Channel, Sourced
from rookery.engine.schedule import OpenGroup, Pick
from rookery.journal import Journal, UnencodableError

log = logging.getLogger("rookery.engine")


class Ledger:
    """The one writer of a run's records. A journal that cannot be written reaches `fail`."""

    def __init__(self, journal: Journal, fail: Callable[[RookeryError], None]) -> None:
        self.journal = journal
        self.quarantined: dict[str, Failed] = {}
        """Broken tasks, by id: none of their rollouts is attempted any more."""
        self.on_record: Callable[[Rollout], None] | None = None
        self.on_event: Callable[[str, dict[str, Any]], None] | None = None
        self._fail = fail
        self._unloadable: set[str] = set()
        """Rollouts whose record was replaced because loading failed."""

    def write(self, put: Callable[[], None]) -> None:
        try:
            put()
        except JournalError as error:
            self._fail(error)

    def event(self, kind: str, payload: dict[str, Any]) -> None:
        self.write(lambda: self.journal.event(kind, payload))
        if self.on_event is not None:
            self.on_event(kind, payload)

    def opened(self, channel: Channel, index: int, sourced: Sourced) -> None:
        """A group was admitted that no earlier process had admitted."""
        position, task, k = sourced.ordinal, sourced.number, channel.schedule.k
        self.write(lambda: self.journal.add_group(index, stream=channel.name, position=position, task=task, k=k))

    def quarantine(self, group: OpenGroup, outcome: Failed) -> None:
        if group.task.id not in self.quarantined:
            self.quarantined[group.task.id] = outcome
            self.write(lambda: self.journal.quarantine(group.number, f"{outcome.cause}: {outcome.detail}"))
            payload = {"task": group.task.id, "cause": outcome.cause, "detail": outcome.detail}
            self.event("task.quarantined", payload)

    @staticmethod
    def bare(group: OpenGroup, member: int, outcome: Outcome) -> Rollout:
        """The record of a rollout that ends without having run, or between two attempts."""
        return Rollout(
            id=group.rollout_id(member),
            group=group.index,
            member=member,
            task=group.task.id,
            outcome=outcome,
            attempts=tuple(group.members[member].attempts),
        )

    def record(self, channel: Channel, pick: Pick, record: Rollout) -> bool:
        """The one place where a rollout becomes terminal. True when its group has all of its k."""
        try:
            self.journal.add_rollout(record)
        except UnencodableError as error:  # it fails this rollout alone, without what may be the reason
            failed = failed_record(record, error, cause="bug.rookery")
            record = msgspec.structs.replace(failed, info={}, metrics={}, rewards={}, attempts=())
            self.write(lambda: self.journal.add_rollout(record))
        except JournalError as error:
            self._fail(error)
        if self.on_record is not None:
            self.on_record(record)
        return channel.schedule.end(pick, record)

    def complete(self, channel: Channel, group: OpenGroup) -> list[OpenGroup]:
        """Takes a group that has all its records; returns groups that are not needed any more."""
        if group.cancelled is not None:
            self.write(lambda: self.journal.set_group(group.index, "surplus"))
            return []
        kept = True
        if channel.keep is not None:
            try:
                kept = channel.keep(channel.group(group))
            except Exception as error:  # noqa: BLE001  (the consumer's own function: the consumer gets its error)
                channel.fail(error)
                kept = False
        if not kept:  # a group that has all its records needs no other word for being finished
            self.write(lambda: self.journal.set_group(group.index, "filtered"))
            channel.untaken.pop(group.index, None)
        for out in channel.schedule.settle(group, kept=kept):
            channel.pending.append((self.journal.put_count, channel.group(out)))
        surplus = channel.schedule.surplus()
        if channel.done:
            channel.changed()
        return surplus

    def loaded(self, before: Group, after: Group) -> None:
        """Record the rollouts of a group that failed while it was loaded."""
        for old, new in zip(before.rollouts, after.rollouts, strict=True):
            if old.valid and isinstance(new.outcome, Failed) and new.id not in self._unloadable:
                self._unloadable.add(new.id)
                self._load_failed(new, new.outcome)

    def _load_failed(self, record: Rollout, outcome: Failed) -> None:
        log.error(
            "rollout %s failed in load: %s: %s\n%s", record.id, outcome.cause, outcome.detail, outcome.traceback
        )
        self.write(lambda: self.journal.replace_rollout(record, outcome.detail))
        self.event("rollout.load_failed", {"id": record.id, "cause": outcome.cause, "detail": outcome.detail})

    def taken(self, channel: Channel, index: int) -> None:
        """The consumer took a group. Only one that trains is worth a word in the journal."""
        channel.schedule.taken()
        channel.taken += 1
        channel.untaken.pop(index, None)
        if channel.trains:
            self.write(lambda: self.journal.set_group(index, "consumed"))

    def committed(self, channels: Iterable[Channel]) -> None:
        """A batch reached the disk: hands out the groups whose records were in it."""
        done = self.journal.done_count
        for channel in channels:
            moved = False
            while channel.pending and channel.pending[0][0] <= done:
                channel.queue.append(channel.pending.popleft()[1])
                moved = True
            if moved:
                channel.changed()
