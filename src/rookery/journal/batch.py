"""Commit a batch of queued journal writes in one SQLite transaction. Runs in the journal thread of the supervisor.

A batch is committed completely or rolled back. The exception is a write that violates a constraint of the
database, such as a second record for one rollout: that write is refused and stored as an event `journal.refused`,
and the rest of the batch is committed. The totals that `rookery ls` shows are updated in the same transaction, so
they always agree with the records.
"""

import sqlite3
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from rookery.core import parse_rollout_id
from rookery.journal.schema import DISCARDED, REFUSED

ADD_TASK, SET_TASK, ADD_GROUP, ADD_ROLLOUT, ADD_ATTEMPT, SET_GROUP, EVENT, PUT_META, SUPERSEDE = range(9)

Op: TypeAlias = tuple[int, tuple[Any, ...]]

_STATEMENTS = {
    ADD_TASK: "INSERT INTO tasks VALUES(?, ?, ?, ?, ?)",
    SET_TASK: "UPDATE tasks SET status = ?, detail = ? WHERE idx = ?",
    ADD_GROUP: "INSERT INTO groups VALUES(?, ?, ?, ?, ?, ?)",
    ADD_ROLLOUT: "INSERT INTO rollouts VALUES(NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    ADD_ATTEMPT: "INSERT INTO attempts VALUES(NULL, ?, ?, ?, ?, ?, ?, ?, ?)",
    SET_GROUP: "UPDATE groups SET status = ? WHERE idx = ?",
    EVENT: "INSERT INTO events VALUES(NULL, ?, ?, ?)",
    SUPERSEDE: "INSERT INTO superseded VALUES(NULL, ?, ?, ?, ?, ?)",
    PUT_META: "INSERT INTO meta VALUES(?, ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value",
}
_NAMES = {ADD_TASK: "task", ADD_GROUP: "group", ADD_ROLLOUT: "rollout"}
_VALID = ("completed", "truncated")
ENVIRONMENTS = "environments"
"""Key in the table `meta` of the names of a mixture's environments, as JSON."""


class EnvironmentTotals(msgspec.Struct):
    """Totals over the rollout records of one environment of a mixture."""

    rollouts: int = 0
    failed: int = 0
    valid: int = 0
    """Number of completed or truncated records that have a reward."""
    reward: float = 0.0
    """Sum of the rewards of the records that `valid` counts."""

    def add(self, kind: str, count: int, rewarded: int, reward: float) -> None:
        """Add `count` records of one kind of outcome (the first part of its label or `failed`).

        `rewarded` of them have a reward, and `reward` is the sum of their rewards.
        """
        self.rollouts += count
        self.failed += count if kind == "failed" else 0
        if kind in _VALID:
            self.valid += rewarded
            self.reward += reward

    @property
    def mean_reward(self) -> float | None:
        """Mean reward of the valid records, or None if there are none."""
        return self.reward / self.valid if self.valid else None


class Totals(msgspec.Struct, omit_defaults=True):
    """Totals over the rollout records of a run, stored in the journal so that `rookery ls` reads no records."""

    labels: dict[str, int] = {}
    """Number of records by outcome label, such as `completed` or `truncated.time`."""
    valid: int = 0
    """Number of completed or truncated records that have a reward."""
    reward: float = 0.0
    """Sum of the rewards of the records that `valid` counts."""
    environments: dict[str, EnvironmentTotals] = {}
    """Totals of each environment of a mixture, by name; empty in other runs."""

    @classmethod
    def load(cls, connection: sqlite3.Connection) -> "Totals":
        """Compute the totals from all rows of the table `rollouts`."""
        totals = cls()
        query = "SELECT label, kind, count(*), count(reward), total(reward) FROM rollouts GROUP BY label, kind"
        for label, kind, count, rewarded, reward in connection.execute(query):
            totals.labels[label] = totals.labels.get(label, 0) + count
            if kind in _VALID:
                totals.valid += rewarded
                totals.reward += reward
        names = connection.execute("SELECT value FROM meta WHERE key = ?", (ENVIRONMENTS,)).fetchone()
        if names is not None:
            totals.environments = {name: EnvironmentTotals() for name in msgspec.json.decode(names[0])}
            query = "SELECT task, kind, count(*), count(reward), total(reward) FROM rollouts GROUP BY task, kind"
            for task, *counts in connection.execute(query):
                if (one := totals._environment_of(task)) is not None:
                    one.add(*counts)
        return totals

    def _environment_of(self, task: str) -> EnvironmentTotals | None:
        """Return the totals of a task's environment, whose name begins the task's ID in a mixture, or None."""
        return self.environments.get(task.partition("/")[0])

    def add(self, row: Sequence[Any], sign: int = 1) -> None:
        """Add a row of the table `rollouts` (without `seq`) to the totals, or subtract it with `sign=-1`."""
        kind, label, reward = row[4], row[5], row[8]
        self.labels[label] = self.labels.get(label, 0) + sign
        if not self.labels[label]:
            del self.labels[label]
        if reward is not None and kind in _VALID:
            self.valid += sign
            self.reward += sign * reward
        if (one := self._environment_of(row[3])) is not None:
            one.add(kind, sign, sign * (reward is not None), sign * (reward or 0.0))

    def copy(self) -> "Totals":
        """Return an independent copy of these totals."""
        environments = {name: msgspec.structs.replace(one) for name, one in self.environments.items()}
        return Totals(dict(self.labels), self.valid, self.reward, environments)

    def take(self, other: "Totals") -> None:
        """Overwrite these totals with those of another object."""
        self.labels, self.valid, self.reward = other.labels, other.valid, other.reward
        self.environments = other.environments


