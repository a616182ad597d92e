"""The sub-calls of one rollout: calls of sub-models, made by code in a REPL, at every depth.

Runs in a runner process. If the REPL cell that made a sub-call ends early, the call continues, and its reply is
kept for the next equal call. A call that hangs ends at its own deadline. Errors that are not about one call, such
as a lost sandbox, end the attempt. At the end of the run stage, all calls are cancelled.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec

from rookery.core import Message, Sampling, ToolSchema, Truncation, UpstreamError
from rookery.environments.context import Context
from rookery.environments.rlm.budget import BudgetExhausted, CallFailed, TreeBudget, TreeLimits
from rookery.environments.rlm.options import RlmOptions
from rookery.environments.rlm.tool_calls import run_sub_model_tool, run_within
from rookery.environments.tools import Tool
from rookery.gateway import ModelReply

END_SECONDS = 20.0
"""Seconds that cancelled sub-calls get to end."""
ROOT_TIME_SHARE = 0.05
"""Share of the run stage's time that is reserved for the root model."""
MAX_PROMPT = 16 << 20


class SubCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a sub-model. If a cell ends before its reply arrives, the next equal request gets the reply."""

    prompt: str
    depth: int
    system: str | None = None
    max_tokens: int | None = None
    context: Any = None
    """Data that a sub-model with a REPL works on: text, JSON-compatible data, or the bytes of a file."""
    recursive: bool = False
    """True if the sub-model has a REPL of its own."""

    def key(self) -> bytes:
        """Return a digest of the request, by which equal requests are recognised."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()


RunChild: TypeAlias = Callable[["CallTree", SubCall], Awaitable[str]]
"""Runs a sub-model that has a REPL and returns its answer."""


