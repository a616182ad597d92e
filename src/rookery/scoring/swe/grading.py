"""Grade what an agent left in its sandbox.

Guarantees:
- fresh, the default: the tests run in a box that no agent was in, over what it changed in the working folder and
  the task's artifacts, with no network unless the task says so;
- shared, where a task asks for it: over all that the agent left, in a copy of its box where the provider can make
  one, with the system's and the runners' start-up files as they were, and none of the agent's processes unless the
  task says that they must live;
- in both, a script that runs the submission through `ROOKERY_RUN` is another user than the submission, and its
  verdict lies where only that user can write; where it is not so, the grade is labelled weaker, and says why;
- the agent's box is never shown a test, unless it has to be graded in itself; then nothing of them is left in it;
- the time is divided among all runs that the rules may need (the submission twice, the task's own solution once),
  and time that the tests take with a submission is never held against the machine or the task;
- a task is at fault only by what happens without a submission: with its own solution, or in an untouched sandbox;
- whatever happens, every box that was opened here is closed when this returns.
"""

import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from rookery.core import ExecResult, SandboxError, SandboxSpec, ScoringError, TaskError
from rookery.core.errors import describe
from rookery.sandboxes import Sandbox
from rookery.scoring.boxes import closed
from rookery.scoring.rewards import Score
from rookery.scoring.swe import changes as moving
from rookery.scoring.swe import planted, scripts, verdicts
from rookery.scoring.swe.changes import Taken, TooMuch, host_folder
from rookery.scoring.swe.prepare import ROOT, Clock, Prepared, prepare, run, told
from rookery.scoring.swe.refereeing import End, Referee
from rookery.scoring.swe.scripts import CannotStart
from rookery.scoring.swe.solving import OutOfTime, solve
from rookery.tasks.swe import GRADED_RUNS, GradeMode, SweStep, SweTask

OpenBox = Callable[[SandboxSpec], Awaitable[Sandbox]]
TAIL: Final = 4_000
MOVE_SECONDS: Final = 60.0
"""Kept for each run to create sandboxes and move files; less where the whole grading has little time."""
START_SECONDS: Final = 2.0
"""After which tests that still run have been started."""
_OF_NAMES: Final = (errno.ENAMETOOLONG, errno.ELOOP, errno.EILSEQ, errno.EINVAL, errno.ENOTDIR, errno.EISDIR)
"""What a submission's own paths do to a file system, on any machine."""
ONE_USER: Final = "the box has one user, so the program under test can be no other than the grader"
AS_ITSELF: Final = "the tests run the submission as themselves, not through ROOKERY_RUN"
ROOT_SERVES: Final = "what the agent left running runs as root, as the grader does"
UNCOMPARED: Final = "the provider cannot compare the box with what it was, so what was planted cannot be found"
VOLATILE: Final = ("/tmp", "/run", "/var/tmp", "/dev", "/proc", "/sys", "/logs", "/tests", "/solution", "/grader")  # noqa: S108
_PROGRAMS: Final = """
IFS=:; set -f; set -- "$@" $PATH; set +f
for d; do [ -d "$d" ] && [ ! -L "$d" ] && for f in "$d"/*; do printf '%s\\n' "$f"; done; done; exit 0
"""
_ROOM: Final = f"printf x > {verdicts.PLACE}/.room && rm {verdicts.PLACE}/.room"
_SHARE: Final = 'for d; do [ -d "$d" ] && chmod -R a+rwX -- "$d"; done; exit 0'


