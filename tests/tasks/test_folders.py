"""Task directories: all problems are reported by field, nothing outside is read."""

import os
import re
import shutil
import socket
from importlib.metadata import EntryPoint

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rookery.core import UsageError
from rookery.tasks import check_tasks, load_tasks
from rookery.tasks.report import MAX_PROBLEMS, ProblemCollector, TaskReport
from rookery.tasks.swe import FileMapping, get_swe_task
from tests.tasks import kit


def one(path, **more):
    (task,) = load_tasks(path, **more)
    assert not task.invalid, task.invalid
    return get_swe_task(task)


def report(path, **more):
    return kit.problems_by_field(check_tasks(path, **more))


# ------------------------------------------------------------------------------------------------ open-instruct


def test_open_instruct_directory_is_a_task(tmp_path):
    files = {
        "environment/seeds/a/b.py": "x",
        "setup.sh": "true",
        "solution/solve.sh": "true",
        "tests/more.py": "y",
    }
    here = kit.open_instruct(tmp_path / "fix-1", files=files)
    (task,) = load_tasks(tmp_path)
    assert (task.id, task.text, task.image) == ("fix-1", "Fix it.\n", "python:3.12")
    assert task.limits.score > 2 * 600
    found = get_swe_task(task)
    (step,) = found.steps
    assert (found.format, found.folder, found.workdir) == ("open-instruct", str(here), "/workspace")
    assert found.files == (FileMapping(source=str(here / "environment/seeds"), target="/workspace"),)
    assert step.tests == (FileMapping(source=str(here / "tests"), target="/tests"),)
    assert step.solution == (FileMapping(source=str(here / "solution"), target="/solution"),)
    assert step.setup == str(here / "setup.sh")
    assert (step.verifier.mode, step.verifier.reward_from_exit) == ("fresh", True)


def test_single_task_directory_is_loaded(tmp_path):
    kit.open_instruct(tmp_path / "all" / "a")
    assert load_tasks(tmp_path / "all")[0] == load_tasks(tmp_path / "all" / "a")[0]


def test_wrapper_directories_of_archives_are_searched(tmp_path):
    kit.open_instruct(tmp_path / "data" / "task-data" / "a")
    kit.write_files(tmp_path / "data", {"README.md": "x", "scripts/x": "x"})
    assert [task.id for task in load_tasks(tmp_path / "data")] == ["a"]


def test_task_directories_are_absolute_paths(tmp_path, monkeypatch):
    kit.open_instruct(tmp_path / "d" / "a")
    monkeypatch.chdir(tmp_path)
    assert one("d").folder == str(tmp_path / "d" / "a")
    monkeypatch.chdir(tmp_path / "d" / "a")
    assert one(".").folder == str(tmp_path / "d" / "a")


def test_directory_may_contain_tasks_of_both_formats(tmp_path):
    kit.open_instruct(tmp_path / "b")
    kit.harbor(tmp_path / "a")
    kit.harbor(tmp_path / "c")
    assert [get_swe_task(task).format for task in load_tasks(tmp_path)] == ["harbor", "open-instruct", "harbor"]
    assert len(load_tasks(tmp_path, limit=2)) == 2


