"""Grade what an agent left in its sandbox by running the task's test script.

Guarantees:
- Mode `fresh` (the default): the tests run in a sandbox that no agent used, over the agent's changes to the
  working directory and the task's artifacts, without network unless the task asks for it.
- Mode `shared` (on the task's request): the tests run over everything that the agent left, in a copy of its
  sandbox if the provider can make one. Start-up files of the system and of test runners are restored first, and
  the agent's processes are killed unless the task needs its services.
- The environment variable `ROOKERY_RUN` names a launcher with which the test script can run the submission as
  another user. Then the submission cannot write the verdict. If the script does not use the launcher,
  `SweGrade.weaker` gives the reason why the verdict is easier to forge.
- The agent's sandbox never contains a test, unless the tests have to run in it; then they are removed afterwards.
- The time is divided among all executions of the tests that may be needed (the submission twice, the reference
  solution once). Time that tests spend on a submission never counts against the infrastructure or the task.
- A task is found at fault only by executions without a submission: with its reference solution, or in an untouched
  sandbox.
- Every sandbox opened here is closed on return.
"""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from rookery.core import ExecResult, SandboxError, SandboxSpec, ScoringError, TaskError
from rookery.core.errors import describe
from rookery.sandboxes import Sandbox
from rookery.scoring.fault_attribution import FaultAttribution, GraderExit
from rookery.scoring.fresh_sandboxes import OpenSandbox, close_sandbox
from rookery.scoring.rewards import Score
from rookery.scoring.swe import protected_files, reward_files, submission_transfer, test_script
from rookery.scoring.swe.preparation import ROOT, Deadline, PreparedSandbox, describe_result, prepare, run_script
from rookery.scoring.swe.reference_solution import SolutionTimeout, run_solution
from rookery.scoring.swe.stored_submission import pack_submission
from rookery.scoring.swe.submission_transfer import SubmissionFiles, UngradableSubmission, staging_directory
from rookery.scoring.swe.test_script import TestsCannotStart
from rookery.tasks.swe import RUNS_PER_GRADING, GradeMode, SweStep, SweTask
from rookery.telemetry.operations import observe_grading

TAIL: Final = 4_000
"""A grade contains at most this many bytes from the end of the script's stdout, and of its stderr."""
TRANSFER_SECONDS: Final = 60.0
"""Seconds reserved in each execution of the tests for creating sandboxes and copying files. If the whole grading
has little time, 5% of it are reserved instead."""
START_SECONDS: Final = 2.0
"""Tests that still run after this many seconds count as started successfully."""
_NAME_ERRORS: Final = (errno.ENAMETOOLONG, errno.ELOOP, errno.EILSEQ, errno.EINVAL, errno.ENOTDIR, errno.EISDIR)
"""Error numbers that are caused by the paths of a submission, not by the machine."""
ONE_USER: Final = "the sandbox has only one user, so the program under test runs as the same user as the grader"
SAME_USER: Final = "the tests run the submission as their own user, not through ROOKERY_RUN"
ROOT_SERVICES: Final = "the agent's services run as root, like the grader"
NO_SNAPSHOT: Final = "the provider has no snapshots, so files that the agent planted cannot be detected"
VOLATILE: Final = ("/tmp", "/run", "/var/tmp", "/dev", "/proc", "/sys", "/logs", "/tests", "/solution", "/grader")  # noqa: S108
_LIST_PROGRAMS_SCRIPT: Final = """
IFS=:; set -f; set -- "$@" $PATH; set +f
for d; do [ -d "$d" ] && [ ! -L "$d" ] && for f in "$d"/*; do printf '%s\\n' "$f"; done; done; exit 0
"""
_WRITE_CHECK_SCRIPT: Final = (
    f"printf x > {reward_files.DIRECTORY}/.write-check && rm {reward_files.DIRECTORY}/.write-check"
)
_SHARE_SCRIPT: Final = 'for d; do [ -d "$d" ] && chmod -R a+rwX -- "$d"; done; exit 0'


