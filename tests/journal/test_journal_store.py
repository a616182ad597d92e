"""Tests of `rookery.journal.store`, `.batch` and `.schema`."""

import asyncio
import contextlib
import errno
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from journal_kit import Mount, record, remount_read_only

from rookery.core import Attempt, Failed, JournalError, Segment, Task, Truncated, UsageError, floats, ints
from rookery.journal import Journal, RunReader, is_locked, open_lock, store
from rookery.journal.schema import FILE, FORMAT


def threads() -> int:
    return sum(thread.name == "rookery-journal" for thread in threading.enumerate())


def fill(folder: Path, n: int) -> None:
    with Journal.create(folder, {"n": n}) as journal:
        for i in range(n):
            journal.add_rollout(record(i // 4, i % 4))


def fill_disk(ballast: Path) -> None:
    """Fill the disk to the last byte."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"b" * 4096)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


@contextmanager
def blocked_commits(folder: Path) -> Iterator[None]:
    """Block commits within the block, by holding SQLite's write lock."""
    connection = sqlite3.connect(folder / FILE, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
    finally:
        connection.close()


async def test_records_are_readable_after_committed(run: Path) -> None:
    journal = Journal.create(run, {"env": "arith", "k": 4}, env="arith", model="m")
    journal.add_tasks([Task(id="a"), Task(id="b", invalid="no prompt")])
    journal.add_group(0, stream="train", position=0, task=0, k=2)
    journal.add_rollout(record(0, 0))
    journal.add_rollout(record(0, 1, outcome=Failed("infra", "sandbox.lost", "gone")))
    journal.add_attempt("0.1", Attempt(id="0.1.0", number=0, outcome=Failed("infra", "runner.lost", "killed")))
    journal.set_group(0, "finished")
    journal.event("note", {"a": 1})
    await journal.committed()
    assert journal.backlog == 0
    with RunReader(run) as reader:
        assert reader.config() == {"env": "arith", "k": 4}
        assert [(row.id, row.status, row.detail) for row in reader.task_rows()] == [
            ("a", "ok", ""),
            ("b", "quarantined", "no prompt"),
        ]
        assert [(group.idx, group.stream, group.k, group.status) for group in reader.groups()] == [
            (0, "train", 2, "finished")
        ]
        assert reader.rollouts() == [
            record(0, 0),
            record(0, 1, outcome=Failed("infra", "sandbox.lost", "gone")),
        ]
        assert [attempt.number for attempt in reader.attempts("0.1")] == [0, 1]
        assert reader.counts() == {"completed": 1, "sandbox.lost": 1}
        assert reader.mean_reward() == 0.5
        assert [event.kind for event in reader.events()] == ["run.started", "note"]
        assert reader.status == "running"
    journal.end("finished")
    await journal.aclose()
    with RunReader(run) as reader:
        assert reader.status == "finished"


def test_segments_stay_out_of_the_journal(run: Path) -> None:
    segment = Segment(tokens=ints([1]), mask=b"\0", logprobs=floats([0.0]))
    with Journal.create(run, {}) as journal:
        import msgspec

        journal.add_rollout(msgspec.structs.replace(record(0, 0), segments=[segment]))
    with RunReader(run) as reader:
        assert reader.rollouts() == [record(0, 0)]


async def test_writes_queued_during_a_commit_form_one_batch(run: Path) -> None:
    notifications: asyncio.Queue[JournalError | None] = asyncio.Queue()
    journal = Journal.create(run, {}, linger=0.0)
    leave = journal.on_commit(notifications.put_nowait)
    with blocked_commits(run):
        for i in range(500):
            journal.add_rollout(record(i, 0))
    await journal.committed()
    batches = [await notifications.get()]
    leave()
    journal.event("later")
    await journal.committed()
    while not notifications.empty():
        batches.append(notifications.get_nowait())
    assert batches in ([None], [None, None])
    journal.close()


async def test_second_record_is_refused_and_the_rest_is_committed(run: Path) -> None:
    with Journal.create(run, {}) as journal:
        journal.add_rollout(record(0, 0, reward=0.5))
        await journal.committed()
        journal.add_rollout(record(0, 1))
        journal.add_rollout(record(0, 0, reward=1.0))
        journal.add_rollout(record(0, 2))
        with pytest.raises(JournalError, match=r"\b0\.0\b.*\b0\b.*\b0\b.*completed"):
            await journal.committed()
        journal.add_rollout(record(0, 3))
        await journal.committed()
    with RunReader(run) as reader:
        assert [(one.member, one.reward) for one in reader.rollouts()] == [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.5)]
        assert reader.counts() == {"completed": 4}
        assert [event.kind for event in reader.events()] == ["run.started", "journal.refused"]


def test_refusal_without_a_waiter_is_raised_at_close(run: Path) -> None:
    journal = Journal.create(run, {})
    journal.add_rollout(record(0, 0))
    journal.add_rollout(record(0, 0))
    with pytest.raises(JournalError, match=r"\b0\.0\b"):
        journal.close()
    assert not is_locked(run)
    journal.close()


async def test_refusal_reaches_a_listener(run: Path) -> None:
    notifications: asyncio.Queue[JournalError | None] = asyncio.Queue()
    with Journal.create(run, {}) as journal:
        journal.on_commit(notifications.put_nowait)
        journal.add_rollout(record(0, 0))
        journal.add_rollout(record(0, 0))
        error = await notifications.get()
        assert isinstance(error, JournalError)
        assert "0.0" in str(error)


async def test_listener_that_raises_does_not_affect_others(run: Path) -> None:
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["exception"]))
    notifications: asyncio.Queue[JournalError | None] = asyncio.Queue()

    def bad(_: JournalError | None) -> None:
        raise RuntimeError("listener")

    with Journal.create(run, {}) as journal:
        journal.on_commit(bad)
        journal.on_commit(notifications.put_nowait)
        journal.event("a")
        assert await notifications.get() is None
        journal.event("b")
        assert await notifications.get() is None
    assert [str(problem) for problem in problems] == ["listener"] * 2


