"""The tool loop: the policy calls typed Python functions until it answers.

Promises:
- every tool call is answered by exactly one message, in the order of the calls;
- nothing the policy writes in a call crashes the attempt or ends it silently: it reads what was wrong;
- each call has a deadline; pauses and the upstream's queue do not count against it;
- what a tool raises is an observation, except what is not the policy's: typed errors, a spent budget and
  cancellation pass through;
- asking for the schemas starts nothing.
"""

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from rookery.core import (
    Limits,
    Message,
    RookeryError,
    TaskError,
    ToolCall,
    ToolSchema,
    Truncation,
    UpstreamError,
    UsageError,
)
from rookery.core.errors import MAX_TRACEBACK, describe
from rookery.environments.base import Environment, Score
from rookery.environments.context import Context
from rookery.environments.python_tool import python
from rookery.environments.registered import find_tool
from rookery.environments.results import clip, match_answer, render
from rookery.environments.schemas import BadArguments, CallLimit, Tool, tool
from rookery.environments.threads import in_thread

__all__ = ["CallLimit", "Tool", "ToolEnvironment", "ToolErrors", "match_answer", "python", "tool"]

ToolErrors: TypeAlias = Literal["observe", "raise"]
ANSWER = "answer"
AT_ONCE = 16
"""Tool calls of one turn under way together, where they run in parallel."""
DEFAULT_CALL = 60.0
UNWIND = 5.0
"""Seconds a tool gets to end after its deadline before it counts as unstoppable."""


class _Ended(msgspec.Struct):
    """How a call ended: with text, with an exception, or not in time."""

    text: str = ""
    error: BaseException | None = None
    late: bool = False


