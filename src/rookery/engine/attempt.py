"""Run the stages of one attempt and enforce their deadlines. Runs in the runner process.

- An attempt produces exactly one `AttemptResult`, whatever its environment raises, swallows or never returns from.
- Every stage has a deadline. The stage's clock excludes pauses and time in the inference engine's queue.
- A run deadline that passes during a model call is `Truncated("time")` only if the inference engine works. If the
  server hangs, the outcome is `Failed` with fault infra, and the attempt's record says what was observed.
- Scoring happens if and only if the run stage ended as `Completed` or `Truncated`.
- Teardown always happens, also after an incomplete setup. A failed teardown is recorded as an event and does not
  change the outcome.
- Everything that the attempt opened is closed before its result is sent. The exception is a stage that does not
  end after its cancellation: the result is then sent at once, what the attempt opened is closed in the background,
  and the runner process is replaced.
- The original exception, with its traceback, is in the outcome.
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
    SandboxUsage,
    Stage,
    StageClock,
    Truncated,
    Turn,
    UpstreamError,
    failed_outcome,
)
from rookery.core.errors import describe, unwrap_group
from rookery.engine.attempt_usage import AttemptTimes, collect_usage
from rookery.engine.background_tasks import AttemptTasks, start_detached
from rookery.engine.plain_data import plain_data
from rookery.engine.runner_protocol import AttemptResult, AttemptSpec, RunnerEvent
from rookery.engine.stage_outcome import StageEnd, decide_outcome
from rookery.environments import Context, Log
from rookery.environments.context import LOSS_CAUSES
from rookery.environments.threads import count_stuck_threads, run_in_thread
from rookery.gateway import Session
from rookery.gateway.direct_session import DirectSession, open_direct_session
from rookery.gateway.gateway_session import GatewaySession, make_registration, open_gateway_session
from rookery.gateway.session import lacks_tokens
from rookery.journal.tokens import encode_turn
from rookery.sandboxes.protocol import Sandbox, SupportsModelNetwork, SupportsUsage
from rookery.scoring import Score, Ungraded, check_score
from rookery.telemetry import tracing
from rookery.telemetry.logs import current_attempt, with_data
from rookery.telemetry.operations import classify_error
from rookery.telemetry.tracing import CurrentSpan
from rookery.trajectories import Recorder
from rookery.upstreams.hang_detector import MAX_EXAMINATION_SECONDS, UpstreamEvidence

if TYPE_CHECKING:
    from rookery.engine.executor import Executor

GRACE = 5.0
"""Seconds that a cancelled stage gets to end. After that, the attempt's result is sent without waiting for it."""
CLOSE_SECONDS = 20.0
EVENTS_PER_ATTEMPT = 1_000
MAX_MEASURED_SANDBOXES = 64
"""Maximum number of an attempt's sandboxes whose usage is recorded, so that a record stays small."""
EXAMINE_SECONDS = MAX_EXAMINATION_SECONDS + 5.0


