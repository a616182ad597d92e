"""A rollout that fails after its environment returned (merge, load, export, send) fails alone."""

import asyncio
import csv
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from rookery import Engine
from rookery.cli.app import app
from rookery.core import Failed, Group, Rollout, Segment, Turn
from rookery.engine import group_transfer
from rookery.journal import RunReader, loading, store
from rookery.journal.export import export
from rookery.training import check_batch, make_batch
from tests.engine.conftest import build_engine, records
from tests.servers import ModelServer
from tests.waiting import wait_for_groups

K = 3
TASKS = [{"id": f"t{n}", "prompt": f"q{n}", "data": {"score": {"0": "half"}}} for n in range(6)]


def outcomes(groups: list[Group]) -> dict[str, str]:
    return {
        one.id: one.outcome.cause if isinstance(one.outcome, Failed) else "ok"
        for group in groups
        for one in group.rollouts
    }


def check_groups(groups: list[Group], failed: dict[str, str], k: int = K) -> None:
    """Check that every group has k records in order and that exactly these failed, each with a traceback."""
    assert sorted(group.task.id for group in groups) == sorted(row["id"] for row in TASKS)
    for group in groups:
        assert [one.member for one in group.rollouts] == list(range(k))
    assert {name: cause for name, cause in outcomes(groups).items() if cause != "ok"} == failed
    for one in (one for group in groups for one in group.rollouts):
        if isinstance(one.outcome, Failed):
            assert (one.reward, one.segments, one.valid) == (None, [], False)
            assert one.outcome.stage == "load"
            assert "Traceback" in one.outcome.traceback
            assert one.outcome.fault == ("bug" if one.outcome.cause.startswith("bug.") else "infra")
        else:
            assert one.valid
            assert one.segments


