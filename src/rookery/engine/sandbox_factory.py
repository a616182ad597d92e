"""Create the sandboxes of the attempts in one runner process, some of them before they are needed (prewarming).

- Sandboxes are created in advance first for running attempts that have not requested theirs yet, then for attempts
  that will start soon. Their number is limited by the runner's share of the run's `warm`, and by its share of half
  of the free memory and disk space.
- A sandbox that becomes ready at the moment in which its attempt is cancelled is closed.
- If the last attempt requested another sandbox than the predicted one, or if the environment declares that it
  needs none, no sandbox is created in advance.
- No sandbox is created in advance during a pause.
- The progress of image downloads is reported: each new step at once, the rest at intervals.
"""

import asyncio
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from rookery.core import SandboxError, SandboxSpec, Task
from rookery.core.errors import describe
from rookery.engine.background_tasks import start_detached
from rookery.engine.runner_protocol import NOT_ISOLATED, ImageUpdate, PrewarmRequest, RunnerEvent, RunSettings
from rookery.environments import Environment
from rookery.sandboxes import NO_ISOLATION_HELP, open_provider
from rookery.sandboxes.images.progress import ImageProgress
from rookery.sandboxes.pools import START_SECONDS, Pool, PoolBudget, spec_key
from rookery.sandboxes.protocol import Command, ImageFetchingProvider, PoolableProvider, Provider, Sandbox
from rookery.telemetry import catalogue
from rookery.telemetry.operations import observe_sandbox_request

DEFAULT_BUDGET: Final = PoolBudget(max_warm=0)
"""A budget from which only the default numbers of concurrent creations and starts are used, for all runners
together."""
CREATE_SECONDS: Final = 60.0
PROGRESS_SECONDS: Final = 0.5
"""Minimum number of seconds between two progress reports of the same step of an image download."""
log = logging.getLogger("rookery.attempts")