class RunningAttempt:
    """Runs one attempt in its own asyncio task, which is cancelled when a deadline passes and by `cancel`."""

    def __init__(self, executor: "Executor", spec: AttemptSpec) -> None:
        self.executor = executor
        self.spec = spec
        self._limits_error: Exception | None = None
        self.loaded = executor.environments[spec.task.environment]
        run_limits = self.loaded.limits
        try:
            self.limits = self.loaded.environment.limits_for(spec.task, run_limits).over(DEFAULT_LIMITS)
        except Exception as error:  # noqa: BLE001  (code of the environment: fails this rollout alone)
            self._limits_error = error
            self.limits = run_limits.over(DEFAULT_LIMITS)
        self.stage: Stage = "queue"
        self.cancelled: CancelledReason | None = None
        self.ended = False
        self._expired = False
        self._waited_on_others = False
        self._interrupted = False
        """True if this object cancelled the attempt's task in the current stage."""
        self._clock = StageClock(0.0, float("inf"))
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._times = AttemptTimes()
        self._extents: list[Extent] = []
        self._events = 0
        self._gateway_sessions: set[GatewaySession] = set()
        """The attempt's open gateway sessions."""
        self._examining: asyncio.Task[None] | None = None
        """Task that checks, after the run deadline, whether the server of a running model call hangs."""
        self._tainted = False
        self._result: tuple[Outcome, Score | Ungraded | None] | None = None
        self.sandboxes: list[Sandbox] = []
        self._tasks = AttemptTasks()
        self._began = time.time()
        self._roles = executor.roles_for(spec.task)
        self.session = Session(
            spec.id,
            self._roles,
            self.limits,
            Recorder(spec.id, self._store_turn),
            self,
            spec.seed,
        )
        self.session.avoid = spec.avoid
        self.ctx = Context(
            attempt=spec.id,
            task=spec.task,
            seed=spec.seed,
            limits=self.limits,
            spec=self.loaded.sandbox,
            session=self.session,
            wait_observer=self,
            remaining=lambda: self._clock.remaining(self._loop.time()),
            elapsed=lambda: self._clock.used(self._loop.time()),
            log=Log(self._log),
            open_sandbox=self._open_sandbox,
            open_gateway_session=self._open_gateway_session if executor.gateway is not None else None,
            open_direct_session=self._open_direct_session if executor.settings.unrecorded else None,
            no_gateway=lambda: executor.refuse_gateway(self.loaded.environment),
        )
        self.task = self._loop.create_task(self._run_stages(), name=spec.id)

    # ---- control from outside

    def cancel(self, reason: CancelledReason) -> None:
        """Cancel the current stage, so that teardown follows. Has no effect during teardown and later."""
        if self.ended or self.cancelled or self.stage == "teardown":
            return
        self.cancelled = reason
        self._interrupt()

    def stop_clock(self) -> None:
        """Stop the clock of the current stage, so that its deadline moves."""
        self._clock.stop(self._loop.time())

    def restart_clock(self) -> None:
        """Undo one `stop_clock`. The stage's clock continues when every `stop_clock` was undone."""
        if not self._clock.stopped:
            return  # that call belonged to a stage that has ended
        if self._clock.restart(self._loop.time()) and not self._interrupted:
            self._arm()

    def exclude_at_least(self, total_seconds: float) -> None:
        """Exclude at least `total_seconds` of waiting from the time of the current stage.

        The gateway measured this total: how long calls of the attempt's programs have waited for the end of a
        pause or in the inference engine's queue.
        """
        self._clock.exclude_at_least(self._loop.time(), total_seconds)
        if not self._clock.stopped and not self._interrupted:
            self._arm()

    def count_wait(self, resource: str, change: int) -> None:
        """Count a call that starts (`change` is 1) or stops (-1) waiting for a resource: `tool` or `sandbox`."""
        self._times.count_wait(resource, change, self._loop.time())

    def on_calls_ended(self) -> None:
        """End the check for hanging servers, if there is one: servers that have answered do not hang."""
        if self._examining is not None:
            self._end_examination()

    # ---- stages

    async def _run_stages(self) -> None:
        current_attempt.set(self.spec.id)
        self._tasks.track()
        score: Score | Ungraded | None = None
        try:
            outcome = await self._setup_and_run()
            if isinstance(outcome, SCORED):
                outcome, score = await self._score(outcome)
        except BaseException as error:  # noqa: BLE001  (a bug in Rookery must not end the runner)
            outcome = failed_outcome(error, self.stage, cause="bug.rookery")
        self._result = (outcome, score)
        self.stage = "teardown"  # from now on it cannot be cancelled
        policy_loss = await self._policy_loss(outcome)
        await self._teardown()
        self._finish(outcome, score, policy_loss=policy_loss)
        # Break reference cycles, so that memory is freed now and not by a later garbage collection.
        del self.ctx, self.session
        self._tasks.untrack()

    async def _setup_and_run(self) -> Outcome:
        env, error = self.loaded.environment, self._resolve_sandbox_spec()
        if error is None and self.loaded.has_setup:
            _, error = await self._run_stage("setup", self.limits.setup, env.setup)
        if error is None and not self.cancelled:
            _, error = await self._run_stage("run", self.limits.run, env.run)
        return self._decide_outcome(error)

    def _resolve_sandbox_spec(self) -> BaseException | None:
        """Set the sandbox spec from the task and the environment. Return the exception if that fails."""
        self.stage = "setup"
        if self._limits_error is not None:
            return self._limits_error
        try:
            self.ctx.spec = self.executor.sandboxes.build_spec(self.spec.task)
        except BaseException as error:  # noqa: BLE001  (fails this rollout alone)
            return error
        return None

    async def _score(self, outcome: Outcome) -> tuple[Outcome, Score | Ungraded | None]:
        value, error = await self._run_stage("score", self.limits.score, self.loaded.environment.score)
        if error is None and not self.cancelled:
            try:
                weights = self.loaded.environment.part_weights
                return outcome, check_score(value, *self.loaded.reward_bounds, weights)
            except RookeryError as bad:
                return failed_outcome(bad, "score", cause="bug.reward"), None
        return self._decide_outcome(error), None

    async def _run_stage(
        self, stage: Stage, budget: float | None, call: Callable[[Context], Any]
    ) -> tuple[Any, BaseException | None]:
        """Run one stage until it ends or its deadline passes; return its value and the exception that ended it."""
        self.stage = stage
        self._expired = self._interrupted = False
        began = self._loop.time()
        self._clock = StageClock(began, budget or float("inf"))
        if self.executor.paused:
            self._clock.stop(began)
        self._arm()
        value: Any = None
        error: BaseException | None = None
        span = self._start_span(stage)
        try:
            if self.cancelled and stage != "teardown":
                raise asyncio.CancelledError  # cancelled between two stages
            value = await self._call(call)
        except BaseException as caught:  # noqa: BLE001  (any exception fails this rollout alone)
            error = caught
        if self._examining is not None:  # the stage ended in the meantime
            self._examining.cancel()
            self._examining = None
        if self._interrupted:
            await self._absorb_cancellation()
            error = error or asyncio.CancelledError()
        self._disarm()
        if span is not None:
            span.end(*((classify_error(unwrap_group(error)), describe(error)) if error is not None else ()))
        self._times.end_stage(stage, self._loop.time() - began, self._clock.stopped_seconds)
        return value, error

    def _start_span(self, stage: Stage) -> CurrentSpan | None:
        """Start the span of a stage, and make it the parent of what the stage does. None without tracing."""
        if tracing.active is None:
            return None
        attributes = {
            "rookery.stage": stage,
            "rookery.attempt": self.spec.id,
            "rookery.attempt.number": self.spec.number,
        }
        return CurrentSpan(tracing.active.start(stage, attributes, parent=self.spec.traceparent))

    async def _call(self, call: Callable[[Context], Any]) -> Any:
        if self.stage in self.loaded.async_stages:
            return await call(self.ctx)
        # A plain function may block, so it runs in a thread. A thread cannot be stopped: if its deadline passes,
        # the runner is replaced after its other rollouts have ended.
        value, error = await run_in_thread(f"{self.stage}-{self.spec.id}", lambda: call(self.ctx))
        if error is not None:
            raise error
        return await value if inspect.isawaitable(value) else value

    def _decide_outcome(self, error: BaseException | None) -> Outcome:
        """Return the attempt's outcome after a stage that returned (`error` is None) or raised `error`."""
        single = unwrap_group(error) if error is not None else None
        if isinstance(single, UpstreamError) and isinstance(single.evidence, UpstreamEvidence):
            self.session.evidence.append(single.evidence)
        hung = next((seen for seen in self.session.evidence if seen.verdict == "hung"), None)
        outcome = decide_outcome(
            StageEnd(
                stage=self.stage,
                error=error,
                cancelled=self.cancelled,
                expired=self._clock.budget if self._expired else None,
                waited_on_others=self._waited_on_others,
                hung=f"{hung.replica}: {hung.text}" if hung is not None else "",
                hung_cause=hung.cause if hung is not None else "upstream.hung",
                truncated=self.session.truncated,
            )
        )
        if isinstance(outcome, Truncated):  # visible to scoring as `ctx.truncated`
            self.session.truncated = outcome.reason
        return outcome

    async def _policy_loss(self, outcome: Outcome) -> bool:
        """Return True if a sandbox was lost during a command of the policy and the machine is healthy."""
        if not (self.ctx.lost_in_command and isinstance(outcome, Failed) and outcome.cause in LOSS_CAUSES):
            return False
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                return await self.executor.sandboxes.check_health(self.spec.task.environment)
        except (TimeoutError, SandboxError):
            return False

    async def _teardown(self) -> None:
        if self.loaded.has_teardown:
            env = self.loaded.environment
            _, error = await self._run_stage("teardown", self.limits.teardown, env.teardown)
            if error is not None:
                trace = "".join(traceback.format_exception(error))
                self._event("teardown.failed", detail=describe(error), traceback=trace)
        await self._release()

    async def _release(self) -> None:
        """Close the attempt's session, cancel its background tasks and close its sandboxes."""
        self.session.close()
        await self._end_background_tasks()
        sandboxes = [*self.sandboxes, *self.ctx.forks]
        if not sandboxes:
            return
        results = await asyncio.gather(*(self._close(sandbox) for sandbox in sandboxes), return_exceptions=True)
        for error in results:
            if error is not None:
                self._event("sandbox.close_failed", detail=describe(error))

    async def _end_background_tasks(self) -> None:
        stuck = await self._tasks.cancel_all(GRACE)
        if stuck:
            self._tainted = True
            names = ", ".join(sorted(task.get_name() for task in stuck))
            self._event(
                "tasks.stuck", detail=f"asyncio tasks of the environment did not end when cancelled: {names}"
            )

    async def _close(self, sandbox: Sandbox) -> None:
        async with asyncio.timeout(CLOSE_SECONDS):
            await sandbox.close()

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
            return  # `restart_clock` starts the timer again
        if self._clock.remaining(self._loop.time()) > 0.001:
            self._arm()
            return
        if self._examining is not None:
            return
        self._expired = True
        self._waited_on_others = self._times.is_waiting or self.session.in_flight > 0
        if self.stage == "run" and (self.session.in_flight or self._gateway_sessions):
            self._examining = start_detached(self._examine())
        else:
            self._interrupt()

    async def _examine(self) -> None:
        """Find out whether the servers of running model calls hang, then end the stage."""
        try:
            async with asyncio.timeout(EXAMINE_SECONDS):
                await asyncio.gather(self.session.examine(), *(one.examine() for one in self._gateway_sessions))
        except (TimeoutError, RookeryError) as error:
            self._event("upstream.unexamined", detail=describe(error))
        finally:
            self._end_examination()

    def _end_examination(self) -> None:
        """End the run stage, whose deadline has passed. Only the first call has an effect."""
        examining, self._examining = self._examining, None
        if examining is None:
            return
        if examining is not asyncio.current_task():
            examining.cancel()
        if self.stage == "run" and not self._interrupted:
            self._interrupt()

    def _interrupt(self) -> None:
        self._disarm()
        self._interrupted = True
        if not self.ended:
            self.task.cancel()
            self._timer = self._loop.call_later(GRACE, self._abandon_stage)

    async def _absorb_cancellation(self) -> None:
        """Undo a cancellation of the attempt's task that the ended stage did not receive."""
        task = self.task
        while task.cancelling():
            task.uncancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            while task.cancelling():
                task.uncancel()

    def _abandon_stage(self) -> None:
        """Send the attempt's result although its stage did not end after its cancellation.

        The runner process is replaced later, because the code of the stage may still be running.
        """
        if self.ended:
            return
        stack = "".join(line for frame in self.task.get_stack() for line in traceback.format_stack(frame, limit=1))
        detail = f"the {self.stage} stage did not end within {GRACE:g} seconds after it was cancelled"
        self._tainted = True
        self.executor.background.start(self._release())
        if self._result is not None:  # only the teardown hangs: the outcome is known
            self._event("teardown.failed", detail=detail, traceback=stack)
            self._finish(*self._result, policy_loss=False)
            return
        outcome: Outcome = Failed("bug", "bug.uncancellable", detail, self.stage, stack)
        self._finish(Cancelled(self.cancelled) if self.cancelled else outcome, None, policy_loss=False)

    # ---- results

    def _finish(self, outcome: Outcome, score: Score | Ungraded | None, *, policy_loss: bool) -> None:
        self._disarm()
        if self.ended:
            return
        self.ended = True
        if isinstance(outcome, Failed):
            self._log_failure(outcome)
        now = time.time()
        try:
            result = self._build_result(outcome, score, now, policy_loss=policy_loss)
        except Exception as error:  # noqa: BLE001  (the environment left unreadable values in its context)
            broken = failed_outcome(error, self.stage, cause="bug.environment")
            result = AttemptResult(self.spec.describe_end(broken, self._began, now), tainted=self._tainted)
        self.executor.finish(self, result)

    def _build_result(
        self, outcome: Outcome, score: Score | Ungraded | None, now: float, *, policy_loss: bool
    ) -> AttemptResult:
        ctx = self.ctx
        return AttemptResult(
            self.spec.describe_end(
                outcome,
                self._began,
                now,
                evidence=self._evidence(),
                policy_loss=policy_loss,
                sandboxes=self._read_sandbox_usage(),
            ),
            reward=score.reward if isinstance(score, Score) else None,
            rewards=score.parts if isinstance(score, Score) else {},
            metrics={**ctx.metrics, **score.metrics} if score and score.metrics else ctx.metrics,
            info=ctx.info,
            usage=collect_usage(self.session, ctx),
            timing=self._times.build_timing(self.spec.queued, self._loop.time(), self.session.busy_seconds),
            tokens=tuple(self._extents),
            minimum=self.loaded.reward_bounds[0],
            tainted=self._tainted or count_stuck_threads() > 0,
        )

    def _read_sandbox_usage(self) -> tuple[SandboxUsage, ...]:
        if not self.sandboxes:
            return ()
        sandboxes = [*self.sandboxes, *self.ctx.forks][:MAX_MEASURED_SANDBOXES]
        return tuple(one.read_usage() for one in sandboxes if isinstance(one, SupportsUsage))

    def _evidence(self) -> dict[str, Any]:
        seen = dict.fromkeys(self.session.evidence)  # the gateway may have reported the same evidence twice
        return {"upstream": [msgspec.to_builtins(one) for one in seen]} if seen else {}

    def _log_failure(self, outcome: Failed) -> None:
        self.executor.logger.error(
            "attempt %s failed in %s: %s: %s\n%s",
            self.spec.id,
            outcome.stage,
            outcome.cause,
            outcome.detail,
            outcome.traceback,
            extra=with_data("attempt.failed", attempt=self.spec.id, cause=outcome.cause, stage=outcome.stage),
        )

    def _store_turn(self, turn: Turn) -> None:
        if not self.ended:
            if turn.role == "policy" and lacks_tokens(turn):
                self.executor.notice_missing_tokens(turn.upstream)
            self._extents.append(self.executor.writer.append(encode_turn(turn)))

    def _log(self, level: str, fields: dict[str, Any]) -> None:
        self._event(f"log.{level}", **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        self._events += 1
        if self._events <= EVENTS_PER_ATTEMPT:
            self.executor.send(RunnerEvent(kind, plain_data({"attempt": self.spec.id, **fields})))

    def _open_gateway_session(
        self, sandbox: SupportsModelNetwork | None, timed: bool
    ) -> AbstractAsyncContextManager[GatewaySession]:
        gateway = self.executor.gateway
        assert gateway is not None
        left = self._clock.remaining(self._loop.time()) if timed else float("inf")
        sampling = self._roles["policy"].sampling
        request = make_registration(self.spec.id, self.limits, sampling, self.spec.seed, left)
        if tracing.active is not None:
            request["traceparent"] = tracing.write_traceparent()
        if sandbox is None:
            return self._track_session(open_gateway_session(gateway, self.session, request))
        request["network"] = "model"  # only this network has a listener in the sandbox
        opening = open_gateway_session(
            gateway, self.session, request, listener=sandbox.listener(), inside_url=sandbox.inside_url
        )
        return self._track_session(opening)

    def _open_direct_session(
        self, sandbox: SupportsModelNetwork | None
    ) -> AbstractAsyncContextManager[DirectSession]:
        policy = self._roles["policy"]
        listening: dict[str, Any] = {}
        if sandbox is not None:
            listening = {"listener": sandbox.listener(), "inside_url": sandbox.inside_url}
        config = self.executor.settings.upstreams["policy"]
        return open_direct_session(policy.upstream, config, policy.model, replica=self.spec.seed, **listening)

    @asynccontextmanager
    async def _track_session(
        self, opening: AbstractAsyncContextManager[GatewaySession]
    ) -> AsyncIterator[GatewaySession]:
        async with opening as session:
            self._gateway_sessions.add(session)
            try:
                yield session
            finally:
                self._gateway_sessions.discard(session)

    async def _open_sandbox(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await self.executor.sandboxes.open(spec, self.spec.id, self.spec.task.environment)
        if self.ended:
            await sandbox.close()
            raise SandboxError(f"attempt {self.spec.id} has ended; it can open no more sandboxes")
        self.sandboxes.append(sandbox)
        return sandbox