def commit(connection: sqlite3.Connection, ops: Sequence[Op], totals: Totals) -> list[str]:
    """Commit the writes `ops` in one transaction and update `totals`.

    Return a description of each write that violates a constraint and was therefore refused. Any other SQLite error
    rolls back the whole batch and is raised.
    """
    try:
        return _transaction(connection, ops, totals, one_by_one=False)
    except sqlite3.IntegrityError:
        # Rare, and a bug in the caller: write row by row to find the offending rows.
        return _transaction(connection, ops, totals, one_by_one=True)


def _transaction(
    connection: sqlite3.Connection, ops: Sequence[Op], totals: Totals, *, one_by_one: bool
) -> list[str]:
    refused: list[str] = []
    counted = totals.copy()
    connection.execute("BEGIN IMMEDIATE")
    try:
        buckets: dict[int, list[tuple[Any, ...]]] = {}
        for kind, row in ops:
            if kind == SUPERSEDE:  # order matters: a new record of the same member may follow
                _write(connection, buckets, counted, refused, one_by_one)
                buckets = {}
                _supersede(connection, counted, *row)
            else:
                buckets.setdefault(kind, []).append(row)
        _write(connection, buckets, counted, refused, one_by_one)
        if counted != totals:
            connection.execute(_STATEMENTS[PUT_META], ("totals", msgspec.json.encode(counted).decode()))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    totals.take(counted)
    return refused


def _write(
    connection: sqlite3.Connection,
    buckets: dict[int, list[tuple[Any, ...]]],
    totals: Totals,
    refused: list[str],
    one_by_one: bool,
) -> None:
    for kind in sorted(buckets):  # in the order of the constants: a group is inserted before its status changes
        rows = buckets[kind]
        if one_by_one:
            rows = [row for row in rows if _write_one(connection, kind, row, refused)]
        else:
            connection.executemany(_STATEMENTS[kind], rows)
        if kind == ADD_ROLLOUT:
            for row in rows:
                totals.add(row)


def _write_one(connection: sqlite3.Connection, kind: int, row: tuple[Any, ...], refused: list[str]) -> bool:
    try:
        connection.execute(_STATEMENTS[kind], row)
    except sqlite3.IntegrityError as error:
        what = f"a second record for {_NAMES.get(kind, 'row')} {row[0]}"
        if kind == ADD_ROLLOUT:
            what += f" (group {row[1]}, member {row[2]}, {row[5]}): the first record is kept"
        refused.append(what)
        payload = msgspec.json.encode({"what": what, "error": str(error)}).decode()
        connection.execute(_STATEMENTS[EVENT], (time.time(), REFUSED, payload))
        return False
    return True


def _supersede(connection: sqlite3.Connection, totals: Totals, rollout_id: str, reason: str, reopen: bool) -> None:
    """Move a rollout's record to the table `superseded`, if there is such a record.

    With `reopen`, also set the status of the rollout's group to `open`, so that the rollout runs again on resume.
    """
    row = connection.execute(
        "SELECT id, group_idx, member, task, kind, label, fault, cause, reward, ended, record "
        "FROM rollouts WHERE group_idx = ? AND member = ?",
        parse_rollout_id(rollout_id) or (-1, -1),
    ).fetchone()
    if row is None:
        return
    now, label = time.time(), row[5]
    connection.execute(_STATEMENTS[SUPERSEDE], (now, rollout_id, label, reason, row[10]))
    payload = msgspec.json.encode({"id": rollout_id, "label": label, "reason": reason}).decode()
    connection.execute(_STATEMENTS[EVENT], (now, DISCARDED, payload))
    connection.execute("DELETE FROM rollouts WHERE group_idx = ? AND member = ?", row[1:3])
    if reopen:
        connection.execute(_STATEMENTS[SET_GROUP], ("open", row[1]))
    totals.add(row, -1)