async def test_cancelled_waiter_does_not_affect_others(run: Path) -> None:
    with Journal.create(run, {}) as journal:
        with blocked_commits(run):
            journal.event("a")
            waiter = asyncio.ensure_future(journal.committed())
            other = asyncio.ensure_future(journal.committed())
            await asyncio.sleep(0)
            waiter.cancel()
        await other
        assert waiter.cancelled()


def test_unencodable_record_raises_only_in_its_caller(run: Path) -> None:
    import msgspec

    with Journal.create(run, {}) as journal:
        for bad in (object(), 1 << 80, "\ud800"):
            with pytest.raises(JournalError, match=r"'0\.0'"):
                journal.add_rollout(msgspec.structs.replace(record(0, 0), info={"x": bad}))
        with pytest.raises(JournalError, match="odd-kind") as caught:
            journal.event("odd-kind", {"x": object()})
        assert isinstance(caught.value.__cause__, TypeError)
        journal.event("big", {"x": "y" * 1_000_000})
        journal.add_rollout(record(0, 0))
    with RunReader(run) as reader:
        assert reader.counts() == {"completed": 1}
        assert "left_out" in reader.events()[-1].payload


def test_close_ends_the_thread_and_releases_the_lock(run: Path) -> None:
    before = threads()
    journal = Journal.create(run, {})
    assert threads() == before + 1
    journal.event("last")
    journal.close()
    assert threads() == before
    assert not is_locked(run)
    assert sorted(os.listdir(run)) == [FILE, "run.lock", "tokens"]
    assert journal.error is None
    with pytest.raises(JournalError):
        journal.event("too late")
    with RunReader(run) as reader:
        assert reader.events()[-1].kind == "last"


def test_totals_agree_with_the_records(run: Path) -> None:
    fill(run, 10)
    with Journal.open(run) as journal:
        journal.add_rollout(record(9, 0, reward=-1.0, outcome=Truncated("time")))
        journal.discard("0.0", "tokens lost")
    with RunReader(run) as reader:
        assert reader.counts() == {"completed": 9, "truncated.time": 1}
        assert reader.mean_reward() == pytest.approx((9 * 0.5 - 1.0) / 10)


