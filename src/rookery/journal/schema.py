"""The shape of `journal.sqlite`, and the only two ways to open it.

Promises:
- a journal of a newer format is refused in words before anything is touched;
- a file that is not a journal, or is damaged, is refused in words, never with a bare SQLite error;
- a reader never writes, and works while a writer is live and on a read-only file system;
- what the schema indexes is what `show` and `ls` look up: every index is paid for by every rollout.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import quote

import msgspec

from rookery.core import JournalError

FORMAT = 1
"""Raised when an older Rookery could misread what this one writes."""
APPLICATION_ID = 0x526F6F6B
FILE = "journal.sqlite"
TOKENS = "tokens"
LOCK = "run.lock"

GroupStatus: TypeAlias = Literal["open", "finished", "filtered", "surplus", "consumed"]
TaskStatus: TypeAlias = Literal["ok", "quarantined"]
EndStatus: TypeAlias = Literal["finished", "stopped"]

STARTED, RESUMED, ENDED = "run.started", "run.resumed", "run.ended"
DISCARDED, REFUSED = "rollout.discarded", "journal.refused"

_TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE config(json TEXT NOT NULL);
CREATE TABLE tasks(
    idx INTEGER PRIMARY KEY, id TEXT NOT NULL, payload BLOB NOT NULL, status TEXT NOT NULL, detail TEXT NOT NULL);
CREATE TABLE groups(
    idx INTEGER PRIMARY KEY, stream TEXT NOT NULL, position INTEGER NOT NULL, task_idx INTEGER NOT NULL,
    k INTEGER NOT NULL, status TEXT NOT NULL);
CREATE TABLE rollouts(
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL, group_idx INTEGER NOT NULL, member INTEGER NOT NULL,
    task TEXT NOT NULL, kind TEXT NOT NULL, label TEXT NOT NULL, fault TEXT, cause TEXT, reward REAL,
    ended REAL NOT NULL, record BLOB NOT NULL, UNIQUE(group_idx, member));
CREATE TABLE attempts(
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL, rollout_id TEXT NOT NULL, number INTEGER NOT NULL,
    label TEXT NOT NULL, started REAL NOT NULL, ended REAL NOT NULL, runner TEXT NOT NULL, record BLOB NOT NULL);
CREATE INDEX attempts_rollout ON attempts(rollout_id);
CREATE TABLE events(seq INTEGER PRIMARY KEY, ts REAL NOT NULL, kind TEXT NOT NULL, payload TEXT NOT NULL);
"""

_SUPERSEDED = """
CREATE TABLE IF NOT EXISTS superseded(
    seq INTEGER PRIMARY KEY, ts REAL NOT NULL, rollout_id TEXT NOT NULL, label TEXT NOT NULL, reason TEXT NOT NULL,
    record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS superseded_rollout ON superseded(rollout_id)
"""
"""Records that a newer record of the same rollout replaces. Journals of format 1 may lack this table: it is added
when such a run is opened for writing, and a reader without it finds no earlier records."""

BUSY_SECONDS = 10.0


class Event(msgspec.Struct, frozen=True):
    """Something that happened to the run, in order of `seq`."""

    seq: int
    ts: float
    kind: str
    payload: dict[str, object]


class TaskRow(msgspec.Struct, frozen=True):
    """A task as the journal keeps it; `payload` is msgpack of `core.Task`."""

    idx: int
    id: str
    payload: bytes
    status: TaskStatus
    detail: str


class GroupRow(msgspec.Struct, frozen=True):
    """A group as it was admitted, and where it stands."""

    idx: int
    stream: str
    position: int
    task_idx: int
    k: int
    status: GroupStatus


