"""A shard's sessions on disk: what a kill at any byte, a full disk and many restarts leave of them."""

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

from rookery.core import JournalError, Message, StageClock, Truncation, Turn, UsageError
from rookery.gateway.registration import Registration, SessionOpened, validate_registration
from rookery.gateway.registry import MAX_DELETED, Registry, owning_shard
from rookery.gateway.session import ModelRole
from rookery.gateway.session_entry import MAX_REPLAYABLE, SessionEntry, make_turn_key
from rookery.journal.tokens import TokenWriter, encode_turn
from rookery.upstreams.protocol import ModelRequest
from tests.gateway.kit import registry_over, served
from tests.gateway.scripted import Play, Scripted


def message(role: str, content: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"role": role, "content": content}))


async def asked(registry: Registry, seat: SessionEntry, *messages: msgspec.Raw, key: str = "") -> Turn:
    session = registry.load_session(seat)
    return (await session.call(session.roles["policy"], ModelRequest(messages=messages), key=key)).turn


def tail(folder: Path, part: str) -> Path:
    return max((folder / part).iterdir(), key=lambda path: (len(path.name), path.name))


# ---- a kill at any byte


async def test_a_kill_at_any_byte_takes_back_nothing_that_was_told_and_invents_nothing(tmp_path: Path) -> None:
    """What is known after each step is noted with how long the files were; then they are cut at every byte."""
    whole = tmp_path / "whole"
    registry = registry_over(whole, Scripted())
    known: list[tuple[int, int, dict[str, tuple[Any, ...]]]] = []
    """Bytes of both files, and each session's ending, truncation and turns."""
    turns: dict[str, list[Turn]] = {}

    def size(part: str) -> int:
        return sum(path.stat().st_size for path in (whole / part).iterdir())

    def noted() -> None:
        state = {
            seat.id: (seat.ended, seat.truncated, tuple(turns[seat.id])) for seat in registry.entries.values()
        } | dict.fromkeys(registry.deleted, ("deleted",))
        known.append((size("sessions"), size("tokens"), state))

    noted()
    for name in ("one", "two", "three"):
        turns[name] = []
        registry.register(Registration(id=name))
        noted()
    for step in range(6):
        seat = registry.entries[("one", "two", "three")[step % 3]]
        turns[seat.id].append(await asked(registry, seat, message("user", f"step {step}"), key=f"{step:032x}"))
        noted()
    registry.mark_truncated(registry.entries["one"], "tokens")
    noted()
    registry.end(registry.entries["two"], "cancelled")
    noted()
    registry.end(registry.entries["three"], "deleted")
    noted()
    registry.close()
    ends = {part: size(part) for part in ("sessions", "tokens")}

    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for part in ("sessions", "tokens"):
        at = 0 if part == "sessions" else 1
        data = tail(whole, part).read_bytes()
        for length in range(ends[part] + 1):
            (cut / part / tail(whole, part).name).write_bytes(data[:length])
            back = registry_over(cut, Scripted())
            sure = [state for state in known if state[at] <= length][-1][2]
            if part == "sessions":
                found = {seat.id: (seat.ended, seat.truncated) for seat in back.entries.values()}
                found |= dict.fromkeys(back.deleted, ("deleted",))
                assert found == {name: state[:2] for name, state in sure.items()}
            else:
                whole_turns = [turn for state in sure.values() for turn in state[-1] if len(state) == 3]
                for seat in back.entries.values():
                    assert back.read_turns(seat) == [turn for turn in turns[seat.id] if turn in whole_turns]
            if length % 23 == 0:  # and it goes on from there, also over the next restart
                for seat in [one for one in back.entries.values() if one.ended is None]:
                    before = back.read_turns(seat)
                    new = await asked(back, seat, message("user", "once more"))
                    back.close()
                    again = registry_over(cut, Scripted())
                    assert again.read_turns(again.entries[seat.id]) == [*before, new]
                    again.close()
                    break
                shutil.rmtree(cut)
                shutil.copytree(whole, cut)
            back.close()
        shutil.rmtree(cut)
        shutil.copytree(whole, cut)