# ---- faults in token files


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def find_payload(folder: Path, rollout: str) -> tuple[Path, int, int]:
    """Return the token file, offset and length of a rollout's first turn."""
    with RunReader(folder) as reader:
        record = reader.rollout(rollout)
    assert record is not None
    extent = record.tokens[0]
    return folder / "tokens" / extent.file, extent.offset, extent.length


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
async def test_corrupt_token_bytes_fail_only_their_rollouts(model: ModelServer, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = [f"{group}.{member}" for group in range(len(TASKS)) for member in range(K)]
    chosen = sorted(rng.sample(names, rng.randint(1, len(names))))
    async with build_engine(model, tmp_path) as engine:
        stream = engine.groups(TASKS, k=K)
        await wait_for_groups(engine, len(TASKS))
        assert engine.folder is not None
        for name in chosen:
            path, offset, length = find_payload(engine.folder, name)
            flip_byte(path, offset + rng.randrange(12 + length))
        state = engine.state_dict()
        groups = [group async for group in stream]
    expected = dict.fromkeys(chosen, "engine.tokens")
    check_groups(groups, expected)
    # In the journal the newest record is failed and counts in no denominator; the first one is kept.
    stored = {record.id: record for record in records(tmp_path)}
    assert len(stored) == len(names)
    assert {name for name, record in stored.items() if isinstance(record.outcome, Failed)} == set(chosen)
    with RunReader(tmp_path / "runs" / "latest") as reader:
        assert reader.totals().valid == len(names) - len(chosen)
        assert {len(reader.earlier(name)) for name in chosen} == {1}
    batch = make_batch(groups)
    check_batch(batch, groups)
    assert batch.counts.valid == len(names) - len(chosen)
    async with build_engine(model, tmp_path) as other:
        other.load_state_dict(state)
        check_groups([group async for group in other.groups(TASKS, k=K)], expected)


@pytest.mark.long
@pytest.mark.parametrize("how", ["missing", "truncated", "emptied", "a folder"])
async def test_missing_token_file_fails_its_rollouts_and_not_the_stream(
    model: ModelServer, tmp_path: Path, how: str
) -> None:
    async with build_engine(model, tmp_path, runners=2, concurrency=4) as engine:
        stream = engine.groups(TASKS, k=K)
        await wait_for_groups(engine, len(TASKS))
        assert engine.folder is not None
        victim = find_payload(engine.folder, "0.0")[0]
        with RunReader(engine.folder) as reader:
            lost = {one.id for one in reader.iter_rollouts() if one.tokens[0].file == victim.name}
        match how:
            case "missing":
                victim.unlink()
            case "truncated":
                victim.write_bytes(victim.read_bytes()[: 8 + 12])
            case "emptied":
                victim.write_bytes(b"")
            case _:
                victim.unlink()
                victim.mkdir()
        engine.state_dict()
        check_groups([group async for group in stream], dict.fromkeys(lost, "engine.tokens"))


# ---- faults in our own merge


@contextmanager
def break_merge(monkeypatch: pytest.MonkeyPatch, broken: set[str], error: type[Exception]) -> Iterator[None]:
    """Make the merge of these rollouts' turns raise."""
    merge: Callable[..., list[Segment]] = loading.build_segments

    def raising(turns: list[Turn]) -> list[Segment]:
        if turns and turns[0].attempt.rpartition(".")[0] in broken:
            raise error("the merge")
        return merge(turns)

    with monkeypatch.context() as patch:
        patch.setattr(loading, "build_segments", raising)
        yield


@pytest.mark.long
@pytest.mark.parametrize("error", [ValueError, AssertionError, RecursionError, MemoryError])
async def test_exception_while_merging_turns_fails_only_its_rollout(
    model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    broken = {"0.1", "2.0", "2.1", "2.2"}
    with break_merge(monkeypatch, broken, error):
        async with build_engine(model, tmp_path) as engine:
            stream = engine.groups(TASKS, k=K)
            await wait_for_groups(engine, len(TASKS))
            engine.state_dict()
            groups = [group async for group in stream]
    check_groups(groups, dict.fromkeys(broken, "bug.merge"))
    assert all(
        error.__name__ in one.outcome.traceback for one in records(tmp_path) if isinstance(one.outcome, Failed)
    )


async def test_steps_continue_after_a_rollout_that_cannot_be_merged(
    model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with break_merge(monkeypatch, {"0.0", "3.2"}, ValueError):
        async with build_engine(model, tmp_path) as engine:
            steps = [step async for step in engine.steps(TASKS, k=K, groups=2)]
    assert len(steps) == 3
    check_groups([group for step in steps for group in step.groups], {"0.0": "bug.merge", "3.2": "bug.merge"})


# ---- exporting and showing


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("tokens", [False, True])
async def test_export_has_a_row_for_every_rollout_and_marks_unloadable_ones(
    model: ModelServer, tmp_path: Path, kind: Any, tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with build_engine(model, tmp_path) as engine:
        assert len([group async for group in engine.groups(TASKS, k=K)]) == len(TASKS)
        assert engine.folder is not None
        path, offset, _ = find_payload(engine.folder, "1.2")
        flip_byte(path, offset + 20)
    out = tmp_path / f"out.{kind}"
    with break_merge(monkeypatch, {"3.0"}, ValueError), RunReader(engine.folder) as reader:
        done = export(reader, out, kind=kind, tokens=tokens)
    assert (done.rollouts, done.damaged) == (len(TASKS) * K, 2)
    rows: list[dict[str, Any]]
    if kind == "parquet":
        rows = pytest.importorskip("pyarrow.parquet").read_table(out).to_pylist()
    elif kind == "csv":
        with out.open(newline="") as file:
            rows = [{**row, "reward": row["reward"] or None} for row in csv.DictReader(file)]
    else:
        rows = [msgspec.json.decode(line) for line in out.read_bytes().splitlines()]
    for row in rows if kind != "jsonl" else ():
        row["outcome"] = msgspec.json.decode(row["outcome"])
    failed = {row["id"]: row for row in rows if row["label"] != "completed"}
    assert {name: row["label"] for name, row in failed.items()} == {
        "r1.2": "engine.tokens",
        "r3.0": "bug.merge",
    }
    for row in failed.values():
        assert row["reward"] is None
        assert row["damage"]
        assert "Traceback" in row["outcome"]["traceback"]
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    shown = CliRunner().invoke(app, ["show", str(engine.folder), "1.2"])
    assert shown.exit_code == 0
    assert "engine.tokens" in shown.output


# ---- the control socket


async def test_client_gets_complete_groups_if_rollouts_cannot_be_loaded_or_sent(
    model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = group_transfer.encoder.encode

    class Encoder:
        def encode(self, value: Any) -> bytes:
            if isinstance(value, Rollout) and value.id == "4.1" and value.valid:
                raise TypeError("cannot be encoded")
            return encode(value)

    monkeypatch.setattr(group_transfer, "encoder", Encoder())
    monkeypatch.setattr(group_transfer, "PART_BYTES", 1)  # every rollout is sent on its own
    with break_merge(monkeypatch, {"2.2"}, ValueError):
        async with build_engine(model, tmp_path) as engine:
            assert engine.folder is not None
            async with await Engine.connect(engine.folder) as remote:
                groups = [group async for group in remote.groups(TASKS, k=K)]
                assert isinstance(await remote.state_dict(), dict)
    check_groups(groups, {"2.2": "bug.merge", "4.1": "bug.send"})


async def test_rollout_larger_than_a_frame_fails_alone(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        (group,) = [group async for group in engine.groups(TASKS[:1], k=K)]
    large = msgspec.structs.replace(group.rollouts[1], info={"text": "x" * 5000})
    group = msgspec.structs.replace(group, rollouts=(group.rollouts[0], large, group.rollouts[2]))
    back = group_transfer.join_group(group_transfer.split_group(group, limit=5000))
    assert outcomes([back]) == {"0.0": "ok", "0.1": "bug.send", "0.2": "ok"}
    parts = group_transfer.split_group(group)
    damaged = msgspec.structs.replace(parts[0].rollouts[2], data=b"\xc1")
    part = msgspec.structs.replace(parts[0], rollouts=[*parts[0].rollouts[:2], damaged])
    assert outcomes([group_transfer.join_group([part])]) == {"0.0": "ok", "0.1": "ok", "0.2": "bug.send"}


async def test_group_sent_to_a_disconnected_client_is_put_back(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        assert engine.folder is not None
        async with await Engine.connect(engine.folder) as remote:
            stream = remote.groups(TASKS, k=K)
            first = await anext(stream)
            for _ in range(5):  # a cancelled `anext` must not lose a group at any moment
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            rest = [group async for group in stream]
    check_groups([first, *rest], {})


async def test_record_that_cannot_be_encoded_fails_alone(
    model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = store._pack

    class Pack:
        def encode(self, value: Any) -> bytes:
            if isinstance(value, Rollout) and value.id == "1.1" and value.valid:
                raise TypeError("cannot be encoded")
            return pack.encode(value)

    monkeypatch.setattr(store, "_pack", Pack())
    async with build_engine(model, tmp_path) as engine:
        groups = [group async for group in engine.groups(TASKS, k=K)]
    check_groups(groups, {"1.1": "bug.rookery"})
    assert len(records(tmp_path)) == len(TASKS) * K
