"""Read a run, finished or live, without writing to it. Runs in any process.

Queries are short and paged, so a reader does not block the process that writes the run, and iterators over
records, tasks and groups hold one page in memory. `RunReader.follow` yields every event once and every rollout
record once, each in the order of their commits. A rollout whose record refers to tokens that are missing from the
token files counts as unfinished. In `list_runs`, an unreadable run does not hide the others.
"""

import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from rookery.core import Attempt, Extent, JournalError, Rollout, Task, Turn, failed_outcome, parse_rollout_id
from rookery.core.lifetimes import ClosesOnExit
from rookery.journal.batch import EnvironmentTotals, Totals
from rookery.journal.folder import is_locked, run_names, training_journals, training_names
from rookery.journal.loading import LoadError
from rookery.journal.schema import (
    ENDED,
    FILE,
    RESUMED,
    STARTED,
    TOKENS,
    Event,
    GroupRow,
    TaskRow,
    open_reader,
    wrap_errors,
)
from rookery.journal.tokens import TokenReader, decode_turn

RunStatus: TypeAlias = Literal["running", "finished", "stopped", "interrupted", "unreadable"]
PAGE = 256

_rollout = msgspec.msgpack.Decoder(Rollout).decode
_attempt = msgspec.msgpack.Decoder(Attempt).decode
_task = msgspec.msgpack.Decoder(Task).decode


class _Tokens(msgspec.Struct):
    """The part of a rollout record that says where its tokens are.

    Decoding all of it takes three times as long.
    """

    tokens: tuple[Extent, ...] = ()


_tokens = msgspec.msgpack.Decoder(_Tokens).decode


_RECORD = "id, group_idx, member, task, record"


def _decode_record(rollout_id: str, group: int, member: int, task: str, record: bytes) -> Rollout:
    """Decode a rollout record. For a corrupt one, return a record with the outcome `Failed` instead of raising."""
    try:
        return _rollout(record)
    except (msgspec.MsgspecError, ValueError) as error:
        what = LoadError(f"the record of rollout {rollout_id} in the journal cannot be decoded: {error}")
        what.__cause__ = error
        outcome = failed_outcome(what, "load", cause=LoadError.cause)
        return Rollout(id=rollout_id, group=group, member=member, task=task, outcome=outcome)


class MissingRollouts(msgspec.Struct, frozen=True):
    """A group, and those of its rollouts that have no usable record and must run again."""

    group: GroupRow
    members: tuple[int, ...]
    """Indices of these rollouts in the group, from 0 to k - 1."""


class Unfinished(msgspec.Struct, frozen=True):
    """The rollouts that must run when a run is resumed."""

    groups: tuple[MissingRollouts, ...]
    lost: tuple[str, ...]
    """IDs of rollouts whose record cannot be decoded or refers to missing tokens. Call `Journal.discard` for them
    before they run again."""


class Superseded(msgspec.Struct, frozen=True):
    """An earlier record of a rollout that was discarded or replaced by a newer one."""

    ts: float
    """Unix time at which the record was discarded or replaced."""
    reason: str
    """The reason why the record was discarded or replaced."""
    record: Rollout


class FailedRollout(msgspec.Struct, frozen=True):
    """A rollout whose newest record has the outcome `Failed`."""

    id: str
    group: int
    """Index of the rollout's group."""
    cause: str
    """Code of the cause, such as `sandbox.lost`."""


