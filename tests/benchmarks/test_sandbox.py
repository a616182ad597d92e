"""The sandbox bench, on real boxes; figures are not judged here."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks import Result, docker_engine
from benchmarks.sandbox_peers import Contender, bare_python, bwrap_python, by_turns, per_second, spawned
from benchmarks.sandbox_workloads import Boxes, boxes_of_our_own, good, pss_mb, python_command
from rookery.core import ExecResult
from rookery.sandbox_runtime import processes
from rookery.sandboxes import Command


@pytest.fixture
async def boxes() -> AsyncIterator[Boxes]:
    async with boxes_of_our_own() as made:
        yield made
    assert processes.read_stat(made.keeper) is None


async def rest() -> None:
    pass


async def test_every_contender_does_the_same_work(boxes: Boxes) -> None:
    plain = python_command(warm=False)
    found = await by_turns([Contender("ours", lambda: boxes.cold(plain)), bare_python()], 1, boxes.rest, print)
    assert {name: len(times) for name, (times, _) in found.items()} == {"ours": 5, "bare python3": 5}
    assert all(time > 0 for times, _ in found.values() for time in times)


async def test_one_that_is_missing_or_fails_gives_a_note_and_no_figure() -> None:
    async def broken() -> float:
        return await spawned(("false",))

    turns = [Contender("missing", None, note="it is not there"), Contender("broken", broken)]
    found = await by_turns(turns, 3, rest, lambda _: None)
    assert found["missing"] == ((), "it is not there")
    assert found["broken"].times == ()
    assert "ended with 1" in found["broken"].note


async def test_without_bwrap_there_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    missing = bwrap_python()
    assert missing.once is None
    assert "make peers" in missing.note


async def test_without_an_engine_there_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    async with docker_engine.engine() as found:
        assert isinstance(found, str)
        assert all(one.once is None for one in docker_engine.contenders(found, every=1))


async def test_an_engine_that_does_not_answer_gives_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "docker").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    for host in (f"unix://{tmp_path}/none.sock", "tcp://127.0.0.1:1"):
        monkeypatch.setenv("DOCKER_HOST", host)
        async with docker_engine.engine() as found:
            assert isinstance(found, str)


def test_a_command_that_did_not_end_well_fails_the_bench() -> None:
    with pytest.raises(RuntimeError, match="exited"):
        good(ExecResult(status="exited", exit_code=1))


async def test_bombs_are_gone_both_ways_and_the_box_stays_after_a_time_limit(boxes: Boxes) -> None:
    assert await boxes.bomb_closed() > 0
    assert await boxes.bomb_limited() > 0


async def test_several_alive_have_a_size(boxes: Boxes) -> None:
    found = await boxes.alive(5)
    assert found.seconds >= found.created > 0
    assert found.pss_mb is None or found.pss_mb > 0
    assert boxes.provider._open == set()
    if os.geteuid() == 0:
        assert (pss_mb(boxes.keeper) or 0) > 0


async def test_snapshots_have_times_or_a_reason(boxes: Boxes) -> None:
    taken, forked, missing = await boxes.snapshots(2)
    assert len(taken) == len(forked) == (0 if missing else 2)


async def test_a_rate_counts_what_was_done_in_its_time() -> None:
    done = 0

    async def once() -> None:
        nonlocal done
        done += 1
        await asyncio.sleep(0)

    assert 0 < await per_second(once, 4, 0.01) <= done / 0.01


async def test_a_live_command_is_seen_from_the_loop(boxes: Boxes) -> None:
    box = await boxes.create()
    assert await boxes.live(box) > 0
    assert (await box.exec(Command(argv=("true",)))).ok
    await box.close()


def test_what_of_ours_cannot_be_measured_is_missing() -> None:
    row = Result(name="a", unit="ms", ours=None, peer="p", theirs=1.0, target=">= 2x", note="why")
    assert (row.ratio, row.met, row.row()["ours"]) == (None, None, None)
    assert Result(name="a", unit="ms", ours=None, target="<= 2").met is None
