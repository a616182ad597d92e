"""Grade submissions by unit tests, by inputs and outputs, or by a function of the user; each in fresh sandboxes.

Guarantees:
- a submission sees neither tests nor expected outputs, and holds no channel that a verdict comes over; where the
  tests must share its process, the grade says that it is weaker and why;
- the form of a task's tests is decided from the task alone, before any submission is seen: by the text of the
  tests, by its own solution or, without one, by a run of the tests without a submission. No submission changes it;
- whatever a submission sends, the result is a verdict about the submission;
- every case's verdict is in the grade; the reward is all or nothing, or with `partial` the share that passed;
- a grader's failure is the submission's, the task's or the machine's as `judging` decides: the minimum reward,
  `TaskError` or `SandboxError`, and never a guess.
"""

import asyncio
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from math import inf, isfinite
from typing import Any, Final

import msgspec

from rookery.core import SandboxError, SandboxSpec, TaskError, UsageError
from rookery.scoring.boxes import Gate, OpenBox, closed, limited
from rookery.scoring.code_tasks import CodeTask
from rookery.scoring.forms import Form, Uses, uses_of
from rookery.scoring.judging import FAILING, LOSSES, Judge
from rookery.scoring.programs import (
    DEFAULT_PROGRAM_LIMITS,
    NO_PROGRAM_LIMITS,
    VERDICTS,
    Program,
    ProgramLimits,
)
from rookery.scoring.rewards import Score, checked
from rookery.scoring.running import Programs, run_program
from rookery.scoring.testing import TestReport, TestResult, probe_tests, run_tests

GradeFunction = Callable[[str, CodeTask, Any], Awaitable[object] | object]
"""`async def grade(submission, task, sandbox) -> float`, or a plain one, which runs in a thread; or returns a
`Score`."""
SEPARATE: Final[tuple[Form, str]] = ("separate", "")
REMEMBERED: Final = 10_000
"""Tasks whose form is kept."""