async def test_a_file_that_grew_by_zeros_when_the_power_went_ends_there(tmp_path: Path) -> None:
    registry = registry_over(tmp_path, Scripted())
    seat, _ = registry.register(Registration(id="x"))
    turn = await asked(registry, seat, message("user", "hello"))
    registry.close()
    for part in ("sessions", "tokens"):
        with tail(tmp_path, part).open("ab") as file:
            file.write(bytes(4096))
    back = registry_over(tmp_path, Scripted())
    assert back.read_turns(back.entries["x"]) == [turn]
    back.close()


async def test_a_session_survives_any_number_of_restarts_with_its_turns_in_order(tmp_path: Path) -> None:
    history: list[msgspec.Raw] = []
    seen: list[Turn] = []
    for life in range(13):  # with the eleventh, names and numbers of the files have different orders
        registry = registry_over(tmp_path, Scripted(Play(f"answer {life}")))
        seat = registry.entries["x"] if life else registry.register(Registration(id="x"))[0]
        assert registry.read_turns(seat) == seen
        history.append(message("user", f"question {life}"))
        turn = await asked(registry, seat, *history)
        assert (turn.index, turn.parent, turn.prefix > 0) == (life, life - 1 if life else None, life > 0)
        history.append(message("assistant", f"answer {life}"))
        seen.append(turn)
        registry.close()


def written(folder: Path, file: str, *turns: Turn) -> None:
    """Turns in a file of that name."""
    with TokenWriter(folder / "tokens", "made") as writer:
        name = writer.name
        for turn in turns:
            writer.append(encode_turn(turn))
    (folder / "tokens" / name).rename(folder / "tokens" / file)


async def test_turns_have_their_order_whichever_shard_wrote_them(tmp_path: Path) -> None:
    """The number of shards may change between two lives: a session then has another owner."""
    registry = registry_over(tmp_path, Scripted())
    registry.register(Registration(id="x"))
    registry.close()
    turns = [Turn(attempt="x", index=index, response=Message("assistant", str(index))) for index in range(4)]
    written(tmp_path, "shard1-0.rtk", *turns[:2])
    written(tmp_path, "shard0-1.rtk", *turns[2:])
    back = registry_over(tmp_path, Scripted())
    assert back.read_turns(back.entries["x"]) == turns
    back.close()


async def test_of_two_turns_with_one_number_the_later_counts(tmp_path: Path) -> None:
    """The earlier one waited for a full disk, was refused, and reached it after all."""
    registry = registry_over(tmp_path, Scripted())
    registry.register(Registration(id="x"))
    registry.close()
    early, late = (Turn(attempt="x", index=0, response=Message("assistant", text)) for text in ("early", "late"))
    written(tmp_path, "shard0-2.rtk", early)
    written(tmp_path, "shard0-10.rtk", late)
    back = registry_over(tmp_path, Scripted())
    assert back.read_turns(back.entries["x"]) == [late]
    back.close()


async def test_a_restored_session_draws_other_seeds_than_it_did(tmp_path: Path) -> None:
    seeds = []
    for _ in range(3):
        upstream = Scripted()
        registry = registry_over(tmp_path, upstream)
        seat = registry.entries["x"] if seeds else registry.register(Registration(id="x", seed=5))[0]
        await asked(registry, seat, message("user", "the same"))
        seeds.append(upstream.calls[0].request.seed)
        registry.close()
    assert len(set(seeds)) == 3


async def test_a_shard_finds_its_own_sessions_only(tmp_path: Path) -> None:
    registry = registry_over(tmp_path, Scripted())
    for n in range(40):
        registry.register(Registration(id=f"s{n}"))
    registry.close()
    found = []
    for shard in range(4):
        back = registry_over(
            tmp_path, Scripted(), is_local=lambda session, shard=shard: owning_shard(session, 4) == shard
        )
        found += list(back.entries)
        assert back.entries
        back.close()
    assert sorted(found) == sorted(f"s{n}" for n in range(40))
    assert [owning_shard(session, 7) for session in ("a", "0.0-1", "3.7-2", "ü")] == [4, 4, 6, 4], (
        "another process sees others"
    )