def test_every_problem_of_every_task_is_in_one_report(tmp_path):
    kit.write_files(tmp_path / "a", {"instruction.md": " \n", "image.txt": "/etc\n", "setup.sh": b"\xff"})
    kit.open_instruct(
        tmp_path / "b", files={"rookery.json": '{"workdir": "tests", "odd": 1, "steps": [{"timeout": -1}]}'}
    )
    kit.harbor(tmp_path / "c", '[verifier]\ntimeout_sec = 0\nenvironment_mode = "x"\n', {"tests/test.sh": ...})
    kit.open_instruct(tmp_path / "fine")
    kit.write_files(tmp_path / "other", {"x": "x"})
    found = check_tasks(tmp_path)
    assert kit.problems_by_field(found) == {
        ("a", "instruction.md"): False,
        ("a", "image.txt"): False,
        ("a", "setup.sh"): False,
        ("a", "tests/test.sh"): False,
        ("b", "rookery.json.workdir"): False,
        ("b", "rookery.json.odd"): False,
        ("b", "rookery.json.steps[0].timeout"): False,
        ("c", "verifier.timeout_sec"): False,
        ("c", "verifier.environment_mode"): False,
        ("c", "tests/test.sh"): False,
        ("c", "environment"): True,
        ("other", "folder"): True,
    }
    assert found.broken == ("a", "b", "c")
    assert not found.ok
    assert (found.tasks, len(found.problems) - found.warnings, found.warnings) == (4, 10, 2)
    assert [int(number) for number in re.findall(r"\d+", str(found).splitlines()[-1])][-4:] == [4, 3, 10, 2]
    assert [bool(task.invalid) for task in load_tasks(tmp_path)] == [True, True, True, False]


