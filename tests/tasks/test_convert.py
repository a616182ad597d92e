"""Conversion: round trips preserve tasks, lost fields are reported, nothing is overwritten."""

import shutil

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from rookery.core import Message, Task, UsageError
from rookery.tasks import load_tasks
from rookery.tasks.conversion import convert
from rookery.tasks.file_trees import describe_task, find_differences
from rookery.tasks.swe import get_swe_task, make_task
from tests.tasks import kit

few = settings(
    max_examples=8,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def round_trips(task, tmp_path, formats):
    """Return the task after each conversion, loaded again."""
    tasks = [make_task(task)]
    for number, to in enumerate(formats):
        target = tmp_path / f"{number}-{to}{'.jsonl' if to == 'rows' else ''}"
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        (done,) = convert(tasks, target, to)
        assert not done.problem, done.problem
        assert done.lost == ()
        tasks = list(load_tasks(target))
        assert not tasks[0].invalid, tasks[0].invalid
        yield get_swe_task(tasks[0])


@few
@given(shape=kit.shapes())
def test_single_step_task_survives_a_round_trip_through_every_format(tmp_path, shape):
    task = kit.build(shape, tmp_path / "made")
    for found in round_trips(
        task, tmp_path, ("harbor", "open-instruct", "rows", "harbor", "rows", "open-instruct")
    ):
        assert describe_task(found) == describe_task(task)


@few
@given(shape=kit.shapes(steps=3))
def test_multi_step_task_survives_harbor_and_rows(tmp_path, shape):
    task = kit.build(shape, tmp_path / "made")
    for found in round_trips(task, tmp_path, ("harbor", "rows", "harbor")):
        assert describe_task(found) == describe_task(task)


def test_build_context_of_an_image_is_converted(tmp_path):
    files = {"environment/Dockerfile": "FROM debian\nWORKDIR /srv/work\n", "environment/extra/x": "x"}
    kit.harbor(tmp_path / "h" / "a", "[environment]\nbuild_timeout_sec = 77\n", files)
    tasks = load_tasks(tmp_path / "h")
    first = get_swe_task(tasks[0])
    assert (first.image, first.workdir) == (f"dockerfile:{tmp_path}/h/a/environment", "/srv/work")
    assert first.build == 77
    for to in ("open-instruct", "rows"):
        (done,) = convert(tasks, tmp_path / to, to)
        assert done.lost == ()
        (found,) = load_tasks(tmp_path / to)
        assert find_differences(first, get_swe_task(found)) == []
        assert get_swe_task(found).image.startswith("dockerfile:")


def test_lost_fields_are_reported_by_task(tmp_path):
    rows = kit.jsonl(
        tmp_path / "r.jsonl", {"id": "a", "instruction": "x", "tests": "exit 0", "messages": "be kind", "level": 3}
    )
    (done,) = convert(load_tasks(rows), tmp_path / "h", "harbor")
    assert set(done.lost) == {"data.level", "prompt"}
    (again,) = convert(load_tasks(rows), tmp_path / "again.jsonl", "rows")
    assert again.lost == ()
    assert load_tasks(tmp_path / "again.jsonl")[0] == load_tasks(rows)[0]


def test_fields_that_only_rookery_reads_are_reported(tmp_path):
    kit.harbor(tmp_path / "h" / "a", '[environment]\ndocker_image = "python:3.12"\n[agent]\ntimeout_sec = 5\n')
    (done,) = convert(load_tasks(tmp_path / "h"), tmp_path / "o", "open-instruct")
    assert {"workdir", "network", "steps[0].timeout", "steps[0].verifier"} == set(done.rookery_only)


def test_task_that_the_format_cannot_express_is_left_out(tmp_path):
    steps = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    more = {f"steps/{name}/instruction.md": name for name in ("one", "two")}
    kit.harbor(tmp_path / "h" / "many", steps, more)
    kit.harbor(tmp_path / "h" / "one")
    kit.harbor(tmp_path / "h" / "worse", "oops")
    done = {one.task: one for one in convert(load_tasks(tmp_path / "h"), tmp_path / "o", "open-instruct")}
    assert "2" in done["many"].problem
    assert "task.toml" in done["worse"].problem
    assert not done["one"].problem
    assert [path.name for path in (tmp_path / "o").iterdir()] == ["one"]


def test_existing_target_is_not_overwritten_and_no_partial_output_is_left(tmp_path):
    tasks = load_tasks(kit.harbor(tmp_path / "h"))
    for name in ("there", "file"):
        (tmp_path / name).mkdir() if name == "there" else (tmp_path / name).write_text("mine")
        with pytest.raises(UsageError):
            convert(tasks, tmp_path / name, "harbor")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(UsageError, match=r"\bx: no\b"):
        convert([Task(id="x", invalid="no")], tmp_path / "new", "rows")
    with pytest.raises(UsageError, match="nonsense"):
        convert(tasks, tmp_path / "new", "nonsense")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "h", "there"]


def test_task_whose_id_is_no_directory_name_is_left_out(tmp_path):
    rows = [{"id": name, "instruction": "x", "tests": "exit 0"} for name in ("../out", "a/b", ".hidden", "fine")]
    tasks = load_tasks(kit.jsonl(tmp_path / "r.jsonl", *rows))
    done = convert(tasks, tmp_path / "o", "open-instruct")
    assert [bool(one.problem) for one in done] == [True, True, True, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o", "r.jsonl"]


def test_task_of_another_environment_cannot_be_converted(tmp_path):
    task = Task(id="a", prompt=(Message("user", "x"),))
    with pytest.raises(UsageError, match=r"\ba\b.*\bswe\b"):
        convert([task], tmp_path / "o", "harbor")
    assert not (tmp_path / "o").exists()
