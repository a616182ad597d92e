"""The supervisor starts rollouts, sends their attempts to runners, decides on retries and records the results.

It executes no environment code (except with `runners=0`), and tokens do not pass through it.

- Nothing that one rollout does cancels another.
- A cancellation reaches the sandbox, the grader and the inference engine.
- If too many attempts fail, the run stops with a message that names the most frequent cause. In a mixture, only
  the environment whose attempts fail stops, and the stream ends with that message after the others have finished.
- Concurrency is bounded over all runners together.
- A bug in the supervisor stops the run with an error; consumers are never left waiting.
"""

import asyncio
import logging
import random
import time
from collections import deque
from typing import Any

import msgspec

from rookery.core import (
    DEFAULT_LIMITS,
    SCORED,
    Cancelled,
    CancelledReason,
    Failed,
    JournalError,
    Outcome,
    Rollout,
    RookeryError,
    Timing,
    UsageError,
    derive_seed,
)
from rookery.core.errors import MAX_DETAIL
from rookery.engine.circuit_breaker import CircuitBreaker
from rookery.engine.cluster import open_cluster
from rookery.engine.config import EngineConfig
from rookery.engine.crash_attribution import CrashAttribution, DeathKind
from rookery.engine.group_channel import GroupChannel
from rookery.engine.length_predictor import LengthPredictor
from rookery.engine.outage import OutageMonitor
from rookery.engine.prewarm import Prewarmer
from rookery.engine.record_writer import RecordWriter
from rookery.engine.retry import EndRollout, Retry, find_hung_replicas
from rookery.engine.run_services import RunGateway, RunKeeper, reap_other_runs, reap_run
from rookery.engine.run_traces import RolloutTraces
from rookery.engine.runner_handle import Dispatch, RunnerHandle
from rookery.engine.runner_pool import TICK, RunnerPool, Stopped, stop_run_on_error
from rookery.engine.runner_protocol import NO_TOKENS, AttemptResult, AttemptSpec, Cancel, RunSettings
from rookery.engine.scheduler import OpenGroup, OpenRollout
from rookery.environments import Environment
from rookery.environments.mixture import get_entries
from rookery.journal import Journal

LOOK_AHEAD = 4
"""Number of rollouts that `longest_first` sorts by length, as a multiple of those that can run at once."""
MAX_BACKLOG = 5_000
"""No attempt is started while this many writes or more wait to be committed to the journal."""
log = logging.getLogger("rookery.engine")


