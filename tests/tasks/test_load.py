"""Loading tasks: an invalid file raises, an invalid row only affects itself."""

import errno
import gzip
import json
import os
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import Limits, Message, Task, Taskset, ToolCall, UsageError
from rookery.tasks import load_tasks, tasks_from


@pytest.fixture
def write(tmp_path):
    def put(*rows, name="tasks.jsonl"):
        path = tmp_path / name
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        data = b"\n".join(lines)
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return put


def refused(source, *named, limit=None):
    with pytest.raises(UsageError) as caught:
        load_tasks(source, limit=limit)
    for name in named:
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(caught.value))


# ------------------------------------------------------------------------------------------------ good rows


@pytest.mark.parametrize("prompt", ["1+1?", [{"role": "user", "content": "1+1?"}], (Message("user", "1+1?"),)])
def test_prompt_of_a_task_object_may_be_text_or_messages(prompt: Any) -> None:
    (task,) = tasks_from([Task(id="t", prompt=prompt)], "tasks")
    assert task.prompt == (Message("user", "1+1?"),)


def test_row_with_prompt_and_answer_is_a_task(write):
    path = write({"prompt": "1+1?", "answer": "2"})
    tasks = load_tasks(path)
    assert list(tasks) == [Task(id="line-000001", prompt=(Message("user", "1+1?"),), data={"answer": "2"})]
    assert (tasks.name, tasks.source) == ("tasks", str(path))


def test_every_field_is_read(write):
    row = {
        "id": 7,
        "prompt": [{"role": "system", "content": "be good"}, {"role": "user", "content": "hi"}],
        "data": {"a": 1},
        "b": [2],
        "files": {"src/x.py": "print()", "y": ""},
        "image": "img:1",
        "limits": {"turns": 3, "run": 10},
    }
    (task,) = load_tasks(write(row))
    assert task == Task(
        id="7",
        prompt=(Message("system", "be good"), Message("user", "hi")),
        data={"a": 1, "b": [2]},
        files={"src/x.py": "print()", "y": ""},
        image="img:1",
        limits=Limits(turns=3, run=10.0),
    )


def test_null_field_counts_as_missing(write):
    row = {"id": None, "prompt": "x", "data": None, "files": None, "image": None, "limits": None}
    assert list(load_tasks(write(row))) == [Task(id="line-000001", prompt=(Message("user", "x"),))]


def test_tool_calls_are_read_in_both_formats(write):
    ours = {"id": "a", "name": "f", "arguments": "{}"}
    theirs = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for call in (ours, theirs):
        prompt = [
            {"role": "user", "content": "x", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "a"},
        ]
        (task,) = load_tasks(write({"prompt": prompt}))
        assert task.prompt[1].tool_calls == (ToolCall("a", "f", "{}"),)


def test_blank_lines_are_skipped_and_do_not_change_the_numbers(write):
    tasks = load_tasks(write(b"", {"prompt": "a"}, b"  \r", {"prompt": "b"}, b""))
    assert [task.id for task in tasks] == ["line-000002", "line-000004"]


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.ndjson", "t", "T.JSONL"])
def test_rows_are_read_from_every_file_type(write, name):
    assert len(load_tasks(write({"prompt": "a"}, {"prompt": "b"}, name=name))) == 2


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_json_list_is_read(write, name):
    tasks = load_tasks(write([{"prompt": "a"}, {"id": "x", "prompt": "b"}], name=name))
    assert [task.id for task in tasks] == ["item-000001", "x"]


def test_byte_order_mark_and_crlf_are_accepted(write):
    tasks = load_tasks(write(b'\xef\xbb\xbf{"prompt": "a"}\r', b'{"prompt": "b"}\r\n'))
    assert [task.text for task in tasks] == ["a", "b"]


def test_limit_takes_the_first_tasks(write):
    path = write(*({"prompt": str(n)} for n in range(5)), b"never read")
    assert [task.text for task in load_tasks(path, limit=2)] == ["0", "1"]
    refused(path, "0", limit=0)


# ------------------------------------------------------------------------------------------------ bad files


def test_missing_file_is_named(tmp_path):
    refused(tmp_path / "nope.jsonl", "nope.jsonl")
    refused(str(tmp_path / "nope" / "x.jsonl"), "x.jsonl")
    refused("a\0b")
    refused("~no-such-user-here/x.jsonl")


def test_directory_is_refused(tmp_path):
    refused(tmp_path, str(tmp_path), "harbor", "open-instruct")


def test_unknown_file_type_is_refused(write):
    refused(write({"prompt": "x"}, name="t.csv"), ".csv", ".jsonl")


def test_unreadable_file_is_named(tmp_path):
    path = tmp_path / "loop.jsonl"
    path.symlink_to(path)
    refused(path, "loop.jsonl", os.strerror(errno.ELOOP))


@pytest.mark.parametrize("data", [b"", b"\n\n  \n", b"\xef\xbb\xbf"])
def test_empty_file_is_refused(write, data):
    refused(write(data), "tasks.jsonl")
    refused(write(data, name="t.json"), "t.json")


