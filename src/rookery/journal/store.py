"""The writer of a run's journal: puts are queued in memory, one thread commits them in batches.

Promises:
- every admitted rollout has at most one terminal record: a second one is refused and the refusal surfaces;
- what was reported committed is there after a kill -9, whole; a batch is there entirely or not at all;
- a full or failing disk reaches every waiter as one clear sentence, and nothing is half written;
- the queue is bounded: `room` waits while it is full;
- one wake-up and one transaction per batch, not per record;
- `close` leaves no thread, no lock and no queue behind, and tries once more what a full disk refused.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import msgspec

import rookery
from rookery.core import Attempt, Failed, JournalError, Rollout, Task, label
from rookery.core.closing import Closing
from rookery.journal.batch import (
    ADD_ATTEMPT,
    ADD_GROUP,
    ADD_ROLLOUT,
    ADD_TASK,
    EVENT,
    PUT_META,
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
    folder_removed,
    in_a_sentence,
    in_words,
    open_reader,
    open_writer,
)
from rookery.journal.waiting import Listener, again, settle, tell

BOUND = 10_000
LINGER = 0.02
"""Seconds a batch waits for company. Measured at 3,000 records a second: 39 microseconds of CPU a record without
waiting, 21 with it; longer gains little, and nobody notices twenty milliseconds after a rollout."""
LONE = 0.001
"""The same after a pause: what comes together comes within this; who waits for one rollout waits no longer."""
MAX_EVENT = 64 << 10

_pack = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()
_NOT_PLAIN = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


class UnencodableError(JournalError):
    """A record holds something that is not plain data. Only that record is affected."""


class Journal(Closing):
    """The one writer of a run. Puts may come from any thread; `committed` and `room` are awaited on a loop."""

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
        self._hurry = threading.Event()
        self._queue: list[Op] = []
        self._writing: list[Op] = []
        self._asleep = False
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
        bound: int = BOUND,
        linger: float = LINGER,
    ) -> Self:
        """A new journal in a run's folder."""
        lock = open_lock(folder)
        try:
            with in_words(folder / FILE, "making"):
                (folder / TOKENS).mkdir(exist_ok=True)
            meta = {"rookery": rookery.__version__, "created": repr(time.time()), "env": env, "model": model}
            return cls(folder, create(folder / FILE, _json.encode(config), meta), lock, bound=bound, linger=linger)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def open(cls, folder: Path, *, bound: int = BOUND, linger: float = LINGER) -> Self:
        """An existing journal, to go on with its run."""
        open_reader(folder / FILE).close()  # refuses a newer or foreign file before anything is written
        lock = open_lock(folder)
        try:
            return cls(folder, open_writer(folder / FILE), lock, bound=bound, linger=linger)
        except BaseException:
            lock.close()
            raise

    def add_tasks(self, tasks: Iterable[Task], *, start: int = 0) -> None:
        """Number the tasks from `start`; one that is not valid is kept as quarantined, with the reason."""
        ops: list[Op] = []
        for idx, task in enumerate(tasks, start):
            status = "quarantined" if task.invalid else "ok"
            ops.append((ADD_TASK, (idx, task.id, _plain(task, "task"), status, task.invalid)))
        self._append(ops)

    def quarantine(self, task: int, detail: str) -> None:
        """The task with this number is broken, and why."""
        self._append([(SET_TASK, ("quarantined", detail, task))])

    def lift_quarantine(self, task: int) -> None:
        """Let the task with this number run again."""
        self._append([(SET_TASK, ("ok", "", task))])

    def add_group(self, idx: int, *, stream: str, position: int, task: int, k: int) -> None:
        """A group was admitted."""
        self._append([(ADD_GROUP, (idx, stream, position, task, k, "open"))])

    def set_group(self, idx: int, status: GroupStatus) -> None:
        """Where the group stands now."""
        self._append([(SET_GROUP, (status, idx))])

    def add_rollout(self, record: Rollout, encoded: bytes | None = None) -> None:
        """The terminal record of a rollout.

        `encoded`: msgpack of the record without segments, where the caller has it already.
        """
        self._append([(ADD_ROLLOUT, _row(record, encoded))])

    def add_attempt(self, rollout_id: str, attempt: Attempt) -> None:
        """An attempt that did not end its rollout; those that did are in the rollout's own record."""
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
        """Something worth keeping happened."""
        try:
            text = _json.encode(payload or {})
        except _NOT_PLAIN as error:
            raise JournalError(f"event {kind} is not plain data: {error}") from error
        if len(text) > MAX_EVENT:
            text = _json.encode({"left_out": f"{len(text)} bytes are too many for an event"})
        self._append([(EVENT, (time.time(), kind, text.decode()))])

    def put_meta(self, key: str, value: str) -> None:
        """Keep a small text under a key, over what was there."""
        self._append([(PUT_META, (key, value))])

    def end(self, status: EndStatus, **payload: Any) -> None:
        """The run came to its end, or was stopped under way."""
        self.event(ENDED, {"status": status, **payload})

    def discard(self, rollout_id: str, reason: str) -> None:
        """Supersede a record and reopen its group, so that the rollout runs again. The record is kept."""
        self._append([(SUPERSEDE, (rollout_id, reason, True))])

    def replace_rollout(self, record: Rollout, reason: str) -> None:
        """Supersede a rollout's record with this one, in one transaction. The journal keeps the earlier record."""
        self._append([(SUPERSEDE, (record.id, reason, False)), (ADD_ROLLOUT, _row(record, None))])

    @property
    def backlog(self) -> int:
        """How much is queued and not yet committed."""
        return self._put - self._done

    @property
    def put_count(self) -> int:
        """How many writes were put; each is committed once `done_count` has reached its number."""
        return self._put

    @property
    def done_count(self) -> int:
        """How many writes are committed, in the order they were put."""
        return self._done

    @property
    def error(self) -> JournalError | None:
        """What stopped the writing, if something did."""
        return self._error

    def on_commit(self, fn: Listener) -> Callable[[], None]:
        """Call `fn(error)` on this loop after each batch, error None when all is well; returns the way out."""
        entry = (asyncio.get_running_loop(), fn)
        self._listeners.append(entry)
        return lambda: self._listeners.remove(entry) if entry in self._listeners else None

    async def committed(self) -> None:
        """Return when everything put so far is committed; raise if it cannot be."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self._wait(loop, lambda error: settle(future, error)):
            await future

    async def room(self) -> None:
        """Return when the queue is below its bound."""
        while self.backlog >= self._bound:
            await self.committed()

    def flush(self) -> None:
        """`committed`, for code without a loop."""
        done = threading.Event()
        errors: list[JournalError] = []

        def hear(error: JournalError | None) -> None:
            if error is not None:
                errors.append(error)
            done.set()

        if self._wait(None, hear):
            self._hurry.set()
            done.wait()
            for error in errors:
                raise again(error)

    def _wait(self, loop: asyncio.AbstractEventLoop | None, hear: Listener) -> bool:
        with self._mutex:
            self._raise_if_failed()
            if self._refused is not None:
                error, self._refused = self._refused, None
                raise again(error)
            if self._done >= self._put:
                return False
            self._waiters.append((self._put, loop, hear))
            return True

    def _append(self, ops: list[Op]) -> None:
        with self._mutex:
            self._raise_if_failed()
            if self._closing:
                raise JournalError(f"{self.path} is closed")
            self._queue += ops
            self._put += len(ops)
            if self._asleep and ops:
                self._asleep = False
                self._wake.release()
        if self._put - self._done >= self._bound:
            self._hurry.set()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise again(self._error)

    def _run(self) -> None:
        wrote = 0.0
        while True:
            with self._mutex:
                self._asleep = idle = not self._queue and not self._closing
            if idle:
                self._wake.acquire()
            if self._linger:
                lone = idle and time.monotonic() - wrote > self._linger
                self._hurry.wait(min(LONE, self._linger) if lone else self._linger)
            with self._mutex:
                if not self._closing:
                    self._hurry.clear()
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
                # SQLite would go on writing to the deleted file without an error.
                raise folder_removed(self.folder)
            refusals = commit(self._db, self._writing, self._totals)
            if refusals:
                refused = JournalError(f"{self.path} refused {len(refusals)} writes: {'; '.join(refusals[:3])}")
        except JournalError as error:
            failure = error
        except sqlite3.Error as error:
            failure = in_a_sentence(error, self.path, "writing")
            failure.__cause__ = error
        except Exception as error:  # noqa: BLE001  (handed to every waiter; the thread must not die silently)
            failure = JournalError(f"writing {self.path} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._mutex:
            if failure is None:
                self._done += len(self._writing)
                self._writing = []
            self._error = failure
            told = failure or refused
            due = [waiter for waiter in self._waiters if failure is not None or waiter[0] <= self._done]
            self._waiters = [] if failure is not None else self._waiters[len(due) :]
            listeners = list(self._listeners)
            if refused is not None and not due and not listeners:
                self._refused = refused
        tell([*((loop, fn) for _, loop, fn in due), *listeners], told)
        return failure is None

    def close(self) -> None:
        """Commit what is queued, end the thread, let go of the run; raise if something could not be written."""
        with self._mutex:
            if self._closed:
                return
            self._closed = self._closing = True
            self._hurry.set()
            if self._asleep:
                self._asleep = False
                self._wake.release()
        self._thread.join()
        try:
            left = self._writing + self._queue
            if left:
                # The run's teardown may have freed the space whose lack stopped us.
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
            raise again(self._refused)

    async def aclose(self) -> None:
        """`close`, without holding up the loop; finishes also when cancelled."""
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
            return  # everything is in the -wal file, which every reader reads


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return what identifies a file whatever its name, or None if it cannot be asked."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _plain(record: Task | Rollout | Attempt, what: str) -> bytes:
    # Encoded where it is put, not in the thread: what cannot be encoded is then its sender's failure alone.
    try:
        return _pack.encode(record)
    except _NOT_PLAIN as error:
        raise UnencodableError(f"{what} {record.id!r} holds something that is not plain data: {error}") from error


def _row(record: Rollout, encoded: bytes | None) -> tuple[Any, ...]:
    """The record as a row of the table `rollouts`, from its id on."""
    outcome = record.outcome
    if encoded is None:
        bare = msgspec.structs.replace(record, segments=[]) if record.segments else record
        encoded = _plain(bare, "rollout")
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
        encoded,
    )