_TIME_IN_NAME: Final = len("20260101T000000Z")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run, as a row of `rookery ls` shows it."""

    name: str
    path: Path
    status: RunStatus
    kind: Literal["run", "training"] = "run"
    created: float = 0.0
    env: str = ""
    model: str = ""
    labels: dict[str, int] = {}
    rollouts: int = 0
    mean_reward: float | None = None
    environments: dict[str, EnvironmentTotals] = {}
    """Totals of each environment of a mixture, by name; empty for other runs."""
    settings: dict[str, Any] = {}
    """The configuration that the run was started with."""
    detail: str = ""
    """Error message if the run is unreadable; otherwise empty."""


class RunReader(ClosesOnExit):
    """Read-only access to the journal and the token files of one run. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        self._db = open_reader(self.path)
        self.tokens = TokenReader(folder / TOKENS)

    def _all(self, query: str, *values: object) -> list[Any]:
        with wrap_errors(self.path, "reading"):
            return self._db.execute(query, values).fetchall()

    def config(self) -> dict[str, Any]:
        """Return the configuration that the run was started with."""
        value: dict[str, Any] = msgspec.json.decode(self._all("SELECT json FROM config")[0][0])
        return value

    def meta(self) -> dict[str, str]:
        """Return metadata of the run as strings.

        The keys include `env`, `model`, `created` (Unix time), `rookery` (the version that created the run) and
        `format` (the number of the journal format).
        """
        version = self._all("PRAGMA user_version")[0][0]
        return {**dict(self._all("SELECT key, value FROM meta")), "format": str(version)}

    @property
    def status(self) -> RunStatus:
        """Status of the run.

        It is `running` while a process has the run open for writing, otherwise `finished` or `stopped`.
        `interrupted` means that no end was recorded since the last start or resume.
        """
        if is_locked(self.folder):
            return "running"
        rows = self._all(
            "SELECT kind, payload FROM events WHERE kind IN (?, ?, ?) ORDER BY seq DESC LIMIT 1",
            *(STARTED, RESUMED, ENDED),
        )
        if not rows or rows[0][0] != ENDED:
            return "interrupted"
        return "stopped" if msgspec.json.decode(rows[0][1]).get("status") == "stopped" else "finished"

    def totals(self) -> Totals:
        """Return the totals over all rollout records. They are stored in the journal, so no record is read."""
        rows = self._all("SELECT value FROM meta WHERE key = 'totals'")
        return msgspec.json.decode(rows[0][0], type=Totals) if rows else Totals()

    def counts(self) -> dict[str, int]:
        """Return the number of rollouts by outcome label."""
        return self.totals().labels

    def mean_reward(self) -> float | None:
        """Return the mean reward of the valid rollouts, or None if no rollout is valid."""
        totals = self.totals()
        return totals.reward / totals.valid if totals.valid else None

    def summary(self) -> RunSummary:
        """Return a summary of the run, as `rookery ls` shows it."""
        meta, totals = self.meta(), self.totals()
        return RunSummary(
            name=self.folder.name,
            path=self.folder,
            status=self.status,
            created=float(meta.get("created", 0.0)),
            env=meta.get("env", ""),
            model=meta.get("model", ""),
            labels=totals.labels,
            rollouts=sum(totals.labels.values()),
            mean_reward=totals.reward / totals.valid if totals.valid else None,
            environments=totals.environments,
            settings=self.config(),
        )

    def rollouts(self, offset: int = 0, limit: int = 100, label: str | None = None) -> list[Rollout]:
        """Return up to `limit` rollout records, after the first `offset`, in the order in which they were
        committed.

        With `label`, only records with that outcome label are counted and returned.
        """
        where, values = ("WHERE label = ?", (label,)) if label is not None else ("", ())
        query = f"SELECT {_RECORD} FROM rollouts {where} ORDER BY seq LIMIT ? OFFSET ?"  # noqa: S608
        return [_decode_record(*row) for row in self._all(query, *values, limit, offset)]

    def count_superseded(self) -> int:
        """Return the number of rollout records that were discarded or replaced."""
        return int(self._all("SELECT count(*) FROM superseded")[0][0]) if self._has_superseded() else 0

    def _has_superseded(self) -> bool:
        # A journal that was written by an older version lacks the table.
        return bool(self._all("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'superseded'"))

    def rollouts_after(self, seq: int, *, limit: int = PAGE) -> list[tuple[int, Rollout]]:
        """Return the first `limit` rollout records whose sequence number is above `seq`, each with its number.

        A record that replaces the newest one may have its number; `count_superseded` then changes.
        """
        rows = self._all(
            f"SELECT seq, {_RECORD} FROM rollouts WHERE seq > ? ORDER BY seq LIMIT ?",  # noqa: S608
            *(seq, limit),
        )
        return [(row[0], _decode_record(*row[1:])) for row in rows]

    @property
    def data_version(self) -> int:
        """A number that changes when another process commits to the journal."""
        return int(self._all("PRAGMA data_version")[0][0])

    def iter_rollouts(self, *, page: int = PAGE) -> Iterator[Rollout]:
        """Yield every rollout record, ordered by group and member. `page` is the number of records per query."""
        group, member = -1, -1
        query = (
            f"SELECT {_RECORD} FROM rollouts WHERE (group_idx, member) > (?, ?) "  # noqa: S608
            "ORDER BY group_idx, member LIMIT ?"
        )
        while rows := self._all(query, group, member, page):
            for row in rows:
                yield _decode_record(*row)
            group, member = rows[-1][1:3]

    def rollout(self, rollout_id: str) -> Rollout | None:
        """Return the record of a rollout, or None if the rollout has no record or the ID is malformed."""
        ids = parse_rollout_id(rollout_id)
        if ids is None:
            return None
        query = f"SELECT {_RECORD} FROM rollouts WHERE group_idx = ? AND member = ?"  # noqa: S608
        rows = self._all(query, *ids)
        return _decode_record(*rows[0]) if rows else None

    def rollouts_of(self, group: int) -> list[Rollout]:
        """Return the records of a group, ordered by member."""
        query = f"SELECT {_RECORD} FROM rollouts WHERE group_idx = ? ORDER BY member"  # noqa: S608
        return [_decode_record(*row) for row in self._all(query, group)]

    def group(self, idx: int) -> GroupRow | None:
        """Return the group with this index, or None if there is no such group."""
        rows = self._all("SELECT idx, stream, position, task_idx, k, status FROM groups WHERE idx = ?", idx)
        return GroupRow(*rows[0]) if rows else None

    def task_of(self, group: int) -> Task | None:
        """Return the task of the group with this index, or None if there is no such group."""
        query = "SELECT tasks.payload FROM groups JOIN tasks ON tasks.idx = groups.task_idx WHERE groups.idx = ?"
        rows = self._all(query, group)
        return _task(rows[0][0]) if rows else None

    def events_of(self, rollout_id: str, *, limit: int = 1000) -> list[Event]:
        """Return the first `limit` events of a rollout's attempts, such as what its environment logged."""
        rows = self._all(
            "SELECT seq, ts, kind, payload FROM events "
            "WHERE json_extract(payload, '$.attempt') GLOB ? ORDER BY seq LIMIT ?",
            f"{rollout_id}.*",
            limit,
        )
        return [Event(seq, ts, kind, msgspec.json.decode(payload)) for seq, ts, kind, payload in rows]

    def labels(self) -> list[str]:
        """Return the distinct outcome labels of this run's rollouts, sorted."""
        return [row[0] for row in self._all("SELECT DISTINCT label FROM rollouts ORDER BY label")]

    def turns(self, rollout: Rollout) -> list[Turn]:
        """Return the turns (model calls) of the rollout's last attempt.

        Raise `JournalError` if a turn is missing from the token files or its checksum is wrong.
        """
        return [decode_turn(self.tokens.read(extent)) for extent in rollout.tokens]

    def earlier(self, rollout_id: str) -> list[Superseded]:
        """Return the records of a rollout that were discarded or replaced, oldest first."""
        if not self._has_superseded():
            return []
        query = "SELECT ts, reason, record FROM superseded WHERE rollout_id = ? ORDER BY seq"
        group, member = parse_rollout_id(rollout_id) or (-1, -1)
        return [
            Superseded(ts, reason, _decode_record(rollout_id, group, member, "", record))
            for ts, reason, record in self._all(query, rollout_id)
        ]

    def attempts(self, rollout_id: str) -> list[Attempt]:
        """Return every attempt at a rollout, ordered by number.

        This includes attempts in discarded or replaced records, and failed attempts that were stored on their own.
        """
        record = self.rollout(rollout_id)
        records = [*(one.record for one in self.earlier(rollout_id)), *([record] if record else [])]
        known = {attempt.id: attempt for one in records for attempt in one.attempts}
        alone = [
            _attempt(row[0])
            for row in self._all("SELECT record FROM attempts WHERE rollout_id = ? ORDER BY seq", rollout_id)
        ]
        return sorted(
            [*known.values(), *(one for one in alone if one.id not in known)], key=lambda one: one.number
        )

    def events(self, after_seq: int = 0, *, limit: int = PAGE) -> list[Event]:
        """Return the first `limit` events whose `seq` is above `after_seq`."""
        rows = self._all(
            "SELECT seq, ts, kind, payload FROM events WHERE seq > ? ORDER BY seq LIMIT ?", after_seq, limit
        )
        return [Event(seq, ts, kind, msgspec.json.decode(payload)) for seq, ts, kind, payload in rows]

    def last_event(self) -> int:
        """Return the sequence number of the newest event, or 0 if there is none."""
        return int(self._all("SELECT coalesce(max(seq), 0) FROM events")[0][0])

    def task_rows(self) -> Iterator[TaskRow]:
        """Yield every task of the run with its status, ordered by `idx`."""
        after = -1
        query = "SELECT idx, id, payload, status, detail FROM tasks WHERE idx > ? ORDER BY idx LIMIT ?"
        while rows := self._all(query, after, PAGE):
            for row in rows:
                yield TaskRow(*row)
            after = rows[-1][0]

    def tasks(self) -> Iterator[Task]:
        """Return an iterator over every task of the run, including quarantined ones, ordered by index."""
        return (_task(row.payload) for row in self.task_rows())

    def groups(self) -> Iterator[GroupRow]:
        """Yield every group of the run, ordered by `idx`."""
        after = -1
        query = "SELECT idx, stream, position, task_idx, k, status FROM groups WHERE idx > ? ORDER BY idx LIMIT ?"
        while rows := self._all(query, after, PAGE):
            for row in rows:
                yield GroupRow(*row)
            after = rows[-1][0]

    def failed_rollouts(self) -> list[FailedRollout]:
        """Return the failed rollouts that can run again.

        Rollouts of groups that were filtered or cancelled, and of tasks that are invalid, cannot run again.
        """
        query = (
            "SELECT rollouts.id, rollouts.group_idx, rollouts.cause, tasks.payload, tasks.status FROM rollouts "
            "JOIN groups ON groups.idx = rollouts.group_idx JOIN tasks ON tasks.idx = groups.task_idx "
            "WHERE rollouts.kind = 'failed' AND groups.status NOT IN ('filtered', 'surplus') "
            "ORDER BY rollouts.group_idx, rollouts.member"
        )
        return [
            FailedRollout(rollout, group, cause)
            for rollout, group, cause, payload, status in self._all(query)
            if status == "ok" or not _task(payload).invalid
        ]

    def unfinished(self, *, checksums: bool = False, again: Collection[str] = ()) -> Unfinished:
        """Return the rollouts without a usable record, by group. Filtered and surplus groups are not included.

        A record is usable if the token files are large enough to contain its tokens. With `checksums`, the tokens
        are also read and verified. The rollouts whose IDs are in `again` are returned even if their records are
        usable.
        """
        lost: list[str] = []
        groups: list[MissingRollouts] = []
        records = self._members(lost, checksums, set(again))
        here = next(records, None)
        for group in self.groups():
            present: set[int] = set()
            while here is not None and here[0] <= group.idx:
                if here[0] == group.idx and here[2]:
                    present.add(here[1])
                here = next(records, None)
            missing = tuple(member for member in range(group.k) if member not in present)
            if missing and group.status not in ("filtered", "surplus"):
                groups.append(MissingRollouts(group, missing))
        for _ in records:  # records of unknown groups are verified, too
            pass
        return Unfinished(tuple(groups), tuple(lost))

    def _members(self, lost: list[str], checksums: bool, again: set[str]) -> Iterator[tuple[int, int, bool]]:
        at = (-1, -1)
        query = (
            "SELECT group_idx, member, id, record FROM rollouts WHERE (group_idx, member) > (?, ?) "
            "ORDER BY group_idx, member LIMIT ?"
        )
        while rows := self._all(query, *at, PAGE):
            for group, member, rollout_id, record in rows:
                if rollout_id in again:
                    yield group, member, False
                    continue
                usable = self._usable(record, checksums)
                if not usable:
                    lost.append(rollout_id)
                yield group, member, usable
            at = rows[-1][:2]

    def _usable(self, record: bytes, checksums: bool) -> bool:
        try:
            extents = _tokens(record).tokens
        except msgspec.MsgspecError:
            return False
        if not all(self.tokens.exists(extent) for extent in extents):
            return False
        if checksums:
            try:
                for extent in extents:
                    self.tokens.read(extent)
            except JournalError:
                return False
        return True

    def follow(
        self, *, interval: float = 0.2, after_event: int = 0, after_rollout: int = 0
    ) -> Iterator[Event | Rollout]:
        """Yield events and rollout records as they are committed, until no process writes to the run any more.

        `after_event` and `after_rollout` are the sequence numbers in the journal after which to begin. The journal
        is polled every `interval` seconds.
        """
        poller = _JournalPoller(self, after_event, after_rollout)
        while True:
            ended = not is_locked(self.folder)  # checked first, so that the last commits are not missed
            if (found := poller.poll()) is not None:
                yield from found
            elif ended:
                return
            else:
                time.sleep(interval)

    def close(self) -> None:
        """Close the database and all token files."""
        self._db.close()
        self.tokens.close()


