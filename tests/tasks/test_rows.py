"""Rows of SWE tasks: inline files, task data, and the instruction in the prompt."""

import os
import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rookery.core import UsageError
from rookery.tasks import check_tasks, load_tasks, tasks_from
from rookery.tasks.swe import get_swe_task
from tests.tasks import kit

ROW = {
    "id": "fix",
    "instruction": "Fix it.",
    "image": "python:3.12",
    "files": {"a/b.py": "x = 1\n", "/etc/thing": "y"},
    "setup": "true",
    "tests": {"test.sh": "exit 0", "data.bin": {"base64": "/w=="}, "run": {"text": "x", "executable": True}},
    "solution": "true",
    "workdir": "/app",
    "timeout": 9,
    "verifier": {"timeout": 5, "mode": "shared"},
}


def test_inline_row_becomes_a_task_with_files_in_the_cache(tmp_path, own_cache):
    (task,) = load_tasks(kit.jsonl(tmp_path / "r.jsonl", ROW))
    assert not task.invalid, task.invalid
    found = get_swe_task(task)
    (step,) = found.steps
    assert (task.id, task.text, task.image, task.limits.run) == ("fix", "Fix it.", "python:3.12", 9)
    assert (found.format, found.workdir, step.verifier.mode, step.verifier.timeout) == (
        "rows",
        "/app",
        "shared",
        5,
    )
    here = own_cache / "content"
    assert found.folder.startswith(str(here))
    assert {part.target for part in found.files} == {"/app", "/etc/thing"}
    tests = own_cache.joinpath(step.tests[0].source)
    assert (tests / "data.bin").read_bytes() == b"\xff"
    assert os.access(tests / "run", os.X_OK)
    assert not os.access(tests / "data.bin", os.X_OK)
    assert own_cache.joinpath(step.solution[0].source, "solve.sh").read_text() == "true"
    assert open(step.setup).read() == "true"


def test_equal_content_is_stored_once(tmp_path, own_cache):
    rows = [{**ROW, "id": str(n), "instruction": f"say {n}"} for n in range(5)]
    tasks = load_tasks(kit.jsonl(tmp_path / "r.jsonl", *rows))
    assert len({get_swe_task(task).folder for task in tasks}) == 1
    (location,) = (own_cache / "content").iterdir()
    before = location.stat().st_mtime_ns
    assert tasks_from(rows, "mine")[0].data == tasks[0].data
    assert [path.stat().st_mtime_ns for path in (own_cache / "content").iterdir()] == [before]
    assert not list((own_cache / "work").iterdir())


def test_rows_of_other_environments_are_unchanged(tmp_path):
    rows = [
        {"prompt": "x", "tests": ["a"], "instruction": "y"},
        {"prompt": "x", "env_config": {"level": 3}},
        {"prompt": "x", "steps": [1, 2]},
    ]
    tasks = load_tasks(kit.jsonl(tmp_path / "r.jsonl", *rows))
    assert [task.data for task in tasks] == [
        {"tests": ["a"], "instruction": "y"},
        {"env_config": {"level": 3}},
        {"steps": [1, 2]},
    ]


def test_row_refers_to_a_directory_of_task_data(tmp_path):
    kit.open_instruct(tmp_path / "data" / "one", files={"instruction.md": "Fix one."})
    kit.harbor(tmp_path / "data" / "two", '[environment]\ndocker_image = "a:1"\n')
    rows = kit.jsonl(
        tmp_path / "r.jsonl",
        {"prompt": "Be brief.", "env_config": {"task_id": "one", "image": "debian:12"}, "level": 2},
        {"env_config": {"task_id": "two"}},
        {"env_config": {"task_id": "one"}},
    )
    one, two, again = load_tasks(rows, task_data=tmp_path / "data")
    assert (one.id, two.id, again.id) == ("one", "two", "line-000003")
    assert [message.text for message in one.prompt] == ["Be brief.", "Fix one."]
    assert (one.image, get_swe_task(one).image, two.image) == ("debian:12", "debian:12", "a:1")
    assert one.data["level"] == 2
    assert get_swe_task(one).folder == str(tmp_path / "data" / "one")


def test_limits_and_data_of_a_row_apply_to_its_task(tmp_path):
    more = {"limits": {"turns": 5, "run": 3}, "data": {"level": 1}, "kind": "x"}
    (task,) = load_tasks(kit.jsonl(tmp_path / "r.jsonl", {**ROW, **more}))
    assert (task.limits.turns, task.limits.run) == (5, 3)
    assert task.limits.score is not None
    assert task.limits.score > 3 * 5
    assert {name: value for name, value in task.data.items() if name != "swe"} == {"level": 1, "kind": "x"}
    assert load_tasks(kit.jsonl(tmp_path / "r.jsonl", {**ROW, "limits": {"turns": -1}}))[0].invalid


def test_instruction_is_not_repeated_in_the_prompt(tmp_path):
    kit.open_instruct(tmp_path / "task-data" / "one", files={"instruction.md": "Fix one."})
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "Now: Fix one."}]
    (task,) = load_tasks(kit.jsonl(tmp_path / "r.jsonl", {"prompt": prompt, "env_config": {"task_id": "one"}}))
    assert len(task.prompt) == 2


