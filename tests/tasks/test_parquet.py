"""Rows in Parquet files: splits, null values and row groups."""

import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import UsageError
from rookery.tasks import load_tasks
from rookery.tasks import parquet as parquet_module
from rookery.tasks.swe import get_swe_task
from tests.tasks import kit
from tests.tasks.hub_server import Hub
from tests.tasks.test_hub import load, packed

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path, rows, schema=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


words = st.text(st.characters(blacklist_categories=("Cs",)), max_size=8)
tables = st.lists(
    st.fixed_dictionaries(
        {"prompt": words.filter(str.strip)},
        optional={
            "image": st.sampled_from(["python:3.12", "debian:12"]),
            "answer": st.integers(-(2**40), 2**40),
            "about": st.fixed_dictionaries({}, optional={"a": words, "b": st.lists(words, max_size=2)}),
        },
    ),
    min_size=1,
    max_size=6,
)


@given(rows=tables)
def test_parquet_gives_the_same_tasks_as_json(tmp_path_factory, rows):
    """Null values of Parquet and missing keys of JSON give the same tasks."""
    folder = tmp_path_factory.mktemp("rows")
    fields = [("prompt", pa.string()), ("image", pa.string()), ("answer", pa.int64())]
    about = pa.struct([("a", pa.string()), ("b", pa.list_(pa.string()))])
    schema = pa.schema([*fields, ("about", about)])
    one = load_tasks(write(folder / "r.parquet", rows, schema))
    other = load_tasks(kit.jsonl(folder / "r.jsonl", *rows))
    shown = [[(task.prompt, task.image, task.data, task.invalid) for task in tasks] for tasks in (one, other)]
    assert shown[0] == shown[1]
    assert [task.id for task in one] == [f"row-{n:06d}" for n in range(1, len(rows) + 1)]


def test_swe_rows_in_parquet_keep_their_files(tmp_path):
    file = pa.map_(pa.string(), pa.binary())
    schema = pa.schema([("instruction", pa.string()), ("files", file), ("tests", pa.string()), ("env", file)])
    rows = [{"instruction": "Fix.", "files": [("a", b"x\n"), ("b", b"\xff")], "tests": "exit 0", "env": []}]
    (task,) = load_tasks(write(tmp_path / "r.parquet", rows, schema))
    assert not task.invalid
    (part,) = get_swe_task(task).files
    from pathlib import Path

    assert {path.name: path.read_bytes() for path in Path(part.source).iterdir()} == {"a": b"x\n", "b": b"\xff"}


def test_files_are_read_in_order_and_one_of_several_splits_must_be_named(tmp_path):
    for number, name in enumerate(("train-00001-of-00002", "train-00000-of-00002", "test-00000-of-00001")):
        write(tmp_path / "ds" / "data" / f"{name}.parquet", [{"prompt": f"{number}"}, {"prompt": f"{number}b"}])
    with pytest.raises(UsageError, match=r"'test', 'train'.*data/test\*\.parquet"):
        load_tasks(tmp_path / "ds")
    for source in ("ds/data/train-*.parquet", "ds/data/train*.parquet"):
        tasks = load_tasks(tmp_path / source)
        assert [(task.id, task.text) for task in tasks] == [
            ("row-000001", "1"),
            ("row-000002", "1b"),
            ("row-000003", "0"),
            ("row-000004", "0b"),
        ]
    (tmp_path / "ds" / "data" / "test-00000-of-00001.parquet").unlink()
    assert len(load_tasks(tmp_path / "ds")) == 4
    assert [task.text for task in load_tasks(tmp_path / "ds", limit=3)] == ["1", "1b", "0"]
    with pytest.raises(UsageError, match=r"/nothing\*\.parquet"):
        load_tasks(tmp_path / "ds" / "nothing*.parquet")


def test_task_data_is_found_beside_or_above_the_rows(tmp_path):
    write(tmp_path / "ds" / "data" / "train-0.parquet", [{"env_config": {"task_id": "one", "image": None}}])
    kit.open_instruct(tmp_path / "ds" / "task-data" / "one")
    for source in ("ds", "ds/data/train-*.parquet"):
        if source != "ds":
            (tmp_path / "ds" / "task-data").rename(tmp_path / "ds" / "data" / "task-data")
        (task,) = load_tasks(tmp_path / source)
        assert (task.id, task.invalid, task.image) == ("one", "", "python:3.12")


def test_task_directories_take_precedence_over_parquet_files(tmp_path):
    kit.open_instruct(tmp_path / "one")
    write(tmp_path / "rows.parquet", [{"prompt": "x"}])
    assert [task.id for task in load_tasks(tmp_path)] == ["one"]


def test_file_that_is_not_parquet_is_refused(tmp_path, monkeypatch):
    (tmp_path / "r.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(UsageError, match=r"\br\.parquet"):
        load_tasks(tmp_path / "r.parquet")
    with pytest.raises(UsageError, match=r"missing\.parquet"):
        load_tasks(tmp_path / "missing.parquet")
    write(tmp_path / "empty.parquet", [], pa.schema([("prompt", pa.string())]))
    with pytest.raises(UsageError, match=r"empty\.parquet"):
        load_tasks(tmp_path / "empty.parquet")
    write(tmp_path / "large.parquet", [{"prompt": "x"}])
    monkeypatch.setattr(parquet_module, "MAX_GROUP_BYTES", 1)
    with pytest.raises(UsageError, match=r"large\.parquet"):
        load_tasks(tmp_path / "large.parquet")


def test_missing_library_is_reported_with_its_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "r.parquet", [{"prompt": "x"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'rookery-rl\[parquet\]'"):
        load_tasks(path)


@pytest.mark.long
def test_hub_dataset_of_parquet_files_is_read(tmp_path, own_cache):
    pytest.importorskip("huggingface_hub")
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"env_config": {"task_id": "one"}, "messages": None}]), table)
    prompts = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"prompt": "Hello."}]), prompts)
    files = {"data/train-00000-of-00001.parquet": prompts.getvalue(), "README.md": b"x"}
    with Hub(files) as hub:
        one = "data/train-00000-of-00001.parquet"
        paths = ["", f":{one}", ":data", ":data/train-*.parquet", ":da*/train.parquet", ":data/none*.parquet"]
        *rows, folders, nothing = load(" ".join(f"hf:team/tasks{path}" for path in paths), hub.url, tmp_path)[0]
        assert rows == ["row-000001 Hello."] * 4
        assert "hf:team/tasks:da*/train.parquet" in folders
        assert nothing.startswith("refused: ")
        assert "'data/none*.parquet'" in nothing
    both = {"data/train-0.parquet": table.getvalue(), "task-data.tar.gz": packed(tmp_path)}
    with Hub(both, commit="d" * 40) as hub:
        sources = "hf:team/tasks:data/train-0.parquet hf:team/tasks:data/train-*.parquet"
        assert load(sources, hub.url, tmp_path)[0] == ["one Fix it."] * 2


def test_every_parquet_value_becomes_a_json_value(tmp_path):
    import datetime as dt
    import decimal

    row = {
        "prompt": "x",
        "when": dt.datetime(2026, 1, 2, 3, 4, 5),  # noqa: DTZ001
        "much": decimal.Decimal("1.50"),
        "list": [{"a": None, "b": 1}, None],
    }
    (task,) = load_tasks(write(tmp_path / "r.parquet", [row]))
    assert not task.invalid
    assert json.loads(json.dumps(task.data)) == {
        "when": "2026-01-02 03:04:05",
        "much": "1.50",
        "list": [{"b": 1}, None],
    }