class _JournalPoller:
    """Read the events and rollout records that were committed since the last poll, one page at a time."""

    def __init__(self, reader: RunReader, after_event: int, after_rollout: int) -> None:
        self._reader = reader
        self._event = after_event
        self._rollout = after_rollout
        self._version: int | None = None

    def poll(self) -> list[Event | Rollout] | None:
        """Return new events and rollout records, or None if there are none.

        If the journal is unchanged, this executes only the statement `PRAGMA data_version`.
        """
        version = self._reader.data_version
        if version == self._version:
            return None
        events = self._reader.events(self._event)
        rows = self._reader.rollouts_after(self._rollout)
        if events:
            self._event = events[-1].seq
        if rows:
            self._rollout = rows[-1][0]
        if not events and not rows:
            self._version = version
            return None
        return [*events, *(record for _, record in rows)]


def list_runs(root: Path, *, limit: int | None = None) -> list[RunSummary]:
    """Return summaries of the runs in `root`, newest first; with `limit`, only of the newest ones.

    A summary takes a few queries, whatever the size of its run. An unreadable run has the status `unreadable`.
    """
    return sort_newest_first(_summary(root / name) for name in run_names(root)[:limit])


def list_training_runs(root: Path, *, limit: int | None = None) -> list[RunSummary]:
    """Return summaries of the training runs in `root`, newest first; with `limit`, only of the newest ones.

    The counts and the reward are those of its newest journal: one journal is written each time it is started.
    """
    found = []
    for name in training_names(root)[:limit]:
        folder = root / name
        journals = training_journals(folder)
        summary = _summary(journals[0]) if journals else RunSummary(name=name, path=folder, status="interrupted")
        if is_locked(folder):
            summary = msgspec.structs.replace(summary, status="running")
        found.append(msgspec.structs.replace(summary, name=name, path=folder, kind="training"))
    return found


def sort_newest_first(runs: Iterable[RunSummary]) -> list[RunSummary]:
    """Sort runs by the second in their names, and runs of one second by the exact time of their creation."""
    return sorted(runs, key=lambda run: (run.name[:_TIME_IN_NAME], run.created), reverse=True)


def _summary(folder: Path) -> RunSummary:
    try:
        with closing(RunReader(folder)) as reader:
            return reader.summary()
    except (JournalError, sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
        return RunSummary(name=folder.name, path=folder, status="unreadable", detail=str(error))
