"""Reading a run, finished or live, without ever writing to it.

Promises:
- a reader works beside a live writer and never holds it up: every query is short, and memory is bounded by a page;
- a follower sees every event and every rollout once, in the order of their commits;
- a record whose tokens are not in the files counts as unfinished and is named;
- one unreadable run does not hide the others from a listing.
"""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from rookery.core import Attempt, Extent, JournalError, Rollout, Task, Turn, failed, rollout_place
from rookery.core.closing import Closing
from rookery.journal.batch import Totals
from rookery.journal.folder import is_locked, run_names
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
    in_words,
    open_reader,
)
from rookery.journal.tokens import TokenReader, decode_turn

RunStatus: TypeAlias = Literal["running", "finished", "stopped", "interrupted", "unreadable"]
PAGE = 256

_rollout = msgspec.msgpack.Decoder(Rollout).decode
_attempt = msgspec.msgpack.Decoder(Attempt).decode
_task = msgspec.msgpack.Decoder(Task).decode


class _Tokens(msgspec.Struct):
    """Only what verifying needs of a record: decoding the rest costs three times as much."""

    tokens: tuple[Extent, ...] = ()


_tokens = msgspec.msgpack.Decoder(_Tokens).decode


_RECORD = "id, group_idx, member, task, record"


def _decoded(rollout_id: str, group: int, member: int, task: str, record: bytes) -> Rollout:
    """Decode a record. One whose bytes are corrupt is `Failed`, so that it does not hide the others."""
    try:
        return _rollout(record)
    except (msgspec.MsgspecError, ValueError) as error:
        what = LoadError(f"the record of rollout {rollout_id} in the journal cannot be decoded: {error}")
        what.__cause__ = error
        outcome = failed(what, "load", cause=LoadError.cause)
        return Rollout(id=rollout_id, group=group, member=member, task=task, outcome=outcome)


class Missing(msgspec.Struct, frozen=True):
    """A group and its members that have no usable record."""

    group: GroupRow
    members: tuple[int, ...]


class Unfinished(msgspec.Struct, frozen=True):
    """What a resume has to do. `lost`: records whose tokens are gone; discard them before running them again."""

    groups: tuple[Missing, ...]
    lost: tuple[str, ...]


class Superseded(msgspec.Struct, frozen=True):
    """An earlier record of a rollout: when and why a newer one took its place."""

    ts: float
    reason: str
    record: Rollout


class FailedRollout(msgspec.Struct, frozen=True):
    """A rollout whose newest record is `Failed`."""

    id: str
    group: int
    cause: str