# ---- a disk that is full for a while


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """No file of this process may grow beyond what it is."""
    most = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_turn_that_cannot_be_written_is_an_error_and_the_session_goes_on_when_it_can(
    tmp_path: Path,
) -> None:
    upstream = Scripted()
    async with served(tmp_path, upstream) as gateway:
        session = await gateway.register(id="x")
        await gateway.chat(session, "fits")
        upstream.then(Play("z" * 5000), Play("y" * 5000, size=100))
        with full_disk(tmp_path):
            lost = await gateway.chat(session, "too much")
            cut = await gateway.chat(session, "too much", stream=True)
        assert (lost.status, lost.error["code"]) == (500, "internal_error")
        assert (cut.status, cut.whole) == (200, False)
        assert b"[DONE]" not in cut.body
        assert len(await gateway.turns(session)) == 1
        assert (await gateway.chat(session, "fits again")).status == 200
        assert (await gateway.chat(session, "too much", retry=1)).text == "ok", (
            "what was not recorded is not replayed"
        )
        turns = await gateway.turns(session)
        assert [turn["index"] for turn in turns] == sorted({turn["index"] for turn in turns})
        assert [turn["response"]["content"] for turn in turns] == ["ok"] * 3
    async with served(tmp_path, upstream) as gateway:
        again = await gateway.turns(session)
        assert [turn["index"] for turn in again] == sorted({turn["index"] for turn in again})
        assert (await gateway.chat(session, "and on")).status == 200


# ---- bounds


async def test_only_the_latest_requests_are_known_and_equal_ones_once(tmp_path: Path) -> None:
    registry = registry_over(tmp_path, Scripted())
    seat, _ = registry.register(Registration(id="x"))
    for _ in range(3):
        for n in range(MAX_REPLAYABLE + 10):
            await asked(registry, seat, message("user", "hello"), key=f"{n:032x}")
    assert len(seat.replayable) == MAX_REPLAYABLE
    assert all(len(turns) == 1 for turns in seat.replayable.values())
    registry.close()


def test_the_choices_of_a_request_have_keys_of_their_own() -> None:
    assert [make_turn_key("ab", n) for n in range(3)] == ["ab", "ab.1", "ab.2"]


def test_what_was_deleted_long_ago_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.gateway.registry.MAX_DELETED", 3)

    async def play() -> None:
        registry = registry_over(tmp_path, Scripted())
        for n in range(5):
            registry.end(registry.register(Registration(id=f"s{n}"))[0], "deleted")
        assert list(registry.deleted) == ["s2", "s3", "s4"]
        registry.close()

    assert MAX_DELETED > 3
    asyncio.run(play())


def test_more_sessions_than_there_is_room_for_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.gateway.registry.MAX_SESSIONS", 1)

    async def play() -> None:
        registry = registry_over(tmp_path, Scripted())
        registry.register(Registration(id="a"))
        with pytest.raises(UsageError, match="limit of 1 open sessions"):
            registry.register(Registration(id="b"))
        registry.close()

    asyncio.run(play())


def test_a_registration_that_cannot_be_is_refused_in_words(tmp_path: Path) -> None:
    for bad in ("", ".", "../x", "a b", "ü", "x" * 201, "a\n"):
        with pytest.raises(UsageError, match="cannot be a session's id"):
            validate_registration(Registration(id=bad), ["policy"])
    validate_registration(Registration(id="x" * 200), ["policy"])


# ---- the deadline


async def test_a_deadline_leaves_out_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rookery.gateway.registry.time.monotonic", lambda: now[0])
    seat = SessionEntry(SessionOpened(Registration(id="x"), b"", 0.0), StageClock(100.0, 10.0))
    seat.hold()
    now[0] += 50
    assert seat.remaining == 10.0
    seat.hold()
    seat.release()
    now[0] += 50
    seat.release()
    seat.release()  # one too many is nobody's error: a session may end while it is held
    assert seat.remaining == 10.0
    now[0] += 10
    with pytest.raises(Truncation, match="its deadline of 10 seconds has passed"):
        async with seat.deadline():
            raise AssertionError("it began")


async def test_a_hold_in_the_moment_when_a_deadline_passes_breaks_nothing() -> None:
    seat = SessionEntry(SessionOpened(Registration(id="x"), b"", 0.0), StageClock(time.monotonic(), 1000.0))

    async def passes() -> None:
        async with seat.deadline():
            (timeout,) = seat._timeouts
            timeout.reschedule(0.0)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                assert timeout.expired()
                seat.hold()  # as a call beside it does, in the same turn of the loop
                seat.release()

    with pytest.raises(Truncation):
        await passes()