class SweGrade(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The score of a submission, with the output of the test script."""

    score: Score
    mode: GradeMode = "fresh"
    source: reward_files.RewardSource | Literal["none"] = "none"
    """The source of the reward; `none` if the submission got the minimum reward without a verdict."""
    weaker: str = ""
    """The reason why a submission could forge this verdict more easily than usual; empty if it could not."""
    detail: str = ""
    stdout: str = ""
    stderr: str = ""
    runs: int = 1
    """Number of times that the test script ran with the submission."""
    left_out: int = 0
    """Changed entries that were not copied: unreadable, removed meanwhile, or not a file, directory or link."""

    @property
    def reward(self) -> float:
        """The reward of the submission."""
        return self.score.reward

    @property
    def parts(self) -> dict[str, float]:
        """The named parts of the reward."""
        return self.score.parts


class _GraderRole(NamedTuple):
    """The users that run the test script and the program under test."""

    grader: str | None
    program: str | None
    strong: bool
    """True if the script runs the submission as another user, through `ROOKERY_RUN`."""
    weaker: str
    """Why a submission could forge the verdict more easily than usual; empty if it could not."""


class _ScriptRun(NamedTuple):
    """The end of one run of the test script."""

    end: GraderExit
    score: Score | None = None
    source: reward_files.RewardSource | Literal["none"] = "none"
    result: ExecResult = ExecResult(status="lost")
    error: Exception | None = None
    left_out: int = 0


class SweGrader:
    """Grades the steps of one SWE task.

    `open` creates fresh sandboxes. Rewards range from `low` to `high`.
    With `fresh_always`, a task that asks for mode `shared` is graded in a fresh sandbox too, with all changes
    that the agent made in the file system, unless its tests need services that the agent started.
    `on_submission` is called with the index of a step and its submission as text, before the tests run. It is not
    called for a submission that is too large to be stored, or in mode `shared`.
    """

    def __init__(
        self,
        open: OpenSandbox,  # noqa: A002
        task: SweTask,
        *,
        low: float = 0.0,
        high: float = 1.0,
        fresh_always: bool = False,
        on_submission: Callable[[int, str], None] | None = None,
    ) -> None:
        self._open = open
        self._task = task
        self._low, self._high = low, high
        self._fresh_always = fresh_always
        self._on_submission = on_submission
        self._solution_ends: dict[int, GraderExit] = {}

    async def grade(self, sandbox: Sandbox, prepared: PreparedSandbox, step: int, *, timeout: float) -> SweGrade:
        """Grade the step with this index from what the agent left in `sandbox`.

        Raise `TaskError` or `ScoringError` if the task is at fault, and `SandboxError` if sandboxes were lost or
        did not respond in time. The agent's processes, including its shells, are killed unless the tests need
        services that the agent started.
        """
        deadline = Deadline(timeout)
        mode = self.get_mode(self._task.steps[step])
        step_grading = _StepGrading(
            task=self._task,
            number=step,
            mode=mode,
            prepared=prepared,
            deadline=deadline,
            wall=get_wall_time(self._task.steps[step].verifier.timeout, timeout),
            open_sandbox=self._open,
            low=self._low,
            high=self._high,
            solution_ends=self._solution_ends,
            on_submission=self._on_submission,
        )
        with observe_grading("swe"):
            return await step_grading.grade(sandbox)

    def get_mode(self, step: SweStep) -> GradeMode:
        """Return where the tests of a step run: in a fresh sandbox, or in the agent's."""
        verifier = step.verifier
        if verifier.mode == "shared" and (verifier.services or not self._fresh_always):
            return "shared"
        return "fresh"


class _StepGrading:
    """Grades one step of a SWE task.

    The step's tests may run several times, to find out whether the submission or something else made them fail.
    The attributes are the same for all of these test runs.
    """

    def __init__(
        self,
        *,
        task: SweTask,
        number: int,
        mode: GradeMode,
        prepared: PreparedSandbox,
        deadline: Deadline,
        wall: float,
        open_sandbox: OpenSandbox,
        low: float,
        high: float,
        solution_ends: dict[int, GraderExit],
        on_submission: Callable[[int, str], None] | None,
    ) -> None:
        self._task = task
        self._number = number
        self._step = task.steps[number]
        self._verifier = self._step.verifier
        self._mode = mode
        self._prepared = prepared
        self._deadline = deadline
        self._wall = wall
        self._open_sandbox = open_sandbox
        self._low, self._high = low, high
        self._solution_ends = solution_ends
        self._on_submission = on_submission
        self._submitted: Sandbox | None = None
        """The agent's sandbox, unlike those with the reference solution or without a submission."""
        self._own = (task.workdir, *task.artifacts)
        """Directories whose changes belong to the submission."""
        self._role = self._get_role()

    async def grade(self, sandbox: Sandbox) -> SweGrade:
        attribution = FaultAttribution(has_solution=bool(self._step.solution))
        runs = 0
        last: _ScriptRun | None = None
        self._submitted = sandbox
        action = "rerun"
        while action == "rerun":
            try:
                tried = await self._run_once(sandbox)
            except SandboxError as error:
                if error.code != "scoring.timeout" or last is None or last.end == "lost":
                    raise
                action = "minimum"  # an earlier run, which failed because of the submission, used up the time
                break
            last, runs = tried, runs + 1
            action = attribution.after_submission(last.end)
            while action == "run_solution":
                action = attribution.after_solution(await self._run_with_solution(sandbox))
            if action == "run_untouched":
                end = await self._run_untouched(sandbox)
                action = attribution.after_untouched(end) if end is not None else "minimum"
        assert last is not None
        if action == "infra_fault":
            reason = describe(last.error) if last.error else "no detail"
            raise SandboxError(f"the grader's sandboxes were lost: {reason}")
        if action == "invalid_verdict":
            assert last.error is not None
            raise last.error
        if action == "task_fault":
            raise TaskError(
                f"task {self._task.id} must be fixed: its tests give no verdict, not even with its reference "
                f"solution; with the submission: {describe_result(last.result)}",
                cause="scoring.missing",
            )
        return self._make_grade(last, runs, scored=action == "score")

    def _make_grade(self, run: _ScriptRun, runs: int, *, scored: bool) -> SweGrade:
        score = run.score if scored and run.score is not None else Score(self._low)
        metrics = {"grade/weaker": float(bool(self._role.weaker)), "grade/runs": float(runs)}
        if not scored:
            metrics[f"grade/{run.end}"] = 1.0
        detail = "" if scored else describe_result(run.result)
        if run.error is not None:
            detail = describe(run.error)
        return SweGrade(
            score=Score(score.reward, score.parts, {**score.metrics, **metrics}),
            mode=self._mode,
            source=run.source,
            weaker=self._role.weaker,
            detail=detail,
            stdout=_decode_tail(run.result.stdout),
            stderr=_decode_tail(run.result.stderr),
            runs=runs,
            left_out=run.left_out,
        )

    def _get_role(self) -> _GraderRole:
        prepared = self._prepared
        if not test_script.is_strong(self._task, self._step):
            return _GraderRole(self._verifier.user if prepared.multi_user else None, None, False, SAME_USER)
        if not prepared.multi_user:
            return _GraderRole(None, None, True, ONE_USER)
        program = test_script.UNPRIVILEGED_USER if prepared.agent == 0 else None
        weaker = ""
        if self._mode == "shared" and not prepared.snapshot:
            weaker = NO_SNAPSHOT
        elif self._mode == "shared" and self._verifier.services and prepared.agent == 0:
            weaker = ROOT_SERVICES
        return _GraderRole(ROOT, program, True, weaker)

    # ---- one run

    async def _run_once(self, sandbox: Sandbox) -> _ScriptRun:
        """Run the test script once over what an agent (or the reference solution) left in `sandbox`."""
        try:
            return await (self._run_fresh(sandbox) if self._mode == "fresh" else self._run_shared(sandbox))
        except UngradableSubmission as error:
            return _ScriptRun("crash", error=error)
        except TestsCannotStart as error:
            if await self._run_untouched(sandbox, seconds=START_SECONDS) is None:
                raise TaskError(
                    f"task {self._task.id}: its tests cannot be started: {error}", cause="task.image"
                ) from error
            reason = f"the tests cannot start in the submission's sandbox: {error}"
            return _ScriptRun("crash", error=UngradableSubmission(reason))
        except TimeoutError as error:
            raise SandboxError(
                "a sandbox for grading did not respond within the time for grading: raise limits.score",
                cause="scoring.timeout",
            ) from error
        except OSError as error:
            reason = f"cannot copy the submission's files: {describe(error)}"[:1000]
            if error.errno in _NAME_ERRORS:
                return _ScriptRun("crash", error=UngradableSubmission(reason))
            raise SandboxError(reason) from error
        except SandboxError as error:
            if error.code == "sandbox.exhausted":
                return _ScriptRun("memory", error=error)
            if error.code != "sandbox.lost":
                raise
            return _ScriptRun("lost", error=error)

    async def _run_fresh(self, sandbox: Sandbox) -> _ScriptRun:
        await test_script.kill_processes(sandbox, self._deadline)
        with staging_directory() as staging:
            async with self._pristine_sandbox(sandbox) as fresh:
                tops, files = await self._collect_submission(sandbox, fresh, staging)
                if sandbox is self._submitted:
                    await self._store_submission(files, tops)
                await submission_transfer.install(fresh, files, tops, self._deadline)
                run = await self._run_script(fresh, used=bool(self._task.artifacts))
        return run._replace(left_out=files.left_out)

    async def _store_submission(self, files: SubmissionFiles, tops: tuple[str, ...]) -> None:
        if self._on_submission is not None and (text := await asyncio.to_thread(pack_submission, files, tops)):
            self._on_submission(self._number, text)

    async def _collect_submission(
        self, sandbox: Sandbox, fresh: Sandbox, staging: Path
    ) -> tuple[tuple[str, ...], SubmissionFiles]:
        """Copy the agent's changes that are graded to the host.

        Return the directories that contain them, and the copies.
        """
        own = self._own
        if not self._prepared.snapshot:
            return own, await submission_transfer.collect_directories(sandbox, own, staging, self._deadline)
        changes = await self._diff(sandbox)
        excluded = set() if self._role.strong else await self._find_protected(sandbox, fresh, changes)
        tops: tuple[str, ...] = own
        if self._verifier.mode == "shared":  # graded in a fresh sandbox, but over the whole file system
            remove, restore = protected_files.find_system_changes(
                changes, own, await _list_programs(fresh, self._deadline)
            )
            excluded |= remove | restore
            tops = tuple(sorted({f"/{path.split('/')[1]}" for path in changes} - set(VOLATILE)))
            tops = tuple(top for top in tops if top != "/") or own
            excluded |= {path for path in changes if protected_files.is_below(path, VOLATILE)}
        files = await submission_transfer.collect_changes(
            sandbox, changes, tops, excluded, staging, self._deadline
        )
        return tops, files

    async def _run_shared(self, sandbox: Sandbox) -> _ScriptRun:
        services, snapshot = self._verifier.services, self._prepared.snapshot
        if not services:
            await test_script.kill_processes(sandbox, self._deadline)
        changes = await self._diff(sandbox) if snapshot else {}
        if services or not snapshot:
            try:
                return await self._run_in_used(sandbox, sandbox, changes)
            finally:
                with contextlib.suppress(SandboxError):  # a lost sandbox contains no tests any more
                    await test_script.remove_tests(
                        sandbox, self._step, multi_user=self._prepared.multi_user, deadline=self._deadline
                    )
        copy = await self._copy_sandbox(sandbox)
        try:
            return await self._run_in_used(copy, sandbox, changes)
        finally:
            await close_sandbox(copy)

    async def _copy_sandbox(self, sandbox: Sandbox) -> Sandbox:
        """Copy the agent's sandbox. Raise `UngradableSubmission` if the agent's own files prevent that."""
        deadline = self._deadline
        try:
            final = await sandbox.snapshot(timeout=deadline.remaining())
            return await sandbox.fork(final, timeout=deadline.remaining(), spec=self._offline_spec(sandbox.spec))
        except SandboxError as error:
            await self._raise_if_lost(sandbox, error)
            async with self._pristine_sandbox(
                sandbox
            ):  # a fork of the initial state succeeds, so the agent's files are the cause
                raise UngradableSubmission(
                    f"the submission's sandbox cannot be copied: {describe(error)}"[:1000]
                ) from error

    async def _run_in_used(self, target: Sandbox, sandbox: Sandbox, changes: Mapping[str, str]) -> _ScriptRun:
        """Run the script in a sandbox that an agent used, after reverting its changes to protected files."""
        deadline = self._deadline
        if changes:
            with staging_directory() as staging:
                async with self._pristine_sandbox(sandbox) as fresh:
                    remove, restore = protected_files.find_system_changes(
                        changes, self._own, await _list_programs(fresh, deadline)
                    )
                    protected = set() if self._role.strong else await self._find_protected(target, fresh, changes)
                    remove |= {path for path in protected if changes[path] == "added"}
                    restore |= {path for path in protected if changes[path] != "added"}
                    restore = {path for path in restore if not protected_files.is_below(path, VOLATILE)}
                    await submission_transfer.revert(target, fresh, remove, restore, staging, deadline)
            if not self._verifier.services:
                # A planted shell may have started processes when it ran the first command of `revert`.
                await test_script.kill_processes(target, deadline)
        return await self._run_script(target, used=True)

    async def _run_script(self, sandbox: Sandbox, *, used: bool, wall: float | None = None) -> _ScriptRun:
        """Copy the tests into a sandbox that is otherwise ready, run them and read the verdict."""
        task, role, deadline = self._task, self._role, self._deadline
        if role.strong and role.program is not None:
            await run_script(sandbox, _SHARE_SCRIPT, *self._own, deadline=deadline)
        await test_script.place_tests(
            sandbox,
            task,
            self._step,
            multi_user=self._prepared.multi_user,
            used=used,
            grader=role.grader,
            strong=role.strong,
            deadline=deadline,
        )
        if deadline.expired:
            raise SandboxError(
                "grading ran out of time before the tests started: raise limits.score", cause="scoring.timeout"
            )
        result = await test_script.run_test_script(
            sandbox,
            task,
            self._step,
            grader=role.grader,
            program=role.program,
            strong=role.strong,
            wall=deadline.remaining(self._wall if wall is None else wall),
        )
        if result.status == "lost":
            error = SandboxError(f"the grader's sandbox was lost: {result.detail}")
            return _ScriptRun("lost", result=result, error=error)
        if result.status == "time_limit":
            return _ScriptRun("time", result=result)
        if result.exit_code is None:
            return _ScriptRun("memory" if result.status == "memory_limit" else "crash", result=result)
        if result.exit_code in (126, 127) and result.detail:
            raise TestsCannotStart(result.detail)
        if not self._verifier.services:
            # Processes left by the tests could still write to the verdict, and processes left by the program could
            # use up the process limit, which we need to read it.
            user = (role.program or "") if role.strong else role.grader
            await test_script.kill_processes(sandbox, deadline, user)
        return await self._read_verdict(sandbox, result)

    async def _read_verdict(self, sandbox: Sandbox, result: ExecResult) -> _ScriptRun:
        try:
            reward_file = await reward_files.read_reward_file(sandbox, timeout=self._deadline.remaining())
            if reward_file is not None:
                source, data = reward_file
                score = reward_files.parse_reward(source, data, self._low, self._high)
                return _ScriptRun("scored", score, source, result)
            if self._verifier.reward_from_exit:
                return _ScriptRun(
                    "scored", Score(self._high if result.exit_code == 0 else self._low), "exit", result
                )
            reward_files.raise_fault("missing", f"wrote no reward file: {describe_result(result)}")
        except ScoringError as error:
            if error.code in ("scoring.missing", "scoring.empty") and await self._failed_early(sandbox, result):
                end: GraderExit = "memory" if result.status == "memory_limit" else "crash"
                return _ScriptRun(end, result=result, error=error)
            return _ScriptRun("invalid", result=result, error=error)

    async def _failed_early(self, sandbox: Sandbox, result: ExecResult) -> bool:
        """Return whether a script that wrote no verdict failed, or had no disk space left for a verdict."""
        if result.exit_code:
            return True
        check = await run_script(sandbox, _WRITE_CHECK_SCRIPT, user=self._role.grader, deadline=self._deadline)
        return not check.ok

    # ---- sandboxes

    async def _diff(self, sandbox: Sandbox) -> Mapping[str, str]:
        try:
            return await sandbox.diff(self._prepared.snapshot, timeout=self._deadline.remaining())
        except SandboxError as error:
            await self._raise_if_lost(sandbox, error)
            raise UngradableSubmission(f"the submission's changes cannot be listed: {describe(error)}") from error

    async def _raise_if_lost(self, sandbox: Sandbox, error: SandboxError) -> None:
        """Raise `error` if the sandbox is lost. Otherwise the agent's own files have caused the error."""
        if (await run_script(sandbox, "exit 0", deadline=self._deadline)).status == "lost":
            raise error

    async def _find_protected(self, sandbox: Sandbox, fresh: Sandbox, changes: Mapping[str, str]) -> set[str]:
        """Return the changed paths that are not graded because they could influence the test runner."""
        own = self._own
        inside = {path: how for path, how in changes.items() if protected_files.is_below(path, own)}
        found = protected_files.find_protected(inside, own)
        for path, how in inside.items():
            name = path.rpartition("/")[2]
            if name not in protected_files.MIXED_FILES or how == "removed":
                continue
            now = await _read_text(sandbox, path, self._deadline)
            before = await _read_text(fresh, path, self._deadline) if how == "changed" else b""
            # A file that cannot be read may configure anything.
            if now is None or before is None or not protected_files.same_runner_settings(name, before, now):
                found.add(path)
        found |= {
            path
            for path in protected_files.find_shadowing(changes, own)
            if not test_script.task_mentions(self._task, self._step, path)
        }
        return found | {path for path in changes if found and protected_files.is_below(path, found)}

    @asynccontextmanager
    async def _pristine_sandbox(self, sandbox: Sandbox) -> AsyncIterator[Sandbox]:
        """Open a sandbox in the state that the agent's sandbox had when the agent received it."""
        spec, snapshot, deadline = self._offline_spec(sandbox.spec), self._prepared.snapshot, self._deadline
        if snapshot:
            fresh = await sandbox.fork(snapshot, timeout=deadline.remaining(), spec=spec)
        else:
            fresh = await self._open_sandbox(spec)
        try:
            if not snapshot:
                await prepare(fresh, self._task, timeout=deadline.remaining())
            yield fresh
        finally:
            await close_sandbox(fresh)

    def _offline_spec(self, spec: SandboxSpec) -> SandboxSpec:
        """Return `spec` with the network access that the task grants its tests, which is none by default."""
        verifier = self._verifier
        return msgspec.structs.replace(
            spec, network=verifier.network or "none", allow=verifier.allow if verifier.network == "allow" else ()
        )

    # ---- runs without a submission

    async def _run_with_solution(self, sandbox: Sandbox) -> GraderExit:
        """Run the test script with the reference solution and return how it ended.

        The result is cached for each step. `not_run` means that too little time was left.
        """
        if self._number not in self._solution_ends:
            try:
                async with self._pristine_sandbox(sandbox) as other:
                    for step in self._task.steps[: self._number + 1]:
                        await run_solution(
                            other,
                            self._task,
                            step,
                            multi_user=self._prepared.multi_user,
                            deadline=self._deadline,
                        )
                    end = (await self._run_once(other)).end
            except SolutionTimeout:
                return "not_run"
            except SandboxError as error:
                if error.code != "scoring.timeout":
                    raise
                return "not_run"
            if end == "time" and (self._deadline.expired or self._wall < self._verifier.timeout):
                return "not_run"  # it had less time than the task grants its tests
            if end == "lost":
                return end
            self._solution_ends[self._number] = end
        return self._solution_ends[self._number]

    async def _run_untouched(self, sandbox: Sandbox, *, seconds: float | None = None) -> GraderExit | None:
        """Run the test script without any submission. Return how it ended, or None if it cannot be started.

        With `seconds`, stop the script after that time; use this to see whether it starts.
        """
        wall = self._wall if seconds is None else min(seconds, self._wall)
        async with self._pristine_sandbox(sandbox) as other:
            try:
                return (await self._run_script(other, used=False, wall=wall)).end
            except TestsCannotStart:
                return None


def get_wall_time(requested: float, total: float) -> float:
    """Return the seconds that one execution of the tests may take, so that all of a grading fit into `total`.

    The result is at most `requested`, but at least 1.
    """
    overhead = min(TRANSFER_SECONDS, 0.05 * total)
    return max(1.0, min(requested, total / RUNS_PER_GRADING - overhead))


async def _list_programs(sandbox: Sandbox, deadline: Deadline) -> set[str]:
    result = await run_script(
        sandbox, _LIST_PROGRAMS_SCRIPT, *protected_files.PROGRAM_DIRECTORIES, deadline=deadline
    )
    return set(result.stdout.decode("utf-8", "surrogateescape").splitlines())


async def _read_text(sandbox: Sandbox, path: str, deadline: Deadline) -> bytes | None:
    """Return the content of a file, or None if it is not a regular file that can be read."""
    try:
        return await sandbox.read(path, limit=1 << 20, timeout=deadline.remaining())
    except OSError:
        return None


def _decode_tail(data: bytes) -> str:
    return data[-TAIL:].decode("utf-8", "replace")