def test_directory_without_tasks_is_refused_with_the_known_formats(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(UsageError, match=r"harbor.*rows\.jsonl"):
        load_tasks(tmp_path)


def test_installed_taskset_is_loaded_by_name_unless_a_local_path_exists(tmp_path, monkeypatch):
    kit.open_instruct(tmp_path / "there" / "a")
    kit.open_instruct(tmp_path / "mine" / "b")
    monkeypatch.setattr(kit, "there", lambda: tmp_path / "there", raising=False)
    point = EntryPoint("mine", "tests.tasks.kit:there", "rookery.tasksets")
    monkeypatch.setattr(
        "rookery.tasks.sources.entry_points", lambda group, name: [point] if name == "mine" else []
    )
    monkeypatch.chdir(tmp_path / "there")
    found = load_tasks("mine")
    assert (found.name, [task.id for task in found]) == ("mine", ["a"])
    monkeypatch.chdir(tmp_path)
    assert [task.id for task in load_tasks("mine")] == ["b"]


# ------------------------------------------------------------------------------------------------ nothing outside


def test_nothing_outside_a_task_is_read(tmp_path):
    secret = tmp_path / "secret"
    kit.write_files(secret, {"key": "s3cret", "test.sh": "s3cret"})
    here = kit.open_instruct(tmp_path / "t" / "a")
    for name in ("instruction.md", "tests/test.sh", "image.txt"):
        (here / name).unlink()
        (here / name).symlink_to(secret / "key")
    (here / "setup.sh").symlink_to(secret / "key")
    (here / "solution").symlink_to(secret)
    (here / "environment").symlink_to(secret)
    (here / "rookery.json").symlink_to("nowhere")
    found = check_tasks(tmp_path / "t")
    fields = {one.field for one in found.problems}
    assert {"instruction.md", "tests/test.sh", "image.txt", "setup.sh", "solution", "rookery.json"} <= fields
    assert "s3cret" not in str(found)
    assert "s3cret" not in repr(list(load_tasks(tmp_path / "t")))


def test_path_with_invalid_utf8_is_reported_as_a_problem(tmp_path):
    kit.open_instruct(tmp_path / os.fsdecode(b"\xff") / "a")
    found = check_tasks(tmp_path / os.fsdecode(b"\xff"))
    assert kit.problems_by_field(found) == {("a", "folder"): False}
    str(found).encode()


def test_too_deep_nesting_is_reported_as_a_problem(tmp_path):
    for depth in (150, 600, 5000):
        kit.harbor(tmp_path / f"a{depth}", "[metadata]\nx = " + "[" * depth + "]" * depth)
    assert all(task.invalid for task in load_tasks(tmp_path)[1:])


def test_fifos_sockets_and_huge_texts_are_reported_without_blocking(tmp_path):
    here = kit.open_instruct(tmp_path / "a", files={"environment/seeds/x": "x"})
    os.mkfifo(here / "environment/seeds/fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(here / "tests/socket"))
        (here / "setup.sh").write_bytes(b"#" * (5 << 20))
        (here / "instruction.md").unlink()
        os.mkfifo(here / "instruction.md")
        assert set(report(tmp_path)) == {
            ("a", name) for name in ("environment/seeds", "tests", "setup.sh", "instruction.md")
        }


@pytest.mark.parametrize(
    "image",
    ["/", "/etc", ".", "./x", "../x", "~", "oci:/x", "dockerfile:.", "docker-archive:x", "a b", "-x", "a\nb", "X"],
)
def test_task_cannot_use_local_files_as_its_image(tmp_path, image):
    kit.open_instruct(tmp_path / "a", files={"image.txt": image})
    assert ("a", "image.txt") in report(tmp_path)


def test_image_name_that_is_also_a_local_path_stays_a_name(tmp_path, monkeypatch):
    kit.open_instruct(tmp_path / "t" / "a", files={"image.txt": "python"})
    (tmp_path / "python").mkdir()
    monkeypatch.chdir(tmp_path)
    assert one("t").image == "docker.io/library/python:latest"


# ------------------------------------------------------------------------------------------------ names

hostile = st.one_of(
    st.sampled_from(
        [
            "$(touch pwned)",
            "`id`",
            "-rf",
            "--help",
            "a'b",
            'a"b',
            "a\nb",
            "a b",
            "ü" * 60,
            "\x1b[31m",
            "*",
            "\u202e",
        ]
    ),
    st.text(st.characters(blacklist_characters="\0/", blacklist_categories=("Cs",)), min_size=1, max_size=80),
    st.binary(min_size=1, max_size=40).map(
        lambda raw: os.fsdecode(raw.replace(b"/", b"").replace(b"\0", b"") or b"x")
    ),
).filter(lambda name: name not in (".", "..") and len(os.fsencode(name)) <= 255)


def snapshot(folder):
    return sorted((path, path.lstat().st_mtime_ns, path.lstat().st_mode) for path in folder.rglob("*"))


@pytest.mark.long
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    folders=st.lists(hostile, min_size=1, max_size=3, unique=True), inner=hostile, kind=st.sampled_from(("o", "h"))
)
def test_any_file_names_give_tasks_or_problems_and_change_nothing(tmp_path, folders, inner, kind):
    shutil.rmtree(tmp_path / "t", ignore_errors=True)
    for name in folders:
        if kind == "o":
            kit.open_instruct(
                tmp_path / "t" / name, files={f"environment/seeds/{inner}": "x", f"tests/{inner}": "y"}
            )
        else:
            kit.harbor(tmp_path / "t" / name, "", {f"tests/{inner}": "y", f"solution/{inner}/solve.sh": "y"})
    before = snapshot(tmp_path)
    seen = [name for name in folders if not name.startswith(".")]
    if not seen:
        with pytest.raises(UsageError):
            load_tasks(tmp_path / "t")
        return
    tasks = load_tasks(tmp_path / "t")
    found = check_tasks(tmp_path / "t")
    assert snapshot(tmp_path) == before
    assert len(tasks) == len(seen) == found.tasks
    assert len({task.id for task in tasks}) == len(tasks)
    for task in tasks:
        assert task.id.isprintable()
        assert bool(task.invalid) == (task.id in found.broken)
    assert all(line.isprintable() for line in str(found).splitlines())
    str(found).encode()


def test_report_has_one_printable_line_per_problem_and_bounded_problems():
    collector = ProblemCollector("a\nb")
    collector.warn("field", "is\x1b[31m odd")
    assert not collector.has_errors
    for _ in range(2 * MAX_PROBLEMS):
        collector.error("field", "is\nwrong")
    assert len(collector.items) == MAX_PROBLEMS
    found = TaskReport(source="s\n", tasks=1, problems=tuple(collector.items))
    lines = str(found).split("\n")
    assert len(lines) == MAX_PROBLEMS + 1
    assert all(line.isprintable() for line in lines)
    assert (found.ok, found.broken, found.warnings) == (False, ("a\nb",), 1)
