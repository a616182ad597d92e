"""The context object of an attempt, passed to every stage of an environment. Runs in a runner process."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from rookery.core import Limits, RookeryError, SandboxError, SandboxSpec, ScoringError, Task, UsageError
from rookery.environments.sandbox_proxy import SandboxProxy
from rookery.gateway import Model, Session, WaitObserver
from rookery.gateway.direct_session import DirectSession
from rookery.gateway.gateway_session import GatewaySession
from rookery.sandboxes.protocol import Sandbox, SupportsModelNetwork
from rookery.scoring.scorers import Submission

T = TypeVar("T")
OpenGatewaySession: TypeAlias = Callable[
    [SupportsModelNetwork | None, bool], AbstractAsyncContextManager[GatewaySession]
]
OpenDirectSession: TypeAlias = Callable[[SupportsModelNetwork | None], AbstractAsyncContextManager[DirectSession]]
LOSS_CAUSES = ("sandbox.lost", "worker.unrecoverable")
"""Cause codes of failures that a policy can provoke by destroying its own sandbox or interpreter."""
MIN_CLOCK_CHECK = 0.01
"""Shortest interval, in seconds, at which `Context.within` reads the stage's clock."""


class Log:
    """Structured log of one attempt. Entries are stored as events in the journal, the run's record on disk."""

    def __init__(self, emit: Callable[[str, dict[str, Any]], None]) -> None:
        self._emit = emit

    def debug(self, message: str, **fields: Any) -> None:
        self._emit("debug", {"message": message, **fields})

    def info(self, message: str, **fields: Any) -> None:
        self._emit("info", {"message": message, **fields})

    def warning(self, message: str, **fields: Any) -> None:
        self._emit("warning", {"message": message, **fields})


