"""One attempt under way: its stages, their deadlines, and what it made of them.

Promises:
- the attempt ends in exactly one `Done`, whatever its environment raises, swallows or never returns from;
- every stage has a deadline that the engine enforces; the run clock excludes pauses and the upstream's queue;
- a run deadline that passes during a model call is Truncated(time) only where the model server works: one that
  hangs is infra, and what was seen of it is in the attempt's record;
- scoring happens if and only if the run stage ended Completed or Truncated;
- teardown always happens, also after half a setup; a failed teardown is an event, never a changed outcome;
- everything the attempt opened is closed before its `Done` is sent;
- the original exception, with its traceback, is in the outcome.
"""

import asyncio
import inspect
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core import (
    DEFAULT_LIMITS,
    SCORED,
    Cancelled,
    CancelledReason,
    Extent,
    Failed,
    Outcome,
    RookeryError,
    SandboxError,
    SandboxSpec,
    Stage,
    StageClock,
    Truncated,
    Turn,
    UpstreamError,
    failed,
)
from rookery.core.errors import behind, describe
from rookery.engine.accounts import Account, usage_of
from rookery.engine.loose import LooseTasks, begin_apart
from rookery.engine.verdicts import StageEnd, verdict
from rookery.engine.wire import Done, Note, Start, plain_event
from rookery.environments import Context, Log
from rookery.environments.context import LOST
from rookery.environments.threads import in_thread, stuck_threads
from rookery.gateway import Session
from rookery.gateway.door import Door, open_door, registration
from rookery.gateway.session import lacks_tokens
from rookery.journal.tokens import encode_turn
from rookery.sandboxes.protocol import Listening, Sandbox
from rookery.scoring import Score, checked
from rookery.trajectories import Recorder
from rookery.upstreams.hangs import LONGEST_LOOK, UpstreamEvidence

if TYPE_CHECKING:
    from rookery.engine.executor import Executor

GRACE = 5.0
"""Seconds a cancelled stage gets to unwind before it counts as unstoppable."""
CLOSE_SECONDS = 20.0
EVENTS_PER_ATTEMPT = 1_000
EXAMINE_SECONDS = LONGEST_LOOK + 5.0


