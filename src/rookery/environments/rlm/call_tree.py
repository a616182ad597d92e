"""The sub-calls of one rollout, at every depth.

Runs in a runner process. A sub-call continues when the REPL cell that made it ends early; its reply is kept for
the next equal call. A call that hangs ends at its own deadline. Errors that no sub-call can recover from, such
as a lost sandbox, end the attempt. No call outlives the rollout.
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
"""Seconds that cancelled calls get to end."""
ROOT_TIME_SHARE = 0.05
"""Share of the rollout's time that is reserved for the root."""
MAX_PROMPT = 16 << 20


class SubCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a sub-call. Equal requests may share a reply."""

    prompt: str
    depth: int
    system: str | None = None
    max_tokens: int | None = None
    context: Any = None
    """Context of a sub-model with a REPL: text, JSON-compatible data, or the bytes of a file."""
    recursive: bool = False

    def key(self) -> bytes:
        """Return a digest of the request, by which equal requests are recognised."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()


RunChild: TypeAlias = Callable[["CallTree", SubCall], Awaitable[str]]
"""Runs a sub-model that has a REPL and returns its answer."""


class CallTree:
    """All sub-calls of one attempt."""

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
        """Calls whose cell ended before their reply arrived, by request."""
        self.orphans_reused = 0

    def begin(self) -> None:
        """Start the clock: call this when the run stage begins."""
        self._run_seconds = self.ctx.remaining

    # ---- for REPLs

    async def call(self, request: SubCall) -> str:
        """Make one sub-call and return its reply; raise `BudgetExhausted` or `CallFailed`."""
        (task,) = await self._run_calls([request])
        return task.result()

    async def call_all(self, requests: Sequence[SubCall]) -> list[str | Exception]:
        """Make sub-calls concurrently. Return replies or errors in order; raise errors that end the attempt."""
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
        """Make one model call below the root."""
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
        """Make one model call of the root, within the token budget of the tree."""
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
        """Seconds left for sub-calls."""
        reserved = ROOT_TIME_SHARE * self._run_seconds if self._run_seconds < 1e9 else 0.0
        return max(0.0, self.ctx.remaining - reserved)

    def left(self, depth: int) -> dict[str, Any]:
        """Return what is left of the budget for a model at this depth."""
        return self.budget.left(depth, self.seconds_left)

    # ---- the end

    async def close(self) -> None:
        """Cancel all running calls and wait for them, for a bounded time."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)
        self._orphaned.clear()
