"""Runs attempts in this process: the inside of a runner, and all of it when there are no runners.

Promises:
- nothing one attempt does cancels another;
- token data is on its way to disk before the `Done` that points to it leaves;
- closing ends every attempt, sandbox and connection.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from rookery.core import CancelledReason, JournalError, RookeryError, UsageError
from rookery.core.errors import describe
from rookery.engine.boxes import Boxes
from rookery.engine.live import Live
from rookery.engine.wire import NO_TOKENS, Done, Note, Pause, Paused, RunSettings, Start, Unfit, plain
from rookery.environments import Environment, reward_bounds
from rookery.environments.checks import no_gateway
from rookery.gateway import Credits, Role
from rookery.gateway.client import GatewayAddress, GatewayClient
from rookery.gateway.renderings import open_offloop
from rookery.journal.tokens import TokenWriter
from rookery.upstreams import open_upstream
from rookery.upstreams.protocol import CONCURRENCY, PauseMode, UpstreamConfig
from rookery.upstreams.urls import redact
from rookery.upstreams.valve import Valve, ValveState

NEVER: Final = 10 * 365 * 86_400.0
"""A pause's deadline is the supervisor's, which tells us: calls that wait here must not fail a moment before."""


class Executor:
    """Holds the environment, upstreams, sandboxes and token file of one process."""

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
        self.environment = environment
        self.rewards = reward_bounds(environment)
        self.has_setup = _overridden(environment, "setup")
        self.has_teardown = _overridden(environment, "teardown")
        self.async_stages = {
            stage
            for stage in ("setup", "run", "score", "teardown")
            if inspect.iscoroutinefunction(getattr(environment, stage))
        }
        self.send = send
        self.logger = logging.getLogger("rookery.attempts")
        self.writer = TokenWriter(Path(settings.folder) / "tokens", writer)
        self.lives: dict[str, Live] = {}
        self.valves: dict[str, Valve] = {}
        self._rendering = open_offloop(settings.rendering) if settings.record == "tokens" else None
        self.roles = {
            name: self._role(name, config, pause, version if name == "policy" else None)
            for name, config in settings.upstreams.items()
        }
        self.gateway = GatewayClient(gateway) if gateway is not None else None
        self.boxes = Boxes(settings, environment, send, paused=pause is not None)
        self._adopted: set[asyncio.Task[None]] = set()
        self._pause = 0
        self.paused = pause is not None
        self._broken = False
        self._missing_tokens_reported = False

    def _role(self, name: str, config: UpstreamConfig, pause: PauseMode | None, version: int | None) -> Role:
        calls = (config.concurrency or CONCURRENCY) * max(1, len(config.urls))
        state = ValveState(mode=pause, version=version, left=NEVER)
        config = replace(config, share=self.settings.share)
        valve = self.valves[name] = Valve(open_upstream(config), state=state)
        return Role(
            name=name,
            upstream=valve,
            model=config.model,
            sampling=config.sampling.over(self.environment.sampling) if name == "policy" else config.sampling,
            credits=Credits(-(-calls // self.settings.share)),
            record=self.settings.record if name == "policy" or self.settings.record == "plain" else "messages",
            rendering=self._rendering if name == "policy" else None,
        )

    def notice_missing_tokens(self, replica: str) -> None:
        """Report once that the policy's server returns no token IDs, unless the run records none anyway."""
        if self._missing_tokens_reported or self.settings.record == "plain":
            return
        self._missing_tokens_reported = True
        detail = (
            f"the model server {redact(replica) or 'of the policy'} returns no token IDs: rollouts are scored but "
            "cannot train. Use a server that returns them (--upstream-kind vllm or sglang), record token by token "
            "(--record tokens --tokenizer NAME), or say --record plain for an evaluation"
        )
        self.send(Note(NO_TOKENS, {"detail": detail}))

    def refuse_gateway(self) -> UsageError:
        """End the run, once: its environment opens gateway sessions and did not say that it needs a gateway."""
        said = no_gateway(self.environment.title)
        self.send(Unfit(said, ""))
        return UsageError(said, cause="bug.environment")

    # ---- attempts

    def start(self, start: Start) -> None:
        self.lives[start.attempt] = Live(self, start)
        self.boxes.begun(start.attempt, start.task)

    def cancel(self, attempt: str, reason: CancelledReason) -> None:
        live = self.lives.get(attempt)
        if live is not None:
            live.cancel(reason)

    def done(self, live: Live, done: Done) -> None:
        del self.lives[live.start.attempt]
        self.boxes.ended(live.start.attempt)
        if self._broken:
            return
        if done.info != {} or done.metrics != {} or done.rewards:
            done = plain(done)
        self.send(done)

    def flush(self) -> None:
        """Writes token data out. Raises once when the disk cannot take it: what points to it must not be sent."""
        if not self._broken:
            try:
                self.writer.flush()
            except JournalError:
                self._broken = True
                raise

    def pause(self, pause: Pause) -> None:
        """Holds model calls back, in every role, and says so when it is done."""
        self._pause = pause.number
        if not self.paused:
            self.paused = True
            self.boxes.hold(back=True)
            for live in self.lives.values():
                live.hold()
        self.adopt(self._hold(pause))

    async def _hold(self, pause: Pause) -> None:
        trouble = ""
        try:
            async with asyncio.TaskGroup() as group:
                for valve in self.valves.values():
                    group.create_task(valve.pause(pause.mode, timeout=pause.timeout, deadline=NEVER))
        except* RookeryError as errors:
            trouble = describe(errors.exceptions[0])
        if self._pause == pause.number:
            self.send(Paused(pause.number, trouble))

    def resume(self, version: int | None = None) -> None:
        """Lets them go on; the policy with this version."""
        self._pause = 0
        policy = self.valves["policy"]
        if version is not None and not policy.paused:  # at once: what starts next may come in the same breath
            policy.version = version
        self.adopt(self._let_go(version))
        if self.paused:
            self.paused = False
            self.boxes.hold(back=False)
            for live in self.lives.values():
                live.release()

    async def _let_go(self, version: int | None) -> None:
        async with asyncio.TaskGroup() as group:
            for name, valve in self.valves.items():
                group.create_task(valve.resume(version if name == "policy" else None))

    # ---- the end

    def adopt(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs cleaning work that nobody waits for; its failure is an event."""
        task = asyncio.get_running_loop().create_task(work)
        self._adopted.add(task)
        task.add_done_callback(self._adopted_ended)

    def _adopted_ended(self, task: "asyncio.Task[None]") -> None:
        self._adopted.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.send(Note("cleanup.failed", {"detail": describe(error)}))

    async def close(self, reason: CancelledReason = "shutdown") -> None:
        """Cancels every attempt, waits for their ends (bounded), closes sandboxes and connections."""
        for live in list(self.lives.values()):
            live.cancel(reason)
        while self.lives:
            await asyncio.wait({live.task for live in self.lives.values()}, timeout=1.0)
            for live in list(self.lives.values()):
                if live.task.done():
                    self.lives.pop(live.start.attempt, None)
        if self._adopted:
            await asyncio.wait(self._adopted, timeout=30.0)
        for close in (self.boxes.close, *(valve.close for valve in self.valves.values())):
            try:
                await close()
            except (RookeryError, OSError) as error:
                self.send(Note("close.failed", {"detail": describe(error)}))
        if self._rendering is not None:
            await self._rendering.close()
        if self.gateway is not None:
            await self.gateway.close()
        try:
            self.writer.close()
        except JournalError:
            self.logger.exception("the token file could not be closed")


def _overridden(environment: Environment, stage: str) -> bool:
    return getattr(type(environment), stage) is not getattr(Environment, stage) or stage in vars(environment)