class Supervisor:
    """Owns the runners and the open streams of a run, and writes its journal."""

    def __init__(
        self,
        settings: RunSettings,
        environment: Environment,
        journal: Journal,
        config: EngineConfig,
        lengths: LengthPredictor,
    ) -> None:
        self.settings = settings
        self.journal = journal
        self.config = config
        self.breakers = {
            name: CircuitBreaker(config.breaker, concurrency=config.concurrency)
            for name in get_entries(environment)
        }
        """The circuit breaker of each environment of a mixture; in other runs, one with an empty name."""
        self.stopped_environments: dict[str, Stopped] = {}
        """Environments of a mixture that are not run any more because too many of their attempts failed."""
        self.crashes = CrashAttribution()
        self.channels: deque[GroupChannel] = deque()
        self.next_group = 0
        self.records = RecordWriter(journal, self.stop)
        self.stopped: RookeryError | None = None
        self.no_tokens = ""
        """The reason why recorded model calls have no token IDs. Empty until a runner has reported that."""
        self.counts = {"attempts": 0, "retries": 0}
        self.lengths = lengths
        cluster = open_cluster(config.cluster) if config.cluster else None
        # On a cluster every node has its own gateway and its own keeper.
        needs_gateway = bool(environment.needs_gateway) and not settings.unrecorded
        self.gateway = RunGateway(settings) if needs_gateway and cluster is None else None
        self.pool = RunnerPool(
            self,
            settings,
            environment,
            size=config.runners,
            capacity=-(-config.concurrency // max(1, config.runners)),
            block_limit=config.block_limit,
            gateway=self.gateway,
            cluster=cluster,
        )
        self.keeper = RunKeeper(settings) if cluster is None else None
        self.prewarmer = Prewarmer(self.pool, settings.warm)
        self.traces = RolloutTraces(settings.run, environment.title) if settings.traces is not None else None
        self.outage = OutageMonitor(
            settings.upstreams,
            config.wait_for_upstream,
            on_wait=self._on_outage,
            on_recovery=self._on_recovery,
            on_expiry=self._on_outage_expired,
        )
        self._loop = asyncio.get_running_loop()
        self._admission_scheduled = False
        self._closing = False
        self._reaping: asyncio.Task[None] | None = None
        self._random = random.Random(config.root_seed)  # noqa: S311

    # ---- start and stop

    async def start(self) -> None:
        """Start the gateway, the keeper and the runners, and return when a runner is ready.

        Raise `UsageError` if the environment cannot be loaded.
        """
        self.journal.on_commit(self._on_commit)
        await asyncio.to_thread(reap_run, self.settings)
        # It may have to wait for a service, so the run does not wait for it.
        self._reaping = self._loop.create_task(asyncio.to_thread(reap_other_runs, self.settings))
        starting_keeper = self._loop.create_task(self.keeper.open()) if self.keeper is not None else None
        try:
            if self.gateway is not None:
                await self.gateway.open()
            await self.pool.start()
        finally:
            if starting_keeper is not None and (problem := await starting_keeper):
                self.record_event("keeper.failed", {"detail": problem})
        if self.stopped is not None:
            raise self.stopped

    async def close(self) -> None:
        """Cancel all attempts and stop the runners, the gateway and the keeper.

        Unfinished rollouts get no final record, so that a resume runs them again.
        """
        self._closing = True
        self.outage.close()
        await self.pool.close()
        if self.traces is not None:
            self.traces.close()
        if self.gateway is not None:
            await self.gateway.close()
        if self.keeper is not None:
            await self.keeper.close()
        await asyncio.to_thread(reap_run, self.settings)
        if self._reaping is not None:
            await asyncio.wait({self._reaping})

    @property
    def closing(self) -> bool:
        return self._closing

    def stop(self, error: RookeryError) -> None:
        """Stop the run: start no more rollouts, and raise `error` in the consumer of every stream.

        Running attempts are cancelled and not recorded. Only the first call has an effect.
        """
        if self.stopped is not None or self._closing:
            return
        self.stopped = error
        self.record_event("stopped", {"detail": str(error)})
        for runner in self.pool.runners:
            for attempt in runner.running:
                runner.send(Cancel(attempt, "shutdown"))
        for channel in self.channels:
            channel.fail(error)
        self.prewarmer.update(())
        self.pool.wake_waiters()

    def record_event(self, kind: str, payload: dict[str, Any]) -> None:
        """Write an event to the journal and pass it to `Engine.on_event`."""
        self.records.record_event(kind, payload)
        if kind == NO_TOKENS:
            self.no_tokens = payload["detail"]
            log.warning("%s", self.no_tokens)
            for channel in self.channels:
                channel.notify()

    def refuse_without_tokens(self, channel: GroupChannel) -> None:
        """Raise `UsageError` if the consumer of a stream needs token IDs and the policy's server returns none."""
        if channel.needs_tokens and self.no_tokens:
            raise UsageError(f"training needs token IDs: {self.no_tokens}")

    # ---- streams

    def open_channel(self, channel: GroupChannel) -> None:
        if self.stopped is not None:
            raise self.stopped
        self.refuse_without_tokens(channel)
        self.channels.append(channel)
        self.records.deliver_committed([channel])
        self.schedule_admission()

    def close_channel(self, channel: GroupChannel, reason: CancelledReason) -> None:
        """Cancel the rest of a stream. Each of its unfinished rollouts gets a `Cancelled` record."""
        if channel.closed:
            return
        channel.close()
        if not self._closing and self.stopped is None:
            self._cancel_groups(channel, channel.scheduler.cancel_all(), reason)
        self._remove_if_done(channel)

    def mark_taken(self, channel: GroupChannel, index: int) -> None:
        """Record that the consumer took a group, and start further rollouts if that is possible now."""
        self.records.mark_taken(channel, index)
        self.schedule_admission()

    def _remove_if_done(self, channel: GroupChannel) -> None:
        if channel.running == 0 and channel.done and channel in self.channels:
            self.channels.remove(channel)

    def _cancel_groups(self, channel: GroupChannel, groups: list[OpenGroup], reason: CancelledReason) -> None:
        for group in groups:
            group.cancelled = reason
        running: set[OpenRollout] = set()
        for runner in self.pool.runners:
            for attempt, dispatch in runner.running.items():
                if dispatch.channel is channel and dispatch.rollout.group in groups:
                    running.add(dispatch.rollout)
                    runner.send(Cancel(attempt, reason))
        for group in groups:
            for rollout in group.rollouts:
                if rollout.record is None and rollout not in running:
                    record = RecordWriter.build_bare_record(rollout, Cancelled(reason))
                    self._record(channel, rollout, record)

    # ---- admission

    @property
    def running(self) -> int:
        """Number of running attempts of all streams."""
        return sum(channel.running for channel in self.channels)

    def schedule_admission(self) -> None:
        """Start as many attempts as possible in the next iteration of the event loop."""
        if not self._admission_scheduled:
            self._admission_scheduled = True
            self._loop.call_soon(self._start_attempts)

    @stop_run_on_error
    def _start_attempts(self) -> None:
        self._admission_scheduled = False
        if self.pool.paused or self._closing or self.stopped is not None or self.outage.waited is not None:
            return
        now = self._loop.time()
        self._start_suspects()
        self._start_waiting_for_node(now)
        running, waiting = self.running, sum(channel.scheduler.waiting_for_node_count for channel in self.channels)
        most = self.config.concurrency
        while running < most and waiting < most and self.journal.backlog < MAX_BACKLOG:
            runner = self.pool.find_free_runner(self.pool.common_requirements)
            found = self._next_rollout(now) if runner is not None else None
            if runner is None or found is None:
                break
            channel, rollout = found
            task = rollout.group.task
            warm_runner = self.prewarmer.find_runner(task.id)
            required = self.pool.requirements_of(task)
            if warm_runner is not None or not self.pool.accepts(runner, required):
                runner = self.pool.find_free_runner(required, preferred=warm_runner)
            if runner is None:
                channel.scheduler.wait_for_node(rollout, required)
                waiting += 1
            else:
                running += self._dispatch(runner, channel, rollout, now)
        self.prewarmer.update(self.channels, self.records.quarantined)
        for channel in list(self.channels):
            if channel.done:
                channel.notify()
                self._remove_if_done(channel)

    def _next_rollout(self, now: float) -> tuple[GroupChannel, OpenRollout] | None:
        """Return the next rollout to start, with its stream, or None.

        Streams take turns. In a stream, rollouts of open groups go before new groups.
        """
        for _ in range(len(self.channels)):
            channel = self.channels[0]
            self.channels.rotate(-1)
            rollout = channel.scheduler.next_rollout(now)
            while rollout is None and channel.error is None and channel.scheduler.can_start_group():
                if not self._start_groups(channel, now):
                    break
                rollout = channel.scheduler.next_rollout(now)
            if rollout is not None:
                return channel, rollout
        return None

    def _start_groups(self, channel: GroupChannel, now: float) -> bool:
        """Start the next group of a stream. Return False if there is none.

        With `longest_first`, start several groups and sort their rollouts. All of them start before further groups
        are started, so that no rollout waits for ever.
        """
        if not self.config.longest_first:
            return self._start_group(channel, now)
        started = 0
        most = LOOK_AHEAD * -(-self.config.concurrency // channel.scheduler.k)
        while started < most and channel.scheduler.can_start_group() and self._start_group(channel, now):
            started += 1
        channel.scheduler.start_longest_first(self.lengths.predict)
        return started > 0

    def _start_group(self, channel: GroupChannel, now: float) -> bool:
        planned = channel.next_group()
        if planned is None:
            return False
        if (error := self.stopped_environments.get(planned.task.environment)) is not None:
            channel.skip(planned, error)
            return channel.error is None
        channel.skipped = 0
        index = planned.index
        if index is None:
            index, self.next_group = self.next_group, self.next_group + 1
            self.records.record_group(channel, index, planned)
        group = channel.scheduler.start_group(index, planned.task, now, planned.finished)
        group.task_number, group.ordinal = planned.task_number, planned.ordinal
        group.stream = planned.stream or channel.name
        channel.add_untaken(index, planned, self.pool.pauses.version)
        for member, used in planned.attempts.items():
            group.rollouts[member].earlier_attempts = used
        if planned.task.invalid:
            broken = Failed("task", "task.invalid", planned.task.invalid, "queue")
            self.records.quarantined.setdefault(planned.task.id, broken)
        if group.unfinished == 0:
            self._complete(channel, group)
        return True

    def _dispatch(self, runner: RunnerHandle, channel: GroupChannel, rollout: OpenRollout, now: float) -> int:
        """Send an attempt to a runner and return 1.

        If the task is quarantined (known to be broken), record the rollout as failed instead and return 0.
        """
        broken = self.records.quarantined.get(rollout.group.task.id)
        if broken is not None:
            self._record(channel, rollout, RecordWriter.build_bare_record(rollout, broken))
            return 0
        # Whole ticks are subtracted from the wait, also for a rollout that was queued within a tick.
        spec = self._build_spec(rollout, queued=max(0.0, now - rollout.waiting_since))
        runner.running[spec.id] = Dispatch(channel, rollout, spec)
        channel.running += 1
        self.counts["attempts"] += 1
        runner.send(spec)
        return 1

    def _build_spec(self, rollout: OpenRollout, *, queued: float) -> AttemptSpec:
        number, group = rollout.next_attempt, rollout.group
        # The seed is the same for every attempt of a rollout, in this run and in a resumed one.
        seed = derive_seed(self.config.root_seed, group.stream, group.ordinal, rollout.member)
        avoid = find_hung_replicas(rollout.attempts)
        traceparent = self.traces.start(rollout) if self.traces is not None else ""
        return AttemptSpec(f"{rollout.id}.{number}", number, seed, group.task, queued, avoid, traceparent)

    def _start_suspects(self) -> None:
        """Start rollouts that must run alone in idle runners, and create spare runners for those that are left.

        Such a rollout is suspected of having crashed its runner.
        """
        if any(channel.scheduler.suspect_tasks() for channel in self.channels):
            for runner in self.pool.find_idle_runners():
                self._start_suspect(runner)
        waiting = [task for channel in self.channels for task in channel.scheduler.suspect_tasks()]
        self.pool.ensure_spares([self.pool.requirements_of(task) for task in waiting])

    def _start_suspect(self, runner: RunnerHandle) -> None:
        for channel in self.channels:
            rollout = channel.scheduler.next_suspect(
                lambda task: self.pool.accepts(runner, self.pool.requirements_of(task))
            )
            if rollout is not None:
                runner.alone = True
                self._dispatch(runner, channel, rollout, self._loop.time())
                return

    def _start_waiting_for_node(self, now: float) -> None:
        """Start rollouts that wait for a node with labels or GPUs, if such a node is free now."""
        for channel in self.channels:
            for required in channel.scheduler.awaited_requirements():
                while self.running < self.config.concurrency:
                    runner = self.pool.find_free_runner(required)
                    rollout = channel.scheduler.next_waiting_for_node(required) if runner is not None else None
                    if runner is None or rollout is None:
                        break
                    self._dispatch(runner, channel, rollout, now)

    @stop_run_on_error
    def on_tick(self, late: float) -> None:
        """End attempts with cause `engine.queue` that have waited too long for a runner. Called once a second.

        `late` is by how many seconds this call is late.
        """
        limit = self.settings.limits.queue or DEFAULT_LIMITS.queue
        assert limit is not None
        now = self._loop.time()
        for channel in self.channels:
            # Waiting behind other rollouts of the run is normal. Only a wait for a runner while a slot is free
            # counts.
            paused = self.pool.paused or self.outage.waited is not None
            full = self.running >= self.config.concurrency
            testing_suspect = any(runner.alone for runner in self.pool.runners)
            channel.scheduler.exclude_wait(
                TICK + late,
                shared=paused or full,
                suspects=paused or testing_suspect,
                waiting_for_node=self.pool.is_waiting_for_gpus,
            )
            for rollout in channel.scheduler.pop_overdue(now, limit):
                self._fail_overdue(channel, rollout, limit)
        self.schedule_admission()

    def _fail_overdue(self, channel: GroupChannel, rollout: OpenRollout, limit: float) -> None:
        spec = self._build_spec(rollout, queued=limit)
        outcome = Failed("infra", "engine.queue", f"no runner was free for {limit:g} seconds", "queue")
        now = time.time()
        result = AttemptResult(spec.describe_end(outcome, now, now), timing=Timing(queue=limit))
        self._end_attempt(Dispatch(channel, rollout, spec), result, "")

    # ---- results from runners

    @stop_run_on_error
    def on_result(self, runner: RunnerHandle, result: AttemptResult) -> None:
        """Process the result of an attempt that has ended."""
        outcome = result.attempt.outcome
        dispatch = runner.running.pop(result.attempt.id, None)
        if dispatch is None:
            return  # an attempt that was already ended otherwise
        runner.alone = False
        dispatch.channel.running -= 1
        if result.tainted:
            self.pool.replace(runner)
        dispatch.channel.notify()
        if isinstance(outcome, Cancelled) and outcome.reason == "shutdown":
            return  # unfinished: a resume runs it again
        if self.journal.error is not None:
            return
        if self.outage.may_explain(outcome):
            name = runner.name
            self.outage.decide_later(
                outcome, lambda gone: self._process_result(dispatch, result, name, charged=not gone)
            )
        else:
            self._process_result(dispatch, result, runner.name, charged=True)

    @stop_run_on_error
    def _process_result(self, dispatch: Dispatch, result: AttemptResult, runner: str, *, charged: bool) -> None:
        """Record an ended attempt. `charged` is False if it failed because an inference engine was unavailable."""
        if self._closing or self.stopped is not None or dispatch.rollout.record is not None:
            return  # the rollout was cancelled in the meantime
        if dispatch.environment in self.stopped_environments:
            return  # unfinished: a resume runs it again
        if charged:
            self._observe(dispatch, result.attempt.outcome)
        self._end_attempt(dispatch, result, runner, charged=charged)
        self._check_breakers()
        self.schedule_admission()

    # ---- circuit breakers

    def _observe(self, dispatch: Dispatch, outcome: Outcome) -> None:
        """Count an ended attempt in the circuit breaker of its environment."""
        running = self.running
        if len(self.breakers) > 1 and isinstance(outcome, Failed):  # only then it matters how many run
            running = sum(
                other.environment == dispatch.environment
                for one in self.pool.runners
                for other in one.running.values()
            )
        self.breakers[dispatch.environment].observe(outcome, running)

    def _check_breakers(self) -> None:
        """Stop the environments whose circuit breaker is open, or the run if all of them are."""
        opened = {name: breaker.message for name, breaker in self.breakers.items() if breaker.is_open}
        for name, message in opened.items():
            if len(opened) == len(self.breakers):
                self.stop(Stopped(f"{name}: {message}" if name else message))
            elif name not in self.stopped_environments:
                self._stop_environment(name, Stopped(f"{name}: {message}"))

    def _stop_environment(self, name: str, error: Stopped) -> None:
        """Run no more rollouts of an environment of a mixture.

        Its unfinished rollouts get no final record, so that a resume runs them again.
        """
        self.stopped_environments[name] = error
        self.record_event("environment.stopped", {"environment": name, "detail": str(error)})
        for runner in self.pool.runners:
            for attempt, dispatch in runner.running.items():
                if dispatch.environment == name:
                    runner.send(Cancel(attempt, "shutdown"))
        for channel in list(self.channels):
            removed, deliverable = channel.scheduler.remove_environment(name)
            if removed:
                channel.missing = error
            self.records.deliver(channel, deliverable)
            channel.notify()
            self._remove_if_done(channel)

    # ---- inference engines that went away

    @stop_run_on_error
    def _on_outage(self, problem: str) -> None:
        limit = self.config.wait_for_upstream
        detail = f"waiting up to {limit:g} s for the inference engine: {problem}"
        self.record_event("upstream.waiting", {"detail": detail, "seconds": limit})

    @stop_run_on_error
    def _on_recovery(self, waited: float) -> None:
        detail = f"the inference engine is back after {waited:.3g} s; the run continues"
        self.record_event("upstream.back", {"detail": detail, "seconds": waited})
        self.schedule_admission()

    @stop_run_on_error
    def _on_outage_expired(self, problem: str) -> None:
        self.stop(
            Stopped(
                f"stopped: the inference engine did not come back within {self.config.wait_for_upstream:g} s: "
                f"{problem.rstrip('.')}; then continue with `rookery resume`"
            )
        )

    # ---- runners that died

    @stop_run_on_error
    def on_runner_death(self, runner: RunnerHandle, death: DeathKind, detail: str) -> None:
        """Decide which rollout of a dead runner is guilty of its death, and end that rollout with fault bug.

        The other rollouts run again without being charged for the attempt. Suspects run alone in a runner.
        """
        dispatches = {one.rollout.id: one for one in runner.running.values()}
        runner.running.clear()
        blamed = runner.blamed.rpartition(".")[0] if runner.blamed else None
        attributions = self.crashes.attribute(list(dispatches), death, alone=runner.alone, blamed=blamed)
        now = time.time()
        for rollout, dispatch in dispatches.items():
            dispatch.channel.running -= 1
            if self._closing or self.stopped is not None or dispatch.environment in self.stopped_environments:
                continue
            guilty = attributions[rollout] == "guilty"
            if guilty:
                cause = "bug.blocked" if death == "blocked" else "bug.crashed"
                text = f"when it ran alone: {detail}"[:MAX_DETAIL]
                outcome = Failed("bug", cause, text, "run", detail)
                self._observe(dispatch, outcome)
            else:
                cause = "machine.lost" if death == "lost" else "runner.lost"
                outcome = Failed("infra", cause, detail.partition("\n")[0], "run")
            result = AttemptResult(dispatch.spec.describe_end(outcome, now, now))
            alone = attributions[rollout] == "suspect"
            self._end_attempt(dispatch, result, runner.name, charged=guilty, alone=alone)
        self._check_breakers()
        self.schedule_admission()

    # ---- records and groups

    def _end_attempt(
        self, dispatch: Dispatch, result: AttemptResult, runner: str, *, charged: bool = True, alone: bool = False
    ) -> None:
        """Record an ended attempt, and queue a new attempt or write the rollout's final record.

        With `alone`, a new attempt runs alone in a runner.
        """
        channel, rollout, group = dispatch.channel, dispatch.rollout, dispatch.rollout.group
        attempt = msgspec.structs.replace(result.attempt, runner=runner, charged=charged)
        rollout.attempts.append(attempt)
        decision = self.config.retry.decide(rollout.attempts, self._random.random())
        if isinstance(decision, Retry):
            self.counts["retries"] += charged
            self.records.write(lambda: self.journal.add_attempt(rollout.id, attempt))
            if group.cancelled is None:
                channel.scheduler.requeue(rollout, self._loop.time(), decision.delay, alone=alone)
                if decision.delay:
                    self._loop.call_later(decision.delay, self.schedule_admission)
                return
            decision = EndRollout(Cancelled(group.cancelled))
        outcome = decision.outcome
        scored = isinstance(outcome, SCORED)
        if isinstance(outcome, Failed) and outcome.fault == "task":
            self.records.quarantine(group, outcome)
        record = Rollout(
            id=rollout.id,
            group=group.index,
            member=rollout.member,
            task=group.task.id,
            environment=group.task.environment,
            outcome=outcome,
            seed=dispatch.spec.seed,
            reward=result.minimum if decision.minimum_reward else (result.reward if scored else None),
            rewards=result.rewards,
            metrics=result.metrics,
            info=result.info,
            attempts=tuple(rollout.attempts),
            usage=result.usage,
            timing=result.timing,
            tokens=result.tokens,
        )
        self._record(channel, rollout, record)

    def _record(self, channel: GroupChannel, rollout: OpenRollout, record: Rollout) -> None:
        self.crashes.forget(record.id)
        if self.traces is not None:
            self.traces.end(record)
        self.lengths.record(record)
        if self.records.record(channel, rollout, record):
            self._complete(channel, rollout.group)

    def _complete(self, channel: GroupChannel, group: OpenGroup) -> None:
        surplus = self.records.complete(channel, group)
        if surplus:
            self._cancel_groups(channel, surplus, "filtered")
        self._remove_if_done(channel)

    @stop_run_on_error
    def _on_commit(self, error: JournalError | None) -> None:
        if error is not None:
            self.stop(error)
            return
        self.records.deliver_committed(self.channels)
        self.schedule_admission()