def test_empty_list_is_refused(write):
    refused(write([], name="t.json"), "t.json")


@pytest.mark.parametrize(
    "bad", [b"{", b"not json", b'{"prompt": "x"} extra', b'{"prompt": NaN}', b"{'a': 1}", b"\0"]
)
def test_line_that_is_not_json_raises_with_its_number(write, bad):
    refused(write({"prompt": "a"}, b"", bad, {"prompt": "b"}), "tasks.jsonl", "3", "JSON")


def test_line_that_is_not_utf8_is_named(write):
    refused(write({"prompt": "a"}, b'{"prompt": "\xff"}'), "2", "UTF-8")


def test_endless_line_is_refused(write, monkeypatch):
    monkeypatch.setattr("rookery.tasks.loader.MAX_LINE", 1 << 20)
    refused(write({"prompt": "a"}, {"prompt": "x" * (1 << 20)}), "2", "1 MB")
    refused(write({"prompt": "x" * (1 << 20)}, name="t.jsonl.gz"), "1", "1 MB")


def test_endless_nesting_is_refused(write):
    refused(write(b"[" * 200_000), "tasks.jsonl", "1")


def test_broken_json_files_are_refused(write, monkeypatch):
    refused(write(b'[{"prompt": "a"},\n{]', name="t.json"), "t.json", "2")
    refused(write({"prompt": "a"}, name="t.json"), "t.json", ".jsonl")
    monkeypatch.setattr("rookery.tasks.loader.MAX_JSON", 10)
    refused(write([{"prompt": "a"}], name="t.json"), "t.json", ".jsonl")


def test_broken_gzip_file_is_refused(write):
    whole = write(*({"prompt": os.urandom(50).hex()} for _ in range(100)), name="t.jsonl.gz")
    data = whole.read_bytes()
    for bad in (data[: len(data) // 2], b"no gzip", data[:-8] + b"\0" * 8, data[:50] + b"\xff" * 50 + data[100:]):
        whole.write_bytes(bad)
        refused(whole, "t.jsonl.gz", "gzip")


# ------------------------------------------------------------------------------------------------- bad rows


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (3, ""),
        (None, ""),
        (["x"], ""),
        ("x", ""),
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": " "}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["hi"]}, "prompt[0]"),
        ({"prompt": [{"role": "user", "content": "x"}, {"role": "boss", "content": "x"}]}, "prompt[1].role"),
        ({"prompt": [{"role": "user", "contents": "x"}]}, "prompt[0].content"),
        ({"prompt": [{"role": "user", "content": ""}]}, "prompt"),
        ({"prompt": [{"role": "user", "content": 3}]}, "prompt[0].content"),
        ({"prompt": [{"role": "assistant", "tool_calls": 3}]}, "prompt[0].tool_calls"),
        ({"prompt": "x", "data": 3}, "data"),
        ({"prompt": "x", "data": {"a": 1}, "a": 2}, "'a'"),
        ({"prompt": "x", "node_labels": ["gpu"]}, "node_labels"),
        ({"prompt": "x", "node_labels": {"gpus": 1}}, "node_labels"),
        ({"prompt": "x", "files": []}, "files"),
        ({"prompt": "x", "files": {"a": 1}}, "files['a']"),
        ({"prompt": "x", "files": {"": "x"}}, "files"),
        ({"prompt": "x", "files": {"/etc/passwd": "x"}}, "/etc/passwd"),
        ({"prompt": "x", "files": {"a/../../b": "x"}}, "a/../../b"),
        ({"prompt": "x", "files": {"..": "x"}}, ".."),
        ({"prompt": "x", "files": {"a\0b": "x"}}, "NUL"),
        ({"prompt": "x", "files": {"a/": "x"}}, "a/"),
        ({"prompt": "x", "files": {"./a": "x"}}, "./a"),
        ({"prompt": "x", "files": {"a" * 300: "x"}}, "a" * 20),
        ({"prompt": "x", "files": {"a/b": "x", "a": "y"}}, "'a'"),
        ({"prompt": "x", "image": 3}, "image"),
        ({"prompt": "x", "image": ""}, "image"),
        ({"prompt": "x", "limits": {"turns": 0}}, "limits.turns"),
        ({"prompt": "x", "limits": {"turns": "3"}}, "limits.turns"),
        ({"prompt": "x", "limits": {"turnz": 3}}, "turnz"),
        ({"prompt": "x", "limits": 3}, "limits"),
        ({"prompt": "x", "id": ""}, "id "),
        ({"prompt": "x", "id": True}, "id "),
        ({"prompt": "x", "id": 1.5}, "id "),
        ({"prompt": "x", "id": "a\nb"}, "id "),
        ({"prompt": "x", "id": "a" * 201}, "id "),
        ({"prompt": "x", "id": 10**30}, "id "),
        ({"prompt": "x", "id": "taken"}, "'taken'"),
        ({"prompt": "x", "n": 10**30}, ""),
        (b'{"prompt": "x", "n": 1e999}', ""),
        (b'{"prompt": "\\ud800 x"}', ""),
    ],
)
def test_invalid_row_is_quarantined_and_the_others_stay(write, row, named):
    tasks = load_tasks(write({"id": "taken", "prompt": "a"}, row, {"prompt": "b"}))
    assert [bool(task.invalid) for task in tasks] == [False, True, False]
    place, _, problem = tasks[1].invalid.partition(": ")
    assert re.fullmatch(r"tasks\.jsonl\W.*\b2", place)
    assert re.search(rf"(?<!\w){re.escape(named)}", problem)
    assert len({task.id for task in tasks}) == 3