_TIME_IN_NAME: Final = len("20260101T000000Z")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `rookery ls`."""

    name: str
    path: Path
    status: RunStatus
    created: float = 0.0
    env: str = ""
    model: str = ""
    labels: dict[str, int] = {}
    rollouts: int = 0
    mean_reward: float | None = None
    settings: dict[str, Any] = {}
    """The configuration that the run was started with."""
    detail: str = ""


class RunReader(Closing):
    """One run, read-only. For one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        self._db = open_reader(self.path)
        self.tokens = TokenReader(folder / TOKENS)

    def _all(self, query: str, *values: object) -> list[Any]:
        with in_words(self.path, "reading"):
            return self._db.execute(query, values).fetchall()

    def config(self) -> dict[str, Any]:
        """The configuration the run was started with."""
        value: dict[str, Any] = msgspec.json.decode(self._all("SELECT json FROM config")[0][0])
        return value

    def meta(self) -> dict[str, str]:
        """Small texts about the run, and the journal's `format`."""
        version = self._all("PRAGMA user_version")[0][0]
        return {**dict(self._all("SELECT key, value FROM meta")), "format": str(version)}

    @property
    def status(self) -> RunStatus:
        """`running` while a writer holds the run; else how it ended, `interrupted` if nobody said."""
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
        """Counts by label, of valid records, and the sum of their rewards; costs the same for any size."""
        rows = self._all("SELECT value FROM meta WHERE key = 'totals'")
        return msgspec.json.decode(rows[0][0], type=Totals) if rows else Totals()

    def counts(self) -> dict[str, int]:
        """How many rollouts ended how."""
        return self.totals().labels

    def mean_reward(self) -> float | None:
        """Over valid rollouts only; None without any."""
        totals = self.totals()
        return totals.reward / totals.valid if totals.valid else None

    def summary(self) -> RunSummary:
        """One line about the run."""
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
            settings=self.config(),
        )

    def rollouts(self, offset: int = 0, limit: int = 100, label: str | None = None) -> list[Rollout]:
        """Records in the order they were committed."""
        where, values = ("WHERE label = ?", (label,)) if label is not None else ("", ())
        query = f"SELECT {_RECORD} FROM rollouts {where} ORDER BY seq LIMIT ? OFFSET ?"  # noqa: S608
        return [_decoded(*row) for row in self._all(query, *values, limit, offset)]

    def each(self, *, page: int = PAGE) -> Iterator[Rollout]:
        """Every record, by group and member, a page at a time."""
        group, member = -1, -1
        query = (
            f"SELECT {_RECORD} FROM rollouts WHERE (group_idx, member) > (?, ?) "  # noqa: S608
            "ORDER BY group_idx, member LIMIT ?"
        )
        while rows := self._all(query, group, member, page):
            for row in rows:
                yield _decoded(*row)
            group, member = rows[-1][1:3]

    def rollout(self, rollout_id: str) -> Rollout | None:
        """The record with this id."""
        place = rollout_place(rollout_id)
        if place is None:
            return None
        query = f"SELECT {_RECORD} FROM rollouts WHERE group_idx = ? AND member = ?"  # noqa: S608
        rows = self._all(query, *place)
        return _decoded(*rows[0]) if rows else None

    def task_of(self, group: int) -> Task | None:
        """Return the task of a group."""
        query = "SELECT tasks.payload FROM groups JOIN tasks ON tasks.idx = groups.task_idx WHERE groups.idx = ?"
        rows = self._all(query, group)
        return _task(rows[0][0]) if rows else None

    def events_of(self, rollout_id: str, *, limit: int = 1000) -> list[Event]:
        """Return up to `limit` events of a rollout's attempts, such as what its environment logged."""
        rows = self._all(
            "SELECT seq, ts, kind, payload FROM events "
            "WHERE json_extract(payload, '$.attempt') GLOB ? ORDER BY seq LIMIT ?",
            f"{rollout_id}.*",
            limit,
        )
        return [Event(seq, ts, kind, msgspec.json.decode(payload)) for seq, ts, kind, payload in rows]

    def labels(self) -> list[str]:
        """Return the labels that rollouts of this run have, in order."""
        return [row[0] for row in self._all("SELECT DISTINCT label FROM rollouts ORDER BY label")]

    def turns(self, rollout: Rollout) -> list[Turn]:
        """The turns of the rollout's last attempt, verified against their checksums."""
        return [decode_turn(self.tokens.read(extent)) for extent in rollout.tokens]

    def earlier(self, rollout_id: str) -> list[Superseded]:
        """Earlier records of the rollout, oldest first. Only its newest record counts anywhere else."""
        if not self._all("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'superseded'"):
            return []  # written before records could be superseded
        query = "SELECT ts, reason, record FROM superseded WHERE rollout_id = ? ORDER BY seq"
        group, member = rollout_place(rollout_id) or (-1, -1)
        return [
            Superseded(ts, reason, _decoded(rollout_id, group, member, "", record))
            for ts, reason, record in self._all(query, rollout_id)
        ]

    def attempts(self, rollout_id: str) -> list[Attempt]:
        """Every known attempt: those in the rollout's records, earlier ones too, and those recorded alone."""
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
        """Up to `limit` events after the given one."""
        rows = self._all(
            "SELECT seq, ts, kind, payload FROM events WHERE seq > ? ORDER BY seq LIMIT ?", after_seq, limit
        )
        return [Event(seq, ts, kind, msgspec.json.decode(payload)) for seq, ts, kind, payload in rows]

    def task_rows(self) -> Iterator[TaskRow]:
        """Every task with its status, by number, a page at a time."""
        after = -1
        query = "SELECT idx, id, payload, status, detail FROM tasks WHERE idx > ? ORDER BY idx LIMIT ?"
        while rows := self._all(query, after, PAGE):
            for row in rows:
                yield TaskRow(*row)
            after = rows[-1][0]

    def tasks(self) -> Iterator[Task]:
        """Every task, by number, quarantined ones included."""
        return (_task(row.payload) for row in self.task_rows())

    def groups(self) -> Iterator[GroupRow]:
        """Every group, by number, a page at a time."""
        after = -1
        query = "SELECT idx, stream, position, task_idx, k, status FROM groups WHERE idx > ? ORDER BY idx LIMIT ?"
        while rows := self._all(query, after, PAGE):
            for row in rows:
                yield GroupRow(*row)
            after = rows[-1][0]

    def failed(self) -> list[FailedRollout]:
        """Failed rollouts that can run again: not those of groups given up, nor of rows that are no valid task."""
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
        """Members without a usable record, of every group that was not given up.

        A record is usable when its token files are long enough; with `checksums`, when its tokens read back.
        Records of the rollouts in `again` count as not there.
        """
        lost: list[str] = []
        groups: list[Missing] = []
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
                groups.append(Missing(group, missing))
        for _ in records:  # records of no known group are verified too
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
        """Events and rollouts as they are committed, until the run is over; polls every `interval` seconds."""
        news = _News(self, after_event, after_rollout)
        while True:
            over = not is_locked(self.folder)  # asked first: what is committed before it ends is still seen
            if (found := news.take()) is not None:
                yield from found
            elif over:
                return
            else:
                time.sleep(interval)

    async def afollow(
        self, *, interval: float = 0.2, after_event: int = 0, after_rollout: int = 0
    ) -> AsyncIterator[Event | Rollout]:
        """`follow`, on a loop."""
        news = _News(self, after_event, after_rollout)
        while True:
            over = not is_locked(self.folder)
            if (found := news.take()) is not None:
                for item in found:
                    yield item
            elif over:
                return
            else:
                await asyncio.sleep(interval)

    def close(self) -> None:
        self._db.close()
        self.tokens.close()