class SandboxFactory:
    """Opens sandbox providers and creates the sandboxes of attempts, some of them in advance."""

    def __init__(
        self,
        settings: RunSettings,
        environments: Mapping[str, Environment],
        send: Callable[[Any], None],
        *,
        paused: bool,
    ) -> None:
        self._settings = settings
        self._environments = environments
        self._send = send
        self._paused = paused
        self._providers: dict[str, Provider] = {}
        self._pools: dict[str, Pool] = {}
        self._upcoming: dict[str, tuple[str, SandboxSpec | None, int]] = {}
        """Maps a task ID to the task's environment, to the sandbox spec that its attempts will request (None if it
        is not pooled), and to the number of attempts that will start."""
        self._expected: dict[str, tuple[str, SandboxSpec]] = {}
        """Maps a running attempt that has not requested its sandbox yet to its task's environment and to the
        sandbox spec that it will probably request."""
        self._prediction_holds = {name: one.needs_sandbox for name, one in environments.items()}
        """True for each environment whose attempts request the predicted sandbox. At first this is what the
        environment declares, then what the last attempt did."""
        self._closing: set[asyncio.Task[None]] = set()
        self._reported: dict[str, tuple[str, float]] = {}

    # ---- specs and creation

    def build_spec(self, task: Task) -> SandboxSpec:
        """Return the sandbox spec for a task: the run's spec with the task's image, changed by the environment.

        The environment changes it in `Environment.sandbox_for`. Raise `TypeError` if that does not return a spec.
        """
        default, environment = self._settings.sandbox_of(task.environment), self._environments[task.environment]
        default = replace(default, image=task.image) if task.image else default
        spec = environment.sandbox_for(task, default)
        if not isinstance(spec, SandboxSpec):
            raise TypeError(f"{environment.title}.sandbox_for must return a SandboxSpec, not {spec!r:.80}")
        return spec

    def _with_provider(self, spec: SandboxSpec, environment: str) -> SandboxSpec:
        """Return `spec` with the provider of the environment's sandboxes, if it names none.

        Raise `SandboxError` if there is no provider.
        """
        name = spec.provider or self._settings.sandbox_of(environment).provider
        if not name:
            raise SandboxError(
                f"no provider on this machine isolates programs; {NO_ISOLATION_HELP}", cause="sandbox.refused"
            )
        return spec if spec.provider else replace(spec, provider=name)

    async def open(self, spec: SandboxSpec, attempt: str, environment: str = "") -> Sandbox:
        """Open a sandbox for an attempt. `environment` is the name of its task's environment in a mixture."""
        spec = self._with_provider(spec, environment)
        with observe_sandbox_request(spec.provider):
            return await self._open(spec, attempt, environment)

    async def _open(self, spec: SandboxSpec, attempt: str, environment: str) -> Sandbox:
        provider = self._provider(spec.provider)
        creation = start_detached(self._create(provider, spec, attempt, environment))
        try:
            return await creation
        except asyncio.CancelledError:
            if creation.done() and not creation.cancelled() and creation.exception() is None:
                # It was ready in the same moment, and nobody else has a reference to it.
                closing = start_detached(creation.result().close())
                self._closing.add(closing)
                closing.add_done_callback(self._on_closed)
            raise

    async def _create(self, provider: Provider, spec: SandboxSpec, attempt: str, environment: str) -> Sandbox:
        """Create a sandbox, or get one that was created in advance.

        The pool itself reduces the number of sandboxes that it expects to provide. Reducing it here as well would
        count the sandbox twice and close a warm sandbox that is still needed.
        """
        _, predicted = self._expected.get(attempt, (environment, None))
        if predicted is not None and (predicted == spec) != self._prediction_holds[environment]:
            self._prediction_holds[environment] = predicted == spec
            self._update_pools()
        self._expected.pop(attempt, None)
        # Requests to a slow provider queue up; the stage's own deadline applies to the whole wait.
        seconds = START_SECONDS if isinstance(provider, Pool) else CREATE_SECONDS
        return await provider.create(spec, attempt=attempt, timeout=seconds)

    def _on_closed(self, closing: "asyncio.Task[None]") -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            self._send(RunnerEvent("sandbox.close_failed", {"detail": describe(error)}))

    def _provider(self, name: str) -> Provider:
        found = self._providers.get(name)
        if found is not None:
            return found
        found = open_provider(name, self._settings.provider_home)
        if not found.isolated:
            detail = f"{name} sandboxes do not isolate: programs run as your user, with your files and network"
            self._send(RunnerEvent(NOT_ISOLATED, {"detail": detail}))
        if isinstance(found, ImageFetchingProvider):
            found.on_image_progress = self.on_image
        if self._settings.warm and isinstance(found, PoolableProvider) and found.poolable:
            found = self._pools[name] = Pool(found, build_pool_budget(self._settings))
            found.set_paused(paused=self._paused)
        self._providers[name] = found
        return found

    async def check_health(self, environment: str = "") -> bool:
        """Return True if the environment's provider can create a working sandbox now.

        Called after a sandbox was lost.
        """
        spec = self._with_provider(self._settings.sandbox_of(environment), environment)
        provider = self._provider(spec.provider)
        if isinstance(provider, Pool):
            provider = provider.provider  # a warm sandbox would prove nothing about now
        sandbox = await provider.create(spec, attempt="health")
        try:
            return (await sandbox.exec(Command(argv=("true",), wall=10.0))).ok
        finally:
            await sandbox.close()

    # ---- prewarming

    def prewarm(self, request: PrewarmRequest) -> None:
        """Create sandboxes in advance for the attempts in `request`, which replaces the previous request."""
        new = {task.id: task for task in request.tasks}
        before, self._upcoming = self._upcoming, {}
        for task, count in request.counts:
            if task in new:
                environment, spec = new[task].environment, self._predict_spec(new[task])
            else:
                environment, spec, _ = before.get(task, ("", None, 0))
            self._upcoming[task] = (environment, spec, count)
        self._update_pools()

    def expect(self, attempt: str, task: Task) -> None:
        """Record that a started attempt will probably request a sandbox, so that one is created in advance."""
        if not self._settings.warm:
            return
        _, spec, count = self._upcoming.get(task.id, ("", None, 0))
        if count:  # counted as upcoming until now
            self._upcoming[task.id] = (task.environment, spec, count - 1)
        spec = spec or self._predict_spec(task)
        if spec is not None:
            self._expected[attempt] = (task.environment, spec)
            self._update_pools()

    def stop_expecting(self, attempt: str) -> None:
        """Record that an attempt has ended and will not request a sandbox any more."""
        if self._expected.pop(attempt, None) is not None:
            self._update_pools()

    def _predict_spec(self, task: Task) -> SandboxSpec | None:
        """Return the spec of the sandbox that an attempt at the task will probably request.

        Return None if the provider's sandboxes are not created in advance, or if the spec is not valid.
        """
        try:
            spec = self._with_provider(self.build_spec(task), task.environment)
            return spec if isinstance(self._provider(spec.provider), Pool) else None
        except Exception as error:  # noqa: BLE001  (the environment's code; the attempt's own setup reports it)
            log.debug("the sandbox of task %s cannot be prewarmed: %s", task.id, error)
            return None

    def _update_pools(self) -> None:
        if not self._pools:
            return
        specs: dict[bytes, SandboxSpec] = {}
        counts: Counter[bytes] = Counter()
        demand = [(environment, spec, 1) for environment, spec in self._expected.values()]
        demand += [(environment, spec, count) for environment, spec, count in self._upcoming.values() if spec]
        for environment, spec, count in demand:
            if self._prediction_holds.get(environment):
                key = spec_key(spec)
                specs.setdefault(key, spec)
                counts[key] += count
        for name, pool in self._pools.items():
            pool.expect([(spec, counts[key]) for key, spec in specs.items() if spec.provider == name])

    def pause_prewarming(self, *, paused: bool) -> None:
        self._paused = paused
        for pool in self._pools.values():
            pool.set_paused(paused=paused)

    def count_prewarmed(self) -> dict[str, int]:
        """Return the number of sandboxes that were created in advance and are ready, by provider."""
        return {name: count for name, pool in self._pools.items() if (count := len(pool.warm_sandboxes))}

    def collect_metrics(self) -> None:
        """Set the gauges of the pools."""
        for name, pool in self._pools.items():
            catalogue.POOL_SANDBOXES.set(len(pool.warm_sandboxes), name, "ready")
            starting = sum(entry.starting for entry in pool.plan.entries.values())
            catalogue.POOL_SANDBOXES.set(starting, name, "starting")

    # ---- images

    def on_image(self, progress: ImageProgress) -> None:
        step, at = self._reported.get(progress.image, ("", 0.0))
        if step == progress.step and time.monotonic() - at < PROGRESS_SECONDS:
            return
        if progress.step in ("ready", "failed"):
            self._reported.pop(progress.image, None)
        else:
            self._reported[progress.image] = (progress.step, time.monotonic())
        self._send(ImageUpdate(progress.image, progress.step, progress.done, progress.total))

    # ---- shutdown

    async def close(self) -> None:
        """Close all providers and their sandboxes. If that fails for some, raise the first error at the end."""
        errors: list[SandboxError | OSError] = []
        for name, provider in self._providers.items():
            try:
                await provider.close()
            except (SandboxError, OSError) as error:
                errors.append(error)
            pool = self._pools.get(name)
            if pool is not None and (pool.hits or pool.misses):
                payload = {
                    "provider": name,
                    "prewarmed": pool.hits,
                    "on_demand": pool.misses,
                    "unresponsive": pool.unresponsive,
                }
                self._send(RunnerEvent("sandboxes.opened", payload))
        if errors:
            raise errors[0]


def build_pool_budget(settings: RunSettings) -> PoolBudget:
    """Return how many sandboxes one runner may create in advance, and how much memory and disk they may use."""
    runners = settings.runner_count
    folder = Path(settings.folder)
    return PoolBudget(
        max_warm=-(-settings.warm // runners),
        memory=_available_memory() // 2 // runners,
        disk=shutil.disk_usage(folder).free // 2 // runners,
        max_starting=-(-DEFAULT_BUDGET.max_starting // runners),
        max_creating=-(-DEFAULT_BUDGET.max_creating // runners),
    )


def _available_memory() -> int:
    """Return the available memory of this machine in bytes."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
