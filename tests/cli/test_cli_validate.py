"""`rookery validate`: tasks that can be solved and not cheated pass; others are reported."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from rookery.cli.validate import format_report, summarize_validation
from rookery.core import Completed, Failed, Rollout
from rookery.environments.swe.validation import CHEAT, expand_variants, split_variant
from rookery.scoring.swe.cheats import CHEATS
from rookery.tasks import load_tasks
from tests.cli.helpers import rookery, start_command, wait_for_end
from tests.scoring.swe.small_task import CHECK, DRIVER, FIXED, STRONG

pytestmark = pytest.mark.timeout(400)

GOOD = ("good", STRONG, FIXED)
GIVING = ("giving", "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n", FIXED)
BROKEN = ("broken", STRONG, "def add(a, b):\n    return 0\n")


def write_tasks(root: Path, *tasks: tuple[str, str, str], mode: str = "") -> Path:
    for name, script, solution in tasks:
        folder = root / name
        for below in ("environment/seeds", "tests", "solution"):
            (folder / below).mkdir(parents=True)
        (folder / "instruction.md").write_text("Repair calc.py.")
        (folder / "environment/seeds/calc.py").write_text("def add(a, b):\n    return a - b\n")
        (folder / "tests/test.sh").write_text(script)
        (folder / "tests/driver.py").write_text(DRIVER)
        (folder / "tests/check.py").write_text(CHECK)
        (folder / "tests/inputs.json").write_text("[[1, 2]]")
        (folder / "tests/expected.json").write_text("[3]")
        (folder / "solution/solve.sh").write_text(f"cat > calc.py <<'E'\n{solution}E\n")
    return root


async def run_validation(
    cwd: Path, *words: str | Path, seconds: float = 300.0
) -> tuple[int, list[dict[str, Any]]]:
    ended = await rookery("validate", *words, "--json", cwd=cwd, seconds=seconds)
    return ended.code, [json.loads(line) for line in ended.out.splitlines()]


@pytest.mark.long
async def test_validation_reports_failed_tasks_and_can_be_shown_again(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", GOOD, GIVING, BROKEN)
    code, events = await run_validation(tmp_path, "tasks", "--no-cheats", "--provider", "local")
    report = events[-1]
    assert (code, report["failed"], report["exit_code"]) == (3, 2, 3), events
    found = {one["task"]: one for one in report["tasks"]}
    assert found["good"]["passed"]
    assert not found["good"]["weaker"]
    problems = {name: [t["problem"] for t in one["tried"] if t["problem"]] for name, one in found.items()}
    assert {
        name: [re.findall(r"\b\d\b", problem)[:2] for problem in found] for name, found in problems.items()
    } == {
        "good": [],
        "giving": [["1", "0"]],
        "broken": [["0", "1"]],
    }
    assert "ROOKERY_RUN" in found["giving"]["weaker"]
    code, again = await run_validation(tmp_path, "--resume", "latest")
    assert code == 3
    assert again[-1]["tasks"] == report["tasks"]


@pytest.mark.long
async def test_validation_of_one_task_and_of_an_unknown_task(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", GOOD, GIVING)
    wanted = ("--no-cheats", "--only", "good", "--provider", "local")
    code, events = await run_validation(tmp_path, "tasks", *wanted)
    assert code == 0
    assert [one["task"] for one in events[-1]["tasks"]] == ["good"]
    ended = await rookery("validate", "tasks", "--only", "gone", cwd=tmp_path)
    assert ended.code == 2
    assert "'gone'" in ended.err
    ended = await rookery("validate", cwd=tmp_path)
    assert ended.code == 2
    assert "--resume" in ended.err


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_every_task_is_tried_with_every_cheat(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", GOOD)
    code, events = await run_validation(tmp_path, "tasks", "--provider", "local", seconds=500.0)
    assert code == 0, events[-1]
    tried = {one["variant"] for one in events[-1]["tasks"][0]["tried"]}
    assert tried == {"solution", "nothing", *(f"{CHEAT}{cheat.name}" for cheat in CHEATS)}


@pytest.mark.long
async def test_stopped_validation_can_be_resumed(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", GOOD, GIVING, BROKEN)
    words = ("validate", "tasks", "--no-cheats", "--provider", "local", "-c", "1", "--json")
    async with start_command(*words, cwd=tmp_path) as process:
        assert process.stdout is not None
        async for line in process.stdout:
            if json.loads(line)["event"] == "rollout":
                process.send_signal(signal.SIGINT)
                break
        await wait_for_end(process)
    code, events = await run_validation(tmp_path, "--resume", "latest")
    assert code == 3
    assert {one["task"]: len(one["tried"]) for one in events[-1]["tasks"]} == {"good": 2, "giving": 2, "broken": 2}
    assert events[0]["done"] >= 1


def test_each_variant_is_its_own_task(tmp_path: Path) -> None:
    made = expand_variants(load_tasks(write_tasks(tmp_path, GOOD)))
    assert len({task.id for task in made}) == len(made) == 2 + len(CHEATS)
    assert {split_variant(task.id)[0] for task in made} == {"good"}
    assert split_variant("a / b / nothing") == ("a / b", "nothing")


def test_task_that_could_not_be_judged_has_not_passed() -> None:
    def record(variant: str, reward: float | None, **info: Any) -> Rollout:
        outcome = Completed() if reward is not None else Failed("task", "scoring.missing", "no verdict", "score")
        return Rollout(
            id="0.0", group=0, member=0, task=f"t / {variant}", outcome=outcome, reward=reward, info=info
        )

    fine = [record("solution", 1.0), record("nothing", 0.0), record(f"{CHEAT}x", 0.0)]
    assert summarize_validation(fine)[0].passed
    for worse in (
        record("nothing", 0.25),
        record(f"{CHEAT}x", 1.0),
        record("solution", 0.5),
        record("nothing", None),
    ):
        (one,) = summarize_validation([*fine, worse])
        assert not one.passed
        assert "FAILED" in "\n".join(format_report([one]))
    (one,) = summarize_validation([record("nothing", 0.0)])
    assert one.passed
    assert len(one.notes) == 1
    (one,) = summarize_validation([*fine, record("fresh", 1.0, grades=[{"mode": "fresh"}])])
    assert one.could_be_fresh
    assert format_report([one]) != format_report(summarize_validation(fine))
    (one,) = summarize_validation([], [("t / nothing", "its image is missing")])
    assert not one.passed


@pytest.mark.long
async def test_code_tasks_are_validated_with_their_solutions_and_programs_that_cheat(tmp_path: Path) -> None:
    case = {"stdin": "1 2", "stdout": "3"}
    rows: list[dict[str, Any]] = [
        {
            "id": "good",
            "cases": [case],
            "solution": "print(sum(map(int, input().split())))",
            "limits": {"wall": 20},
        },
        {"id": "wrong", "cases": [case], "solution": "print(4)"},
        {
            "id": "empty",
            "tests": "def check(f):\n    f(1)\n",
            "entry_point": "f",
            "solution": "def f(x): return x",
        },
        {"id": "open", "tests": ["assert f(1) == 2"]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": "Write it.", **row}) for row in rows))
    code, events = await run_validation(tmp_path, "rows.jsonl", "--provider", "local")
    assert (code, events[-1]["failed"]) == (3, 2), events
    tried = {
        (one["task"], each["variant"]): each["reward"] for one in events[-1]["tasks"] for each in one["tried"]
    }
    assert tried == {
        ("good", "solution"): 1,
        ("good", "nothing"): 0,
        ("good", "cheat:exit"): 0,
        ("wrong", "solution"): 0,
        ("wrong", "nothing"): 0,
        ("wrong", "cheat:exit"): 0,
        ("empty", "solution"): 1,
        ("empty", "nothing"): 0,
        ("empty", "cheat:exit"): 0,
        ("empty", "cheat:stub"): 1,
        ("open", "nothing"): 0,
        ("open", "cheat:exit"): 0,
    }
    assert [one["passed"] for one in events[-1]["tasks"]] == [True, False, False, True]
    (tmp_path / "questions.jsonl").write_text('{"prompt": "What is 1 + 1?", "answer": 2}')
    assert (await rookery("validate", "questions.jsonl", cwd=tmp_path)).code == 2