def test_discarded_record_is_kept_and_its_member_can_run_again(run: Path) -> None:
    with Journal.create(run, {}) as journal:
        journal.add_group(0, stream="s", position=0, task=0, k=1)
        journal.add_rollout(record(0, 0, reward=0.25))
        journal.set_group(0, "finished")
    with Journal.open(run) as journal:
        journal.discard("0.0", "tokens lost")
        journal.discard("no such", "")
        journal.add_rollout(record(0, 0, reward=0.75))
    with RunReader(run) as reader:
        assert [one.reward for one in reader.rollouts()] == [0.75]
        assert [group.status for group in reader.groups()] == ["open"]
        [event] = [event for event in reader.events() if event.kind == "rollout.discarded"]
        assert event.payload["reason"] == "tokens lost"
        assert event.payload["label"] == "completed"
        [earlier] = reader.earlier("0.0")
        assert (earlier.record.reward, earlier.reason) == (0.25, "tokens lost")


def test_replaced_record_is_kept_and_the_newest_one_counts(run: Path) -> None:
    lost = Failed("infra", "engine.tokens", "gone", "load")
    with Journal.create(run, {}) as journal:
        journal.add_group(0, stream="s", position=0, task=0, k=1)
        journal.add_rollout(record(0, 0, reward=0.25))
        journal.set_group(0, "consumed")
    with Journal.open(run) as journal:
        journal.replace_rollout(record(0, 0, outcome=lost), "gone")
    with RunReader(run) as reader:
        assert reader.counts() == {"engine.tokens": 1}
        assert reader.mean_reward() is None
        assert [group.status for group in reader.groups()] == ["consumed"]
        assert [one.record.reward for one in reader.earlier("0.0")] == [0.25]


def test_journal_without_superseded_table_can_be_read_and_resumed(run: Path) -> None:
    with Journal.create(run, {}) as journal:
        journal.add_rollout(record(0, 0, reward=0.25))
    with contextlib.closing(sqlite3.connect(run / FILE)) as connection:
        connection.execute("DROP TABLE superseded")
        connection.commit()
    with RunReader(run) as reader:
        assert reader.earlier("0.0") == []
    with Journal.open(run) as journal:
        journal.discard("0.0", "why not")
    with RunReader(run) as reader:
        assert len(reader.earlier("0.0")) == 1


def sqlite_code(error: BaseException) -> int:
    """Return the primary SQLite error code of the error that caused a `JournalError`."""
    assert isinstance(error.__cause__, sqlite3.Error)
    return error.__cause__.sqlite_errorcode & 0xFF