class Context:
    """Everything that belongs to one attempt at a task: its models, sandboxes, clock and state.

    Rookery creates the context and passes it to every stage of the environment:

        async def run(self, ctx: Context) -> None:
            sandbox = await ctx.sandbox()
            await sandbox.write("notes.txt", b"...")
            reply = await ctx.policy.chat(ctx.task.prompt)
            ctx.state["answer"] = reply.text
            ctx.metrics["length"] = float(len(reply.text))

    Sandboxes and gateway sessions opened through the context are closed when the attempt ends.
    """

    def __init__(
        self,
        *,
        attempt: str,
        task: Task,
        seed: int,
        limits: Limits,
        spec: SandboxSpec,
        session: Session,
        wait_observer: WaitObserver,
        remaining: Callable[[], float],
        elapsed: Callable[[], float],
        log: Log,
        open_sandbox: Callable[[SandboxSpec], Awaitable[Sandbox]],
        open_gateway_session: OpenGatewaySession | None = None,
        open_direct_session: OpenDirectSession | None = None,
        no_gateway: Callable[[], UsageError] = lambda: UsageError("this run has no gateway"),
    ) -> None:
        self.attempt = attempt
        """Identifier of the attempt."""
        self.task = task
        self.seed = seed
        """Random seed of the rollout; all attempts of a rollout have the same one."""
        self.limits = limits
        """Limits of the rollout, combined from those of the run, the task and the environment."""
        self.spec = spec
        """Specification of the sandbox that `sandbox()` creates. `setup` may replace it before the first call."""
        self.log = log
        self.state: dict[str, Any] = {}
        """Storage for data of the environment between stages, discarded at the end of the attempt."""
        self.info: dict[str, Any] = {}
        """JSON-compatible data to store in the rollout's record."""
        self.metrics: dict[str, float] = {}
        """Numbers to store in the rollout's record."""
        self._session = session
        self._wait_observer = wait_observer
        self._remaining = remaining
        self._elapsed = elapsed
        self._open_sandbox = open_sandbox
        self._open_gateway_session = open_gateway_session
        self._open_direct_session = open_direct_session
        self._no_gateway = no_gateway
        self._main_sandbox: Sandbox | None = None
        self._main_sandbox_lock = asyncio.Lock()
        self.forks: list[Sandbox] = []
        """Sandboxes that were forked from sandboxes of the attempt. They are closed when the attempt ends."""
        self.tool_calls = 0
        """Number of tool calls of the policy so far."""
        self.sandbox_gone = False
        """True if a stored rollout is graded again, without the sandbox in which the policy worked."""
        self.lost_in_command = False
        """True if a sandbox or its interpreter was lost while it ran a command of the policy."""

    @property
    def policy(self) -> Model:
        """The policy: the model that is trained or evaluated."""
        return self._session.model("policy")

    def model(self, role: str) -> Model:
        """Return the model that the run configures for another role, such as `judge`."""
        return self._session.model(role)

    def sub_model(self, *, trained: bool) -> Model:
        """Return a model for calls outside of the main conversation. Each call is recorded as a separate branch.

        If `trained`, the policy answers and its tokens are trained on. Otherwise the calls go to the model of the
        role `sub` or, if that role is not configured, to the policy's inference engine, and their tokens are not
        trained on. The caller must limit how many calls are made. If a call raises `Truncation`, the caller may
        catch it: the attempt is not truncated by it.
        """
        return self._session.sub_model(trained=trained)

    def untrained_policy(self, name: str) -> Model:
        """Return a model that answers like the policy and does not train, such as an opponent in self-play.

        Its calls are recorded under `name`. The caller must limit how many calls are made.
        """
        return self._session.untrained_policy(name)

    @property
    def truncated(self) -> str | None:
        """Name of the budget, such as `tokens` or `time`, whose exhaustion ended the run stage; None otherwise."""
        return self._session.truncated

    @property
    def remaining(self) -> float:
        """Seconds until the deadline of the current stage.

        Pauses of the run, and time in the queue of the inference engine, do not count.
        """
        return max(0.0, self._remaining())

    @property
    def elapsed(self) -> float:
        """Seconds since the current stage began.

        Pauses of the run, and time in the queue of the inference engine, do not count.
        """
        return self._elapsed()

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Cancel the block and raise `TimeoutError` if it takes longer than `seconds` by the stage's clock.

            async with ctx.within(30):
                await search(query)

        Unlike with `asyncio.timeout`, pauses of the run and time in the queue of the inference engine do not
        count. Blocks may be nested. The deadline of the stage still applies.
        """
        loop = asyncio.get_running_loop()
        deadline = self._elapsed() + seconds
        timer: asyncio.TimerHandle | None = None

        def check() -> None:
            nonlocal timer
            left = deadline - self._elapsed()
            if left <= 0:
                timeout.reschedule(loop.time())
            else:  # while the clock is stopped, `left` does not shrink
                timer = loop.call_later(max(left, MIN_CLOCK_CHECK), check)

        async with asyncio.timeout(None) as timeout:
            check()
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()

    @cached_property
    def rng(self) -> random.Random:
        """Random generator seeded with `seed`, so that every attempt of a rollout draws the same numbers."""
        return random.Random(self.seed)  # noqa: S311

    @contextmanager
    def pause_clock(self) -> Iterator[None]:
        """Stop the stage's clock inside the block, for example while waiting for a shared resource."""
        self._wait_observer.stop_clock()
        try:
            yield
        finally:
            self._wait_observer.restart_clock()

    async def sandbox(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Return the attempt's sandbox. The first call creates it and writes the task's files into it.

        If `spec` is given, create a further sandbox from it, without the task's files, and return that one.
        Raise `ScoringError` if a stored rollout is graded again, which has no sandbox of its own any more.
        """
        if spec is not None:
            return await self._create_sandbox(spec)
        async with self._main_sandbox_lock:  # parallel tool calls must get the same sandbox
            if self._main_sandbox is None:
                if self.sandbox_gone:
                    raise ScoringError(
                        "the sandbox in which the policy worked is gone: a stored rollout has only its messages, "
                        "its answer and its stored submission",
                        cause="scoring.sandbox_gone",
                    )
                sandbox = await self._create_sandbox(self.spec)
                for path, text in self.task.files.items():
                    await sandbox.write(path, text.encode())
                self._main_sandbox = sandbox
            return self._main_sandbox

    async def _create_sandbox(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await self.charge_policy("sandbox", self._open_sandbox(spec))
        return SandboxProxy(sandbox, self.charge_policy, self.forks)

    def submission(self, answer: str) -> Submission:
        """Return what a scorer grades: this answer to the task, and the messages in `state["messages"]`.

        return await NumericMatch().score(ctx.submission(reply.text))
        """
        return Submission(
            task=self.task,
            answer=answer,
            messages=tuple(self.state.get("messages", ())),
            get_model=self.model,
            get_sandbox=self.sandbox,
            get_seconds=lambda: self.remaining,
        )

    def gateway_session(
        self, sandbox: Sandbox | None = None, *, timed: bool = True
    ) -> AbstractAsyncContextManager[GatewaySession]:
        """Open a gateway session, for programs that call models over HTTP.

            async with ctx.gateway_session(sandbox) as session:
                await sandbox.exec(Command(argv=("my-agent",), env=session.environment()))

        The gateway is the run's HTTP service for model calls. The session has a base URL and a key, enforces the
        attempt's budgets and records every call. If `sandbox` is given, it must have the network `model`, and the
        URL is a loopback address inside of it; otherwise the URL is the gateway's public address. When the session
        ends, the recorded turns are added to the attempt.

        If `timed`, the gateway refuses calls after the time that is left in the stage when the session is opened.
        Pass False if `pause_clock` is used while the session is open, and enforce the deadline yourself.
        """
        if self._open_gateway_session is None:
            raise self._no_gateway()
        return self._open_gateway_session(_require_model_network(sandbox), timed)

    @property
    def recorded(self) -> bool:
        """False if the run records no model calls: programs then use `direct_session`."""
        return self._open_direct_session is None

    def direct_session(self, sandbox: Sandbox | None = None) -> AbstractAsyncContextManager[DirectSession]:
        """Give programs direct access to the policy's inference engine, in a run that does not record model calls.

        `sandbox` is as for `gateway_session`. No budget is enforced. Raise `UsageError` if the run records.
        """
        if self._open_direct_session is None:
            raise UsageError(
                "this run records model calls: use ctx.gateway_session, or run with --record off",
                cause="bug.environment",
            )
        return self._open_direct_session(_require_model_network(sandbox))

    async def charge_policy(self, activity: str, awaitable: Awaitable[T]) -> T:
        """Await `awaitable` and return its result. The time that it takes counts as the policy's.

        If the deadline of the run stage passes meanwhile, the rollout ends as Truncated(time), not as a failure of
        the environment. `activity` is `tool` for a command of the policy and `sandbox` for another operation of a
        sandbox.
        """
        self._wait_observer.count_wait(activity, 1)
        try:
            return await awaitable
        except SandboxError as error:
            if error.code in LOSS_CAUSES and activity == "tool" and getattr(error, "after_cell", True):
                self.lost_in_command = True
            raise
        finally:
            self._wait_observer.count_wait(activity, -1)


async def run_with_deadline(
    ctx: Context, seconds: float, work: Coroutine[Any, Any, T], name: str, *, unwind: float
) -> tuple["asyncio.Task[T]", bool]:
    """Run `work` as an asyncio task and cancel it after `seconds` by the stage's clock.

    Return the finished task and whether the deadline passed. Raise `RookeryError` with the cause
    `bug.uncancellable` if the task still runs `unwind` seconds after it was cancelled. `name` names the work in
    that message.
    """
    task = asyncio.create_task(work, name=name)
    try:
        with suppress(TimeoutError):  # only the deadline raises it here: exceptions of `work` stay in the task
            async with ctx.within(seconds):
                await asyncio.wait({task})
        timed_out = not task.done()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=unwind)
    if not task.done():
        raise RookeryError(
            f"{name} kept running after it was cancelled at its limit of {seconds:g} s: re-raise CancelledError "
            "wherever it is caught",
            cause="bug.uncancellable",
        )
    return task, timed_out


def _require_model_network(sandbox: Sandbox | None) -> SupportsModelNetwork | None:
    """Return the sandbox. Raise `UsageError` if it has no listener for model calls."""
    if sandbox is None or (isinstance(sandbox, SupportsModelNetwork) and sandbox.inside_url):
        return sandbox
    raise UsageError(
        f"programs in sandbox {sandbox.id} cannot call the model: its network is {sandbox.spec.network!r}, not "
        f"'model', or the provider {sandbox.spec.provider or '?'} does not support that network: use the network "
        "'model', or pass no sandbox",
        cause="bug.environment",
    )