class ToolEnvironment(Environment):
    """The policy and its tools, turn by turn. Usable as it stands, or as the base of your own.

    Tools are given to the constructor, or as the class attribute `toolset`, or are methods decorated with
    `@tool`; without any of them the policy gets `python`. The final message is kept as `answer(ctx)`; a tool
    may set `ctx.state["answer"]` itself. The default `score` compares it with `task.data["answer"]`.
    """

    toolset: ClassVar[Sequence[Tool | Callable[..., Any]] | None] = None
    system_prompt: str | None = None
    """Put before the task's prompt, unless that brings its own."""
    parallel: bool = False
    """Whether the calls of one turn run together; in order otherwise, since they may share a sandbox."""
    tool_errors: ToolErrors = "observe"
    """`raise`: what a tool raises fails the rollout as a bug."""
    max_result: int = 16_384
    """Bytes of a tool's result that the policy gets to see."""

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any] | str] | None = None,
        *,
        system_prompt: str | None = None,
        max_turns: int | None = None,
        parallel: bool | None = None,
        tool_errors: ToolErrors | None = None,
        max_result: int | None = None,
    ) -> None:
        if type(self) is ToolEnvironment and not self.name:
            self.name = "tools"
        self._given = tools
        if system_prompt is not None:
            self.system_prompt = system_prompt
        if parallel is not None:
            self.parallel = parallel
        if tool_errors is not None:
            self.tool_errors = tool_errors
        if max_result is not None:
            self.max_result = max_result
        if self.tool_errors not in ("observe", "raise"):
            raise UsageError(f"tool_errors must be 'observe' or 'raise', not {self.tool_errors!r}")
        if self.max_result < 1:
            raise UsageError(f"max_result must be at least 1 byte, not {self.max_result!r}")
        if max_turns is not None:
            if max_turns < 1:
                raise UsageError(f"max_turns must be at least 1, not {max_turns!r}")
            self.limits = Limits(turns=max_turns).over(self.limits)
        self._tools  # noqa: B018  (what is wrong with them is said now)

    @property
    def needs_sandbox(self) -> bool:
        return super().needs_sandbox or any(found.function is python.function for found in self._tools.values())

    def tools(self) -> Sequence[ToolSchema]:
        return tuple(found.schema for found in self._tools.values())

    def messages(self, ctx: Context) -> list[Message]:
        """How the conversation begins."""
        prompt = ctx.task.prompt
        if not prompt:
            raise TaskError(f"task {ctx.task.id} has no prompt")
        if self.system_prompt is None or prompt[0].role in ("system", "developer"):
            return list(prompt)
        return [Message("system", self.system_prompt), *prompt]

    def done(self, ctx: Context) -> bool:  # noqa: ARG002  (for those who override it)
        """Asked after each turn's tools: whether the attempt ends here, without a further turn."""
        return False

    def offered(self, ctx: Context) -> dict[str, Tool]:  # noqa: ARG002  (for those who override it)
        """The tools of one attempt, by name."""
        return self._tools

    def answer(self, ctx: Context) -> str:
        """The policy's final answer; empty where it did not get to one."""
        return str(ctx.state.get(ANSWER, ""))

    async def run(self, ctx: Context) -> None:
        if type(self).score is ToolEnvironment.score:
            _expected(ctx)  # a row that cannot be scored is not worth playing
        messages = ctx.state["messages"] = self.messages(ctx)
        schemas = self.tools()
        while True:
            reply = await ctx.policy.chat(messages, tools=schemas)
            if reply.finish == "abort":
                raise UpstreamError("the model server aborted an answer before its end")
            messages.append(reply.message)
            if not reply.tool_calls:
                if reply.finish == "length":
                    raise Truncation("tokens", "the answer was cut at its token limit")
                ctx.state.setdefault(ANSWER, reply.text)
                return
            messages.extend(await self._replies(ctx, reply.tool_calls))
            if self.done(ctx):
                return

    async def score(self, ctx: Context) -> Score | float:
        """The upper end of the reward range for the expected answer, the lower end for any other."""
        return self.reward_range[match_answer(self.answer(ctx), _expected(ctx))]

    @cached_property
    def _tools(self) -> dict[str, Tool]:
        given = getattr(self, "_given", None)
        chosen = type(self).toolset if given is None else given
        methods = _decorated(self)
        if chosen is None:
            chosen = () if methods else (python,)
        found: dict[str, Tool] = {}
        for entry in (*chosen, *methods):
            if isinstance(entry, str):
                entry = find_tool(entry)  # noqa: PLW2901
            made = entry if isinstance(entry, Tool) else Tool(entry)
            if made.method:
                raise UsageError(f"the tool {made.name} is a method: it is found by itself, on its own class")
            if made.name in found:
                raise UsageError(f"{self.title} has two tools named {made.name!r}: rename one with @tool(name=…)")
            found[made.name] = made
        return found

    async def _replies(self, ctx: Context, calls: Sequence[ToolCall]) -> list[Message]:
        if self.parallel and len(calls) > 1:
            places = asyncio.Semaphore(AT_ONCE)
            try:
                async with asyncio.TaskGroup() as group:
                    working = [group.create_task(self._one_of_many(ctx, call, places)) for call in calls]
            except BaseExceptionGroup as errors:
                if (fault := _fault(errors)) is not None:
                    raise fault from errors
                raise
            ends = [task.result() for task in working]
            texts = [self._observation(ctx, call, ended) for call, ended in zip(calls, ends, strict=True)]
        else:
            texts = [self._observation(ctx, call, await self._call(ctx, call)) for call in calls]
        # Ids are repeated as sampled, also empty or doubled ones: the order tells them apart.
        pairs = zip(calls, texts, strict=True)
        return [Message("tool", text, tool_call_id=call.id) for call, text in pairs]

    async def _one_of_many(self, ctx: Context, call: ToolCall, places: asyncio.Semaphore) -> _Ended:
        async with places:
            return await self._call(ctx, call)

    async def _call(self, ctx: Context, call: ToolCall) -> _Ended:
        """Runs one call. Raises only what ends the attempt."""
        ctx.tool_calls += 1
        tools = self.offered(ctx)
        found = tools.get(call.name)
        if found is None:
            _count(ctx, "bad_tool_calls")
            known = ", ".join(tools) or "none"
            return _Ended(f"There is no tool named {clip(call.name, 100)!r}. The tools are: {known}.")
        try:
            arguments = found.parse(call.arguments)
        except BadArguments as problem:
            _count(ctx, "bad_tool_calls")
            return _Ended(str(problem))
        return await ctx.working("tool", _timed(found, arguments, ctx))

    def _observation(self, ctx: Context, call: ToolCall, ended: _Ended) -> str:
        """What the policy reads about a call that ended."""
        if ended.late:
            _count(ctx, "tool_timeouts")
            return f"{call.name} was stopped: it did not end within its {ended.text} s."
        error = ended.error
        if error is None:
            return clip(ended.text, self.max_result)
        _count(ctx, "tool_errors")
        trace = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
        ctx.log.warning("a tool raised", tool=call.name, error=clip(describe(error), 500), traceback=trace)
        if self.tool_errors == "raise":
            raise error
        return clip(f"{call.name} failed: {describe(error)}", self.max_result)