class SweGrade(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a submission is worth, and why."""

    score: Score
    mode: GradeMode = "fresh"
    source: verdicts.Source | Literal["none"] = "none"
    """What the reward was read from."""
    weaker: str = ""
    """Why the verdict is easier to forge than it should be; empty where it is not."""
    detail: str = ""
    stdout: str = ""
    stderr: str = ""
    runs: int = 1
    left_out: int = 0
    """Files of the submission that were neither files, folders nor links."""

    @property
    def reward(self) -> float:
        return self.score.reward

    @property
    def parts(self) -> dict[str, float]:
        return self.score.parts


class _Who(NamedTuple):
    """Who runs the tests and the program under test, and for how long."""

    grader: str | None
    program: str | None
    strong: bool
    weaker: str
    wall: float = 600.0


class _Run(NamedTuple):
    """How one run of the script ended."""

    end: End
    score: Score | None = None
    source: verdicts.Source | Literal["none"] = "none"
    result: ExecResult = ExecResult(status="lost")
    error: Exception | None = None
    left_out: int = 0


class SweGrader:
    """Grades the steps of one task. `open`: makes fresh boxes; `spec`: what the agent's box is.

    `low`, `high`: the range of rewards. `fresh_always`: tasks that ask for `shared` are graded in a fresh box
    too, with all that the agent changed in the file system, unless what it started must be alive.
    """

    def __init__(
        self,
        open: OpenBox,  # noqa: A002  (the word for it)
        task: SweTask,
        spec: SandboxSpec,
        *,
        low: float = 0.0,
        high: float = 1.0,
        fresh_always: bool = False,
    ) -> None:
        self._open = open
        self._task = task
        self._spec = spec
        self._low, self._high = low, high
        self._fresh_always = fresh_always
        self._solved: dict[int, End] = {}

    async def grade(self, box: Sandbox, prepared: Prepared, step: int, *, timeout: float) -> SweGrade:
        """`TaskError` and `ScoringError`: the task is at fault; `SandboxError`: a box was lost.

        The agent's processes are dead afterwards, its shells too, unless the task's services must live.
        """
        clock = Clock(timeout)
        one = self._task.steps[step]
        mode = self.mode_of(one)
        who = self._who(one, prepared, mode)._replace(wall=_wall(one.verifier.timeout, timeout))
        referee = Referee(has_solution=bool(one.solution))
        runs = 0
        last: _Run | None = None
        said: str = "again"
        while said == "again":
            try:
                tried = await self._tried(box, prepared, step, mode, who, clock)
            except SandboxError as error:
                if error.code != "scoring.timeout" or last is None or last.end == "lost":
                    raise
                said = "minimum"  # the time went into a run that the submission made fail
                break
            last, runs = tried, runs + 1
            said = referee.submission(last.end)
            if said == "solution":
                said = referee.solution(await self._solution(box, prepared, step, mode, who, clock))
            elif said == "untouched":
                alone = await self._alone(box, prepared, step, who, clock)
                said = referee.untouched(alone) if alone is not None else "minimum"
        assert last is not None
        if said == "infra":
            raise SandboxError(
                f"the boxes of a grader were lost: {describe(last.error) if last.error else 'lost'}"
            )
        if said == "invalid":
            assert last.error is not None
            raise last.error
        if said == "task":
            raise TaskError(
                f"task {self._task.id}: its tests fail with its own solution too: {told(last.result)}",
                cause="scoring.missing",
            )
        score = last.score if said == "score" and last.score is not None else Score(self._low)
        metrics = {"grade/weaker": float(bool(who.weaker)), "grade/runs": float(runs)}
        if said == "minimum":
            metrics[f"grade/{last.end}"] = 1.0
        return SweGrade(
            score=Score(score.reward, score.parts, {**score.metrics, **metrics}),
            mode=mode,
            source=last.source,
            weaker=who.weaker,
            detail=describe(last.error)
            if last.error is not None
            else ""
            if said == "score"
            else told(last.result),
            stdout=_tail(last.result.stdout),
            stderr=_tail(last.result.stderr),
            runs=runs,
            left_out=last.left_out,
        )

    def mode_of(self, step: SweStep) -> GradeMode:
        verifier = step.verifier
        if verifier.mode == "shared" and (verifier.services or not self._fresh_always):
            return "shared"
        return "fresh"

    def _who(self, step: SweStep, prepared: Prepared, mode: GradeMode) -> _Who:
        strong = scripts.is_strong(self._task, step)
        if not strong:
            return _Who(step.verifier.user if prepared.several else None, None, False, AS_ITSELF)
        if not prepared.several:
            return _Who(None, None, True, ONE_USER)
        program = scripts.STRANGER if prepared.agent == 0 else None
        weaker = ""
        if mode == "shared" and not prepared.snapshot:
            weaker = UNCOMPARED
        elif mode == "shared" and step.verifier.services and prepared.agent == 0:
            weaker = ROOT_SERVES
        return _Who(ROOT, program, True, weaker)

    # ---- one run

    async def _tried(
        self, box: Sandbox, prepared: Prepared, step: int, mode: GradeMode, who: _Who, clock: Clock
    ) -> _Run:
        one = self._task.steps[step]
        try:
            if mode == "fresh":
                return await self._fresh(box, prepared, one, who, clock)
            return await self._shared(box, prepared, one, who, clock)
        except TooMuch as error:
            return _Run("crash", error=error)
        except CannotStart as error:
            started = await self._alone(box, prepared, step, who, clock, seconds=START_SECONDS)
            if started is None:
                raise TaskError(
                    f"task {self._task.id}: its tests cannot be started: {error}", cause="task.image"
                ) from error
            return _Run("crash", error=TooMuch(f"its sandbox does not let the tests start: {error}"))
        except TimeoutError as error:
            raise SandboxError("a grader's sandbox did not answer in time", cause="scoring.timeout") from error
        except OSError as error:
            if error.errno in _OF_NAMES:
                return _Run("crash", error=TooMuch(f"its files cannot be carried: {describe(error)}"[:1000]))
            raise SandboxError(f"a submission could not be carried: {describe(error)}"[:1000]) from error
        except SandboxError as error:
            if error.code == "sandbox.exhausted":
                return _Run("memory", error=error)
            if error.code != "sandbox.lost":
                raise
            return _Run("lost", error=error)

    async def _fresh(self, box: Sandbox, prepared: Prepared, step: SweStep, who: _Who, clock: Clock) -> _Run:
        await scripts.killed(box, clock)
        with host_folder() as here:
            async with self._pristine(box, prepared, step, clock) as fresh:
                tops, taken = await self._taken(box, fresh, prepared, step, who, here, clock)
                await moving.put(fresh, taken, tops, clock)
                done = await self._judged(fresh, prepared, step, who, clock, used=bool(self._task.artifacts))
        return done._replace(left_out=taken.left_out)

    async def _taken(
        self, box: Sandbox, fresh: Sandbox, prepared: Prepared, step: SweStep, who: _Who, here: Path, clock: Clock
    ) -> tuple[tuple[str, ...], Taken]:
        """What counts of what the agent changed, and the folders that it lies in."""
        own = (self._task.workdir, *self._task.artifacts)
        if not prepared.snapshot:
            return own, await moving.whole(box, own, here, clock)
        found = await self._diff(box, prepared, clock)
        back = set() if who.strong else await self._kept_back(box, fresh, step, found, own, clock)
        tops: tuple[str, ...] = own
        if step.verifier.mode == "shared":
            remove, restore = planted.of_system(found, own, await _programs(fresh, clock))
            back |= remove | restore
            tops = tuple(sorted({f"/{path.split('/')[1]}" for path in found} - set(VOLATILE)))
            tops = tuple(top for top in tops if top != "/") or own
            back |= {path for path in found if planted.below(path, VOLATILE)}
        return tops, await moving.take(box, found, tops, back, here, clock)

    async def _shared(self, box: Sandbox, prepared: Prepared, step: SweStep, who: _Who, clock: Clock) -> _Run:
        if not step.verifier.services:
            await scripts.killed(box, clock)
        found = await self._diff(box, prepared, clock) if prepared.snapshot else {}
        own = (self._task.workdir, *self._task.artifacts)
        if step.verifier.services or not prepared.snapshot:
            try:
                return await self._in(box, box, prepared, step, who, found, own, clock)
            finally:
                with contextlib.suppress(SandboxError):  # a box that is lost has nothing left in it
                    await scripts.cleared(box, step, several=prepared.several, clock=clock)
        copy = await self._copy(box, prepared, step, clock)
        try:
            return await self._in(copy, box, prepared, step, who, found, own, clock)
        finally:
            await closed(copy)

    async def _copy(self, box: Sandbox, prepared: Prepared, step: SweStep, clock: Clock) -> Sandbox:
        """Return a copy of the agent's sandbox. `TooMuch` where only what the agent left in it prevents that."""
        spec = self._quiet(box.spec, step)
        try:
            final = await box.snapshot(timeout=clock.left())
            return await box.fork(final, timeout=clock.left(), spec=spec)
        except SandboxError as error:
            await self._alive_or_raise(box, error, clock)
            async with self._pristine(box, prepared, step, clock):  # the machine can: so it is not the machine
                raise TooMuch(f"its sandbox cannot be copied: {describe(error)}"[:1000]) from error

    async def _in(
        self,
        where: Sandbox,
        box: Sandbox,
        prepared: Prepared,
        step: SweStep,
        who: _Who,
        found: Mapping[str, str],
        own: tuple[str, ...],
        clock: Clock,
    ) -> _Run:
        """In a box that an agent was in: what it planted goes, what it replaced comes back, then the tests."""
        if found:
            with host_folder() as here:
                async with self._pristine(box, prepared, step, clock) as fresh:
                    remove, restore = planted.of_system(found, own, await _programs(fresh, clock))
                    back = set() if who.strong else await self._kept_back(where, fresh, step, found, own, clock)
                    remove |= {path for path in back if found[path] == "added"}
                    restore |= {path for path in back if found[path] != "added"}
                    restore = {path for path in restore if not planted.below(path, VOLATILE)}
                    await moving.undo(where, fresh, remove, restore, here, clock)
            if not step.verifier.services:
                await scripts.killed(where, clock)  # what the first program of a planted shell may have left
        return await self._judged(where, prepared, step, who, clock, used=True)

    async def _judged(
        self, box: Sandbox, prepared: Prepared, step: SweStep, who: _Who, clock: Clock, *, used: bool
    ) -> _Run:
        """The script in a box that is ready for it."""
        task, verifier = self._task, step.verifier
        if who.strong and who.program is not None:
            own = (task.workdir, *task.artifacts)
            await run(box, _SHARE, *own, clock=clock)
        await scripts.placed(
            box,
            task,
            step,
            several=prepared.several,
            used=used,
            grader=who.grader,
            strong=who.strong,
            clock=clock,
        )
        if clock.over:
            raise SandboxError("grading ran out of time before its tests began", cause="scoring.timeout")
        wall = clock.left(who.wall)
        result = await scripts.ran(
            box, task, step, grader=who.grader, program=who.program, strong=who.strong, wall=wall
        )
        if result.status == "lost":
            return _Run("lost", result=result, error=SandboxError(f"a grader's box was lost: {result.detail}"))
        if result.status == "time_limit":
            return _Run("time", result=result)
        if result.exit_code is None:
            return _Run("memory" if result.status == "memory_limit" else "crash", result=result)
        if result.exit_code in (126, 127) and result.detail:
            raise CannotStart(result.detail)
        if not who.strong and not verifier.services:
            await scripts.killed(box, clock, who.grader)  # nobody writes to the verdict any more
        elif not verifier.services:
            # What the program left may hold every process that the sandbox may have, and we need one.
            await scripts.killed(box, clock, who.program or "")
        return await self._verdict(box, step, who, result, clock)

    async def _verdict(self, box: Sandbox, step: SweStep, who: _Who, result: ExecResult, clock: Clock) -> _Run:
        try:
            told_by = await verdicts.found(box, timeout=clock.left())
            if told_by is not None:
                source, data = told_by
                score = verdicts.score_of(source, data, self._low, self._high)
                return _Run("reward", score, source, result)
            if step.verifier.reward_from_exit:
                return _Run("reward", Score(self._high if result.exit_code == 0 else self._low), "exit", result)
            verdicts.fault("missing", f"wrote no reward: {told(result)}")
        except ScoringError as error:
            blank = error.code in ("scoring.missing", "scoring.empty")
            if blank and (result.exit_code or not (await run(box, _ROOM, user=who.grader, clock=clock)).ok):
                # It failed before its end, or there was no room to write to: not what it meant to say.
                return _Run("memory" if result.status == "memory_limit" else "crash", result=result, error=error)
            return _Run("invalid", result=result, error=error)

    # ---- boxes

    async def _diff(self, box: Sandbox, prepared: Prepared, clock: Clock) -> Mapping[str, str]:
        try:
            return await box.diff(prepared.snapshot, timeout=clock.left())
        except SandboxError as error:
            # What there is too much of to be compared is in a box that lives; a lost one answers nothing.
            await self._alive_or_raise(box, error, clock)
            raise TooMuch(f"what it changed cannot be told: {describe(error)}") from error

    async def _alive_or_raise(self, box: Sandbox, error: SandboxError, clock: Clock) -> None:
        """Raise `error` if the sandbox is lost; a living one failed because of what programs left in it."""
        alive = await run(box, "exit 0", clock=clock)
        if alive.status == "lost":
            raise error

    async def _kept_back(
        self,
        box: Sandbox,
        fresh: Sandbox,
        step: SweStep,
        found: Mapping[str, str],
        own: tuple[str, ...],
        clock: Clock,
    ) -> set[str]:
        """Return the changes that are not carried over, because they decide how a test runner starts."""
        back = planted.kept_back({path: how for path, how in found.items() if planted.below(path, own)}, own)
        for path, how in found.items():
            if _is_mixed(path, how, own):
                name = path.rpartition("/")[2]
                now = await _text(box, path, clock)
                before = await _text(fresh, path, clock) if how == "changed" else b""
                if now is None or before is None or not planted.says_same(name, before, now):
                    back.add(path)  # what cannot be read may say anything
        back |= {path for path in planted.shadowing(found, own) if not scripts.asks_for(self._task, step, path)}
        return back | {path for path in found if back and planted.below(path, back)}

    @asynccontextmanager
    async def _pristine(
        self, box: Sandbox, prepared: Prepared, step: SweStep, clock: Clock
    ) -> AsyncIterator[Sandbox]:
        """A box as the agent got it."""
        spec = self._quiet(box.spec, step)
        if prepared.snapshot:
            fresh = await box.fork(prepared.snapshot, timeout=clock.left(), spec=spec)
        else:
            fresh = await self._open(spec)
        try:
            if not prepared.snapshot:
                await prepare(fresh, self._task, timeout=clock.left())
            yield fresh
        finally:
            await closed(fresh)

    def _quiet(self, spec: SandboxSpec, step: SweStep) -> SandboxSpec:
        verifier = step.verifier
        return msgspec.structs.replace(
            spec, network=verifier.network or "none", allow=verifier.allow if verifier.network == "allow" else ()
        )

    async def _solution(
        self, box: Sandbox, prepared: Prepared, step: int, mode: GradeMode, who: _Who, clock: Clock
    ) -> End:
        """Return how the script ends with the task's own solution, tried once for each step.

        `lost`: it could not be tried, or had less time than the task gives its tests.
        """
        if step not in self._solved:
            one = self._task.steps[step]
            try:
                async with self._pristine(box, prepared, one, clock) as other:
                    for before in self._task.steps[: step + 1]:
                        await solve(other, self._task, before, several=prepared.several, clock=clock)
                    end = (await self._tried(other, prepared, step, mode, who, clock)).end
            except OutOfTime:
                return "lost"
            except SandboxError as error:
                if error.code != "scoring.timeout":
                    raise
                return "lost"
            if end == "time" and (clock.over or who.wall < one.verifier.timeout):
                return "lost"
            self._solved[step] = end
        return self._solved[step]

    async def _alone(
        self, box: Sandbox, prepared: Prepared, step: int, who: _Who, clock: Clock, *, seconds: float | None = None
    ) -> End | None:
        """Return how the script ends in a sandbox that no submission changed; None where it cannot be started.

        `seconds`: run it for no longer, to see whether it starts.
        """
        one = self._task.steps[step]
        async with self._pristine(box, prepared, one, clock) as other:
            wall = who.wall if seconds is None else min(seconds, who.wall)
            try:
                return (await self._judged(other, prepared, one, who._replace(wall=wall), clock, used=False)).end
            except CannotStart:
                return None


def _wall(wanted: float, whole: float) -> float:
    """Return the seconds that one run of the tests may take, so that there is time for all that may be needed."""
    room = min(MOVE_SECONDS, 0.05 * whole)
    return max(1.0, min(wanted, whole / GRADED_RUNS - room))


def _is_mixed(path: str, how: str, own: tuple[str, ...]) -> bool:
    return path.rpartition("/")[2] in planted.MIXED and how != "removed" and planted.below(path, own)


async def _programs(box: Sandbox, clock: Clock) -> set[str]:
    result = await run(box, _PROGRAMS, *planted.PROGRAMS, clock=clock)
    return set(result.stdout.decode("utf-8", "surrogateescape").splitlines())


async def _text(box: Sandbox, path: str, clock: Clock) -> bytes | None:
    """None where it is no plain file."""
    try:
        return await box.read(path, limit=1 << 20, timeout=clock.left())
    except OSError:
        return None


def _tail(data: bytes) -> str:
    return data[-TAIL:].decode("utf-8", "replace")
