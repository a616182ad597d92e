"""Tests of `rookery.journal.export`."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from journal_kit import Mount, record, record_with_tokens

from rookery.core import Failed, Task, UsageError
from rookery.journal import Journal, RunReader
from rookery.journal.export import MAX_TASK_VALUE, export, export_jsonl, export_parquet


@pytest.fixture
def filled(run: Path) -> Path:
    with Journal.create(run, {}) as journal:
        for group in reversed(range(3)):
            for member in range(2):
                journal.add_rollout(record_with_tokens(run, group, member, writer=f"w{group}{member}"))
        failure = Failed("bug", "bug.environment", "boom", "run", "Traceback …")
        journal.add_rollout(record(3, 0, outcome=failure))
    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_one_object_per_record_in_order(filled: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    with RunReader(filled) as reader:
        done = export_jsonl(reader, tmp_path / "a.jsonl", tokens=True, progress=seen.append)
    assert (done.rollouts, done.damaged, seen) == (7, 0, list(range(1, 8)))
    found = lines(tmp_path / "a.jsonl")
    assert [(one["group"], one["member"]) for one in found] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (3, 0),
    ]
    assert len({tuple(one) for one in found}) == 1
    first, failed = found[0], found[-1]
    assert first["outcome"] == {"kind": "completed"}
    assert [message["role"] for message in first["messages"]] == ["user", "assistant", "tool", "assistant"]
    [segment] = first["segments"]
    assert segment["tokens"] == [1, 2, 3, 10, 11, 20, 21, 30, 31, 32]
    assert segment["mask"] == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert segment["versions"] == [
        {"start": 3, "end": 5, "version": 3},
        {"start": 7, "end": 10, "version": 4},
    ]
    assert first["usage"]["others"] == {"judge": 3}
    assert first["timing"]["queue"] == 0.0
    assert failed["reward"] is None
    assert failed["segments"] == []
    assert failed["outcome"]["traceback"] == "Traceback …"


def decode_columns(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a row of an exported Parquet file to the object that a JSONL export contains."""
    as_json = ("answer", "task_data", "outcome", "info", "messages", "attempts", "run")
    decoded = {**row, **{name: json.loads(row[name]) for name in as_json}}
    decoded["rewards"], decoded["metrics"] = dict(row["rewards"]), dict(row["metrics"])
    usage = row["usage"]
    decoded["usage"] = {**usage, "others": dict(usage["others"]), "other_prompts": dict(usage["other_prompts"])}
    if "segments" in row:
        decoded["segments"] = [{**part, "extras": json.loads(part["extras"])} for part in row["segments"]]
    return decoded


@pytest.mark.parametrize("tokens", [False, True])
def test_parquet_holds_the_same_data_as_jsonl(filled: Path, tmp_path: Path, tokens: bool) -> None:
    import pyarrow.parquet as pq

    with RunReader(filled) as reader:
        assert export(reader, tmp_path / "a.jsonl", tokens=tokens).rollouts == 7
        assert export(reader, tmp_path / "a.parquet", tokens=tokens).rollouts == 7
    table = pq.read_table(tmp_path / "a.parquet")
    assert [decode_columns(one) for one in table.to_pylist()] == lines(tmp_path / "a.jsonl")


