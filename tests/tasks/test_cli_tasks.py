"""`rookery tasks`: every problem is shown, tests only on request, nothing is overwritten."""

import json
from pathlib import Path

import pytest

from rookery.cli.app import run_app
from rookery.core import UsageError
from rookery.sandbox_runtime import processes
from rookery.tasks import cache_users, load_tasks
from rookery.tasks.cache import TaskCache
from tests.tasks import kit
from tests.tasks.test_cache import an_archive
from tests.tasks.test_prune import process_using


@pytest.fixture
def source(tmp_path):
    secret = {"tests/test.sh": "echo THE-TESTS\n", "solution/solve.sh": "echo THE-SOLUTION\n"}
    kit.open_instruct(tmp_path / "s" / "good", files=secret)
    kit.harbor(tmp_path / "s" / "hard", "odd = 1\n", {"instruction.md": "\x1b[31mred\n"})
    kit.write_files(tmp_path / "s" / "bad", {"instruction.md": "", "image.txt": "/etc"})
    return tmp_path / "s"


def run(capsys, *args):
    code = run_app(["tasks", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list_shows_every_problem_and_exits_with_3(source, capsys):
    code, out, err = run(capsys, "list", source)
    assert code == 3
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["bad", "3"],
        ["good", "open-instruct"],
        ["hard", "harbor"],
    ]
    for field in ("bad: instruction.md", "bad: image.txt", "bad: tests/test.sh", "hard: odd: warning"):
        assert field in err


def test_list_json_has_one_line_per_task(source, capsys):
    code, out, _ = run(capsys, "list", source, "--json")
    rows = {row["id"]: row for row in map(json.loads, out.splitlines())}
    assert code == 3
    assert {one["field"] for one in rows["bad"]["problems"]} == {"instruction.md", "image.txt", "tests/test.sh"}
    assert (rows["good"]["format"], rows["good"]["image"], rows["good"]["steps"]) == (
        "open-instruct",
        "python:3.12",
        1,
    )


def test_columns_and_row_formats_are_options(tmp_path, capsys):
    rows = kit.jsonl(tmp_path / "r.jsonl", {"q": "How many?", "a": "#### 5"})
    options = ("--row-format", "gsm8k", "--columns", "question=q,answer=a", "--json")
    assert run(capsys, "list", rows)[0] == 3
    code, out, _ = run(capsys, "list", rows, *options)
    assert (code, json.loads(out)["broken"]) == (0, False)
    code, out, _ = run(capsys, "show", rows, json.loads(out)["id"], *options)
    assert json.loads(out)["task"]["data"]["answer"] == "5"
    assert run(capsys, "list", rows, "--row-format", "gsm9k")[0] == 2
    assert run_app(["validate", str(rows), "--columns", "question"]) == 2


def test_source_without_problems_exits_with_0(tmp_path, capsys):
    kit.open_instruct(tmp_path / "s" / "good")
    assert run(capsys, "list", tmp_path / "s")[0] == 0
    rows = kit.jsonl(tmp_path / "r.jsonl", {"prompt": "x"})
    assert run(capsys, "list", rows)[0] == 0


@pytest.mark.parametrize("json_", [False, True])
def test_show_hides_tests_and_solution_by_default(source, capsys, json_):
    more = ["--json"] if json_ else []
    code, out, _ = run(capsys, "show", source, "good", *more)
    assert code == 0
    assert "Fix it." in out
    assert "python:3.12" in out
    assert "THE-" not in out
    out = run(capsys, "show", source, "good", "--tests", *more)[1]
    assert "THE-TESTS" in out
    assert "THE-SOLUTION" in out


def test_show_of_an_invalid_task_reports_its_problems(source, capsys):
    code, _, err = run(capsys, "show", source, "bad")
    assert code == 3
    assert "image.txt" in err


def test_control_characters_of_a_task_never_reach_the_terminal(source, capsys):
    assert "\x1b" not in run(capsys, "show", source, "hard")[1]


def test_show_does_not_follow_links_of_the_tests(source, capsys, tmp_path):
    (tmp_path / "secret").write_text("s3cret")
    (source / "good" / "tests" / "more").symlink_to(tmp_path / "secret")
    assert "s3cret" not in run(capsys, "show", source, "good", "--tests")[1]


def test_unknown_task_is_a_usage_error_with_a_suggestion(source, capsys):
    code, _, err = run(capsys, "show", source, "god")
    assert code == 2
    assert "'good'" in err


def test_convert_reports_omitted_tasks_and_overwrites_nothing(source, capsys, tmp_path):
    code, _, err = run(capsys, "convert", source, tmp_path / "rows.jsonl", "--to", "rows")
    assert code == 3
    assert "bad" in err
    assert "good" not in err
    assert [task.id for task in load_tasks(tmp_path / "rows.jsonl")] == ["good", "hard"]
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert run(capsys, "convert", tmp_path / "rows.jsonl", tmp_path / "rows.jsonl", "--to", "harbor")[0] == 2
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    code, out, err = run(capsys, "convert", tmp_path / "rows.jsonl", tmp_path / "h", "--to", "harbor", "--json")
    assert code == 0
    assert [json.loads(line)["task"] for line in out.splitlines()] == ["good", "hard"]
    assert run(capsys, "convert", source, tmp_path / "x", "--to", "nonsense")[0] == 2


def test_task_data_option_locates_the_task_data_of_rows(source, capsys, tmp_path):
    (tmp_path / "r").mkdir()
    rows = kit.jsonl(tmp_path / "r" / "r.jsonl", {"env_config": {"task_id": "good"}})
    assert run(capsys, "list", rows)[0] == 3
    assert run(capsys, "list", rows, "--task-data", source)[0] == 0


def test_run_accepts_every_task_source(source, capsys):
    """Only the tasks: the selection of `--tasks` is tested with the library."""
    from rookery.cli.run import select_tasks
    from rookery.environments.arithmetic import Arithmetic

    tasks = select_tasks(Arithmetic(), {"tasks": str(source), "num_tasks": 2})
    assert [task.id for task in tasks] == ["bad", "good"]


def test_variables_reach_the_tasks_and_invalid_ones_are_refused(tmp_path, capsys):
    kit.harbor(tmp_path / "s" / "one", '[environment.env]\nPORT = "${PORT}"\n')
    code, _, err = run(capsys, "list", tmp_path / "s")
    assert code == 3
    assert "--variable" in err
    code, out, _ = run(capsys, "show", tmp_path / "s", "one", "--variable", "PORT=80=80", "--json")
    assert code == 0
    assert json.loads(out)["task"]["data"]["swe"]["env"] == {"PORT": "80=80"}
    for wrong in ("s3cret", "=1", "A-B=s3cret", "1A=s3cret"):
        code, _, err = run(capsys, "list", tmp_path / "s", "--variable", wrong)
        assert code == 2
        assert "NAME=VALUE" in err
        assert "s3cret" not in err


def test_cache_prune_keeps_what_unfinished_runs_need(tmp_path, capsys, own_cache):
    from rookery.journal import Journal

    row = {"instruction": "Do.", "tests": "exit 0"}
    rows = kit.jsonl(tmp_path / "r.jsonl", {"id": "a", **row}, {"id": "b", **row, "tests": "exit 1"})
    with process_using(rows):
        code, out, _ = run(capsys, "cached", "--json")
        assert (code, len(out.splitlines())) == (0, 2)
        tasks = load_tasks(rows)  # the same folders
    cache_users._registrations.pop(own_cache)  # as if this process had never loaded them
    for path in (own_cache / "locks").glob("use-*"):
        path.unlink()
    folder = tmp_path / "runs" / "20260101T000000Z-env-model-0000"
    folder.mkdir(parents=True)
    with Journal.create(folder, {}) as journal:
        journal.add_tasks(tasks[:1])
        journal.end("stopped", reason="breaker")
    code, out, err = run(capsys, "prune", "--runs", tmp_path / "runs")
    assert code == 0
    assert "0 B" in out.splitlines()[-1]
    assert "--unused DAYS" in err
    code, out, err = run(capsys, "prune", "--all", "--runs", tmp_path / "runs", "--json")
    done = json.loads(out)
    assert (code, len(done["removed"]), done["kept_on_request"]) == (0, 1, 1)
    assert [one["key"] for one in map(json.loads, run(capsys, "cached", "--json")[1].splitlines())] == [
        Path(tasks[0].data["swe"]["folder"]).name
    ]
    with Journal.open(folder) as journal:
        journal.end("finished")
    code, out, _ = run(capsys, "prune", "--unused", "0", "--runs", tmp_path / "runs", "--json")
    assert (code, len(json.loads(out)["removed"])) == (0, 1)
    assert run(capsys, "cached", "--json")[1] == ""
    assert run(capsys, "prune", "--to", "much")[0] == 2


def test_cache_list_shows_the_users_of_an_entry(tmp_path, capsys, own_cache):
    archive = an_archive(tmp_path / "t.tar.gz", tasks=1)
    with process_using(archive) as pid:
        (one,) = map(json.loads, run(capsys, "cached", "--json")[1].splitlines())
        assert (one["what"].endswith(str(archive)), one["used_by"]) == (True, [pid])
        code, out, _ = run(capsys, "prune", "--all", "--runs", tmp_path, "--json")
        done = json.loads(out)
        assert (code, done["removed"], done["kept_in_use"]) == (0, [], 1)


def test_run_is_not_resumed_while_its_tasks_are_missing(tmp_path, capsys, own_cache):
    from rookery.cli.tasks_cache import lock_cached_tasks

    rows = kit.jsonl(tmp_path / "r.jsonl", {"id": "a", "instruction": "Do.", "tests": "exit 0"})
    tasks = load_tasks(rows)
    lock_cached_tasks(tasks, {"tasks": str(rows), "task_data": ""})
    processes.remove_tree(str(own_cache))
    with pytest.raises(UsageError, match=r"rookery tasks list .*r\.jsonl"):
        lock_cached_tasks(tasks, {"tasks": str(rows), "task_data": ""})
    assert run(capsys, "list", rows)[0] == 0
    lock_cached_tasks(tasks, {"tasks": str(rows), "task_data": ""})
    assert TaskCache().prune(budget=0).kept_in_use == 1
