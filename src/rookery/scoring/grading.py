"""Grade programs by unit tests, by test cases (input and output) or by a user's function, in fresh sandboxes.

Guarantees:
- A submission sees neither tests nor expected outputs and has no access to the channel that carries the verdict.
  If the tests must run in the process of the submission, `Grade.weaker` gives the reason.
- Whether tests share the submission's process is decided from the task alone, before a submission is seen: from
  the source of the tests, by running them with the reference solution or, without one, without a submission.
- Malformed data from a submission never raises an exception. It leads to a verdict on that submission.
- The grade contains the verdict of every test. The reward is all or nothing, or the share of passed tests with
  `partial`.
- If the tests time out, crash or run out of memory, `FaultAttribution` decides between the minimum reward,
  `TaskError` and `SandboxError`.
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
from rookery.scoring.code_tasks import CodeTask
from rookery.scoring.fault_attribution import MAX_LOSSES, FaultAttribution
from rookery.scoring.fresh_sandboxes import OpenSandbox, SandboxGate, apply_limits, close_sandbox
from rookery.scoring.program_runner import ProgramRunner, run_program
from rookery.scoring.programs import (
    DEFAULT_PROGRAM_LIMITS,
    NO_PROGRAM_LIMITS,
    VERDICTS,
    Program,
    ProgramLimits,
)
from rookery.scoring.rewards import Score, check_reward
from rookery.scoring.test_analysis import Isolation, TestAnalysis, analyze_tests
from rookery.scoring.unit_tests import TestReport, TestResult, probe_tests, run_tests
from rookery.telemetry.operations import observe_grading

GradeFunction = Callable[[str, CodeTask, Any], Awaitable[object] | object]
"""A user's grading function: `async def grade(submission, task, sandbox) -> float`. It may return a `Score`
instead of a number. A function that is not `async` is called in another thread."""
IsolationDecision = tuple[Isolation, str]
"""The form in which a task's tests run: `separate` (in another sandbox than the submission) or `shared` (in the
submission's process); and the reason for `shared`, empty for `separate`."""
SEPARATE: Final[IsolationDecision] = ("separate", "")
MAX_CACHED: Final = 10_000
"""Maximum number of tasks whose decision an `IsolationCache` keeps."""


