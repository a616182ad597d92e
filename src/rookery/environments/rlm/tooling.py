"""Tools of the environment's, called from a REPL as functions or by a sub-model.

Promises:
- arguments are checked against the tool's types; what does not fit is refused in words;
- a call has the tool's deadline, or the attempt's for one call;
- what a tool raises is told to who called it; typed errors, a spent budget and cancellation pass through.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import msgspec

from rookery.core import RookeryError, ToolCall, Truncation
from rookery.core.errors import describe
from rookery.environments.context import Context
from rookery.environments.results import clip, render
from rookery.environments.rlm.budgets import CallFailed
from rookery.environments.rlm.timing import within
from rookery.environments.schemas import BadArguments, Tool
from rookery.environments.threads import in_thread

CALL_SECONDS = 60.0


async def called(ctx: Context, tool: Tool, arguments: str) -> Any:
    """What the tool returned."""
    ctx.tool_calls += 1
    try:
        found = tool.parse(arguments)
    except BadArguments as problem:
        raise CallFailed(str(problem)) from None
    limit = tool.timeout or ctx.limits.call or CALL_SECONDS
    return await within(ctx, limit, _invoked(ctx, tool, found, limit), tool.name)


async def _invoked(ctx: Context, tool: Tool, arguments: dict[str, Any], limit: float) -> Any:
    try:
        if tool.blocking:
            value, error = await in_thread(tool.name, lambda: tool.invoke(arguments, ctx, limit))
            if error is not None:
                raise error
        else:
            value = tool.invoke(arguments, ctx, limit)
        return await value if inspect.isawaitable(value) else value
    except (RookeryError, Truncation, CallFailed):
        raise
    except Exception as error:
        raise CallFailed(f"{tool.name} failed: {describe(error)}") from error


def plain(value: Any) -> Any:
    """As a REPL gets it: plain data, or else its text."""
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return render(value)
    return value


def named(tool: Tool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Arguments as JSON, those by position by the names of the tool's."""
    names = list(tool.parameters.get("properties", {}))
    if len(args) > len(names):
        raise CallFailed(f"{tool.name} takes {len(names)} arguments, not {len(args)}")
    given = dict(zip(names, args, strict=False))
    if twice := given.keys() & kwargs.keys():
        raise CallFailed(f"{tool.name} was given {', '.join(sorted(twice))} twice")
    return msgspec.json.encode({**given, **kwargs}).decode()


async def replied(ctx: Context, tools: Mapping[str, Tool], call: ToolCall, limit: int) -> str:
    """What a sub-model reads of its call."""
    tool = tools.get(call.name)
    if tool is None:
        return f"There is no tool named {clip(call.name, 100)!r}. The tools are: {', '.join(tools) or 'none'}."
    try:
        return clip(render(await called(ctx, tool, call.arguments)), limit)
    except CallFailed as problem:
        return clip(str(problem), limit)
