"""Sub-calls of one rollout, at every depth: outside of the REPLs that ask for them.

Promises:
- a call goes on when the cell that asked for it dies; its answer is kept, and the next equal call gets it;
- each call is a branch of its own in the record, with the role that was chosen for sub-calls;
- the whole tree keeps one budget; a call that hangs ends at its deadline and costs itself alone;
- what no sub-call can help (an upstream that is gone, a sandbox that is lost) ends the attempt;
- when the rollout ends, or is cancelled, no call is left.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec

from rookery.core import Message, Sampling, ToolSchema, Truncation, UpstreamError
from rookery.environments.context import Context
from rookery.environments.rlm.budgets import BudgetSpent, CallFailed, Ledger, TreeLimits
from rookery.environments.rlm.options import Options
from rookery.environments.rlm.timing import within
from rookery.environments.rlm.tooling import replied
from rookery.environments.schemas import Tool
from rookery.gateway import Reply

END_SECONDS = 20.0
SPARE = 0.05
"""Part of the rollout's time that sub-calls leave to the root."""
MOST_PROMPT = 16 << 20


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One sub-call. Equal ones are equal questions."""

    prompt: str
    depth: int
    system: str | None = None
    max_tokens: int | None = None
    context: Any = None
    """For a sub-model with a REPL of its own: text, plain data, or bytes of a file."""
    recursive: bool = False

    def key(self) -> bytes:
        return blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()


Child: TypeAlias = Callable[["Tree", Asked], Awaitable[str]]
"""Plays a sub-model that has a REPL."""


class Tree:
    """Of one attempt, from the beginning of its run to the end."""

    def __init__(self, ctx: Context, options: Options, sub_tools: Mapping[str, Tool], child: Child) -> None:
        self.ctx = ctx
        self.options = options
        self.ledger = Ledger(
            TreeLimits(
                calls=options.max_calls,
                depth=options.max_depth,
                tokens=min((most for most in (options.max_tokens, ctx.limits.tokens) if most), default=None),
            )
        )
        self.model = ctx.sub_model(trained=options.train_sub)
        self._time = 0.0
        self._tools = dict(sub_tools)
        self._schemas = tuple(tool.schema for tool in sub_tools.values())
        self._child = child
        self._places = asyncio.Semaphore(options.concurrency)
        self._levels = [asyncio.Semaphore(options.children) for _ in range(options.max_depth + 1)]
        self._under_way: set[asyncio.Task[str]] = set()
        self._kept: dict[bytes, deque[asyncio.Task[str]]] = {}
        """Calls whose asker was gone before their answer came."""
        self.kept_used = 0

    def begin(self) -> None:
        """The run's time counts from here."""
        self._time = self.ctx.remaining

    # ---- for REPLs

    async def ask(self, asked: Asked) -> str:
        """The answer; `BudgetSpent` or `CallFailed` in words for who asked."""
        (work,) = await self._done([asked])
        return work.result()

    async def ask_all(self, asked: Sequence[Asked]) -> list[str | Exception]:
        """The answers in order, or why there is none; what ends the attempt is raised."""
        found: list[str | Exception] = []
        for work in await self._done(asked):
            error = work.exception()
            if error is None:
                found.append(work.result())
            elif isinstance(error, BudgetSpent | CallFailed):
                found.append(error)
            else:
                raise error
        return found

    async def _done(self, asked: Sequence[Asked]) -> list[asyncio.Task[str]]:
        work = [self._work(one) for one in asked]
        if not work:
            return []
        try:
            await asyncio.wait(work)
        except asyncio.CancelledError:
            # The cell is gone, the calls go on: their tokens are spent and recorded either way.
            for one, task in zip(asked, work, strict=True):
                self._kept.setdefault(one.key(), deque()).append(task)
            raise
        return work

    def _work(self, asked: Asked) -> "asyncio.Task[str]":
        kept = self._kept.get(asked.key()) if self._kept else None
        while kept:
            task = kept.popleft()
            if not task.done() or (not task.cancelled() and task.exception() is None):
                self.kept_used += 1
                return task
        task = asyncio.create_task(self._answered(asked), name=f"sub-call of {self.ctx.attempt}")
        self._under_way.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: "asyncio.Task[str]") -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # who asked may be gone; then nobody else looks at it

    # ---- one sub-call

    async def _answered(self, asked: Asked) -> str:
        if len(asked.prompt) > MOST_PROMPT:
            raise CallFailed(f"a prompt of {len(asked.prompt)} characters; {MOST_PROMPT} is the most")
        if asked.recursive:
            if asked.depth > self.options.max_depth:
                self.ledger.call(asked.depth)  # it says why not
            async with self._levels[asked.depth]:
                return await self._child(self, asked)
        messages = [Message("user", asked.prompt)]
        if asked.system is not None:
            messages.insert(0, Message("system", asked.system))
        for _ in range(self.options.sub_turns):
            reply = await self.chat(messages, asked.depth, tools=self._schemas, max_tokens=asked.max_tokens)
            if not reply.tool_calls or not self._tools:
                return reply.text
            messages.append(reply.message)
            for call in reply.tool_calls:
                text = await replied(self.ctx, self._tools, call, self.options.max_output)
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
    ) -> Reply:
        """One model call below the root."""
        options = self.options
        self.ledger.call(depth)
        async with self._places:
            granted = await self.ledger.grant(min(max_tokens or options.sub_max_tokens, options.sub_max_tokens))
            used = 0

            async def call() -> Reply:
                nonlocal used
                sampling = Sampling(max_tokens=granted, stop=stop)
                reply = await self.model.chat(messages, tools=tools, tool_choice=tool_choice, sampling=sampling)
                used = reply.turn.sampled_tokens  # in one step with its record: who waits may be cancelled between
                return reply

            try:
                seconds = min(options.sub_timeout, self.seconds_left)
                if seconds <= 0:
                    raise BudgetSpent("the time for sub-calls is over")
                return await within(self.ctx, seconds, call(), "the sub-call")
            except Truncation as refused:
                raise CallFailed(f"the sub-call was refused: {refused}") from refused
            except UpstreamError as error:
                if error.code != "upstream.rejected":
                    raise
                raise CallFailed(f"the sub-call was refused: {error}") from error
            finally:
                self.ledger.settle(granted, used)

    async def root_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        tool_choice: str | None = None,
        stop: tuple[str, ...] = (),
    ) -> Reply:
        """One turn of the root's, within the tokens of the tree."""
        policy = self.ctx.policy
        try:
            granted = await self.ledger.grant(policy.sampling.max_tokens, root=True)
        except BudgetSpent as spent:
            raise Truncation("tokens", str(spent)) from None
        used = 0
        try:
            reply = await policy.chat(
                messages, tools=tools, tool_choice=tool_choice, sampling=Sampling(max_tokens=granted, stop=stop)
            )
            used = reply.turn.sampled_tokens
            return reply
        finally:
            self.ledger.settle(granted, used)

    @property
    def seconds_left(self) -> float:
        """For sub-calls."""
        spare = SPARE * self._time if self._time < 1e9 else 0.0
        return max(0.0, self.ctx.remaining - spare)

    def left(self, depth: int) -> dict[str, Any]:
        return self.ledger.left(depth, self.seconds_left)

    # ---- the end

    async def close(self) -> None:
        """Cancels what is under way; bounded."""
        work = list(self._under_way)
        for task in work:
            task.cancel()
        if work:
            await asyncio.wait(work, timeout=END_SECONDS)
        self._kept.clear()
