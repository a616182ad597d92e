"""Promises of `rookery tasks`: every problem shown, tests only when asked for, nothing overwritten."""

import json

import pytest

from rookery.cli.app import run_app
from rookery.tasks import load_tasks
from tests.tasks import kit


@pytest.fixture
def source(tmp_path):
    secret = {"tests/test.sh": "echo THE-TESTS\n", "solution/solve.sh": "echo THE-SOLUTION\n"}
    kit.open_instruct(tmp_path / "s" / "good", files=secret)
    kit.harbor(tmp_path / "s" / "hard", "odd = 1\n", {"instruction.md": "\x1b[31mred\n"})
    kit.put(tmp_path / "s" / "bad", {"instruction.md": "", "image.txt": "/etc"})
    return tmp_path / "s"


def run(capsys, *args):
    code = run_app(["tasks", *map(str, args)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_list_shows_every_problem_and_ends_with_1(source, capsys):
    code, out, err = run(capsys, "list", source)
    assert code == 1
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["bad", "3"],
        ["good", "open-instruct"],
        ["hard", "harbor"],
    ]
    for field in ("bad: instruction.md", "bad: image.txt", "bad: tests/test.sh", "hard: odd: warning"):
        assert field in err
    assert "3 tasks, 1 broken" in err


def test_list_as_json_is_a_line_a_task(source, capsys):
    code, out, _ = run(capsys, "list", source, "--json")
    rows = {row["id"]: row for row in map(json.loads, out.splitlines())}
    assert code == 1
    assert {one["field"] for one in rows["bad"]["problems"]} == {"instruction.md", "image.txt", "tests/test.sh"}
    assert (rows["good"]["format"], rows["good"]["image"], rows["good"]["steps"]) == (
        "open-instruct",
        "python:3.12",
        1,
    )


def test_a_source_without_problems_ends_with_0(tmp_path, capsys):
    kit.open_instruct(tmp_path / "s" / "good")
    assert run(capsys, "list", tmp_path / "s")[0] == 0
    rows = kit.jsonl(tmp_path / "r.jsonl", {"prompt": "x"})
    assert run(capsys, "list", rows)[0] == 0


@pytest.mark.parametrize("json_", [False, True])
def test_show_has_everything_but_tests_and_solution(source, capsys, json_):
    more = ["--json"] if json_ else []
    code, out, _ = run(capsys, "show", source, "good", *more)
    assert code == 0
    assert "Fix it." in out
    assert "python:3.12" in out
    assert "THE-" not in out
    out = run(capsys, "show", source, "good", "--tests", *more)[1]
    assert "THE-TESTS" in out
    assert "THE-SOLUTION" in out


def test_show_of_a_broken_task_says_what_is_wrong(source, capsys):
    code, _, err = run(capsys, "show", source, "bad")
    assert code == 1
    assert "image.txt" in err


def test_nothing_of_a_task_reaches_the_terminal_raw(source, capsys):
    assert "\x1b" not in run(capsys, "show", source, "hard")[1]


def test_show_follows_no_link_of_the_tests(source, capsys, tmp_path):
    (tmp_path / "secret").write_text("s3cret")
    (source / "good" / "tests" / "more").symlink_to(tmp_path / "secret")
    assert "s3cret" not in run(capsys, "show", source, "good", "--tests")[1]


def test_a_task_that_is_not_there_is_one_sentence(source, capsys):
    code, _, err = run(capsys, "show", source, "god")
    assert code == 2
    assert "did you mean 'good'?" in err


def test_convert_says_what_is_left_out_and_overwrites_nothing(source, capsys, tmp_path):
    code, out, err = run(capsys, "convert", source, tmp_path / "rows.jsonl", "--to", "rows")
    assert code == 1
    assert "2 tasks as rows" in out
    assert "bad: left out" in err
    assert [task.id for task in load_tasks(tmp_path / "rows.jsonl")] == ["good", "hard"]
    code, _, err = run(capsys, "convert", tmp_path / "rows.jsonl", tmp_path / "rows.jsonl", "--to", "harbor")
    assert code == 2
    assert "exists already" in err
    code, out, err = run(capsys, "convert", tmp_path / "rows.jsonl", tmp_path / "h", "--to", "harbor", "--json")
    assert code == 0
    assert [json.loads(line)["task"] for line in out.splitlines()] == ["good", "hard"]
    assert run(capsys, "convert", source, tmp_path / "x", "--to", "nonsense")[0] == 2


def test_rows_find_their_task_data_by_option(source, capsys, tmp_path):
    (tmp_path / "r").mkdir()
    rows = kit.jsonl(tmp_path / "r" / "r.jsonl", {"env_config": {"task_id": "good"}})
    assert run(capsys, "list", rows)[0] == 1
    assert run(capsys, "list", rows, "--task-data", source)[0] == 0


def test_a_run_takes_such_a_source(source, capsys):
    """As far as the tasks: the arithmetic of `--tasks` is that of the library."""
    from rookery.cli.run import chosen_tasks
    from rookery.environments.arithmetic import Arithmetic

    tasks = chosen_tasks(Arithmetic(), {"tasks": str(source), "num_tasks": 2})
    assert [task.id for task in tasks] == ["bad", "good"]