def test_parquet_is_written_in_row_groups(run: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    with Journal.create(run, {}) as journal:
        for i in range(600):
            journal.add_rollout(record(i, 0))
    with RunReader(run) as reader:
        export_parquet(reader, tmp_path / "a.parquet")
    file = pq.ParquetFile(tmp_path / "a.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [256, 256, 88]


def test_jsonl_can_be_written_to_a_stream(filled: Path) -> None:
    out = io.StringIO()
    with RunReader(filled) as reader:
        export_jsonl(reader, out)
    assert len(out.getvalue().splitlines()) == 7


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_damaged_tokens_fail_only_their_rollout(filled: Path, tmp_path: Path, name: str) -> None:
    (filled / "tokens" / "w10-0.rtk").unlink()
    with RunReader(filled) as reader:
        done = export(reader, tmp_path / name, tokens=True)
        assert (done.rollouts, done.damaged) == (7, 1)
        export_jsonl(reader, tmp_path / "check.jsonl", tokens=True)
    damage = [one["damage"] for one in lines(tmp_path / "check.jsonl")]
    assert [one is not None for one in damage] == [False, False, True, False, False, False, False]
    assert "w10-0.rtk" in str(damage[2])


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_interrupted_export_leaves_no_partial_file(filled: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("the one from before")

    def interrupt(done: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with RunReader(filled) as reader, pytest.raises(KeyboardInterrupt):
        export(reader, out / name, progress=interrupt)
    assert os.listdir(out) == [name]
    assert (out / name).read_text() == "the one from before"


@pytest.mark.needs("mount")
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_full_disk_is_reported_and_leaves_nothing(run: Path, disk: Mount, name: str) -> None:
    with Journal.create(run, {}) as journal:
        for i in range(500):
            journal.add_rollout(record(i, 0))
    out = disk(4)
    with RunReader(run) as reader, pytest.raises(UsageError, match=rf"{name}.*No space left"):
        export(reader, out / name)
    assert os.listdir(out) == []


def test_missing_pyarrow_is_reported_with_its_extra(filled: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path; from rookery.journal import RunReader\n"
        "from rookery.journal.export import export_parquet\n"
        "from rookery.core import UsageError\n"
        "try: export_parquet(RunReader(Path(sys.argv[1])), Path(sys.argv[2]))\n"
        "except UsageError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(filled), str(tmp_path / "a.parquet")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip install 'rookery-rl[parquet]'" in done.stdout


def test_rollout_ids_never_look_like_numbers(run: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    with Journal.create(run, {}) as journal:
        for member in range(11):
            journal.add_rollout(record_with_tokens(run, 0, member, writer=f"w{member}"))
    with RunReader(run) as reader:
        export(reader, tmp_path / "a.jsonl")
        export(reader, tmp_path / "a.csv")
        export(reader, tmp_path / "a.parquet")
    expected = [f"r0.{member}" for member in range(11)]
    assert list(pandas.read_json(tmp_path / "a.jsonl", lines=True)["id"]) == expected
    assert list(pandas.read_csv(tmp_path / "a.csv")["id"]) == expected
    assert list(pandas.read_parquet(tmp_path / "a.parquet")["id"]) == expected
    with RunReader(run) as reader:
        assert reader.rollout("r0.10") == reader.rollout("0.10")


def test_row_has_answer_task_data_and_settings(run: Path, tmp_path: Path) -> None:
    task = Task(id="t0", data={"answer": 42, "context": "x" * (2 * MAX_TASK_VALUE)})
    with Journal.create(run, {"seed": 7}, env="sums", model="m") as journal:
        journal.add_tasks([task])
        journal.add_group(0, stream="main", position=0, task=0, k=1)
        journal.add_rollout(record_with_tokens(run, 0, 0, writer="w"))
    with RunReader(run) as reader:
        export(reader, tmp_path / "a.jsonl")
    (found,) = lines(tmp_path / "a.jsonl")
    assert found["answer"] == 42
    assert found["task_data"] == {"answer": 42, "context": {"left_out_bytes": 2 * MAX_TASK_VALUE + 2}}
    assert found["run"]["settings"] == {"seed": 7}
    assert (found["run"]["environment"], found["run"]["model"]) == ("sums", "m")


def test_csv_holds_the_same_data_as_jsonl(filled: Path, tmp_path: Path) -> None:
    csv.field_size_limit(1 << 30)
    with RunReader(filled) as reader:
        export(reader, tmp_path / "a.jsonl", tokens=True)
        export(reader, tmp_path / "a.csv", tokens=True)
    with (tmp_path / "a.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    for row, plain in zip(found, lines(tmp_path / "a.jsonl"), strict=True):
        assert row.keys() == plain.keys()
        assert json.loads(row["messages"]) == plain["messages"]
        assert json.loads(row["segments"]) == plain["segments"]
        assert row["label"] == plain["label"]
        assert (float(row["reward"]) if row["reward"] else None) == plain["reward"]