class CallTree:
    """Makes all sub-calls of one attempt, within the budget of its tree of calls."""

    def __init__(
        self, ctx: Context, options: RlmOptions, sub_tools: Mapping[str, Tool], run_child: RunChild
    ) -> None:
        self.ctx = ctx
        self.options = options
        self.budget = TreeBudget(
            TreeLimits(
                calls=options.max_calls,
                depth=options.max_depth,
                tokens=min((limit for limit in (options.max_tokens, ctx.limits.tokens) if limit), default=None),
            )
        )
        self.model = ctx.sub_model(trained=options.train_sub)
        self._run_seconds = 0.0
        self._tools = dict(sub_tools)
        self._schemas = tuple(tool.schema for tool in sub_tools.values())
        self._run_child = run_child
        self._slots = asyncio.Semaphore(options.concurrency)
        self._child_slots = [asyncio.Semaphore(options.children) for _ in range(options.max_depth + 1)]
        self._running: set[asyncio.Task[str]] = set()
        self._orphaned: dict[bytes, deque[asyncio.Task[str]]] = {}
        """Sub-calls whose cell ended before the reply arrived, by the key of their request."""
        self.orphans_reused = 0
        """Number of requests that got the reply of such a sub-call."""

    def begin(self) -> None:
        """Set the time from which the root's share is reserved. Call this when the run stage begins."""
        self._run_seconds = self.ctx.remaining

    # ---- for REPLs

    async def call(self, request: SubCall) -> str:
        """Make one sub-call and return its reply. Raise `BudgetExhausted`, `CallFailed`, or an error that ends the
        attempt."""
        (task,) = await self._run_calls([request])
        return task.result()

    async def call_all(self, requests: Sequence[SubCall]) -> list[str | Exception]:
        """Make several sub-calls concurrently, and return a reply or an error for each, in order.

        `BudgetExhausted` and `CallFailed` are returned; errors that end the attempt are raised.
        """
        results: list[str | Exception] = []
        for task in await self._run_calls(requests):
            error = task.exception()
            if error is None:
                results.append(task.result())
            elif isinstance(error, BudgetExhausted | CallFailed):
                results.append(error)
            else:
                raise error
        return results

    async def _run_calls(self, requests: Sequence[SubCall]) -> list[asyncio.Task[str]]:
        tasks = [self._start_call(request) for request in requests]
        if not tasks:
            return []
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            # The cell ended. The calls continue, since their tokens are sampled and recorded anyway.
            for request, task in zip(requests, tasks, strict=True):
                self._orphaned.setdefault(request.key(), deque()).append(task)
            raise
        return tasks

    def _start_call(self, request: SubCall) -> "asyncio.Task[str]":
        orphans = self._orphaned.get(request.key()) if self._orphaned else None
        while orphans:
            task = orphans.popleft()
            if not task.done() or (not task.cancelled() and task.exception() is None):
                self.orphans_reused += 1
                return task
        task = asyncio.create_task(self._make_call(request), name=f"sub-call of {self.ctx.attempt}")
        self._running.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[str]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the caller may be gone

    # ---- one sub-call

    async def _make_call(self, request: SubCall) -> str:
        if len(request.prompt) > MAX_PROMPT:
            raise CallFailed(f"the prompt has {len(request.prompt)} characters; the maximum is {MAX_PROMPT}")
        if request.recursive:
            if request.depth > self.options.max_depth:
                self.budget.call(request.depth)  # raises BudgetExhausted
            async with self._child_slots[request.depth]:
                return await self._run_child(self, request)
        messages = [Message("user", request.prompt)]
        if request.system is not None:
            messages.insert(0, Message("system", request.system))
        for _ in range(self.options.sub_turns):
            reply = await self.chat(messages, request.depth, tools=self._schemas, max_tokens=request.max_tokens)
            if not reply.tool_calls or not self._tools:
                return reply.text
            messages.append(reply.message)
            for call in reply.tool_calls:
                text = await run_sub_model_tool(self.ctx, self._tools, call, self.options.max_output)
                messages.append(Message("tool", text, tool_call_id=call.id))
        raise CallFailed(f"the sub-model did not answer within its {self.options.sub_turns} turns")

    async def chat(
        self,
        messages: Sequence[Message],
        depth: int,
        *,
        tools: Sequence[ToolSchema] = (),
        tool_choice: str | None = None,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> ModelReply:
        """Make one call of a sub-model at this depth; raise `BudgetExhausted` or `CallFailed` if that fails."""
        options = self.options
        self.budget.call(depth)
        async with self._slots:
            granted = await self.budget.grant(min(max_tokens or options.sub_max_tokens, options.sub_max_tokens))
            used = 0

            async def call() -> ModelReply:
                nonlocal used
                sampling = Sampling(max_tokens=granted, stop=stop)
                reply = await self.model.chat(messages, tools=tools, tool_choice=tool_choice, sampling=sampling)
                used = reply.turn.sampled_tokens  # before the next await, where this task may be cancelled
                return reply

            try:
                seconds = min(options.sub_timeout, self.seconds_left)
                if seconds <= 0:
                    raise BudgetExhausted("the time for sub-calls is over")
                return await run_within(self.ctx, seconds, call(), "the sub-call")
            except Truncation as error:
                raise CallFailed(f"the sub-call was refused: {error}") from error
            except UpstreamError as error:
                if error.code != "upstream.rejected":
                    raise
                raise CallFailed(f"the sub-call was refused: {error}") from error
            finally:
                self.budget.release(granted, used)

    async def root_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        tool_choice: str | None = None,
        stop: tuple[str, ...] = (),
    ) -> ModelReply:
        """Make one call of the root model, within the token budget; raise `Truncation` if no tokens are left."""
        policy = self.ctx.policy
        try:
            granted = await self.budget.grant(policy.sampling.max_tokens, root=True)
        except BudgetExhausted as error:
            raise Truncation("tokens", str(error)) from None
        used = 0
        try:
            reply = await policy.chat(
                messages, tools=tools, tool_choice=tool_choice, sampling=Sampling(max_tokens=granted, stop=stop)
            )
            used = reply.turn.sampled_tokens
            return reply
        finally:
            self.budget.release(granted, used)

    @property
    def seconds_left(self) -> float:
        """Seconds left for sub-calls: the time left in the stage, less the share reserved for the root model."""
        reserved = ROOT_TIME_SHARE * self._run_seconds if self._run_seconds < 1e9 else 0.0
        return max(0.0, self.ctx.remaining - reserved)

    def left(self, depth: int) -> dict[str, Any]:
        """Return what is left of the budget for a model at this depth."""
        return self.budget.left(depth, self.seconds_left)

    # ---- the end

    async def close(self) -> None:
        """Cancel all running sub-calls and wait for them, for at most `END_SECONDS`."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)
        self._orphaned.clear()
