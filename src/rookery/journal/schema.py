"""Define the schema of `journal.sqlite`, the database of a run, and open it for writing or reading.

Opening a journal of a newer format, a file that is not a journal or a damaged file raises `JournalError` before
anything is written. Readers never write. They can read while another process writes, and on a read-only file
system. Only columns that `rookery show` and `rookery ls` look up have an index, because each index slows down
every insert.
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
"""Number of the journal format. It is increased when an older Rookery could misread what this version writes."""
APPLICATION_ID = 0x526F6F6B
FILE = "journal.sqlite"
TOKENS = "tokens"
LOCK = "run.lock"

GroupStatus: TypeAlias = Literal["open", "finished", "filtered", "surplus", "consumed"]
"""`filtered`: the consumer's filter rejected the group. `surplus`: the group was cancelled. `consumed`: the
consumer took the group with its tokens. All other groups keep the status `open`, even when all their rollouts have
ended."""
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
"""Table of rollout records that were discarded or replaced by a newer record of the same rollout. Older journals
of format 1 lack this table: it is created when such a run is opened for writing, and readers treat a missing table
as empty."""

BUSY_SECONDS = 10.0


class Event(msgspec.Struct, frozen=True):
    """One entry of a run's event log, such as `run.started`. Events are ordered by `seq`."""

    seq: int
    ts: float
    """Unix time in seconds."""
    kind: str
    payload: dict[str, object]


class TaskRow(msgspec.Struct, frozen=True):
    """Row of the table `tasks`: one task of the run."""

    idx: int
    id: str
    payload: bytes
    """The `rookery.core.Task`, encoded as msgpack."""
    status: TaskStatus
    detail: str
    """The reason why the task is quarantined; empty if it is not."""


class GroupRow(msgspec.Struct, frozen=True):
    """Row of the table `groups`: one group, that is the k rollouts of one task, and its status."""

    idx: int
    stream: str
    """Name of the stream of groups that this group belongs to."""
    position: int
    """Position of the group in its stream."""
    task_idx: int
    """Value of `TaskRow.idx` of the group's task."""
    k: int
    """Number of rollouts in the group."""
    status: GroupStatus


def create(path: Path, config: bytes, meta: dict[str, str]) -> sqlite3.Connection:
    """Create the database of a new run and return a connection for writing.

    All tables are created in one transaction. If that fails, the file is removed.
    """
    if path.exists():
        raise JournalError(f"{path} already exists: continue the run with `rookery resume`")
    with wrap_errors(path, "creating"):
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
    """Open an existing journal for writing and store an event that the run was resumed.

    The caller must hold the lock of the run and must have checked the journal's format with `open_reader`.
    """
    with wrap_errors(path, "opening"):
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
    """Open a journal read-only. Raise `JournalError` if it is missing, is not a journal or has a newer format."""
    if not path.is_file():
        raise JournalError(f"{path.parent} is not a run: it has no {FILE}")
    with wrap_errors(path, "reading"):
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
        # WAL mode needs a shared-memory file beside the journal, which a read-only file system cannot have.
        # Without a -wal file, or with an empty one, the journal itself is complete and can be read as immutable.
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
        raise sqlite3.OperationalError(f"the file system does not support a write-ahead log (mode {mode})")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA journal_size_limit=67108864")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION_ID:
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            raise JournalError(f"{path} is empty: its run ended before it started; start a new run")
        raise JournalError(f"{path} is a database, but not a Rookery journal")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > FORMAT:
        raise JournalError(
            f"{path} was written by a newer Rookery (format {version}, this version reads up to {FORMAT}): upgrade"
        )


def folder_removed(folder: Path) -> JournalError:
    """Return the error to raise when a run's directory was removed or moved while the run was being written."""
    return JournalError(
        f"the run directory {folder} was removed or moved during the run, so records can no longer be written. "
        "Start the run again and leave its directory in place"
    )


@contextmanager
def wrap_errors(path: Path, doing: str) -> Iterator[None]:
    """Convert SQLite and operating system errors raised in the block to a `JournalError` that says what to do.

    `doing` says what the block does with the file `path`, for example "reading".
    """
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise explain_error(error, path, doing) from error


def explain_error(error: Exception, path: Path, doing: str) -> JournalError:
    """Return a `JournalError` that says what failed and what to do.

    `error` occurred with the journal file `path`; `doing` is the operation, for example "writing".
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    resume = f"`rookery resume {path.parent.name}`"
    match code:
        case sqlite3.SQLITE_FULL:
            return JournalError(f"disk full while {doing} {path}: free space, then {resume}")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return JournalError(
                f"{doing} {path} is not permitted: make the file and its directory writable, then {resume}"
            )
        case sqlite3.SQLITE_CANTOPEN:
            return JournalError(
                f"cannot open {path} while {doing} it: check the permissions and free space of its directory"
            )
        case sqlite3.SQLITE_NOTADB:
            return JournalError(f"{path} is not a Rookery journal")
        case sqlite3.SQLITE_CORRUPT:
            return JournalError(
                f"{path} is damaged ({error}): restore it from a copy; its token files are not affected"
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return JournalError(f"{path} is locked by another program: end that program, then {resume}")
        case sqlite3.SQLITE_IOERR:
            return JournalError(f"the disk failed while {doing} {path} ({error}): check it, then {resume}")
    return JournalError(f"{doing} {path} failed ({error}): the run's earlier records are kept; try {resume}")