class Grade(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a submission is worth, and why."""

    reward: float
    tests: tuple[TestResult, ...] = ()
    """Every test or case with its verdict."""
    form: Form = "separate"
    weaker: str = ""
    """Why the verdict is easier to forge than it should be; empty where it is not."""
    detail: str = ""
    printed: str = ""
    runs: int = 1
    """Times that the grader ran with the submission."""

    @property
    def passed(self) -> bool:
        return bool(self.tests) and all(test.verdict == "passed" for test in self.tests)

    @property
    def share(self) -> float:
        return sum(test.verdict == "passed" for test in self.tests) / len(self.tests) if self.tests else 0.0

    @property
    def score(self) -> Score:
        """As an environment returns it."""
        counts = {
            f"verdict/{name}": float(sum(t.verdict == name for t in self.tests))
            for name in VERDICTS
            if any(t.verdict == name for t in self.tests)
        }
        return Score(self.reward, {"share": self.share}, {**counts, "weaker": float(bool(self.weaker))})


class Forms:
    """Remembers in which form the tests of each task run. Graders of the same tasks share one."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[Form, str]] = OrderedDict()
        self._locks: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()

    async def decided(self, key: bytes, decide: Callable[[], Awaitable[tuple[Form, str]]]) -> tuple[Form, str]:
        """Return the form and why it is weaker; `decide` is called once for each key at a time."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if key not in self._known:
                self._known[key] = await decide()
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            return self._known[key]


class Grader:
    """Grades submissions of many tasks. `open_box`, `spec` and `gate`: where sandboxes come from, and how many at
    once.

    `isolated`: whether the provider keeps programs apart; if not, every grade is labelled weaker. `seconds`: for
    one grading; what a submission has not done by then has the verdict `time`.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        open_box: OpenBox,
        gate: Gate,
        *,
        isolated: bool = True,
        limits: ProgramLimits = NO_PROGRAM_LIMITS,
        partial: bool = False,
        low: float = 0.0,
        high: float = 1.0,
        forms: Forms | None = None,
        seconds: float = inf,
    ) -> None:
        self._spec = spec
        self._open_box = open_box
        self._gate = gate
        self._isolated = isolated
        self._limits = limits.over(DEFAULT_PROGRAM_LIMITS)
        self._partial = partial
        self._low, self._high = low, high
        self._forms = forms or Forms()
        self._seconds = seconds

    @classmethod
    def of(cls, programs: Programs, **settings: Any) -> "Grader":
        """In the sandboxes of an open `Programs`."""
        from rookery.sandboxes import is_isolated

        isolated = is_isolated(programs.spec.provider)
        return cls(programs.spec, programs.create, programs.gate, isolated=isolated, **settings)

    async def grade(self, task: CodeTask, submission: str) -> Grade:
        """`TaskError`: the task is at fault; `SandboxError`: the machine is."""
        last = asyncio.get_running_loop().time() + self._seconds
        by = self._by_cases if task.cases else self._by_tests
        grade = await by(task, submission, last)
        return self._labelled(grade)

    async def grade_by(self, function: GradeFunction, task: CodeTask, submission: str, *, wall: float) -> Score:
        """By a function of the user's, in a fresh sandbox, with its own limits; twice too long is the minimum.

        What it raises passes; what it returns is checked as every reward is.
        """
        limits = task.limits.over(self._limits)
        for _ in range(2):
            async with self._gate:
                box = await self._open_box(limited(self._spec, limits))
                try:
                    async with asyncio.timeout(wall):
                        if inspect.iscoroutinefunction(function):
                            value = await function(submission, task, box)
                        else:
                            value = await asyncio.to_thread(function, submission, task, box)
                    return checked(value, self._low, self._high)
                except TimeoutError:
                    continue
                finally:
                    await closed(box)
        return Score(self._low, {}, {"grader_time": 1.0})

    # ---- inputs and outputs

    async def _by_cases(self, task: CodeTask, submission: str, last: float) -> Grade:
        if not submission.strip():
            return self._nothing(len(task.cases), "the submission is empty")
        try:
            program = Program(
                source=submission,
                language=task.language,
                cases=task.cases,
                tolerance=task.tolerance,
                limits=task.limits,
            )
        except UsageError as error:  # the task was checked when it was read: this is about the submission
            return self._nothing(len(task.cases), f"the submission cannot be a program: {error}")
        result = await run_program(program, self._limits, self._spec, self._open_box, self._gate, last)
        tests = []
        for at, one in enumerate(result.cases):
            if one.verdict is None:
                raise SandboxError(f"case {at} could not be run: {one.detail}", cause=one.cause or None)
            tests.append(TestResult(name=f"case {at}", verdict=one.verdict, detail=one.detail))
        return self._grade(
            Grade(reward=self._low, tests=tuple(tests), detail=result.detail, printed=result.stderr)
        )

    def _nothing(self, count: int, why: str) -> Grade:
        tests = tuple(TestResult(name=f"case {at}", verdict="crash", detail=why) for at in range(count))
        return Grade(reward=self._low, tests=tests, detail=why)

    # ---- tests

    async def _by_tests(self, task: CodeTask, submission: str, last: float) -> Grade:
        uses = uses_of(task.tests, task.entry_point)
        if not uses.has_tests:
            raise TaskError(
                f"task {task.id!r}: its grader cannot be used: there is no test in its tests",
                cause="scoring.missing",
            )
        key = msgspec.msgpack.encode((task.id, task.tests, task.entry_point, task.solution))
        try:
            async with asyncio.timeout(self._seconds / 2 if isfinite(self._seconds) else None):
                form, why = await self._forms.decided(key, lambda: self._form_of(task, uses))
        except TimeoutError as error:
            raise SandboxError(
                f"task {task.id!r}: there was no time to find out how its tests run: raise limits.score",
                cause="scoring.timeout",
            ) from error
        grade = await self._judged(task, uses, submission, form, last)
        return msgspec.structs.replace(grade, weaker="; ".join(filter(None, (why, grade.weaker))))

    async def _form_of(self, task: CodeTask, uses: Uses) -> tuple[Form, str]:
        """Decide the form from the task alone; `TaskError` where its own solution passes in neither."""
        if uses.why_shared:
            return "shared", uses.why_shared
        if not task.solution:
            found = await self._probed(task, uses)
            return ("shared", f"the tests pass something that is not plain data: {found}") if found else SEPARATE
        report = await self._solved(task, uses, "separate")
        if report.end == "ended" and _passed(report):
            return SEPARATE
        report = await self._solved(task, uses, "shared")
        if report.end == "ended" and _passed(report):
            return "shared", "the task's own solution passes only in the tests' own process"
        if report.end == "ended":
            raise TaskError(f"task {task.id!r}: its own solution does not pass its tests: {_why(report)}")
        raise TaskError(
            f"task {task.id!r}: its grader cannot be used: with its own solution: {_why(report)}",
            cause="scoring.missing",
        )

    async def _solved(self, task: CodeTask, uses: Uses, form: Form) -> TestReport:
        """Run the tests with the task's own solution; a failure of the grader is tried once more."""
        losses = failures = 0
        while True:
            report = await self._tried(task, uses, task.solution, form)
            losses += report.end == "lost"
            failures += report.end in FAILING
            if losses >= LOSSES:
                raise SandboxError(f"the sandboxes of a grader were lost: {report.detail}")
            if report.end != "lost" and (report.end not in FAILING or failures > 1):
                return report

    async def _probed(self, task: CodeTask, uses: Uses) -> str:
        limits = task.limits.over(self._limits)
        for left in reversed(range(LOSSES)):
            try:
                return await probe_tests(
                    task.tests,
                    uses,
                    entry_point=task.entry_point,
                    limits=limits,
                    spec=self._spec,
                    open_box=self._open_box,
                    gate=self._gate,
                )
            except SandboxError as error:
                if not left or error.fault != "infra" or error.code == "sandbox.refused":
                    raise
        raise AssertionError("unreachable")

    async def _judged(self, task: CodeTask, uses: Uses, submission: str, form: Form, last: float) -> Grade:
        judge = Judge(has_solution=bool(task.solution))
        runs = 0
        while True:
            report = await self._tried(task, uses, submission, form, last)
            runs += 1
            step = judge.submission(report.end)
            while step == "solution":
                told = await self._tried(task, uses, task.solution, form)
                step = judge.solution(told.end)
            match step:
                case "again":
                    continue
                case "infra":
                    raise SandboxError(f"the sandboxes of a grader were lost: {report.detail}")
                case "task":
                    raise TaskError(
                        f"task {task.id!r}: its grader cannot be used: {_why(report)}", cause="scoring.missing"
                    )
            decided = f"the submission's own word decided a test: {report.decided}" if report.decided else ""
            grade = Grade(
                reward=self._low,
                tests=report.tests,
                form=form,
                weaker=decided,
                detail=report.detail,
                printed=report.printed,
                runs=runs,
            )
            return self._grade(grade) if step == "score" else grade

    async def _tried(
        self, task: CodeTask, uses: Uses, submission: str, form: Form, last: float = inf
    ) -> TestReport:
        try:
            return await self._run(task, uses, submission, form, last)
        except SandboxError as error:
            if error.fault != "infra" or error.code == "sandbox.refused":
                raise
            return TestReport(form=form, end="lost", detail=str(error))

    async def _run(self, task: CodeTask, uses: Uses, submission: str, form: Form, last: float) -> TestReport:
        return await run_tests(
            task.tests,
            submission,
            uses,
            form=form,
            entry_point=task.entry_point,
            limits=task.limits.over(self._limits),
            spec=self._spec,
            open_box=self._open_box,
            gate=self._gate,
            last=last,
        )

    # ---- rewards

    def _grade(self, grade: Grade) -> Grade:
        share = grade.share if self._partial else float(grade.passed)
        reward = self._low + share * (self._high - self._low)
        return msgspec.structs.replace(grade, reward=checked(reward, self._low, self._high).reward)

    def _labelled(self, grade: Grade) -> Grade:
        if self._isolated:
            return grade
        return msgspec.structs.replace(
            grade, weaker="; ".join(filter(None, (grade.weaker, "the sandboxes do not isolate")))
        )


def _passed(report: TestReport) -> bool:
    return bool(report.tests) and all(test.verdict == "passed" for test in report.tests)


def _why(report: TestReport) -> str:
    first = next((test for test in report.tests if test.verdict != "passed"), None)
    said = f"{first.name}: {first.verdict} {first.detail}".rstrip() if first is not None else report.end
    return f"{said} {report.detail if first is None or report.detail != first.detail else ''}".rstrip()[:1000]