async def test_an_ended_session_records_nothing_and_keeps_its_record(tmp_path: Path) -> None:
    registry = registry_over(tmp_path, Scripted())
    seat, _ = registry.register(Registration(id="x"))
    turn = await asked(registry, seat, message("user", "hello"))
    session = registry.load_session(seat)
    place = session.recorder.match_history("policy", (message("user", "late"),))
    registry.end(seat, "cancelled")
    registry.end(seat, "cancelled")
    with pytest.raises(Exception, match="has ended"):
        session.recorder.record(place, prompt=b"", response=turn.response, sampled=b"")
    assert registry.read_turns(seat) == [turn]
    registry.end(seat, "deleted")
    registry.end(seat, "cancelled")
    assert (seat.ended, "x" in registry.entries, "x" in registry.deleted) == ("deleted", False, True)
    registry.close()


def test_damaged_bytes_in_the_middle_are_told_not_passed_over(tmp_path: Path) -> None:
    async def play() -> None:
        registry = registry_over(tmp_path, Scripted())
        for n in range(3):
            registry.register(Registration(id=f"s{n}"))
        registry.close()
        path = tail(tmp_path, "sessions")
        data = bytearray(path.read_bytes())
        data[40] ^= 1
        path.write_bytes(data)
        with pytest.raises(JournalError, match="damaged at byte"):
            registry_over(tmp_path, Scripted())

    asyncio.run(play())


def test_roles_are_those_of_the_shard(tmp_path: Path) -> None:
    async def play() -> None:
        registry = registry_over(tmp_path, Scripted())
        seat, _ = registry.register(Registration(id="x", model="tuned"))
        role = registry.load_session(seat).roles["policy"]
        assert isinstance(role, ModelRole)
        assert (role.model, registry.roles["policy"].model) == ("tuned", "m")
        registry.close()

    asyncio.run(play())


# ---- what is let go of


async def test_a_session_that_rests_goes_on_from_the_disk(tmp_path: Path) -> None:
    registry = registry_over(tmp_path, Scripted())
    seat, _ = registry.register(Registration(id="a"))
    over, _ = registry.register(Registration(id="b"))
    first = await asked(registry, seat, message("user", "x"), key="k")
    await asked(registry, over, message("user", "x"))
    registry.end(over, "cancelled")
    registry.unload_idle(3600.0)
    assert (seat.session is None, over.session is None) == (False, True), "who is over needs no time to rest"
    before = seat.summary()
    registry.unload_idle(0.0)
    assert (seat.session, seat.replayable, seat.summary()) == (None, {}, before)
    answer = msgspec.json.encode({"role": "assistant", "content": first.response.content})
    second = await asked(registry, seat, message("user", "x"), msgspec.Raw(answer), message("user", "y"))
    assert (second.index, second.parent) == (1, 0)
    assert list(seat.replayable) == ["k"], "also a retry of what came before is known again"
    assert seat.session is not None
    assert (seat.session.turns, seat.take_new_counts(seat.session)) == (2, {})


async def test_what_was_deleted_is_freed_on_disk_file_by_file(tmp_path: Path) -> None:
    registry = registry_over(tmp_path, Scripted(), max_bytes=64)
    seats = [registry.register(Registration(id=name))[0] for name in ("a", "b", "c")]
    for seat in seats:
        await asked(registry, seat, message("user", "x"))
    there = {path.name for path in (tmp_path / "tokens").iterdir()}
    assert len(there) == 3, "each turn has a file of its own"
    registry.end(seats[0], "deleted")
    left = {path.name for path in (tmp_path / "tokens").iterdir()}
    assert there - left == {seats[0].extents[0].file}
    registry.end(seats[2], "deleted")
    assert {path.name for path in (tmp_path / "tokens").iterdir()} == left, "the file that is written to stays"
    assert registry.read_turns(seats[1])
    registry.close()
    back = registry_over(tmp_path, Scripted())
    assert sorted(back.entries) == ["b"]
    assert len(back.read_turns(back.entries["b"])) == 1