async def _timed(found: Tool, arguments: dict[str, Any], ctx: Context) -> _Ended:
    """Runs a tool's function until it ends or its deadline passes."""
    began, loop = ctx.remaining, asyncio.get_running_loop()
    at = loop.time()
    limit = min(found.timeout or ctx.limits.call or DEFAULT_CALL, began)
    # A tool that keeps its limit itself still has the stage's.
    budget = began if found.keeps_time else limit

    def left() -> float:
        # By the stage's clock, which stands still in a pause and in the upstream's queue.
        return budget - (began - ctx.remaining if math.isfinite(began) else loop.time() - at)

    work = asyncio.create_task(_guarded(found, arguments, ctx, limit), name=f"tool {found.name}")
    try:
        while True:
            done, _ = await asyncio.wait({work}, timeout=min(max(left(), 0.01), 3600.0))
            if done:
                return _settled(work.result())
            if left() <= 0:
                break
    finally:
        if not work.done():
            work.cancel()
            # Longer than the engine waits for us: a tool that goes on must not look ended to it.
            await asyncio.wait({work}, timeout=2 * UNWIND)
    if not work.done():
        raise RookeryError(
            f"the tool {found.name} went on after it was cancelled at its limit of {budget:g} s: "
            "never catch CancelledError without raising it again",
            cause="bug.uncancellable",
        )
    if not work.cancelled():
        _settled(work.result())  # it may have failed for a reason of its own while it ended
    elif found.blocking:
        _count(ctx, "stuck_threads")
        ctx.log.warning("a tool that is a plain function still runs past its limit", tool=found.name)
    return _Ended(f"{budget:.3g}", late=True)


def _settled(ended: _Ended) -> _Ended:
    """Lets pass what is not the policy's doing."""
    if ended.error is not None and (fault := _fault(ended.error)) is not None:
        raise fault
    return ended


async def _guarded(found: Tool, arguments: dict[str, Any], ctx: Context, limit: float) -> _Ended:
    """Calls the function; whatever it raises comes back as a value, unless we are really being cancelled."""
    # A SystemExit that leaves a task takes the event loop with it, so it must be caught here, inside.
    error: BaseException | None = None
    value: Any = None
    try:
        if found.blocking:
            value, error = await in_thread(found.name, lambda: found.invoke(arguments, ctx, limit))
        else:
            value = found.invoke(arguments, ctx, limit)
        if inspect.isawaitable(value):
            value = await value
        if error is None:
            return _Ended(render(value))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except asyncio.CancelledError as cancelled:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        error = cancelled
    except BaseException as raised:  # noqa: BLE001  (an observation for the policy; see `_observation`)
        error = raised
    return _Ended(error=error)


def _fault(error: BaseException) -> BaseException | None:
    """The error that is not the policy's doing, also out of a task group's."""
    if isinstance(error, RookeryError | Truncation):
        return error
    if isinstance(error, BaseExceptionGroup):
        for leaf in error.exceptions:
            if (fault := _fault(leaf)) is not None:
                return fault
    return None


def _expected(ctx: Context) -> str | float:
    answer = ctx.task.data.get("answer")
    if isinstance(answer, str | int | float) and answer != "":
        return answer
    raise TaskError(
        f"task {ctx.task.id} cannot be scored: data.answer must be a text or a number, "
        f"{'it is missing' if answer is None else f'not {answer!r:.100}'}"
    )


def _decorated(env: ToolEnvironment) -> list[Tool]:
    """The tools that are attributes of the environment's class, bound to it, in the order of definition."""
    names: dict[str, None] = {}
    for kind in reversed(type(env).__mro__):
        names.update(dict.fromkeys(vars(kind)))
    found = ((name, inspect.getattr_static(type(env), name)) for name in names)
    return [getattr(env, name) for name, value in found if isinstance(getattr(value, "__func__", value), Tool)]


def _count(ctx: Context, name: str) -> None:
    ctx.metrics[name] = ctx.metrics.get(name, 0.0) + 1
