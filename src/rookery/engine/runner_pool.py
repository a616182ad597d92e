"""Start, watch, pause, replace and stop the runners of a run. Runs in the supervisor's process.

- If the event loop of a runner is blocked, its stack is recorded. After `block_limit` seconds the runner is
  killed. A runner that sends no heartbeats is killed a few seconds later than that.
- A dead runner is replaced. If runners keep dying while they run no attempt, the run stops and reports why.
- A runner that is created during a pause starts paused.
- If the node of a runner is lost, the runner is not replaced, and none of its attempts is blamed.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rookery.core import JournalError, RookeryError, Task, UsageError
from rookery.core.errors import describe
from rookery.engine.background_tasks import BackgroundTasks
from rookery.engine.cluster import Cluster
from rookery.engine.crash_attribution import DeathKind
from rookery.engine.run_services import RunGateway
from rookery.engine.runner_handle import LocalRunner, ProcessRunner, RunnerHandle
from rookery.engine.runner_protocol import (
    NO_TOKENS,
    NOT_ISOLATED,
    AttemptResult,
    FromRunner,
    Heartbeat,
    ImageUpdate,
    LoopBlocked,
    Pause,
    Paused,
    Ready,
    Resume,
    RunnerEvent,
    RunnerFailed,
    RunSettings,
)
from rookery.engine.scheduler import NO_REQUIREMENTS, Requirements
from rookery.environments import Environment
from rookery.gateway.client import GatewayAddress
from rookery.telemetry import REGISTRY
from rookery.upstreams.pause import PauseCoordinator
from rookery.upstreams.protocol import PauseMode

READY_SECONDS = 300.0
MAX_IDLE_DEATHS = 3
"""The run stops after this many runners in a row died while they ran no attempt: a new one would die as well."""
TICK = 1.0
"""Seconds between two checks of the runners."""
ONCE_PER_RUN = frozenset({NOT_ISOLATED, NO_TOKENS})
"""Kinds of events that every runner may send and that are recorded once per run."""
P = ParamSpec("P")
log = logging.getLogger("rookery.engine")


class Stopped(RookeryError):  # noqa: N818  (an orderly end with a reason)
    """The run was stopped before its end; the message says why.

    For example, too many attempts failed, an inference engine did not come back, or no runner process can be
    started.
    """


class InternalError(Stopped):
    """Rookery's supervisor itself failed. The run was stopped, so that no consumer waits for ever."""


class PoolOwner(Protocol):
    """Receives results, events and deaths of the pool's runners. Implemented by `Supervisor`."""

    def schedule_admission(self) -> None: ...

    def stop(self, error: RookeryError) -> None: ...

    def record_event(self, kind: str, payload: dict[str, Any]) -> None: ...

    def on_result(self, runner: RunnerHandle, result: AttemptResult) -> None: ...

    def on_runner_death(self, runner: RunnerHandle, death: DeathKind, detail: str) -> None: ...

    def on_tick(self, late: float) -> None: ...


Owner = TypeVar("Owner", bound=PoolOwner)