def create(path: Path, config: bytes, meta: dict[str, str]) -> sqlite3.Connection:
    """A new journal, complete or absent: one transaction makes it."""
    if path.exists():
        raise JournalError(f"{path} is already there: a run's journal is made once; use `rookery resume`")
    with in_words(path, "making"):
        connection = _connect(f"file:{quote(str(path))}?mode=rwc")
        try:
            _tune(connection)
            connection.execute("BEGIN IMMEDIATE")
            for statement in (*_TABLES.split(";"), *_SUPERSEDED.split(";")):
                connection.execute(statement)
            connection.executemany("INSERT INTO meta VALUES(?, ?)", meta.items())
            connection.execute("INSERT INTO config VALUES(?)", (config.decode(),))
            _insert_start(connection, STARTED)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={FORMAT}")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            raise
    return connection


def open_writer(path: Path) -> sqlite3.Connection:
    """For the one writer; the caller holds the run's lock and has seen the format checked."""
    with in_words(path, "opening"):
        connection = _connect(f"file:{quote(str(path))}?mode=rw")
        try:
            _tune(connection)
            connection.execute("BEGIN IMMEDIATE")
            for statement in _SUPERSEDED.split(";"):
                connection.execute(statement)
            _insert_start(connection, RESUMED)
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
    return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """Read-only, format checked."""
    if not path.is_file():
        raise JournalError(f"{path.parent} is not a run: it holds no {FILE}")
    with in_words(path, "reading"):
        connection = _connect_reader(path)
        try:
            _check(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def _insert_start(connection: sqlite3.Connection, kind: str) -> None:
    connection.execute("INSERT INTO events(ts, kind, payload) VALUES(?, ?, '{}')", (time.time(), kind))


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)


def _connect_reader(path: Path) -> sqlite3.Connection:
    uri = f"file:{quote(str(path))}?mode=ro"
    connection = _connect(uri)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        # WAL needs a shared-memory file beside the journal, which a read-only place cannot hold. With no
        # -wal file, or an empty one, nothing is newer than the journal itself: reading it as a constant is exact.
        wal = path.with_name(path.name + "-wal")
        if wal.exists() and wal.stat().st_size:
            raise
        return _connect(uri + "&immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def _tune(connection: sqlite3.Connection) -> None:
    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise sqlite3.OperationalError(f"the file system cannot hold a write-ahead log (mode {mode})")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA journal_size_limit=67108864")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION_ID:
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            raise JournalError(f"{path} is empty: its run ended before it began; start a new one")
        raise JournalError(f"{path} is a database, but not a Rookery journal")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > FORMAT:
        raise JournalError(
            f"{path} was made by a newer Rookery (format {version}, this one reads up to {FORMAT}): upgrade"
        )


def folder_removed(folder: Path) -> JournalError:
    """Return the error for a run whose folder disappeared while the run was under way."""
    return JournalError(
        f"the run's folder {folder} was removed or moved while the run was under way: its records can no longer "
        "be written. Start the run again and leave its folder where it is"
    )


@contextmanager
def in_words(path: Path, doing: str) -> Iterator[None]:
    """Inside, a SQLite or operating system error becomes a `JournalError` that says what to do."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise in_a_sentence(error, path, doing) from error


def in_a_sentence(error: Exception, path: Path, doing: str) -> JournalError:
    """What went wrong with the journal, and what to do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    resume = f"`rookery resume {path.parent.name}`"
    match code:
        case sqlite3.SQLITE_FULL:
            return JournalError(f"disk full while {doing} {path}: free space, then {resume}")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return JournalError(f"no permission while {doing} {path}: make its folder writable, then {resume}")
        case sqlite3.SQLITE_CANTOPEN:
            return JournalError(
                f"cannot open {path} while {doing} it: check the folder's permissions and free space"
            )
        case sqlite3.SQLITE_NOTADB:
            return JournalError(f"{path} is not a Rookery journal")
        case sqlite3.SQLITE_CORRUPT:
            return JournalError(
                f"{path} is damaged ({error}): restore it from a copy; its token files are untouched"
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return JournalError(f"{path} is held by another program: end that one, then {resume}")
        case sqlite3.SQLITE_IOERR:
            return JournalError(f"the disk failed while {doing} {path} ({error}): check it, then {resume}")
    return JournalError(f"{doing} {path} failed ({error}): the run's earlier records are kept; try {resume}")