@pytest.mark.parametrize("beside", ["task-data", "task-data.tar.gz", ""])
def test_task_data_is_found_beside_the_rows(tmp_path, beside):
    made = kit.open_instruct(tmp_path / "made" / "one")
    if beside.endswith(".gz"):
        with tarfile.open(tmp_path / beside, "w:gz") as archive:
            archive.add(made, "one")
    else:
        made.rename(kit.write_files(tmp_path / beside, {".": None}) / "one")
    (task,) = load_tasks(kit.jsonl(tmp_path / "r.jsonl", {"env_config": {"task_id": "one"}}))
    assert not task.invalid, task.invalid


@pytest.mark.parametrize("name", ["../secret", "/etc", "..", ".", "", "a/b", "a\nb", "missing", 3, "x" * 300])
def test_task_id_cannot_lead_out_of_the_task_data(tmp_path, name):
    kit.open_instruct(tmp_path / "secret")
    kit.open_instruct(tmp_path / "data" / "one")
    rows = kit.jsonl(tmp_path / "r.jsonl", {"id": "x", "env_config": {"task_id": name}})
    found = check_tasks(rows, task_data=tmp_path / "data")
    assert kit.problems_by_field(found) == {("x", "env_config.task_id"): False}


def test_task_data_that_is_no_directory_is_refused(tmp_path):
    rows = kit.jsonl(tmp_path / "r.jsonl", {"env_config": {"task_id": "x"}})
    with pytest.raises(UsageError, match=r"r\.jsonl"):
        load_tasks(rows, task_data=rows)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"instruction": " "}, "instruction"),
        ({"image": "/etc"}, "image"),
        ({"tests": {}}, "tests"),
        ({"tests": {"other.sh": "x"}}, "tests"),
        ({"tests": "  "}, "tests"),
        ({"tests": {"test.sh": {"link": "/etc/passwd"}}}, "tests"),
        ({"tests": {"test.sh": "x", "../x": "y"}}, "tests"),
        ({"files": {"/../x": "y"}}, "files"),
        ({"files": {"a": {"link": "/etc"}, "a/b": "x"}}, "files"),
        ({"files": {"a": {"base64": "?"}}}, "files"),
        ({"files": {"a": {"text": "x", "base64": "eA=="}}}, "files"),
        ({"files": 3}, "files"),
        ({"setup": 3}, "setup"),
        ({"workdir": "rel"}, "workdir"),
        ({"workdir": "/logs/x"}, "workdir"),
        ({"env": {"A": None}}, "env.A"),
        ({"timeout": "x"}, "steps[0].timeout"),
        ({"timeout": 0}, "steps[0].timeout"),
        ({"verifier": {"mode": "other"}}, "steps[0].verifier"),
        ({"verifier": {"odd": 1}}, "steps[0].verifier.odd"),
        ({"memory": -1}, "memory"),
        ({"network": "allow", "allow": ["http://x"]}, "allow"),
        ({"dockerfile": {"x": "y"}}, "dockerfile"),
        ({"steps": []}, "steps"),
    ],
)
def test_problem_names_its_field_and_other_rows_are_loaded(tmp_path, more, field):
    rows = kit.jsonl(tmp_path / "r.jsonl", {**ROW, **more}, {"prompt": "x"})
    found = check_tasks(rows)
    assert kit.problems_by_field(found).get(("fix", field)) is False, str(found)
    bad, good = load_tasks(rows)
    assert bad.invalid.startswith("r.jsonl, line 1: ")
    assert not good.invalid


def test_problems_of_plain_rows_are_reported(tmp_path):
    rows = kit.jsonl(tmp_path / "r.jsonl", {"prompt": ""}, 3, {"id": "a", "prompt": "x", "limits": {"turns": -1}})
    assert kit.problems_by_field(check_tasks(rows)) == {
        ("line-000001", "prompt"): False,
        ("line-000002", "row"): False,
        ("a", "limits.turns"): False,
    }


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
keys = st.sampled_from(
    ["id", "instruction", "image", "files", "setup", "tests", "solution", "workdir", "steps", "env", "verifier",
     "timeout", "mcp", "metadata", "network", "allow", "dockerfile", "messages", "env_config", "artifacts"]
)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=st.dictionaries(keys, values, max_size=5), good=st.booleans())
def test_any_row_gives_a_task_or_a_problem(row, good):
    whole = {**ROW, **row} if good else {"instruction": "x", "tests": "exit 0", **row}
    (task,) = tasks_from([whole], "any")
    assert task.invalid or get_swe_task(task).steps


def test_integral_floats_are_accepted_as_bytes(tmp_path):
    (task,) = load_tasks(kit.jsonl(tmp_path / "r.jsonl", {**ROW, "memory": 2e9, "disk": 1e9}))
    assert not task.invalid, task.invalid
    assert (get_swe_task(task).memory, get_swe_task(task).disk) == (2_000_000_000, 1_000_000_000)
    (task,) = load_tasks(kit.jsonl(tmp_path / "r.jsonl", {**ROW, "memory": 2.5}))
    assert task.invalid
