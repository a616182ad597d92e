"""The sessions of a shard on disk survive kills at any byte, full disks and many restarts."""

import asyncio
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery.core import JournalError, Message, RookeryError, StageClock, Truncation, Turn, UsageError
from rookery.gateway.registration import Registration, SessionOpened, validate_registration
from rookery.gateway.registry import MAX_DELETED, SessionRegistry, owning_shard
from rookery.gateway.session import ModelRole
from rookery.gateway.session_entry import MAX_REPLAYABLE, SessionEntry, make_turn_key
from rookery.journal.tokens import TokenWriter, encode_turn
from rookery.upstreams.protocol import ModelRequest
from tests.gateway.kit import open_registry, run_shard
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream


def message(role: str, content: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"role": role, "content": content}))


async def run_call(registry: SessionRegistry, entry: SessionEntry, *messages: msgspec.Raw, key: str = "") -> Turn:
    session = registry.load_session(entry)
    return (await session.call(session.roles["policy"], ModelRequest(messages=messages), key=key)).turn


def newest_file(folder: Path, part: str) -> Path:
    return max((folder / part).iterdir(), key=lambda path: (len(path.name), path.name))


# ---- kills and restarts


@pytest.mark.long
async def test_kill_at_any_byte_loses_and_invents_no_record(tmp_path: Path) -> None:
    """Note the state and the file sizes after each step; then cut the files at every byte and reopen them."""
    whole = tmp_path / "whole"
    registry = open_registry(whole, ScriptedUpstream())
    known: list[tuple[int, int, dict[str, tuple[Any, ...]]]] = []
    """Sizes of both files, and the ending, truncation and turns of each session."""
    turns: dict[str, list[Turn]] = {}

    def size(part: str) -> int:
        return sum(path.stat().st_size for path in (whole / part).iterdir())

    def note_state() -> None:
        state = {
            entry.id: (entry.ended, entry.truncated, tuple(turns[entry.id])) for entry in registry.entries.values()
        } | dict.fromkeys(registry.deleted, ("deleted",))
        known.append((size("sessions"), size("tokens"), state))

    note_state()
    for name in ("one", "two", "three"):
        turns[name] = []
        registry.register(Registration(id=name))
        note_state()
    for step in range(6):
        entry = registry.entries[("one", "two", "three")[step % 3]]
        turns[entry.id].append(
            await run_call(registry, entry, message("user", f"step {step}"), key=f"{step:032x}")
        )
        note_state()
    registry.mark_truncated(registry.entries["one"], "tokens")
    note_state()
    registry.end(registry.entries["two"], "cancelled")
    note_state()
    registry.end(registry.entries["three"], "deleted")
    note_state()
    registry.close()
    ends = {part: size(part) for part in ("sessions", "tokens")}

    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for part in ("sessions", "tokens"):
        at = 0 if part == "sessions" else 1
        data = newest_file(whole, part).read_bytes()
        for length in range(ends[part] + 1):
            (cut / part / newest_file(whole, part).name).write_bytes(data[:length])
            reopened = open_registry(cut, ScriptedUpstream())
            expected = [state for state in known if state[at] <= length][-1][2]
            if part == "sessions":
                sessions = {entry.id: (entry.ended, entry.truncated) for entry in reopened.entries.values()}
                sessions |= dict.fromkeys(reopened.deleted, ("deleted",))
                assert sessions == {name: state[:2] for name, state in expected.items()}
            else:
                whole_turns = [turn for state in expected.values() for turn in state[-1] if len(state) == 3]
                for entry in reopened.entries.values():
                    assert reopened.read_turns(entry) == [turn for turn in turns[entry.id] if turn in whole_turns]
            if length % 23 == 0:  # the session continues from here, also after another restart
                for entry in [one for one in reopened.entries.values() if one.ended is None]:
                    before = reopened.read_turns(entry)
                    new = await run_call(reopened, entry, message("user", "once more"))
                    reopened.close()
                    reopened_again = open_registry(cut, ScriptedUpstream())
                    assert reopened_again.read_turns(reopened_again.entries[entry.id]) == [*before, new]
                    reopened_again.close()
                    break
                shutil.rmtree(cut)
                shutil.copytree(whole, cut)
            reopened.close()
        shutil.rmtree(cut)
        shutil.copytree(whole, cut)


