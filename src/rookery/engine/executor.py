"""Execute attempts in this process. Used in runner processes, and in the supervisor's process with `runners=0`.

- Nothing that one attempt does cancels another.
- The tokens of an attempt are written to disk before the `AttemptResult` that refers to them is sent.
- Closing cancels all attempts and closes their sandboxes and connections.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rookery.core import CancelledReason, JournalError, RookeryError, Task, UsageError
from rookery.core.errors import describe
from rookery.core.messages import NO_SAMPLING
from rookery.engine.attempt import RunningAttempt
from rookery.engine.background_tasks import BackgroundTasks
from rookery.engine.runner_protocol import (
    NO_TOKENS,
    AttemptResult,
    AttemptSpec,
    Cancel,
    Pause,
    Paused,
    PrewarmRequest,
    ReplicaCalls,
    Resume,
    RunnerEvent,
    RunnerFailed,
    RunnerState,
    RunSettings,
    ToRunner,
)
from rookery.engine.sandbox_factory import SandboxFactory
from rookery.environments import Environment, MixtureEntry, reward_bounds
from rookery.environments.checks import missing_gateway_message
from rookery.environments.mixture import get_entries
from rookery.gateway import ModelRole
from rookery.gateway.chat_renderers import open_threaded_renderer
from rookery.gateway.client import GatewayAddress, GatewayClient
from rookery.journal.tokens import TokenWriter
from rookery.telemetry import REGISTRY, catalogue
from rookery.upstreams import open_upstream
from rookery.upstreams.pause import PausableUpstream, PauseState, RunnerPause
from rookery.upstreams.pause.runner import NO_DEADLINE
from rookery.upstreams.protocol import PauseMode, Upstream, UpstreamConfig
from rookery.upstreams.reply_cache import with_cache
from rookery.upstreams.urls import redact


class LoadedEnvironment:
    """An environment of the run, and what the executor needs to know about it."""

    def __init__(self, entry: MixtureEntry, settings: RunSettings) -> None:
        self.entry = entry
        self.environment: Environment = entry.environment
        self.limits = entry.limits.over(settings.limits)
        """The limits that the run sets explicitly for this environment."""
        self.sandbox = settings.sandbox_of(entry.name)
        self.reward_bounds = reward_bounds(self.environment)
        self.has_setup = _is_overridden(self.environment, "setup")
        self.has_teardown = _is_overridden(self.environment, "teardown")
        self.async_stages = {
            stage
            for stage in ("setup", "run", "score", "teardown")
            if inspect.iscoroutinefunction(getattr(self.environment, stage))
        }


class Executor:
    """Owns what the attempts of one process share: environment, upstreams, sandboxes and the file for tokens."""

    def __init__(
        self,
        settings: RunSettings,
        environment: Environment,
        writer: str,
        send: Callable[[Any], None],
        pause: PauseMode | None = None,
        version: int | None = None,
        gateway: GatewayAddress | None = None,
    ) -> None:
        self.settings = settings
        self.environments = {
            name: LoadedEnvironment(entry, settings) for name, entry in get_entries(environment).items()
        }
        """The run's environments by name: those of a mixture, or one with an empty name."""
        self.send = send
        self.logger = logging.getLogger("rookery.attempts")
        self.writer = TokenWriter(Path(settings.folder) / "tokens", writer)
        self.attempts: dict[str, RunningAttempt] = {}
        self.upstreams: dict[str, PausableUpstream] = {}
        self._called_upstreams: dict[str, Upstream] = {}
        """The upstreams that answer calls: those of `upstreams`, or wrappers of them with a cache of replies."""
        self._rendering = open_threaded_renderer(settings.rendering) if settings.record == "tokens" else None
        self.roles = {
            name: self._role(name, config, pause, version if name == "policy" else None)
            for name, config in settings.upstreams.items()
        }
        self.gateway = GatewayClient(gateway) if gateway is not None else None
        environments = {name: one.environment for name, one in self.environments.items()}
        self.sandboxes = SandboxFactory(settings, environments, send, paused=pause is not None)
        self.background = BackgroundTasks(self._on_failure)
        """Tasks that pause upstreams and close sandboxes. If one fails, an event is sent."""
        self.pauses = RunnerPause(
            self.upstreams,
            self,
            paused=pause is not None,
            run_in_background=self.background.start,
            confirm=lambda number, problem: self.send(Paused(number, problem)),
        )
        self._disk_failed = False
        self._missing_tokens_reported = False
        if settings.metrics:
            REGISTRY.collectors.append(self._collect_metrics)

    def read_state(self) -> RunnerState:
        """Return the open sandboxes of attempts, the prewarmed sandboxes and the replicas of all upstreams."""
        sandboxes: dict[str, int] = {}
        for attempt in self.attempts.values():
            for sandbox in attempt.sandboxes:
                name = sandbox.spec.provider
                sandboxes[name] = sandboxes.get(name, 0) + 1
        replicas: list[ReplicaCalls] = []
        for role, upstream in self.upstreams.items():
            states = upstream.states()
            replicas += [ReplicaCalls(role, one.name, one.healthy, one.load, one.limit) for one in states]
            if not states:
                replicas.append(ReplicaCalls(role, upstream.name, healthy=True, calls=upstream.in_flight))
        return RunnerState(sandboxes, self.sandboxes.count_prewarmed(), tuple(replicas))

    def _collect_metrics(self) -> None:
        for role, upstream in self.upstreams.items():
            upstream.collect_metrics(role)
        for attempt in self.attempts.values():
            for sandbox in attempt.sandboxes:
                catalogue.SANDBOXES.set(1, sandbox.spec.provider)
        self.sandboxes.collect_metrics()

    def _role(self, name: str, config: UpstreamConfig, pause: PauseMode | None, version: int | None) -> ModelRole:
        state = PauseState(mode=pause, version=version, left=NO_DEADLINE)
        config = replace(config, share=self.settings.runner_count)
        upstream = self.upstreams[name] = PausableUpstream(open_upstream(config), state=state)
        cached = self._called_upstreams[name] = with_cache(upstream, config)
        return ModelRole(
            name=name,
            upstream=cached,
            model=config.model,
            sampling=config.sampling,
            record=self.settings.record if name == "policy" or self.settings.record == "plain" else "messages",
            rendering=self._rendering if name == "policy" else None,
            top_logprobs=self.settings.top_logprobs if name == "policy" else 0,
        )

    def roles_for(self, task: Task) -> dict[str, ModelRole]:
        """Return the model roles for an attempt at this task.

        The policy's sampling parameters are those of the task, then of the task's entry in a mixture, then of the
        run, then of the environment.
        """
        loaded = self.environments[task.environment]
        policy = self.roles["policy"]
        sampling = loaded.entry.sampling.over(policy.sampling).over(loaded.environment.sampling)
        if task.sampling != NO_SAMPLING:
            sampling = task.sampling.over(sampling)
        if sampling == policy.sampling:
            return self.roles
        return {**self.roles, "policy": replace(policy, sampling=sampling)}

    def notice_missing_tokens(self, replica: str) -> None:
        """Send one event that the policy's server returns no token IDs. Do nothing in record mode `plain`."""
        if self._missing_tokens_reported or self.settings.record == "plain":
            return
        self._missing_tokens_reported = True
        detail = (
            f"the inference engine {redact(replica) or 'of the policy'} returns no token IDs: rollouts are scored "
            "but cannot train. Use one that returns them (such as vLLM or SGLang), render the prompts "
            "in Rookery (--record tokens --tokenizer NAME), or pass --record plain for an evaluation"
        )
        self.send(RunnerEvent(NO_TOKENS, {"detail": detail}))

    def refuse_gateway(self, environment: Environment) -> UsageError:
        """Stop the run because an environment opens gateway sessions but does not declare `needs_gateway`.

        Return the exception for the attempt to raise.
        """
        message = missing_gateway_message(environment.title)
        self.send(RunnerFailed(message, ""))
        return UsageError(message, cause="bug.environment")

    # ---- attempts

    def handle(self, message: ToRunner) -> None:
        """Carry out a message of the supervisor. `Hello` and `Stop` are handled by the caller."""
        match message:
            case AttemptSpec():
                self.start(message)
            case Cancel(attempt, reason):
                if (running := self.attempts.get(attempt)) is not None:
                    running.cancel(reason)
            case Pause(number, mode, timeout):
                self.pauses.pause(number, mode, timeout)
            case Resume(version):
                self.pauses.resume(version)
            case PrewarmRequest():
                self.sandboxes.prewarm(message)

    def start(self, spec: AttemptSpec) -> None:
        """Start an attempt."""
        self.attempts[spec.id] = RunningAttempt(self, spec)
        self.sandboxes.expect(spec.id, spec.task)

    def finish(self, attempt: RunningAttempt, result: AttemptResult) -> None:
        """Remove an attempt that has ended and send its result, unless its tokens could not be written to disk."""
        del self.attempts[attempt.spec.id]
        self.sandboxes.stop_expecting(attempt.spec.id)
        if self._disk_failed:
            return
        if result.info != {} or result.metrics != {} or result.rewards:
            result = result.to_plain_data()
        self.send(result)

    def flush(self) -> None:
        """Write recorded tokens to disk. Raise `JournalError` at the first failure; later calls do nothing.

        The caller must not send results that refer to tokens that are not on disk.
        """
        if not self._disk_failed:
            try:
                self.writer.flush()
            except JournalError:
                self._disk_failed = True
                raise

    # ---- pause

    @property
    def paused(self) -> bool:
        return self.pauses.paused

    def stop_clocks(self) -> None:
        """Stop the clocks of all attempts, and create no sandboxes in advance, because of a pause."""
        self.sandboxes.pause_prewarming(paused=True)
        for attempt in self.attempts.values():
            attempt.stop_clock()

    def restart_clocks(self) -> None:
        """Undo `stop_clocks`."""
        self.sandboxes.pause_prewarming(paused=False)
        for attempt in self.attempts.values():
            attempt.restart_clock()

    # ---- shutdown

    def _on_failure(self, error: BaseException) -> None:
        self.send(RunnerEvent("cleanup.failed", {"detail": describe(error)}))

    async def close(self, reason: CancelledReason = "shutdown") -> None:
        """Cancel all attempts, wait until they have ended, and close sandboxes and connections."""
        for attempt in list(self.attempts.values()):
            attempt.cancel(reason)
        while self.attempts:
            await asyncio.wait({attempt.task for attempt in self.attempts.values()}, timeout=1.0)
            for attempt in list(self.attempts.values()):
                if attempt.task.done():
                    self.attempts.pop(attempt.spec.id, None)
        await self.background.wait(30.0)
        if self._collect_metrics in REGISTRY.collectors:
            REGISTRY.collectors.remove(self._collect_metrics)
        for close in (self.sandboxes.close, *(upstream.close for upstream in self._called_upstreams.values())):
            try:
                await close()
            except (RookeryError, OSError) as error:
                self.send(RunnerEvent("close.failed", {"detail": describe(error)}))
        if self._rendering is not None:
            await self._rendering.close()
        if self.gateway is not None:
            await self.gateway.close()
        try:
            self.writer.close()
        except JournalError:
            self.logger.exception("the file with the recorded tokens could not be closed")


def _is_overridden(environment: Environment, stage: str) -> bool:
    return getattr(type(environment), stage) is not getattr(Environment, stage) or stage in vars(environment)
