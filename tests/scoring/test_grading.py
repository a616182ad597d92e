"""Grading: only correct submissions are rewarded, and every failure has the right fault."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rookery.core import SandboxError, SandboxSpec, ScoringError, TaskError
from rookery.scoring.code_tasks import CodeTask, parse_code_task
from rookery.scoring.grading import Grader
from rookery.scoring.program_runner import ProgramRunner
from rookery.scoring.programs import ProgramLimits
from rookery.scoring.rewards import Score
from tests.scoring.problems import HOSTILE, HOSTILE_PRELUDE, SECRET, SECRET_TESTS, TASKS, hostile

LIMITS = ProgramLimits(wall=60.0)


@asynccontextmanager
async def grader(provider: str = "local", **settings: Any) -> AsyncIterator[Grader]:
    async with ProgramRunner(provider, concurrency=4) as programs:
        yield Grader.from_runner(programs, limits=LIMITS, **settings)


@pytest.mark.long
@pytest.mark.parametrize("provider", ["local", "subprocess"])
async def test_correct_submissions_are_rewarded_and_wrong_ones_are_not(provider: str) -> None:
    chosen = TASKS if provider == "local" else [t for t in TASKS if t["id"] in ("total", "own-error", "sum-lines")]
    async with grader(provider) as one, asyncio.TaskGroup() as group:
        right = [group.create_task(one.grade(parse_code_task(row), row["solution"])) for row in chosen]
        wrong = [group.create_task(one.grade(parse_code_task(row), row["wrong"])) for row in chosen]
    for row, good, bad in zip(chosen, right, wrong, strict=True):
        assert good.result().reward == 1.0, (row["id"], good.result())
        assert bad.result().reward == 0.0, (row["id"], bad.result())
        assert bad.result().tests
        assert good.result().isolation == row.get("form", "separate"), row["id"]
        weaker = good.result().weaker
        assert bool(weaker) == (row.get("form") == "shared" or provider == "subprocess"), (row["id"], weaker)


@pytest.mark.long
@pytest.mark.parametrize("provider", ["local", "subprocess"])
async def test_hostile_submissions_get_no_reward(provider: str) -> None:
    names = list(HOSTILE) if provider == "local" else ["exits early", "equal to everything", "says verdicts"]
    task = CodeTask(id="secret", tests=SECRET_TESTS, entry_point="f", limits=LIMITS)
    async with grader(provider) as one, asyncio.TaskGroup() as group:
        grades = {name: group.create_task(one.grade(task, hostile(name))) for name in names}
        fine = group.create_task(one.grade(task, f"def f(x):\n    return {SECRET}\n"))
    for name, grade in grades.items():
        assert grade.result().reward == 0.0, (name, grade.result())
        assert grade.result().isolation == "separate", (name, grade.result())
        assert grade.result().tests[0].verdict in ("wrong_answer", "crash"), (name, grade.result())
    assert fine.result().reward == 1.0, fine.result()


async def test_shared_isolation_is_labelled_weaker_and_rewards_no_early_exit() -> None:
    tests = "try:\n    f(1)\nexcept Custom:\n    assert False\nassert f(2) == 4\nassert all([f(3) == 6])\n"
    task = CodeTask(id="shared", tests=tests)
    custom = "class Custom(Exception): pass\n"
    names = ("exits early", "exits at import", "sys.exit at import", "sys.exit in a call", "patches the builtins")
    async with grader() as one, asyncio.TaskGroup() as group:
        grades = {name: group.create_task(one.grade(task, custom + hostile(name))) for name in names}
        fine = group.create_task(one.grade(task, custom + "def f(x):\n    return 2 * x\n"))
    for name, grade in grades.items():
        assert grade.result().reward == 0.0, (name, grade.result())
    assert fine.result().reward == 1.0, fine.result()
    assert "Custom" in fine.result().weaker


@pytest.mark.long
async def test_every_case_has_its_verdict_and_partial_credit_is_the_share() -> None:
    ways = (
        "xs = []\ndef f(n):\n    if n == 1: return 1\n    if n == 2: return 0\n    if n == 3: raise KeyError(n)\n"
    )
    ways += (
        "    if n == 4:\n        while True: pass\n    if n == 5:\n        while True: xs.append('x' * 10000000)\n"
    )
    ways += "    if n == 6: import os; os.abort()\n    return n\n"
    task = CodeTask(
        id="ways",
        tests=[f"assert f({n}) == {n}" for n in range(1, 8)],
        limits=ProgramLimits(wall=8.0, memory=96 << 20),
    )
    async with grader(partial=True) as one:
        grade = await one.grade(task, ways)
    assert [t.verdict for t in grade.tests] == [
        *("passed", "wrong_answer", "crash", "time", "memory", "crash", "passed")
    ], grade
    assert grade.reward == pytest.approx(2 / 7)
    assert grade.tests[2].detail == "KeyError: 3"
    assert grade.score.metrics["verdict/crash"] == 2.0


async def test_submission_cannot_choose_the_weaker_isolation() -> None:
    # The tests pass on the value; if it could not be sent, they would seem to need the shared form.
    task = CodeTask(id="passes-on", tests="def check(c):\n    assert c(c(c(1))) == 12345\n", entry_point="f")
    nested = "def f(x):\n    out = []\n    for _ in range(190): out = [out, x]\n    return out\n"
    tagged = (
        'import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b\'r{"v":{"t":"ndarray",'
        '"v":["O",[1],"00"]}}\\n\')\n        except OSError: pass\n    return 1\n'
    )
    dated = "import datetime as d\ndef f(x):\n    return d.datetime(2020, 1, 1, tzinfo=d.timezone.utc)\n"
    ways = (nested, tagged, dated, hostile("a coroutine that is passed on"), HOSTILE_PRELUDE + "f = Same()\n")
    async with grader() as one, asyncio.TaskGroup() as group:
        grades = [group.create_task(one.grade(task, way)) for way in ways]
    for grade in grades:
        assert (grade.result().reward, grade.result().isolation) == (0.0, "separate"), grade.result()


async def test_class_that_equals_everything_gets_no_reward() -> None:
    (row,) = [row for row in TASKS if row["id"] == "stack"]
    async with grader() as one:
        grade = await one.grade(parse_code_task(row), HOSTILE_PRELUDE + "class Stack(Same): pass\n")
    assert (grade.reward, grade.isolation) == (0.0, "separate"), grade


async def test_cancelled_grading_leaves_no_sandbox() -> None:
    task = CodeTask(id="waits", tests=["assert f(1) == 1"], limits=ProgramLimits(wall=60.0))
    begun = asyncio.Event()
    async with ProgramRunner("local", concurrency=2) as programs:
        sandboxes = []

        async def watched(spec: SandboxSpec) -> Any:
            sandboxes.append(await programs.create(spec))
            if len(sandboxes) == 2:
                begun.set()
            return sandboxes[-1]

        one = Grader(programs.spec, watched, programs.gate)
        grading = asyncio.create_task(one.grade(task, "import time\ntime.sleep(60)\n"))
        await begun.wait()
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        for sandbox in sandboxes:
            with pytest.raises(SandboxError, match=sandbox.id):
                await sandbox.read("main.py")


@pytest.mark.long
async def test_tests_that_fail_with_the_reference_solution_are_a_task_fault() -> None:
    broken = CodeTask(id="broken", tests=["assert f(1) == 2"], solution="def f(x):\n    return 1\n")
    spinning = CodeTask(
        id="spins",
        tests="def test_it():\n    f(1)\n    while True: pass\n",
        solution="def f(x):\n    return x\n",
        limits=ProgramLimits(wall=1.0),
    )
    empty = CodeTask(id="empty", tests="def helper():\n    pass\n")
    async with grader() as one:
        with pytest.raises(TaskError, match="'broken'"):
            await one.grade(broken, "def f(x):\n    return 0\n")
        with pytest.raises(TaskError, match="'spins'") as failed:
            await one.grade(spinning, "def f(x):\n    return 0\n")
        assert failed.value.code == "scoring.missing"
        with pytest.raises(TaskError, match=r"'empty'.*\btests\b"):
            await one.grade(empty, "def f(x):\n    return 0\n")


@pytest.mark.long
async def test_submission_that_crashes_the_grader_twice_gets_the_minimum() -> None:
    task = CodeTask(
        id="huge",
        tests="def test_it():\n    n = f(1)\n    while n > 0: n -= 1\n",
        solution="def f(x):\n    return 1\n",
        limits=ProgramLimits(wall=4.0),
    )
    async with grader(low=-1.0) as one:
        grade = await one.grade(task, "def f(x):\n    return 10 ** 30\n")
    assert (grade.reward, grade.runs) == (-1.0, 2)
    assert grade.tests[0].verdict == "time"


async def test_lost_sandboxes_are_an_infra_fault() -> None:
    task = CodeTask(id="lost", tests=["assert f(1) == 1"])
    async with ProgramRunner("local", concurrency=2) as programs:
        made = 0

        async def failing(spec: SandboxSpec) -> Any:
            nonlocal made
            made += 1
            sandbox = await programs.create(spec)
            if made <= lost:
                await sandbox.close()
            return sandbox

        one = Grader(programs.spec, failing, programs.gate, limits=LIMITS)
        lost = 2
        assert (await one.grade(task, "def f(x):\n    return x\n")).reward == 1.0
        made, lost = 0, 100
        with pytest.raises(SandboxError) as caught:
            await one.grade(task, "def f(x):\n    return x\n")
        assert caught.value.fault == "infra"


async def test_user_function_gets_a_fresh_sandbox_and_its_reward_is_validated() -> None:
    from rookery.sandboxes import Command

    task = CodeTask(id="own")

    async def grade(submission: str, task: CodeTask, sandbox: Any) -> float:
        result = await sandbox.exec(Command(argv=("python3", "-c", submission), warm=True))
        return float(result.stdout)

    async def slow(submission: str, task: CodeTask, sandbox: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    def plain(submission: str, task: CodeTask, sandbox: Any) -> Score:
        return Score(0.25, {"style": 0.5})

    async with grader() as one:
        assert (await one.grade_by(grade, task, "print(0.5)", wall=60)).reward == 0.5
        assert (await one.grade_by(plain, task, "", wall=60)).parts == {"style": 0.5}
        assert (await one.grade_by(slow, task, "", wall=0.05)).reward == 0.0
        with pytest.raises(ScoringError):
            await one.grade_by(grade, task, "print('inf')", wall=60)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"id": "a"}, r"\btests\b.*\bcases\b"),
        ({"id": "a", "tests": "assert 1", "cases": [{"stdout": "1"}]}, r"\btests\b.*\bcases\b"),
        ({"id": "a", "tests": 5}, r"\btests\b"),
        ({"id": "a", "tests": "assert 1", "limits": {"wall": -1}}, r"limits\.wall\b.*-1"),
        ({"id": "a", "tests": "assert 1", "timeout_seconds": "soon"}, r"limits\.wall\b.*'soon'"),
        ({"id": "a", "cases": [{"stdin": 3}]}, r"cases\[0\]\.stdin"),
        ({"id": "a", "cases": [{"stdout": 3}]}, r"cases\[0\]\.stdout"),
        ({"id": "a", "tests": "assert 1", "entry_point": "a b"}, "entry_point"),
        ({"id": "a", "tests": "assert 1", "language": "c"}, r"\btests\b.*\bc\b.*\bcases\b"),
    ],
)
def test_invalid_row_raises_a_task_error_that_names_the_field(row: dict[str, Any], named: str) -> None:
    with pytest.raises(TaskError, match=f"'a'.*{named}"):
        parse_code_task(row)