async def test_trailing_zeros_of_a_power_failure_are_ignored(tmp_path: Path) -> None:
    registry = open_registry(tmp_path, ScriptedUpstream())
    entry, _ = registry.register(Registration(id="x"))
    turn = await run_call(registry, entry, message("user", "hello"))
    registry.close()
    for part in ("sessions", "tokens"):
        with newest_file(tmp_path, part).open("ab") as file:
            file.write(bytes(4096))
    reopened = open_registry(tmp_path, ScriptedUpstream())
    assert reopened.read_turns(reopened.entries["x"]) == [turn]
    reopened.close()


async def test_session_keeps_its_turns_in_order_over_many_restarts(tmp_path: Path) -> None:
    history: list[msgspec.Raw] = []
    seen: list[Turn] = []
    for life in range(13):  # from the eleventh on, file names sort differently from file numbers
        registry = open_registry(tmp_path, ScriptedUpstream(ScriptedReply(f"answer {life}")))
        entry = registry.entries["x"] if life else registry.register(Registration(id="x"))[0]
        assert registry.read_turns(entry) == seen
        history.append(message("user", f"question {life}"))
        turn = await run_call(registry, entry, *history)
        assert (turn.index, turn.parent, turn.prefix > 0) == (life, life - 1 if life else None, life > 0)
        history.append(message("assistant", f"answer {life}"))
        seen.append(turn)
        registry.close()


def write_turns(folder: Path, file: str, *turns: Turn) -> None:
    """Write turns to a token file of this name."""
    with TokenWriter(folder / "tokens", "made") as writer:
        name = writer.name
        for turn in turns:
            writer.append(encode_turn(turn))
    (folder / "tokens" / name).rename(folder / "tokens" / file)


async def test_turns_are_ordered_by_index_across_the_files_of_several_shards(tmp_path: Path) -> None:
    """When the number of shards changes between restarts, a session gets another owner."""
    registry = open_registry(tmp_path, ScriptedUpstream())
    registry.register(Registration(id="x"))
    registry.close()
    turns = [Turn(attempt="x", index=index, response=Message("assistant", str(index))) for index in range(4)]
    write_turns(tmp_path, "shard1-0.rtk", *turns[:2])
    write_turns(tmp_path, "shard0-1.rtk", *turns[2:])
    reopened = open_registry(tmp_path, ScriptedUpstream())
    assert reopened.read_turns(reopened.entries["x"]) == turns
    reopened.close()


async def test_later_of_two_turns_with_the_same_index_wins(tmp_path: Path) -> None:
    """The earlier one was reported as failed on a full disk, but reached the disk later."""
    registry = open_registry(tmp_path, ScriptedUpstream())
    registry.register(Registration(id="x"))
    registry.close()
    early, late = (Turn(attempt="x", index=0, response=Message("assistant", text)) for text in ("early", "late"))
    write_turns(tmp_path, "shard0-2.rtk", early)
    write_turns(tmp_path, "shard0-10.rtk", late)
    reopened = open_registry(tmp_path, ScriptedUpstream())
    assert reopened.read_turns(reopened.entries["x"]) == [late]
    reopened.close()


async def test_restored_session_draws_new_seeds(tmp_path: Path) -> None:
    seeds = []
    for _ in range(3):
        upstream = ScriptedUpstream()
        registry = open_registry(tmp_path, upstream)
        entry = registry.entries["x"] if seeds else registry.register(Registration(id="x", seed=5))[0]
        await run_call(registry, entry, message("user", "the same"))
        seeds.append(upstream.calls[0].request.seed)
        registry.close()
    assert len(set(seeds)) == 3


async def test_shard_loads_only_its_own_sessions(tmp_path: Path) -> None:
    registry = open_registry(tmp_path, ScriptedUpstream())
    for n in range(40):
        registry.register(Registration(id=f"s{n}"))
    registry.close()
    sessions = []
    for shard in range(4):
        reopened = open_registry(
            tmp_path, ScriptedUpstream(), is_local=lambda session, shard=shard: owning_shard(session, 4) == shard
        )
        sessions += list(reopened.entries)
        assert reopened.entries
        reopened.close()
    assert sorted(sessions) == sorted(f"s{n}" for n in range(40))
    assert [owning_shard(session, 7) for session in ("a", "0.0-1", "3.7-2", "ü")] == [4, 4, 6, 4], (
        "the owner of a session depends on the process"
    )