def test_invalid_row_keeps_its_id(write):
    tasks = load_tasks(write({"id": "mine", "prompt": ""}, {"id": "mine", "prompt": "x"}, 3))
    assert [task.id for task in tasks] == ["mine", "line-000002", "line-000003"]
    assert all(task.invalid for task in tasks)


def test_explicit_and_generated_ids_never_collide(write):
    tasks = load_tasks(write({"id": "line-000002", "prompt": "a"}, {"prompt": "b"}, {"id": 1, "prompt": "c"}))
    assert [task.id for task in tasks] == ["line-000002", "line-000002-2", "1"]
    assert not any(task.invalid for task in tasks)


def test_the_same_source_gives_the_same_ids(write):
    path = write({"prompt": "a"}, 3, {"id": "x", "prompt": "b"}, {"id": "x", "prompt": "c"})
    assert list(load_tasks(path)) == list(load_tasks(path))


# -------------------------------------------------------------------------------------------- from Python


def test_tasks_rows_and_prompts_form_a_taskset():
    task = Task(id="t", prompt=(Message("user", "x"),))
    made = tasks_from([task, {"prompt": "y", "answer": 1}, "z"], "mine")
    assert [t.id for t in made] == ["t", "task-000002", "task-000003"]
    assert [t.text for t in made] == ["x", "y", "z"]
    assert (made.name, made[0]) == ("mine", task)
    assert len(tasks_from((str(n) for n in range(1, 9)), "mine", limit=3)) == 3


def test_taskset_is_returned_unchanged():
    made = Taskset([Task(id="t")], name="mine")
    assert tasks_from(made, "other") is made


def test_messages_and_limits_may_be_objects():
    limits = Limits(turns=2)
    (task,) = tasks_from([{"prompt": [Message("user", "x")], "limits": limits}], "mine")
    assert (task.prompt, task.limits) == ((Message("user", "x"),), limits)


@pytest.mark.parametrize(
    "row", [3, None, object(), Task(id="a"), {"prompt": "x", "data": {"o": object()}}, {"prompt": "x", 3: 4}, b"x"]
)
def test_invalid_python_row_is_quarantined(row):
    made = tasks_from([Task(id="a", prompt=(Message("user", "x"),)), row], "mine")
    assert [bool(task.invalid) for task in made] == [False, True]
    assert re.match(r"mine\W.*\b2: ", made[1].invalid)


def test_task_with_files_outside_the_sandbox_is_quarantined():
    (task,) = tasks_from([Task(id="a", files={"../x": ""})], "mine")
    assert (task.id, task.files) == ("a", {})
    assert "../x" in task.invalid


@pytest.mark.parametrize("obj", ["text", {"prompt": "x"}, 3, None, []])
def test_value_that_is_no_list_of_tasks_is_refused(obj):
    with pytest.raises(UsageError, match="mine"):
        tasks_from(obj, "mine")


# ------------------------------------------------------------------------------------------------ anything

KEYS = st.sampled_from(
    ["id", "prompt", "data", "files", "image", "limits", "role", "content", "tool_calls", "turns"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)
ROWS = st.fixed_dictionaries(
    {"prompt": st.just("x") | VALUES},
    optional={
        "id": st.integers(0, 3) | st.sampled_from(["a", "line-000001", "task-000002"]) | VALUES,
        "data": VALUES,
        "files": st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3) | VALUES,
        "limits": st.dictionaries(st.sampled_from(["turns", "run"]), st.integers(-1, 3)) | VALUES,
        "image": VALUES,
        "other": VALUES,
    },
)


@given(st.lists(ROWS | VALUES, min_size=1, max_size=5))
def test_any_rows_give_valid_or_invalid_tasks_with_unique_ids(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    for tasks in (load_tasks(path), tasks_from(rows, "any")):
        assert len(tasks) == len(rows)
        assert len({task.id for task in tasks}) == len(rows)
        for task in tasks:
            assert bool(task.invalid) != bool(task.prompt)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task) == task
            for name in task.files:
                inside = os.path.normpath(os.path.join("/sandbox", name))
                assert inside.startswith("/sandbox/")


@given(st.binary(max_size=60))
def test_any_file_gives_tasks_or_a_usage_error(tmp_path_factory, data):
    for name in ("bytes.jsonl", "bytes.json", "bytes.jsonl.gz"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(data)
        try:
            assert len(load_tasks(path)) >= 1
        except UsageError as error:
            assert name in str(error)  # noqa: PT017
