"""Rows of well-known datasets: what tasks they become, and what happens to rows of another shape."""

import base64
import json
import pickle
import zlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from rookery.cli.options import parse_columns
from rookery.core import Task, UsageError
from rookery.scoring.code_tasks import parse_code_task
from rookery.tasks import load_tasks
from rookery.tasks.row_formats import GROUP


def load(folder: Path, rows: list[dict[str, Any]], **options: Any) -> list[Task]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(load_tasks(path, **options))


def test_gsm8k_and_math_rows_become_questions_with_answers(tmp_path: Path) -> None:
    rows = [{"question": "How many?", "answer": "2 + 2\n#### 1,004"}, {"question": "?", "answer": "none"}]
    good, bad = load(tmp_path, rows, row_format="gsm8k")
    assert (good.text, good.data["answer"], good.id) == ("How many?", "1004", "line-000001")
    assert bad.invalid
    solution = r"So $\boxed{1}$, no: \boxed{\frac{1}{2}}."
    rows = [{"problem": "Half?", "solution": solution, "level": "Level 1"}, {"problem": "?", "solution": "?"}]
    rows.append({"problem": "One?", "answer": "1", "unique_id": "test/1"})
    half, bad, one = load(tmp_path, rows, row_format="math")
    assert half.data == {"answer": r"\frac{1}{2}", "solution": solution, "level": "Level 1"}
    assert bad.invalid
    assert (one.id, one.data["answer"]) == ("test/1", "1")


def test_code_rows_become_tasks_that_the_code_environment_grades(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "task_id": "HumanEval/0",
        "prompt": "def add(a, b):\n",
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "entry_point": "add",
    }
    (task,) = load(tmp_path, [row], row_format="humaneval")
    parsed = parse_code_task(task.data, name=task.id)
    assert (task.id, parsed.entry_point, parsed.solution) == (
        "HumanEval/0",
        "add",
        "def add(a, b):\n    return a + b\n",
    )
    tests = ["assert f(1) == 1", "assert f(2) == 4"]
    row = {"task_id": 11, "text": "Square.", "code": "def f(x): return x * x", "test_list": tests}
    plain, setup = load(
        tmp_path, [row, {**row, "task_id": 12, "test_setup_code": "import math"}], row_format="mbpp"
    )
    assert parse_code_task(plain.data, name=plain.id).tests == tests
    assert "assert f(2) == 4" in plain.text
    assert str(parse_code_task(setup.data, name=setup.id).tests).startswith("import math")


def test_livecodebench_rows_have_cases_or_method_tests(tmp_path: Path) -> None:
    public = json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}])
    hidden = json.dumps([{"input": "3\n", "output": "4\n", "testtype": "stdin"}])
    packed = _pack(hidden)
    row = {"question_id": "abc", "question_content": "Add 1.", "public_test_cases": public}
    method = json.dumps([{"input": '[1, 2]\n"x"', "output": "true", "testtype": "functional"}])
    rows: list[dict[str, Any]] = [
        {**row, "private_test_cases": packed},
        {**row, "question_id": "m", "public_test_cases": method, "metadata": '{"func_name": "solve"}'},
        {**row, "question_id": "evil", "private_test_cases": _pack(print)},
        {**row, "question_id": "large", "private_test_cases": _compress(b"N" + b"r\xff\xff\xff\xff" + b".")},
        {**row, "question_id": "deep", "private_test_cases": "[" * 100_000},
    ]
    stdin, functional, evil, large, deep = load(tmp_path, rows, row_format="livecodebench")
    assert [case.stdout for case in parse_code_task(stdin.data, name="t").cases] == ["2\n", "4\n"]
    assert functional.data["tests"] == ["assert Solution().solve([1, 2], 'x') == True"]
    assert evil.invalid  # a pickled function is refused
    assert large.invalid  # to execute this pickle needs more than 32 GB
    assert deep.invalid


def _pack(value: object) -> str:
    return _compress(pickle.dumps(value))


def _compress(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def test_columns_are_renamed_also_in_parquet(tmp_path: Path) -> None:
    columns = parse_columns(["prompt=input, answer=target", "id=name"])
    (task,) = load(tmp_path, [{"input": "2 + 2?", "target": 4, "name": "sum", "more": 1}], columns=columns)
    assert (task.id, task.text, task.data) == ("sum", "2 + 2?", {"answer": 4, "more": 1})
    (bad,) = load(tmp_path, [{"input": "2 + 2?"}], columns=columns)
    assert "target" in bad.invalid
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"q": ["How many?"], "a": ["#### 5"]}), tmp_path / "rows.parquet")
    named = {"question": "q", "answer": "a"}
    (task,) = load_tasks(tmp_path / "rows.parquet", row_format="gsm8k", columns=named)
    assert (task.text, task.data["answer"]) == ("How many?", "5")


def test_wrong_formats_and_columns_are_refused(tmp_path: Path) -> None:
    assert {"gsm8k", "humaneval", "livecodebench", "math", "mbpp"} <= entry_points(group=GROUP).names
    with pytest.raises(UsageError):
        load(tmp_path, [{"prompt": "x"}], row_format="gsm9k")
    for text in ("prompt", "=x", "prompt="):
        with pytest.raises(UsageError):
            parse_columns([text])
    (tmp_path / "tasks" / "one").mkdir(parents=True)
    (tmp_path / "tasks" / "one" / "instruction.md").write_text("Do it.")
    with pytest.raises(UsageError):
        load_tasks(tmp_path / "tasks", row_format="gsm8k")