class _News:
    """What was committed since it was last asked, a page at a time."""

    def __init__(self, reader: RunReader, after_event: int, after_rollout: int) -> None:
        self._reader = reader
        self._event = after_event
        self._rollout = after_rollout
        self._version: int | None = None

    def take(self) -> list[Event | Rollout] | None:
        """None: nothing new. Polling an unchanged journal costs one pragma."""
        version = self._reader._all("PRAGMA data_version")[0][0]
        if version == self._version:
            return None
        events = self._reader.events(self._event)
        rows = self._reader._all(
            f"SELECT seq, {_RECORD} FROM rollouts WHERE seq > ? ORDER BY seq LIMIT ?",  # noqa: S608
            *(self._rollout, PAGE),
        )
        if events:
            self._event = events[-1].seq
        if rows:
            self._rollout = rows[-1][0]
        if not events and not rows:
            self._version = version
            return None
        return [*events, *(_decoded(*row[1:]) for row in rows)]


def list_runs(root: Path, *, limit: int | None = None) -> list[RunSummary]:
    """Return the newest runs in `root`, newest first. Costs a few queries for each, whatever its size."""
    runs = [_summary(root / name) for name in run_names(root)[:limit]]
    # A name begins with the second in which its run was created; runs of one second are ordered by the exact time.
    return sorted(runs, key=lambda run: (run.name[:_TIME_IN_NAME], run.created), reverse=True)


def _summary(folder: Path) -> RunSummary:
    try:
        with closing(RunReader(folder)) as reader:
            return reader.summary()
    except (JournalError, sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
        return RunSummary(name=folder.name, path=folder, status="unreadable", detail=str(error))