# ---- full disk


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Keep every file of this process from growing beyond its current size."""
    most = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_unwritable_turn_is_an_error_and_the_session_continues_afterwards(
    tmp_path: Path,
) -> None:
    upstream = ScriptedUpstream()
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register(id="x")
        await gateway.chat(session, "fits")
        upstream.then(ScriptedReply("z" * 5000), ScriptedReply("y" * 5000, size=100))
        with full_disk(tmp_path):
            lost = await gateway.chat(session, "too much")
            cut = await gateway.chat(session, "too much", stream=True)
        assert (lost.status, lost.error["code"]) == (500, "internal_error")
        assert (cut.status, cut.complete) == (200, False)
        assert b"[DONE]" not in cut.body
        assert len(await gateway.turns(session)) == 1
        assert (await gateway.chat(session, "fits again")).status == 200
        assert (await gateway.chat(session, "too much", retry=1)).text == "ok", (
            "a reply that was not recorded is not replayed"
        )
        turns = await gateway.turns(session)
        assert [turn["index"] for turn in turns] == sorted({turn["index"] for turn in turns})
        assert [turn["response"]["content"] for turn in turns] == ["ok"] * 3
    async with run_shard(tmp_path, upstream) as gateway:
        reopened_again = await gateway.turns(session)
        assert [turn["index"] for turn in reopened_again] == sorted({turn["index"] for turn in reopened_again})
        assert (await gateway.chat(session, "and on")).status == 200


# ---- limits


async def test_replayable_requests_are_limited_and_unique(tmp_path: Path) -> None:
    registry = open_registry(tmp_path, ScriptedUpstream())
    entry, _ = registry.register(Registration(id="x"))
    for _ in range(3):
        for n in range(MAX_REPLAYABLE + 10):
            await run_call(registry, entry, message("user", "hello"), key=f"{n:032x}")
    assert len(entry.replayable) == MAX_REPLAYABLE
    assert all(len(turns) == 1 for turns in entry.replayable.values())
    registry.close()


def test_each_choice_of_a_request_has_its_own_key() -> None:
    assert [make_turn_key("ab", n) for n in range(3)] == ["ab", "ab.1", "ab.2"]


async def test_oldest_deleted_sessions_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.gateway.registry.MAX_DELETED", 3)
    registry = open_registry(tmp_path, ScriptedUpstream())
    for n in range(5):
        registry.end(registry.register(Registration(id=f"s{n}"))[0], "deleted")
    assert list(registry.deleted) == ["s2", "s3", "s4"]
    registry.close()
    assert MAX_DELETED > 3


async def test_sessions_above_the_limit_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.gateway.registry.MAX_SESSIONS", 1)
    registry = open_registry(tmp_path, ScriptedUpstream())
    registry.register(Registration(id="a"))
    with pytest.raises(UsageError):
        registry.register(Registration(id="b"))
    registry.close()


def test_invalid_session_id_is_rejected(tmp_path: Path) -> None:
    for bad in ("", ".", "../x", "a b", "ü", "x" * 201, "a\n"):
        with pytest.raises(UsageError):
            validate_registration(Registration(id=bad), ["policy"])
    validate_registration(Registration(id="x" * 200), ["policy"])


# ---- the deadline


async def test_deadline_excludes_time_on_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rookery.gateway.registry.time.monotonic", lambda: now[0])
    entry = SessionEntry(SessionOpened(Registration(id="x"), b"", 0.0), StageClock(100.0, 10.0))
    entry.stop_clock()
    now[0] += 50
    assert entry.remaining == 10.0
    entry.stop_clock()
    entry.restart_clock()
    now[0] += 50
    entry.restart_clock()
    entry.restart_clock()  # an extra restart is allowed, because a session may end while its clock is stopped
    assert entry.remaining == 10.0
    now[0] += 10
    with pytest.raises(Truncation) as stopped:
        async with entry.deadline():
            raise AssertionError("the block was entered")
    assert stopped.value.reason == "time"


async def test_hold_at_the_moment_of_the_deadline_is_harmless() -> None:
    entry = SessionEntry(SessionOpened(Registration(id="x"), b"", 0.0), StageClock(time.monotonic(), 1000.0))

    async def passes() -> None:
        async with entry.deadline():
            (timeout,) = entry._timeouts
            timeout.reschedule(0.0)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                assert timeout.expired()
                entry.stop_clock()  # as a concurrent call does in the same iteration of the event loop
                entry.restart_clock()

    with pytest.raises(Truncation):
        await passes()


async def test_ended_session_records_no_new_turn_and_keeps_its_record(tmp_path: Path) -> None:
    registry = open_registry(tmp_path, ScriptedUpstream())
    entry, _ = registry.register(Registration(id="x"))
    turn = await run_call(registry, entry, message("user", "hello"))
    session = registry.load_session(entry)
    place = session.recorder.match_history("policy", (message("user", "late"),))
    registry.end(entry, "cancelled")
    registry.end(entry, "cancelled")
    with pytest.raises(RookeryError):
        session.recorder.record(place, prompt=b"", response=turn.response, sampled=b"")
    assert registry.read_turns(entry) == [turn]
    registry.end(entry, "deleted")
    registry.end(entry, "cancelled")
    assert (entry.ended, "x" in registry.entries, "x" in registry.deleted) == ("deleted", False, True)
    registry.close()


async def test_damage_in_the_middle_of_a_file_raises_journal_error(tmp_path: Path) -> None:
    registry = open_registry(tmp_path, ScriptedUpstream())
    for n in range(3):
        registry.register(Registration(id=f"s{n}"))
    registry.close()
    path = newest_file(tmp_path, "sessions")
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError):
        open_registry(tmp_path, ScriptedUpstream())


async def test_registration_overrides_the_model_of_its_own_roles_only(tmp_path: Path) -> None:
    registry = open_registry(tmp_path, ScriptedUpstream())
    entry, _ = registry.register(Registration(id="x", model="tuned"))
    role = registry.load_session(entry).roles["policy"]
    assert isinstance(role, ModelRole)
    assert (role.model, registry.roles["policy"].model) == ("tuned", "m")
    registry.close()


# ---- unloading and deleting


async def test_unloaded_session_continues_from_disk(tmp_path: Path) -> None:
    registry = open_registry(tmp_path, ScriptedUpstream())
    entry, _ = registry.register(Registration(id="a"))
    over, _ = registry.register(Registration(id="b"))
    first = await run_call(registry, entry, message("user", "x"), key="k")
    await run_call(registry, over, message("user", "x"))
    registry.end(over, "cancelled")
    registry.unload_idle(3600.0)
    assert (entry.session is None, over.session is None) == (False, True), "an ended session is unloaded at once"
    before = entry.summary()
    registry.unload_idle(0.0)
    assert (entry.session, entry.replayable, entry.summary()) == (None, {}, before)
    answer = msgspec.json.encode({"role": "assistant", "content": first.response.content})
    second = await run_call(registry, entry, message("user", "x"), msgspec.Raw(answer), message("user", "y"))
    assert (second.index, second.parent) == (1, 0)
    assert list(entry.replayable) == ["k"], "earlier requests can be replayed again"
    assert entry.session is not None
    assert (entry.session.turns, entry.take_new_counts(entry.session)) == (2, {})


async def test_files_with_only_deleted_sessions_are_removed(tmp_path: Path) -> None:
    registry = open_registry(tmp_path, ScriptedUpstream(), max_bytes=64)
    entries = [registry.register(Registration(id=name))[0] for name in ("a", "b", "c")]
    for entry in entries:
        await run_call(registry, entry, message("user", "x"))
    there = {path.name for path in (tmp_path / "tokens").iterdir()}
    assert len(there) == 3, "each turn has its own file"
    registry.end(entries[0], "deleted")
    left = {path.name for path in (tmp_path / "tokens").iterdir()}
    assert there - left == {entries[0].extents[0].file}
    registry.end(entries[2], "deleted")
    assert {path.name for path in (tmp_path / "tokens").iterdir()} == left, "the file that is being written stays"
    assert registry.read_turns(entries[1])
    registry.close()
    reopened = open_registry(tmp_path, ScriptedUpstream())
    assert sorted(reopened.entries) == ["b"]
    assert len(reopened.read_turns(reopened.entries["b"])) == 1