class Grade(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reward of a submission, with the verdicts that led to it."""

    reward: float
    tests: tuple[TestResult, ...] = ()
    """Every test or test case with its verdict."""
    isolation: Isolation = "separate"
    """`separate` if the tests ran in another sandbox than the submission, `shared` if in its process."""
    weaker: str = ""
    """The reason why a submission could forge this verdict more easily than usual; empty if it could not."""
    detail: str = ""
    printed: str = ""
    runs: int = 1
    """Number of times that the tests ran with the submission."""

    @property
    def passed(self) -> bool:
        """True if every test passed."""
        return bool(self.tests) and all(test.verdict == "passed" for test in self.tests)

    @property
    def passed_fraction(self) -> float:
        """The fraction of the tests that passed, from 0 to 1."""
        return sum(test.verdict == "passed" for test in self.tests) / len(self.tests) if self.tests else 0.0

    @property
    def score(self) -> Score:
        """The grade as a `Score`, which an environment's scoring returns."""
        counts = {
            f"verdict/{name}": float(sum(t.verdict == name for t in self.tests))
            for name in VERDICTS
            if any(t.verdict == name for t in self.tests)
        }
        return Score(self.reward, {"share": self.passed_fraction}, {**counts, "weaker": float(bool(self.weaker))})


class IsolationCache:
    """Remembers for each task whether its tests share the submission's process.

    All graders of a run should use the same cache, because a decision can take several executions of the tests.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, IsolationDecision] = OrderedDict()
        self._locks: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()

    async def get(self, key: bytes, decide: Callable[[], Awaitable[IsolationDecision]]) -> IsolationDecision:
        """Return the decision for the task that `key` identifies.

        If it is not cached, call `decide`. Concurrent calls for the same task wait for this call.
        """
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if key not in self._known:
                self._known[key] = await decide()
                if len(self._known) > MAX_CACHED:
                    self._known.popitem(last=False)
            return self._known[key]


class Grader:
    """Grades submissions for any number of tasks.

    Args:
        spec: The sandboxes in which submissions and tests run.
        open_sandbox: Creates a fresh sandbox.
        gate: Limits how many executions of tests or cases use sandboxes at once.
        isolated: False if the provider does not isolate programs. `Grade.weaker` of every grade then says so.
        limits: Limits for tasks that set none.
        partial: Whether the reward is proportional to the fraction of passed tests, instead of all or nothing.
        low: The reward if no test passes.
        high: The reward if all tests pass.
        isolation_cache: See `IsolationCache`.
        seconds: Time for one grading. Tests that have not ended by then get the verdict `time`.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        open_sandbox: OpenSandbox,
        gate: SandboxGate,
        *,
        isolated: bool = True,
        limits: ProgramLimits = NO_PROGRAM_LIMITS,
        partial: bool = False,
        low: float = 0.0,
        high: float = 1.0,
        isolation_cache: IsolationCache | None = None,
        seconds: float = inf,
    ) -> None:
        self._spec = spec
        self._open_sandbox = open_sandbox
        self._gate = gate
        self._isolated = isolated
        self._limits = limits.over(DEFAULT_PROGRAM_LIMITS)
        self._partial = partial
        self._low, self._high = low, high
        self._isolation_cache = isolation_cache or IsolationCache()
        self._seconds = seconds

    @classmethod
    def from_runner(cls, runner: ProgramRunner, **settings: Any) -> "Grader":
        """Create a grader that uses the sandboxes of an open `ProgramRunner`."""
        from rookery.sandboxes import is_isolated

        isolated = is_isolated(runner.spec.provider)
        return cls(runner.spec, runner.create, runner.gate, isolated=isolated, **settings)

    async def grade(self, task: CodeTask, submission: str) -> Grade:
        """Grade a submission by the task's tests or cases.

        Raise `TaskError` if the task is at fault, and `SandboxError` if sandboxes failed.
        """
        deadline = asyncio.get_running_loop().time() + self._seconds
        grade_by = self._grade_by_cases if task.cases else self._grade_by_tests
        with observe_grading("code"):
            grade = await grade_by(task, submission, deadline)
        if self._isolated:
            return grade
        return msgspec.structs.replace(
            grade, weaker=_join_reasons(grade.weaker, "the sandbox provider does not isolate programs")
        )

    async def grade_by(self, function: GradeFunction, task: CodeTask, submission: str, *, wall: float) -> Score:
        """Grade with a user's function, which gets a fresh sandbox and `wall` seconds.

        A function that times out runs once more. If it times out again, the submission gets the minimum reward.
        Exceptions of the function propagate. Its result is checked by `check_reward`.
        """
        with observe_grading("function"):
            return await self._grade_by(function, task, submission, wall)

    async def _grade_by(self, function: GradeFunction, task: CodeTask, submission: str, wall: float) -> Score:
        limits = task.limits.over(self._limits)
        for _ in range(2):
            async with self._gate:
                sandbox = await self._open_sandbox(apply_limits(self._spec, limits))
                try:
                    async with asyncio.timeout(wall):
                        if inspect.iscoroutinefunction(function):
                            value = await function(submission, task, sandbox)
                        else:
                            value = await asyncio.to_thread(function, submission, task, sandbox)
                    return check_reward(value, self._low, self._high)
                except TimeoutError:
                    continue
                finally:
                    await close_sandbox(sandbox)
        return Score(self._low, {}, {"grader_time": 1.0})

    # ---- test cases

    async def _grade_by_cases(self, task: CodeTask, submission: str, deadline: float) -> Grade:
        if not submission.strip():
            return self._fail_all_cases(len(task.cases), "the submission is empty")
        try:
            program = Program(
                source=submission,
                language=task.language,
                cases=task.cases,
                tolerance=task.tolerance,
                limits=task.limits,
            )
        except UsageError as error:  # the task was validated when it was loaded, so the submission is at fault
            return self._fail_all_cases(len(task.cases), f"the submission is not a valid program: {error}")
        result = await run_program(program, self._limits, self._spec, self._open_sandbox, self._gate, deadline)
        tests = []
        for number, case in enumerate(result.cases):
            if case.verdict is None:
                raise SandboxError(f"cannot run test case {number}: {case.detail}", cause=case.cause or None)
            tests.append(TestResult(name=f"case {number}", verdict=case.verdict, detail=case.detail))
        return self._with_reward(
            Grade(reward=self._low, tests=tuple(tests), detail=result.detail, printed=result.stderr)
        )

    def _fail_all_cases(self, count: int, reason: str) -> Grade:
        tests = tuple(TestResult(name=f"case {n}", verdict="crash", detail=reason) for n in range(count))
        return Grade(reward=self._low, tests=tests, detail=reason)

    # ---- unit tests

    async def _grade_by_tests(self, task: CodeTask, submission: str, deadline: float) -> Grade:
        analysis = analyze_tests(task.tests, task.entry_point)
        if not analysis.has_tests:
            raise TaskError(f"task {task.id!r}: its field tests defines no test", cause="scoring.missing")
        key = msgspec.msgpack.encode((task.id, task.tests, task.entry_point, task.solution))
        try:
            async with asyncio.timeout(self._seconds / 2 if isfinite(self._seconds) else None):
                isolation, reason = await self._isolation_cache.get(
                    key, lambda: self._decide_isolation(task, analysis)
                )
        except TimeoutError as error:
            raise SandboxError(
                f"task {task.id!r}: the trial that decides how to isolate its tests timed out: raise limits.score",
                cause="scoring.timeout",
            ) from error
        grade = await self._run_and_attribute(task, analysis, submission, isolation, deadline)
        return msgspec.structs.replace(grade, weaker=_join_reasons(reason, grade.weaker))

    async def _decide_isolation(self, task: CodeTask, analysis: TestAnalysis) -> IsolationDecision:
        """Decide from the task alone whether its tests share the submission's process.

        Raise `TaskError` if the reference solution passes in neither way.
        """
        if analysis.shared_reason:
            return "shared", analysis.shared_reason
        if not task.solution:
            found = await self._probe(task, analysis)
            return ("shared", f"the tests pass a value that is not plain data: {found}") if found else SEPARATE
        report = await self._run_solution(task, analysis, "separate")
        if report.end == "scored" and _all_passed(report):
            return SEPARATE
        report = await self._run_solution(task, analysis, "shared")
        if report.end == "scored" and _all_passed(report):
            return "shared", "the reference solution passes only in the same process as the tests"
        failure = _describe_failure(report)
        if report.end == "scored":
            raise TaskError(f"task {task.id!r}: its reference solution does not pass its tests: {failure}")
        raise TaskError(
            f"task {task.id!r}: its tests fail with its reference solution: {failure}", cause="scoring.missing"
        )

    async def _run_solution(self, task: CodeTask, analysis: TestAnalysis, isolation: Isolation) -> TestReport:
        """Run the tests with the reference solution. Repeat a failed execution once and replace lost sandboxes."""
        attribution = FaultAttribution(has_solution=False)
        while True:
            report = await self._run_tests(task, analysis, task.solution, isolation)
            match attribution.after_submission(report.end):
                case "rerun":
                    continue
                case "infra_fault":
                    raise SandboxError(f"the grader's sandboxes were lost: {report.detail}")
            return report

    async def _probe(self, task: CodeTask, analysis: TestAnalysis) -> str:
        limits = task.limits.over(self._limits)
        for left in reversed(range(MAX_LOSSES)):
            try:
                return await probe_tests(
                    task.tests,
                    analysis,
                    entry_point=task.entry_point,
                    limits=limits,
                    spec=self._spec,
                    open_sandbox=self._open_sandbox,
                    gate=self._gate,
                )
            except SandboxError as error:
                if not left or error.fault != "infra" or error.code == "sandbox.refused":
                    raise
        raise AssertionError("unreachable")

    async def _run_and_attribute(
        self, task: CodeTask, analysis: TestAnalysis, submission: str, isolation: Isolation, deadline: float
    ) -> Grade:
        """Run the tests with the submission, again if `FaultAttribution` asks for it, and return the grade."""
        attribution = FaultAttribution(has_solution=bool(task.solution))
        runs = 0
        action = "rerun"
        while action == "rerun":
            report = await self._run_tests(task, analysis, submission, isolation, deadline)
            runs += 1
            action = attribution.after_submission(report.end)
            while action == "run_solution":
                solved = await self._run_tests(task, analysis, task.solution, isolation)
                action = attribution.after_solution(solved.end)
        if action == "infra_fault":
            raise SandboxError(f"the grader's sandboxes were lost: {report.detail}")
        if action == "task_fault":
            raise TaskError(
                f"task {task.id!r} must be fixed: its tests give no verdict, not even with its reference "
                f"solution; with the submission: {_describe_failure(report)}",
                cause="scoring.missing",
            )
        grade = Grade(
            reward=self._low,
            tests=report.tests,
            isolation=isolation,
            weaker=f"a method of the submission decided a test: {report.decided}" if report.decided else "",
            detail=report.detail,
            printed=report.printed,
            runs=runs,
        )
        return self._with_reward(grade) if action == "score" else grade

    async def _run_tests(
        self, task: CodeTask, analysis: TestAnalysis, submission: str, isolation: Isolation, deadline: float = inf
    ) -> TestReport:
        try:
            return await run_tests(
                task.tests,
                submission,
                analysis,
                isolation=isolation,
                entry_point=task.entry_point,
                limits=task.limits.over(self._limits),
                spec=self._spec,
                open_sandbox=self._open_sandbox,
                gate=self._gate,
                deadline=deadline,
            )
        except SandboxError as error:
            if error.fault != "infra" or error.code == "sandbox.refused":
                raise
            return TestReport(isolation=isolation, end="lost", detail=str(error))

    def _with_reward(self, grade: Grade) -> Grade:
        fraction = grade.passed_fraction if self._partial else float(grade.passed)
        reward = self._low + fraction * (self._high - self._low)
        return msgspec.structs.replace(grade, reward=check_reward(reward, self._low, self._high).reward)


def _join_reasons(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _all_passed(report: TestReport) -> bool:
    return bool(report.tests) and all(test.verdict == "passed" for test in report.tests)


def _describe_failure(report: TestReport) -> str:
    first = next((test for test in report.tests if test.verdict != "passed"), None)
    text = f"{first.name}: {first.verdict} {first.detail}".rstrip() if first is not None else report.end
    return f"{text} {report.detail if first is None or report.detail != first.detail else ''}".rstrip()[:1000]
