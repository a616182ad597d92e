"""Write the journal of a run. Runs in the supervisor process; a thread commits queued writes in batches.

- Every rollout has at most one current record. A second one is refused with a `JournalError`.
- A batch is committed completely or not at all, except for refused writes. Committed writes survive a `kill -9`.
- An error of the disk is raised in every caller that waits for a commit. Its message says what to do.
- `close` ends the thread and releases the lock. If a write had failed, `close` tries it once more.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import msgspec

import rookery
from rookery.core import Attempt, Failed, JournalError, Rollout, Task, label
from rookery.core.lifetimes import ClosesOnExit
from rookery.journal.batch import (
    ADD_ATTEMPT,
    ADD_GROUP,
    ADD_ROLLOUT,
    ADD_TASK,
    ENVIRONMENTS,
    EVENT,
    SET_GROUP,
    SET_TASK,
    SUPERSEDE,
    Op,
    Totals,
    commit,
)
from rookery.journal.folder import RunLock, open_lock
from rookery.journal.schema import (
    ENDED,
    FILE,
    TOKENS,
    EndStatus,
    GroupStatus,
    create,
    explain_error,
    folder_removed,
    open_reader,
    open_writer,
    wrap_errors,
)

Listener: TypeAlias = Callable[[JournalError | None], None]
"""Callback that is called after a commit, with None, or with the error if the commit failed or refused a write."""
BOUND = 10_000
"""Number of uncommitted writes at which a batch is committed without waiting for further writes."""
LINGER = 0.02
"""Seconds to wait for further writes before a batch is committed. At 3,000 records per second, a record costs 39
microseconds of CPU time without the wait and 21 with it. A longer wait gains little."""
SINGLE_WRITE_LINGER = 0.001
"""Seconds to wait instead of `LINGER` if nothing was written recently, so that a single write is committed
quickly."""
MAX_EVENT = 64 << 10

_pack = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()
_NOT_PLAIN = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


class UnencodableError(JournalError):
    """A task, attempt or rollout contains a value that cannot be encoded.

    It is not stored; the journal stays usable.
    """


class Journal(ClosesOnExit):
    """Writer of the journal of one run. Create it with `create` or `open`.

    Methods that add or change something queue a write and return at once; they can be called from any thread. Use
    `committed` or `flush` to wait until the queued writes are on disk.
    """

    def __init__(
        self, folder: Path, connection: sqlite3.Connection, lock: RunLock, *, bound: int, linger: float
    ) -> None:
        self.folder = folder
        self.path = folder / FILE
        self._db = connection
        self._file = _file_id(self.path)
        self._lock = lock
        self._bound = bound
        self._linger = linger
        self._totals = Totals.load(connection)
        self._mutex = threading.Lock()
        self._wake = threading.Semaphore(0)
        self._commit_now = threading.Event()
        self._queue: list[Op] = []
        self._writing: list[Op] = []
        self._idle = False
        self._closing = False
        self._closed = False
        self._put = 0
        self._done = 0
        self._waiters: list[tuple[int, asyncio.AbstractEventLoop | None, Listener]] = []
        self._listeners: list[tuple[asyncio.AbstractEventLoop, Listener]] = []
        self._error: JournalError | None = None
        self._refused: JournalError | None = None
        self._thread = threading.Thread(target=self._run, name="rookery-journal", daemon=True)
        self._thread.start()

    @classmethod
    def create(
        cls,
        folder: Path,
        config: dict[str, Any],
        *,
        env: str = "",
        model: str = "",
        environments: Sequence[str] = (),
        bound: int = BOUND,
        linger: float = LINGER,
    ) -> Self:
        """Create the journal of a new run in the directory `folder` and lock the run.

        `config` is stored as the run's configuration. `environments` are the names of the environments of a
        mixture. `bound` and `linger` control batches: see `BOUND` and
        `LINGER`.
        """
        lock = open_lock(folder)
        try:
            with wrap_errors(folder / FILE, "creating"):
                (folder / TOKENS).mkdir(exist_ok=True)
            meta = {"rookery": rookery.__version__, "created": repr(time.time()), "env": env, "model": model}
            if environments:
                meta[ENVIRONMENTS] = _json.encode(environments).decode()
            return cls(folder, create(folder / FILE, _json.encode(config), meta), lock, bound=bound, linger=linger)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def open(cls, folder: Path, *, bound: int = BOUND, linger: float = LINGER) -> Self:
        """Open the journal of an existing run to continue it, and lock the run.

        Raise `UsageError` if another process holds the lock.
        """
        open_reader(folder / FILE).close()  # refuse a newer or foreign file before anything is written
        lock = open_lock(folder)
        try:
            return cls(folder, open_writer(folder / FILE), lock, bound=bound, linger=linger)
        except BaseException:
            lock.close()
            raise

    def add_tasks(self, tasks: Iterable[Task], *, start: int = 0) -> None:
        """Store tasks, with indices from `start`. An invalid task is stored as quarantined, with the reason."""
        ops: list[Op] = []
        for idx, task in enumerate(tasks, start):
            status = "quarantined" if task.invalid else "ok"
            ops.append((ADD_TASK, (idx, task.id, _plain(task, "task"), status, task.invalid)))
        self._append(ops)

    def quarantine(self, task: int, detail: str) -> None:
        """Mark the task with index `task` as quarantined. `detail` is the reason."""
        self._append([(SET_TASK, ("quarantined", detail, task))])

    def lift_quarantine(self, task: int) -> None:
        """Mark the task with index `task` as no longer quarantined."""
        self._append([(SET_TASK, ("ok", "", task))])

    def add_group(self, idx: int, *, stream: str, position: int, task: int, k: int) -> None:
        """Store a new group of k rollouts, with the status `open`.

        `stream` and `position` say where the group is in its stream of groups. `task` is the index of its task.
        """
        self._append([(ADD_GROUP, (idx, stream, position, task, k, "open"))])

    def set_group(self, idx: int, status: GroupStatus) -> None:
        """Set the status of the group with index `idx`."""
        self._append([(SET_GROUP, (status, idx))])

    def add_rollout(self, record: Rollout) -> None:
        """Store the final record of a rollout, without its segments."""
        self._append([(ADD_ROLLOUT, _row(record))])

    def add_attempt(self, rollout_id: str, attempt: Attempt) -> None:
        """Store an attempt after which its rollout is retried.

        The last attempt is stored in the rollout's record.
        """
        row = (
            attempt.id,
            rollout_id,
            attempt.number,
            label(attempt.outcome),
            attempt.started,
            attempt.ended,
            attempt.runner,
            _plain(attempt, "attempt"),
        )
        self._append([(ADD_ATTEMPT, row)])

    def event(self, kind: str, payload: dict[str, Any] | None = None) -> None:
        """Store an event with the current time. A payload of more than `MAX_EVENT` bytes is replaced by a note."""
        try:
            text = _json.encode(payload or {})
        except _NOT_PLAIN as error:
            raise JournalError(f"the payload of event {kind} cannot be encoded: {error}") from error
        if len(text) > MAX_EVENT:
            text = _json.encode({"left_out": f"{len(text)} bytes are too many for an event"})
        self._append([(EVENT, (time.time(), kind, text.decode()))])

    def end(self, status: EndStatus, **payload: Any) -> None:
        """Store the event that the run finished or was stopped."""
        self.event(ENDED, {"status": status, **payload})

    def discard(self, rollout_id: str, reason: str) -> None:
        """Move a rollout's record to the superseded records and reopen its group, so that it can run again."""
        self._append([(SUPERSEDE, (rollout_id, reason, True))])

    def replace_rollout(self, record: Rollout, reason: str) -> None:
        """Store a new record of a rollout. The earlier record is kept as a superseded record, with the reason."""
        self.replace_rollouts([record], reason)

    def replace_rollouts(self, records: Iterable[Rollout], reason: str) -> None:
        """Store new records of several rollouts, as `replace_rollout` does, in one transaction."""
        ops: list[Op] = []
        for record in records:
            ops += [(SUPERSEDE, (record.id, reason, False)), (ADD_ROLLOUT, _row(record))]
        self._append(ops)

    @property
    def backlog(self) -> int:
        """Number of writes that are queued and not committed."""
        return self._put - self._done

    @property
    def queued_count(self) -> int:
        """Number of writes that were queued so far.

        They are all committed once `done_count` reaches this number.
        """
        return self._put

    @property
    def done_count(self) -> int:
        """Number of writes that are committed, or refused. Batches are committed in the order of their writes."""
        return self._done

    @property
    def error(self) -> JournalError | None:
        """The error that stopped the writer thread, or None if no write has failed."""
        return self._error

    def on_commit(self, fn: Listener) -> Callable[[], None]:
        """Call `fn(error)` on the running event loop after each batch.

        `error` is None if the batch was committed without a refused write. Return a function that unsubscribes.
        """
        entry = (asyncio.get_running_loop(), fn)
        self._listeners.append(entry)
        return lambda: self._listeners.remove(entry) if entry in self._listeners else None

    async def committed(self) -> None:
        """Wait until everything queued so far is committed.

        Raise `JournalError` if a commit fails or a write is refused.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self._wait(loop, lambda error: _resolve_future(future, error)):
            await future

    def flush(self) -> None:
        """Block until everything queued so far is committed: `committed` for callers without an event loop."""
        done = threading.Event()
        errors: list[JournalError] = []

        def on_commit(error: JournalError | None) -> None:
            if error is not None:
                errors.append(error)
            done.set()

        if self._wait(None, on_commit):
            self._commit_now.set()
            done.wait()
            for error in errors:
                raise _copy_error(error)

    def _wait(self, loop: asyncio.AbstractEventLoop | None, listener: Listener) -> bool:
        with self._mutex:
            self._raise_if_failed()
            if self._refused is not None:
                error, self._refused = self._refused, None
                raise _copy_error(error)
            if self._done >= self._put:
                return False
            self._waiters.append((self._put, loop, listener))
            return True

    def _append(self, ops: list[Op]) -> None:
        with self._mutex:
            self._raise_if_failed()
            if self._closing:
                raise JournalError(f"{self.path} is closed")
            self._queue += ops
            self._put += len(ops)
            if self._idle and ops:
                self._idle = False
                self._wake.release()
        if self._put - self._done >= self._bound:
            self._commit_now.set()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise _copy_error(self._error)

    def _run(self) -> None:
        wrote = 0.0
        while True:
            with self._mutex:
                self._idle = idle = not self._queue and not self._closing
            if idle:
                self._wake.acquire()
            if self._linger:
                lone = idle and time.monotonic() - wrote > self._linger
                self._commit_now.wait(min(SINGLE_WRITE_LINGER, self._linger) if lone else self._linger)
            with self._mutex:
                if not self._closing:
                    self._commit_now.clear()
                self._writing, self._queue = self._queue, []
                if not self._writing:
                    if self._closing:
                        return
                    continue
            if not self._write():
                return
            wrote = time.monotonic()

    def _write(self) -> bool:
        refused: JournalError | None = None
        failure: JournalError | None = None
        try:
            if self._file is not None and _file_id(self.path) != self._file:
                # SQLite would continue to write to the deleted file without an error.
                raise folder_removed(self.folder)
            refusals = commit(self._db, self._writing, self._totals)
            if refusals:
                refused = JournalError(f"{self.path} refused {len(refusals)} writes: {'; '.join(refusals[:3])}")
        except JournalError as error:
            failure = error
        except sqlite3.Error as error:
            failure = explain_error(error, self.path, "writing")
            failure.__cause__ = error
        except Exception as error:  # noqa: BLE001  (raised in every waiter; the thread must not die silently)
            failure = JournalError(f"writing {self.path} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._mutex:
            if failure is None:
                self._done += len(self._writing)
                self._writing = []
            self._error = failure
            error_to_report = failure or refused
            due = [waiter for waiter in self._waiters if failure is not None or waiter[0] <= self._done]
            self._waiters = [] if failure is not None else self._waiters[len(due) :]
            listeners = list(self._listeners)
            if refused is not None and not due and not listeners:
                self._refused = refused
        _notify([*((loop, fn) for _, loop, fn in due), *listeners], error_to_report)
        return failure is None

    def close(self) -> None:
        """Commit all queued writes, end the writer thread and release the lock of the run.

        Raise `JournalError` if something could not be written. A second call does nothing.
        """
        with self._mutex:
            if self._closed:
                return
            self._closed = self._closing = True
            self._commit_now.set()
            if self._idle:
                self._idle = False
                self._wake.release()
        self._thread.join()
        try:
            left = self._writing + self._queue
            if left:
                # The teardown of the run may have freed disk space since the write failed.
                self._writing, self._queue = left, []
                self._error = None
                self._write()
            if self._error is None:
                self._checkpoint()
        finally:
            self._db.close()
            self._lock.close()
        if self._error is not None:
            raise JournalError(f"{self._error} ({self.backlog} writes are not on disk)") from self._error
        if self._refused is not None:
            raise _copy_error(self._refused)

    async def aclose(self) -> None:
        """Do the same as `close` without blocking the event loop.

        If the caller is cancelled, the journal is still closed completely before `CancelledError` is raised.
        """
        closing = asyncio.ensure_future(asyncio.to_thread(self.close))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError as cancelled:
            await asyncio.wait([closing])
            raise cancelled from closing.exception()

    def _checkpoint(self) -> None:
        try:
            self._db.execute(
                "PRAGMA busy_timeout=200"
            )  # a reader in the middle of a query must not hold up the end
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error:
            return  # everything is in the -wal file, which readers use, too


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file, or None if it cannot be examined."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _plain(record: Task | Rollout | Attempt, what: str) -> bytes:
    # Encode in the caller's thread, so that a record that cannot be encoded fails its caller only.
    try:
        return _pack.encode(record)
    except _NOT_PLAIN as error:
        raise UnencodableError(f"{what} {record.id!r} contains a value that cannot be encoded: {error}") from error


def _row(record: Rollout) -> tuple[Any, ...]:
    """Return the record as a row of the table `rollouts`, without `seq`."""
    outcome = record.outcome
    bare = msgspec.structs.replace(record, segments=[]) if record.segments else record
    fault, cause = (outcome.fault, outcome.cause) if isinstance(outcome, Failed) else (None, None)
    ended = record.attempts[-1].ended if record.attempts else time.time()
    kind: str = outcome.__struct_config__.tag  # type: ignore[assignment]
    return (
        record.id,
        record.group,
        record.member,
        record.task,
        kind,
        label(outcome),
        fault,
        cause,
        record.reward,
        ended,
        _plain(bare, "rollout"),
    )


def _copy_error(error: JournalError) -> JournalError:
    """Return a copy of an exception: raising the same object in several waiting callers would mix their
    tracebacks.
    """
    fresh = JournalError(str(error))
    fresh.__cause__ = error.__cause__
    return fresh


def _resolve_future(future: "asyncio.Future[None]", error: JournalError | None) -> None:
    """Set the result or the exception of a future, unless it is done."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(_copy_error(error))


def _notify(calls: list[tuple[asyncio.AbstractEventLoop | None, Listener]], error: JournalError | None) -> None:
    """Call each listener on its event loop, or in this thread if the loop is None."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Listener]] = {}
    for loop, fn in calls:
        if loop is None:
            fn(error)
        else:
            by_loop.setdefault(loop, []).append(fn)
    for loop, fns in by_loop.items():
        try:
            loop.call_soon_threadsafe(_call_all, loop, fns, error)
        except RuntimeError:
            continue  # the loop is closed, so nothing waits there any more


def _call_all(loop: asyncio.AbstractEventLoop, fns: list[Listener], error: JournalError | None) -> None:
    for fn in fns:
        loop.call_soon(fn, error)  # separate callbacks, so that one that raises does not prevent the others
