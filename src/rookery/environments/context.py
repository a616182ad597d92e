"""What an environment gets for one attempt."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from rookery.core import Limits, SandboxError, SandboxSpec, Task, UsageError
from rookery.environments.watched import WatchedSandbox
from rookery.gateway import Model, Session, Watch
from rookery.gateway.door import Door
from rookery.sandboxes.protocol import Listening, Sandbox

T = TypeVar("T")
OpenDoor: TypeAlias = Callable[[Listening | None, bool], AbstractAsyncContextManager[Door]]
LOST = ("sandbox.lost", "worker.unrecoverable")
"""Causes of failures that a policy can bring about in its own sandbox."""


class Log:
    """Structured log lines of an attempt; they go into the journal as events."""

    def __init__(self, emit: Callable[[str, dict[str, Any]], None]) -> None:
        self._emit = emit

    def debug(self, message: str, **fields: Any) -> None:
        self._emit("debug", {"message": message, **fields})

    def info(self, message: str, **fields: Any) -> None:
        self._emit("info", {"message": message, **fields})

    def warning(self, message: str, **fields: Any) -> None:
        self._emit("warning", {"message": message, **fields})


class Context:
    """One attempt's task, models, sandboxes, time and state."""

    def __init__(
        self,
        *,
        attempt: str,
        task: Task,
        seed: int,
        limits: Limits,
        spec: SandboxSpec,
        session: Session,
        watch: Watch,
        remaining: Callable[[], float],
        log: Log,
        open_sandbox: Callable[[SandboxSpec], Awaitable[Sandbox]],
        open_door: OpenDoor | None = None,
        no_gateway: Callable[[], UsageError] = lambda: UsageError("this run has no gateway"),
    ) -> None:
        self.attempt = attempt
        self.task = task
        self.seed = seed
        self.limits = limits
        self.spec = spec
        """What `sandbox()` makes when nothing else is asked for."""
        self.log = log
        self.state: dict[str, Any] = {}
        """Yours, for this attempt only; gone with it."""
        self.info: dict[str, Any] = {}
        """Plain data to keep in the record."""
        self.metrics: dict[str, float] = {}
        """Numbers to keep in the record."""
        self._session = session
        self._watch = watch
        self._remaining = remaining
        self._open_sandbox = open_sandbox
        self._open_door = open_door
        self._no_gateway = no_gateway
        self._main: Sandbox | None = None
        self.forks: list[Sandbox] = []
        """Sandboxes that were made of others; they end with the attempt, as all do."""
        self._first = asyncio.Lock()
        self.tool_calls = 0
        self.lost_in_command = False
        """A sandbox was lost while it ran what the policy asked for."""

    @property
    def policy(self) -> Model:
        return self._session.model("policy")

    def model(self, role: str) -> Model:
        """Another model role (judge, simulated user, sub-model)."""
        return self._session.model(role)

    def sub_model(self, *, trained: bool) -> Model:
        """A model for calls beside the conversation, each a branch of its own. Trained, they are the policy's;
        else they have the role `sub`. Their budget is the caller's to keep; `Truncation` ends the one call alone.
        """
        return self._session.sub_model(trained=trained)

    @property
    def truncated(self) -> str | None:
        """The budget that ended the run stage, once one did."""
        return self._session.truncated

    @property
    def remaining(self) -> float:
        """Seconds left of the stage; pauses and the upstream's queue do not count."""
        return max(0.0, self._remaining())

    @cached_property
    def rng(self) -> random.Random:
        """Draws the same numbers each time this attempt is made."""
        return random.Random(self.seed)  # noqa: S311

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the stage's clock stands still: for waiting in a queue that is neither the policy's nor ours."""
        self._watch.hold()
        try:
            yield
        finally:
            self._watch.release()

    async def sandbox(self, spec: SandboxSpec | None = None) -> Sandbox:
        """The attempt's sandbox: made at the first call, with the task's files in it, the same one afterwards.

        With a spec, a new one, empty.
        """
        if spec is not None:
            return await self._opened(spec)
        async with self._first:  # tools that run together must find the same one
            if self._main is None:
                box = await self._opened(self.spec)
                for path, text in self.task.files.items():
                    await box.write(path, text.encode())
                self._main = box
            return self._main

    async def _opened(self, spec: SandboxSpec) -> Sandbox:
        return WatchedSandbox(await self.working("sandbox", self._open_sandbox(spec)), self.working, self.forks)

    def door(self, box: Sandbox | None = None, *, timed: bool = True) -> AbstractAsyncContextManager[Door]:
        """A door for programs that call models themselves, with this attempt's budgets and recording.

        In a sandbox whose network is `model`, at its own loopback address; without one, at the gateway's public
        address. Turns are the attempt's when the door ends. `timed`: calls end with the stage's time as it is now;
        without it who opens the door keeps the time, which then may be `held` meanwhile.
        """
        if self._open_door is None:
            raise self._no_gateway()
        if box is None:
            return self._open_door(None, timed)
        if not isinstance(box, Listening) or not box.inside_url:
            raise UsageError(
                f"sandbox {box.id} has no way to the gateway: its network is {box.spec.network!r}, not 'model', "
                f"or its provider {box.spec.provider or '?'} cannot give one",
                cause="bug.environment",
            )
        return self._open_door(box, timed)

    async def working(self, on: str, awaitable: Awaitable[T]) -> T:
        """Awaits on behalf of the policy: if the run's deadline passes meanwhile, that is Truncated(time)."""
        self._watch.waiting(on, 1)
        try:
            return await awaitable
        except SandboxError as error:
            if error.code in LOST and on == "tool" and getattr(error, "after_cell", True):
                self.lost_in_command = True
            raise
        finally:
            self._watch.waiting(on, -1)