HOLD = """
import sys
from pathlib import Path
from rookery.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_second_writer_is_refused_until_the_first_dies(run: Path) -> None:
    fill(run, 1)
    command = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_locked(run)
        with pytest.raises(UsageError, match=rf"\b{holder.pid}\b.*{socket.gethostname()}"):
            Journal.open(run)
        holder.kill()
        holder.wait()
        assert not is_locked(run)
        Journal.open(run).close()


def test_second_lock_in_the_same_process_is_refused(run: Path) -> None:
    with open_lock(run), pytest.raises(UsageError, match=rf"\b{os.getpid()}\b"):
        open_lock(run, timeout=0.0)
    open_lock(run).close()


def test_journal_cannot_be_created_twice(run: Path) -> None:
    fill(run, 3)
    with pytest.raises(JournalError):
        Journal.create(run, {})
    with RunReader(run) as reader:
        assert reader.counts() == {"completed": 3}


def test_newer_format_is_refused_and_unchanged(run: Path) -> None:
    fill(run, 3)
    connection = sqlite3.connect(run / FILE)
    connection.execute("PRAGMA user_version=3")
    connection.commit()
    connection.close()
    before = {name: (run / name).read_bytes() for name in (FILE, "run.lock")}
    for opening in (Journal.open, RunReader):
        with pytest.raises(JournalError, match=rf"\b3\b.*\b{FORMAT}\b"):
            opening(run)
    assert {name: (run / name).read_bytes() for name in before} == before
    assert not is_locked(run)


@pytest.mark.parametrize("content", [b"not a database at all" * 100, os.urandom(8192)], ids=["text", "noise"])
def test_file_that_is_no_journal_is_refused(run: Path, content: bytes) -> None:
    (run / FILE).write_bytes(content)
    for opening in (Journal.open, RunReader):
        with pytest.raises(JournalError) as caught:
            opening(run)
        assert sqlite_code(caught.value) == sqlite3.SQLITE_NOTADB
    assert (run / FILE).read_bytes() == content


def test_foreign_database_empty_file_and_empty_directory_are_refused(run: Path) -> None:
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        RunReader(run)
    (run / FILE).touch()
    with pytest.raises(JournalError):
        RunReader(run)
    connection = sqlite3.connect(run / FILE)
    connection.execute("CREATE TABLE t(x)")
    connection.close()
    with pytest.raises(JournalError):
        Journal.open(run)


def test_damaged_journal_is_reported(run: Path) -> None:
    fill(run, 400)
    path = run / FILE
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(JournalError) as caught, RunReader(run) as reader:
        reader.rollouts(limit=400)
    assert sqlite_code(caught.value) == sqlite3.SQLITE_CORRUPT


@pytest.mark.needs("mount")
async def test_full_disk_reaches_every_waiter_and_keeps_earlier_records(disk: Mount) -> None:
    run = disk(1024)
    journal = Journal.create(run, {})
    notifications: asyncio.Queue[JournalError | None] = asyncio.Queue()
    journal.on_commit(notifications.put_nowait)
    journal.add_rollout(record(0, 0))
    await journal.committed()
    fill_disk(run / "ballast")
    put = 0
    with contextlib.suppress(JournalError):  # the first of them may have failed before the last is there
        for put in range(1, 2000):
            journal.add_rollout(record(put, 0))
    waiters = [asyncio.ensure_future(journal.committed()) for _ in range(3)]
    for result in await asyncio.gather(*waiters, return_exceptions=True):
        assert isinstance(result, JournalError)
        assert sqlite_code(result) == sqlite3.SQLITE_FULL
        assert f"`rookery resume {run.name}`" in str(result)
    while (error := await notifications.get()) is None:
        pass  # of batches that went well
    assert str(error) == str(journal.error)
    for put in (lambda: journal.event("x"), lambda: journal.add_rollout(record(5000, 0)), journal.flush):
        with pytest.raises(JournalError) as caught:
            put()
        assert sqlite_code(caught.value) == sqlite3.SQLITE_FULL
    with pytest.raises(JournalError, match=rf"\b{journal.backlog}\b"):
        await journal.aclose()
    assert not is_locked(run)
    (run / "ballast").unlink()
    with RunReader(run) as reader:
        assert reader.counts() == {"completed": 1}
        assert reader.rollouts() == [record(0, 0)]
    with Journal.open(run) as journal:
        journal.add_rollout(record(1, 0))


@pytest.mark.needs("mount")
def test_close_retries_writes_that_a_full_disk_refused(disk: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        store, "SINGLE_WRITE_LINGER", 60.0
    )  # nothing is written before `flush`, however slow the machine is
    run = disk(2048)
    journal = Journal.create(run, {}, linger=60.0)
    ballast = run / "ballast"
    fill_disk(ballast)
    for i in range(500):
        journal.add_rollout(record(i, 0))
    with pytest.raises(JournalError) as caught:
        journal.flush()
    assert sqlite_code(caught.value) == sqlite3.SQLITE_FULL
    ballast.unlink()
    journal.close()
    with RunReader(run) as reader:
        assert reader.counts() == {"completed": 500}


@pytest.mark.needs("mount")
def test_full_or_read_only_disk_at_the_start_is_reported(disk: Mount) -> None:
    full = disk(16)
    with pytest.raises(JournalError) as caught:
        Journal.create(full, {"text": "x" * 100_000})
    assert sqlite_code(caught.value) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
    assert not (full / FILE).exists()
    frozen = disk(1024)
    fill(frozen, 4)
    remount_read_only(frozen)
    with pytest.raises(JournalError, match=r"run\.lock.*Read-only file system"):
        Journal.open(frozen)
    with RunReader(frozen) as reader:
        assert reader.counts() == {"completed": 4}
        assert reader.status == "interrupted"


def test_journal_fails_if_its_directory_was_removed(run: Path) -> None:
    journal = Journal.create(run, {})
    journal.event("before")
    journal.flush()
    shutil.rmtree(run)
    journal.event("after")
    with pytest.raises(JournalError, match=re.escape(str(run))):
        journal.flush()
    with pytest.raises(JournalError, match=re.escape(str(run))):
        journal.close()