def stop_run_on_error(method: Callable[Concatenate[Owner, P], None]) -> Callable[Concatenate[Owner, P], None]:
    """Decorator for methods that the event loop calls: an exception stops the run with an `InternalError`."""

    @wraps(method)
    def call(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(owner, *args, **kwargs)
        except Exception as error:
            log.exception("the supervisor failed in %s", method.__name__)
            owner.stop(InternalError(f"Rookery's supervisor failed in {method.__name__}: {describe(error)}"))

    return call


class RunnerPool:
    """Creates and maintains `size` runner processes; with `size` 0, one runner in this process."""

    def __init__(
        self,
        owner: PoolOwner,
        settings: RunSettings,
        environment: Environment,
        *,
        size: int,
        capacity: int,
        block_limit: float,
        gateway: RunGateway | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.owner = owner
        self.settings = settings
        self.environment = environment
        self.size = size
        self.capacity = capacity
        """Maximum number of concurrent attempts per runner."""
        self.block_limit = block_limit
        self.runners: list[RunnerHandle] = []
        self.deaths = 0
        self._created = 0
        self._idle_deaths = 0
        self._has_spares = False
        """True if a spare runner may exist that is not retiring."""
        self._stopping = False
        self._recorded_once: set[str] = set()
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = self._loop.time()
        self.late = 0.0
        """Delay of the last check of the runners, in seconds."""
        self.gateway = gateway
        self.cluster = cluster
        """The cluster on whose nodes the runners are started, or None if they are child processes."""
        specs = settings.sandboxes.values() or [settings.sandbox]
        gpus = min(spec.gpus or 0 for spec in specs) if cluster is not None else 0
        self.common_requirements = Requirements(gpus) if gpus else NO_REQUIREMENTS
        """Requirements that the attempts of every task have."""
        self.pauses = PauseCoordinator(PoolPauseTargets(self))
        self.background = BackgroundTasks(self._on_failure)
        """Tasks that start, stop and pause runners. If one fails, the run stops."""

    # ---- start and stop

    async def start(self) -> None:
        """Start the runners. Return when one is ready, or when the run was stopped meanwhile.

        Raise `Stopped` if none is ready after `READY_SECONDS`.
        """
        if self.cluster is not None:
            await self.cluster.open(
                self,
                concurrency=self.capacity * max(1, self.size),
                needs_gateway=bool(self.environment.needs_gateway) and not self.settings.unrecorded,
            )
        else:
            for _ in range(max(1, self.size)):
                await self._create_runner()
        self._tick()
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._ready.wait()
        except TimeoutError as error:
            if self.cluster is not None and not self.cluster.describe():
                raise Stopped(
                    f"no node of the cluster has joined after {READY_SECONDS:g} seconds: check that Rookery is "
                    "installed on the nodes and that they can connect to this machine"
                ) from error
            raise Stopped(
                f"no runner process was ready after {READY_SECONDS:g} seconds: read {self.settings.folder}/logs"
            ) from error

    def add_runner(self, node: str) -> None:
        """Start one more runner on a node of the cluster."""
        self.background.start(self._create_runner(node=node))

    async def _create_runner(
        self, *, spare: bool = False, node: str = "", required: Requirements = NO_REQUIREMENTS
    ) -> None:
        self._created += 1
        runner: RunnerHandle | None
        if self.size == 0:
            name = f"local-{self._created}"
            runner = LocalRunner(name, self, self.settings, self.environment, self.gateway_address)
        elif self.cluster is not None:
            runner = self.cluster.create_runner(f"runner-{self._created}", node, required)
        else:
            runner = ProcessRunner(f"runner-{self._created}", self, self.settings)
        if runner is None:
            return  # the node is gone; a node that joins brings its own runners
        runner.spare = spare
        self._has_spares |= spare
        self.runners.append(runner)
        try:
            await runner.open(self.pauses, self.gateway_address)
        except OSError as error:
            self.runners.remove(runner)
            self.owner.stop(Stopped(f"a runner process could not be started: {describe(error)}"))

    async def close(self) -> None:
        """Stop all runners. Each of them cancels its attempts first."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        await self.background.cancel()
        await asyncio.gather(*(runner.stop() for runner in list(self.runners)))
        if self.cluster is not None:
            await self.cluster.close()

    def wake_waiters(self) -> None:
        """Let `start` and waiting pauses return after the run was stopped."""
        self._ready.set()
        self.pauses.recheck()

    def _on_failure(self, error: BaseException) -> None:
        self.owner.stop(Stopped(f"a runner cannot be started or stopped: {describe(error)}"))

    @property
    def paused(self) -> bool:
        return self.pauses.mode is not None

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def gateway_address(self) -> GatewayAddress | None:
        """The address of the run's gateway, for new runners."""
        return self.gateway.address if self.gateway is not None else None

    # ---- choice of a runner

    @property
    def running(self) -> int:
        """Number of running attempts in all runners."""
        return sum(len(runner.running) for runner in self.runners)

    def requirements_of(self, task: Task) -> Requirements:
        """Return what an attempt of this task needs of its node. Without a cluster, it needs nothing."""
        if self.cluster is None:
            return NO_REQUIREMENTS
        gpus = self.settings.sandbox_of(task.environment).gpus or 0
        return (
            Requirements(gpus, frozenset(task.node_labels.items()))
            if gpus or task.node_labels
            else NO_REQUIREMENTS
        )

    def find_free_runner(
        self, required: Requirements = NO_REQUIREMENTS, preferred: RunnerHandle | None = None
    ) -> RunnerHandle | None:
        """Return the shared runner with the fewest attempts, or None if all are full.

        Return `preferred` if it can take an attempt; without a cluster, it may get twice its share. A cluster
        chooses itself, among its nodes that meet the requirements.
        """
        if self.cluster is not None:
            return self.cluster.find_free_runner(required, preferred)
        if preferred is not None and preferred.is_shared and len(preferred.running) < 2 * self.capacity:
            return preferred
        best = min((one for one in self.runners if one.is_shared), key=lambda one: len(one.running), default=None)
        return best if best is not None and len(best.running) < self.capacity else None

    def find_runner_to_prewarm(self, task: Task) -> RunnerHandle | None:
        """Return the runner that should prepare a sandbox for an attempt of this task, or None."""
        if self.cluster is not None:
            return self.cluster.find_runner_to_prewarm(self.requirements_of(task))
        shared = (one for one in self.runners if one.is_shared)
        return min(shared, key=lambda one: len(one.running) + one.planned, default=None)

    def find_idle_runners(self) -> list[RunnerHandle]:
        """Return the ready runners that run no attempt and are not retiring.

        A rollout that is suspected of crashing its runner runs alone in one of these.
        """
        return [one for one in self.runners if one.ready and not one.running and not one.retiring]

    def accepts(self, runner: RunnerHandle, required: Requirements) -> bool:
        """Return whether an attempt with these requirements may run in this runner now."""
        return self.cluster is None or required is NO_REQUIREMENTS or self.cluster.accepts(runner, required)

    def is_waiting_for_gpus(self, required: Requirements) -> bool:
        """Return whether an attempt waits only because other attempts of the run use the GPUs that it needs."""
        return self.cluster is not None and required.gpus > 0 and self.cluster.can_meet(required)

    def ensure_spares(self, waiting: Sequence[Requirements]) -> None:
        """Create spare runners for rollouts that must run alone, at most `size` at a time.

        `waiting` are their requirements. If no such rollout is waiting, retire the idle spare runners.
        """
        if not waiting:
            if self._has_spares:
                self._has_spares = False
                for runner in [one for one in self.runners if one.spare and not one.retiring]:
                    if runner.ready and not runner.running:
                        self.retire(runner)
                    else:
                        self._has_spares = True
            return
        spares = [runner for runner in self.runners if runner.spare and not runner.retiring]
        for required in waiting[: max(1, self.size)]:
            found = next((runner for runner in spares if self.accepts(runner, required)), None)
            if found is not None:
                spares.remove(found)
            else:
                self.background.start(self._create_runner(spare=True, required=required))

    def retire(self, runner: RunnerHandle) -> None:
        """Send no more attempts to a runner and stop it when it has none."""
        runner.retiring = True
        if not runner.running and not runner.stopping and runner.is_process:
            runner.stopping = True
            self.background.start(runner.stop())

    def replace(self, runner: RunnerHandle) -> None:
        """Retire a runner in which the code of an ended attempt cannot be stopped, and start another runner."""
        if runner.retiring or not runner.is_process:
            return
        self.owner.record_event("runner.tainted", {"runner": runner.name})
        spare = runner.spare
        self.retire(runner)
        if not spare:
            self.background.start(self._create_runner(node=runner.node))

    # ---- messages from runners

    def on_message(self, runner: RunnerHandle, message: FromRunner) -> None:
        match message:
            case AttemptResult():
                self._idle_deaths = 0
                self.owner.on_result(runner, message)
                if runner.retiring:
                    self.retire(runner)
            case RunnerEvent(kind, payload):
                if kind in self._recorded_once:
                    return
                if kind in ONCE_PER_RUN:
                    self._recorded_once.add(kind)
                self.owner.record_event(kind, {"runner": runner.name, **payload})
            case Heartbeat(state, metrics):
                runner.state = state
                if metrics:
                    REGISTRY.absorb(self._source(runner), metrics)
            case ImageUpdate():
                self._on_image(runner, message)
            case Ready():
                runner.ready = True
                if runner.pause_number:
                    self.pauses.confirm(runner.name, runner.pause_number)
                self._ready.set()
                self.owner.schedule_admission()
            case RunnerFailed(detail, _, disk):
                self.owner.stop(JournalError(detail) if disk else UsageError(detail))
            case Paused(number, problem):
                self.pauses.confirm(runner.name, number, problem)
            case LoopBlocked(seconds, attempt, stack):
                self._on_blocked(runner, seconds, attempt, stack)

    def _source(self, runner: RunnerHandle) -> str:
        return f"{self.settings.folder}/{runner.name}"

    def on_death(self, runner: RunnerHandle, death: DeathKind, detail: str) -> None:
        REGISTRY.forget(self._source(runner))
        if runner in self.runners:
            self.runners.remove(runner)
        self.pauses.recheck()
        if self._stopping or (runner.retiring and not runner.running):
            return
        self.deaths += 1
        if runner.block_stack:
            detail = f"{detail}\nthe event loop was blocked here:\n{runner.block_stack}"
        self.owner.record_event("runner.died", {"runner": runner.name, "death": death, "detail": detail})
        if not runner.running and death != "lost":
            self._idle_deaths += 1
            if self._idle_deaths >= MAX_IDLE_DEATHS:
                self.owner.stop(
                    Stopped(
                        "runner processes keep dying while they run no attempt (see logs/ in the run's "
                        f"directory): {detail}"
                    )
                )
                return
        self.owner.on_runner_death(runner, death, detail)
        if not runner.spare and not runner.retiring and death != "lost":
            self.background.start(self._create_runner(node=runner.node))

    def _on_image(self, runner: RunnerHandle, image: ImageUpdate) -> None:
        """Keep the progress of an image for `Engine.status`. Record events for the start and end of a download."""
        known = runner.images.pop(image.image, None)
        if image.step not in ("ready", "failed"):
            runner.images[image.image] = image
            started = image.step == "fetching" and (known is None or known.step != "fetching")
            if started:
                payload = {"runner": runner.name, "image": image.image, "bytes": image.total}
                self.owner.record_event("image.fetching", payload)
        elif known is not None:
            self.owner.record_event(f"image.{image.step}", {"runner": runner.name, "image": image.image})

    def _on_blocked(self, runner: RunnerHandle, seconds: float, attempt: str | None, stack: str) -> None:
        first = not runner.block_stack
        runner.blamed, runner.block_stack = attempt, stack
        if first:
            payload = {"runner": runner.name, "attempt": attempt, "seconds": round(seconds, 1), "stack": stack}
            self.owner.record_event("loop.blocked", payload)
        if seconds >= self.block_limit:
            runner.kill("blocked")

    def _tick(self) -> None:
        now = self._loop.time()
        late = self.late = max(0.0, now - self._last_tick - TICK)
        self._last_tick = now
        for runner in list(self.runners):
            if not runner.is_process or not runner.ready:
                continue
            runner.last_message += late  # this process was late itself: the silence proves nothing
            if runner.block_stack and now - runner.last_message < 2 * TICK:
                runner.blamed, runner.block_stack = None, ""
            if now - runner.last_message > self.block_limit + 5 * TICK:
                runner.kill("blocked")
        self.owner.on_tick(late)
        if not self._stopping:
            self._timer = self._loop.call_later(TICK, self._tick)


class PoolPauseTargets:
    """Sends pause and resume requests to the runners and the gateway of a run."""

    GATEWAY = "the gateway"

    def __init__(self, pool: RunnerPool) -> None:
        self._pool = pool

    @property
    def stopping(self) -> bool:
        return self._pool.stopping

    def names(self) -> list[str]:
        ready = [runner.name for runner in self._pool.runners if runner.ready]
        if self._pool.cluster is not None:
            return [*ready, *self._pool.cluster.pause_targets()]
        return ready if self._pool.gateway is None else [*ready, self.GATEWAY]

    def send_pause(self, number: int, mode: PauseMode, timeout: float) -> None:
        for runner in self._pool.runners:
            runner.send(Pause(number, mode, timeout))
        if self._pool.cluster is not None:
            self._pool.cluster.send_pause(number, mode, timeout)
        if self._pool.gateway is not None:
            self._pool.background.start(self._pause_gateway(self._pool.gateway, number, mode, timeout))

    async def _pause_gateway(self, gateway: RunGateway, number: int, mode: PauseMode, timeout: float) -> None:
        problem = ""
        try:
            await gateway.pause(mode, timeout)
        except RookeryError as error:
            problem = describe(error)
        self._pool.pauses.confirm(self.GATEWAY, number, problem)

    def send_resume(self, version: int | None) -> None:
        for runner in self._pool.runners:
            runner.send(Resume(version))
        if self._pool.cluster is not None:
            self._pool.cluster.send_resume(version)
        if self._pool.gateway is not None:
            self._pool.background.start(self._pool.gateway.resume(version, self._pool.owner.record_event))

    def resumed(self) -> None:
        self._pool.owner.schedule_admission()

    def overdue(self, detail: str) -> None:
        self._pool.owner.record_event("pause.overdue", {"detail": detail})