class Live:
    """One attempt. Its one task runs the stages; timers cancel it; nobody else does."""

    __slots__ = (
        "__weakref__",
        "_account",
        "_asked",
        "_began",
        "_clock",
        "_doors",
        "_events",
        "_examining",
        "_expired",
        "_extents",
        "_hung_on_others",
        "_limits_error",
        "_loop",
        "_loose",
        "_result",
        "_sandboxes",
        "_tainted",
        "_timer",
        "cancelled",
        "ctx",
        "ended",
        "executor",
        "limits",
        "session",
        "stage",
        "start",
        "task",
    )

    def __init__(self, executor: "Executor", start: Start) -> None:
        self.executor = executor
        self.start = start
        self._limits_error: Exception | None = None
        env, said = executor.environment, executor.settings.limits
        try:
            self.limits = env.limits_for(start.task, said).over(DEFAULT_LIMITS)
        except Exception as error:  # noqa: BLE001  (an environment's own code: it ends this rollout alone)
            self._limits_error = error
            self.limits = said.over(DEFAULT_LIMITS)
        self.stage: Stage = "queue"
        self.cancelled: CancelledReason | None = None
        self.ended = False
        self._expired = False
        self._hung_on_others = False
        self._asked = False
        """We asked the task to cancel in this stage."""
        self._clock = StageClock(0.0, float("inf"))
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._account = Account()
        self._extents: list[Extent] = []
        self._events = 0
        self._doors: set[Door] = set()
        """Sessions of the attempt at the gateway that are open."""
        self._examining: asyncio.Task[None] | None = None
        """Past the run deadline, during a model call: finds out whether its server hangs."""
        self._tainted = False
        self._result: tuple[Outcome, Score | None] | None = None
        self._sandboxes: list[Sandbox] = []
        self._loose = LooseTasks()
        self._began = time.time()
        self.session = Session(
            start.attempt,
            executor.roles,
            self.limits,
            Recorder(start.attempt, self._keep),
            self,
            start.seed,
        )
        self.session.avoid = start.avoid
        self.ctx = Context(
            attempt=start.attempt,
            task=start.task,
            seed=start.seed,
            limits=self.limits,
            spec=executor.settings.sandbox,
            session=self.session,
            watch=self,
            remaining=lambda: self._clock.remaining(self._loop.time()),
            log=Log(self._log),
            open_sandbox=self._open_sandbox,
            open_door=self._open_door if executor.gateway is not None else None,
            no_gateway=executor.refuse_gateway,
        )
        self.task = self._loop.create_task(self._play(), name=start.attempt)

    # ---- what others tell it

    def cancel(self, reason: CancelledReason) -> None:
        """From outside: the user, a filter, a shutdown. Teardown is already the end and goes on."""
        if self.ended or self.cancelled or self.stage == "teardown":
            return
        self.cancelled = reason
        self._interrupt()

    def hold(self) -> None:
        """Watch: the clock stops."""
        self._clock.hold(self._loop.time())

    def release(self) -> None:
        """Watch: the clock goes on."""
        if not self._clock.stopped:
            return  # held in a stage that has ended since
        if self._clock.release(self._loop.time()) and not self._asked:
            self._arm()

    def credit(self, held: float) -> None:
        """Watch: what programs at a door waited for others is not charged."""
        self._clock.credit(self._loop.time(), held)
        if not self._clock.stopped and not self._asked:
            self._arm()

    def waiting(self, on: str, step: int) -> None:
        """Watch: counts what the attempt waits on, and for how long."""
        self._account.waiting(on, step, self._loop.time())
        if self._examining is not None and on == "model" and not self._account.waits_on("model"):
            self._examined()  # the call has ended: its server works, or its error says what it does

    # ---- stages

    async def _play(self) -> None:
        self._loose.begin()
        score: Score | None = None
        try:
            outcome = await self._setup_and_run()
            if isinstance(outcome, SCORED):
                outcome, score = await self._score(outcome)
        except BaseException as error:  # noqa: BLE001  (our own bug must not take the runner with it)
            outcome = failed(error, self.stage, cause="bug.rookery")
        self._result = (outcome, score)
        self.stage = "teardown"  # from here on nothing cancels it
        policy_loss = await self._policy_loss(outcome)
        await self._teardown()
        self._finish(outcome, score, policy_loss=policy_loss)
        # They know us and we know them: apart, all of it is freed now and not by some later collection.
        del self.ctx, self.session
        self._loose.forget()

    async def _setup_and_run(self) -> Outcome:
        env, error = self.executor.environment, self._described()
        if error is None and self.executor.has_setup:
            _, error = await self._run_stage("setup", self.limits.setup, env.setup)
        if error is None and not self.cancelled:
            _, error = await self._run_stage("run", self.limits.run, env.run)
        return self._verdict(error)

    def _described(self) -> BaseException | None:
        """What its sandbox is to be: with the task's and the environment's words, which may be wrong."""
        self.stage = "setup"
        if self._limits_error is not None:
            return self._limits_error
        try:
            self.ctx.spec = self.executor.boxes.spec_for(self.start.task)
        except BaseException as error:  # noqa: BLE001  (as in any stage: it ends this rollout alone)
            return error
        return None

    async def _score(self, outcome: Outcome) -> tuple[Outcome, Score | None]:
        env = self.executor.environment
        value, error = await self._run_stage("score", self.limits.score, env.score)
        if error is None and not self.cancelled:
            try:
                return outcome, checked(value, *self.executor.rewards)
            except RookeryError as bad:
                return failed(bad, "score", cause="bug.reward"), None
        return self._verdict(error), None

    async def _run_stage(
        self, stage: Stage, budget: float | None, call: Callable[[Context], Any]
    ) -> tuple[Any, BaseException | None]:
        """Runs one stage to its end or its deadline. An error it returns is one that really ended it."""
        self.stage = stage
        self._expired = self._asked = False
        began = self._loop.time()
        self._clock = StageClock(began, budget or float("inf"))
        if self.executor.paused:
            self._clock.hold(began)
        self._arm()
        value: Any = None
        error: BaseException | None = None
        try:
            if self.cancelled and stage != "teardown":
                raise asyncio.CancelledError  # asked for between two stages
            value = await self._call(call)
        except BaseException as caught:  # noqa: BLE001  (any exception of any kind ends this rollout alone)
            error = caught
        if self._examining is not None:  # the stage ended by itself meanwhile
            self._examining.cancel()
            self._examining = None
        if self._asked:
            await self._absorb()
            error = error or asyncio.CancelledError()
        self._disarm()
        self._account.stage(stage, self._loop.time() - began, self._clock.held)
        return value, error

    async def _call(self, call: Callable[[Context], Any]) -> Any:
        if self.stage in self.executor.async_stages:
            return await call(self.ctx)
        # A plain function is taken for blocking work. A thread cannot be stopped: past its deadline the runner
        # is replaced once its other rollouts have ended.
        value, error = await in_thread(f"{self.stage}-{self.start.attempt}", lambda: call(self.ctx))
        if error is not None:
            raise error
        return await value if inspect.isawaitable(value) else value

    def _verdict(self, error: BaseException | None) -> Outcome:
        """The outcome, as of the stage that just ended."""
        single = behind(error) if error is not None else None
        if isinstance(single, UpstreamError) and isinstance(single.evidence, UpstreamEvidence):
            self.session.evidence.append(single.evidence)
        hung = next((seen for seen in self.session.evidence if seen.verdict == "hung"), None)
        outcome = verdict(
            StageEnd(
                stage=self.stage,
                error=error,
                cancelled=self.cancelled,
                expired=self._clock.budget if self._expired else None,
                waited_on_others=self._hung_on_others,
                hung=f"{hung.replica}: {hung.text}" if hung is not None else "",
                hung_cause=hung.cause if hung is not None else "upstream.hung",
                truncated=self.session.truncated,
            )
        )
        if isinstance(outcome, Truncated):  # scoring may want to know
            self.session.truncated = outcome.reason
        return outcome

    async def _policy_loss(self, outcome: Outcome) -> bool:
        """Whether a lost sandbox may be the policy's doing: lost in its own command, and the host is healthy."""
        if not (self.ctx.lost_in_command and isinstance(outcome, Failed) and outcome.cause in LOST):
            return False
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                return await self.executor.boxes.healthy()
        except (TimeoutError, SandboxError):
            return False

    async def _teardown(self) -> None:
        if self.executor.has_teardown:
            env = self.executor.environment
            _, error = await self._run_stage("teardown", self.limits.teardown, env.teardown)
            if error is not None:
                trace = "".join(traceback.format_exception(error))
                self._event("teardown.failed", detail=describe(error), traceback=trace)
        await self._release()

    async def _release(self) -> None:
        """Ends what the attempt still holds."""
        self.session.close()
        await self._end_loose()
        boxes = [*self._sandboxes, *self.ctx.forks]
        if not boxes:
            return
        results = await asyncio.gather(*(self._close(box) for box in boxes), return_exceptions=True)
        for error in results:
            if error is not None:
                self._event("sandbox.close_failed", detail=describe(error))

    async def _end_loose(self) -> None:
        stuck = await self._loose.end(GRACE)
        if stuck:
            self._tainted = True
            names = ", ".join(sorted(task.get_name() for task in stuck))
            self._event("tasks.stuck", detail=f"tasks of the environment's went on after the attempt: {names}")

    async def _close(self, box: Sandbox) -> None:
        async with asyncio.timeout(CLOSE_SECONDS):
            await box.close()

    # ---- deadlines

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left = self._clock.remaining(self._loop.time())
        self._timer = self._loop.call_later(left, self._expire) if left < float("inf") else None

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._clock.stopped:
            return  # `release` arms it again
        if self._clock.remaining(self._loop.time()) > 0.001:
            self._arm()
            return
        if self._examining is not None:
            return
        self._expired = True
        self._hung_on_others = self._account.waits
        if self.stage == "run" and (self._account.waits_on("model") or self._doors):
            self._examining = begin_apart(self._examine())
        else:
            self._interrupt()

    async def _examine(self) -> None:
        """Collect evidence about the servers of the model calls under way, then end the stage."""
        try:
            async with asyncio.timeout(EXAMINE_SECONDS):
                await asyncio.gather(self.session.examine(), *(door.examine() for door in self._doors))
        except (TimeoutError, RookeryError) as error:
            self._event("upstream.unexamined", detail=describe(error))
        finally:
            self._examined()

    def _examined(self) -> None:
        """End the stage, whose deadline has passed. Only the first call does something."""
        examining, self._examining = self._examining, None
        if examining is None:
            return
        if examining is not asyncio.current_task():
            examining.cancel()
        if self.stage == "run" and not self._asked:
            self._interrupt()

    def _interrupt(self) -> None:
        self._disarm()
        self._asked = True
        if not self.ended:
            self.task.cancel()
            self._timer = self._loop.call_later(GRACE, self._unstoppable)

    async def _absorb(self) -> None:
        """Takes back a cancellation that came too late to be seen by the stage."""
        task = self.task
        while task.cancelling():
            task.uncancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            while task.cancelling():
                task.uncancel()

    def _unstoppable(self) -> None:
        """The stage swallowed its cancellation. Its record must not wait for it; its runner must go."""
        if self.ended:
            return
        stack = "".join(line for frame in self.task.get_stack() for line in traceback.format_stack(frame, limit=1))
        detail = f"{self.stage} went on for {GRACE:g} seconds after it was cancelled"
        self._tainted = True
        self.executor.adopt(self._release())
        if self._result is not None:  # it is the teardown that hangs: the outcome stands
            self._event("teardown.failed", detail=detail, traceback=stack)
            self._finish(*self._result, policy_loss=False)
            return
        outcome: Outcome = Failed("bug", "bug.uncancellable", detail, self.stage, stack)
        self._finish(Cancelled(self.cancelled) if self.cancelled else outcome, None, policy_loss=False)

    # ---- results

    def _finish(self, outcome: Outcome, score: Score | None, *, policy_loss: bool) -> None:
        self._disarm()
        if self.ended:
            return
        self.ended = True
        if isinstance(outcome, Failed):
            self._log_failure(outcome)
        now = time.time()
        try:
            done = self._done(outcome, score, now, policy_loss=policy_loss)
        except Exception as error:  # noqa: BLE001  (what the environment left in its context cannot be read)
            broken = failed(error, self.stage, cause="bug.environment")
            done = Done(self.start.attempt, broken, self._began, now, tainted=self._tainted)
        self.executor.done(self, done)

    def _done(self, outcome: Outcome, score: Score | None, now: float, *, policy_loss: bool) -> Done:
        ctx = self.ctx
        return Done(
            attempt=self.start.attempt,
            outcome=outcome,
            started=self._began,
            ended=now,
            reward=score.reward if score else None,
            rewards=score.parts if score else {},
            metrics={**ctx.metrics, **score.metrics} if score and score.metrics else ctx.metrics,
            info=ctx.info,
            usage=usage_of(self.session, ctx),
            timing=self._account.timing(self.start.queued, self._loop.time()),
            tokens=tuple(self._extents),
            policy_loss=policy_loss,
            evidence=self._evidence(),
            minimum=self.executor.rewards[0],
            tainted=self._tainted or stuck_threads() > 0,
        )

    def _evidence(self) -> dict[str, Any]:
        seen = dict.fromkeys(self.session.evidence)  # a gateway may have reported the same twice
        return {"upstream": [msgspec.to_builtins(one) for one in seen]} if seen else {}

    def _log_failure(self, outcome: Failed) -> None:
        self.executor.logger.error(
            "attempt %s failed in %s: %s: %s\n%s",
            self.start.attempt,
            outcome.stage,
            outcome.cause,
            outcome.detail,
            outcome.traceback,
        )

    def _keep(self, turn: Turn) -> None:
        if not self.ended:
            if turn.role == "policy" and lacks_tokens(turn):
                self.executor.notice_missing_tokens(turn.upstream)
            self._extents.append(self.executor.writer.append(encode_turn(turn)))

    def _log(self, level: str, fields: dict[str, Any]) -> None:
        self._event(f"log.{level}", **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        self._events += 1
        if self._events <= EVENTS_PER_ATTEMPT:
            self.executor.send(Note(kind, plain_event({"attempt": self.start.attempt, **fields})))

    def _open_door(self, box: Listening | None, timed: bool) -> AbstractAsyncContextManager[Door]:
        gateway = self.executor.gateway
        assert gateway is not None
        left = self._clock.remaining(self._loop.time()) if timed else float("inf")
        sampling = self.executor.roles["policy"].sampling
        wish = registration(self.start.attempt, self.limits, sampling, self.start.seed, left)
        if box is None:
            return self._tracked(open_door(gateway, self.session, wish))
        wish["network"] = "model"  # no other network has such a listener
        opening = open_door(gateway, self.session, wish, listener=box.listener(), inside_url=box.inside_url)
        return self._tracked(opening)

    @asynccontextmanager
    async def _tracked(self, opening: AbstractAsyncContextManager[Door]) -> AsyncIterator[Door]:
        async with opening as door:
            self._doors.add(door)
            try:
                yield door
            finally:
                self._doors.discard(door)

    async def _open_sandbox(self, spec: SandboxSpec) -> Sandbox:
        box = await self.executor.boxes.open(spec, self.start.attempt)
        if self.ended:
            await box.close()
            raise SandboxError(f"attempt {self.start.attempt} has ended; it can open no more sandboxes")
        self._sandboxes.append(box)
        return box
