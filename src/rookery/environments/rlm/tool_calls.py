"""Call the environment's tools from a REPL or on behalf of a sub-model, in the runner process.

Arguments are checked against the tool's schema, and every call has a deadline. An exception of a tool is raised as
`CallFailed`. `RookeryError`, `Truncation` (an exhausted budget) and cancellation are raised unchanged.
"""

import inspect
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from rookery.core import RookeryError, ToolCall, Truncation
from rookery.core.errors import describe
from rookery.environments.context import Context, run_with_deadline
from rookery.environments.rlm.budget import CallFailed
from rookery.environments.text import clip, render
from rookery.environments.threads import run_in_thread
from rookery.environments.tools import InvalidArguments, Tool
from rookery.telemetry.operations import observe_tool_call

T = TypeVar("T")
DEFAULT_CALL_SECONDS = 60.0
UNWIND = 5.0
"""Seconds that a cancelled call gets to end. A call that exceeds them fails the rollout as a bug."""


async def run_within(ctx: Context, seconds: float, work: Coroutine[Any, Any, T], name: str) -> T:
    """Await `work`; cancel it and raise `CallFailed` if it takes longer than `seconds` by the stage's clock.

    `name` names the work in the error message.
    """
    task, _ = await run_with_deadline(ctx, seconds, work, name, unwind=UNWIND)
    if task.cancelled():
        raise CallFailed(f"{name} took longer than its {seconds:.3g} s")
    return task.result()


async def call_tool(ctx: Context, tool: Tool, arguments: str) -> Any:
    """Call a tool with arguments in JSON and return its result.

    Raise `CallFailed` if the arguments are invalid, the tool raises an exception, or its deadline passes.
    """
    ctx.tool_calls += 1
    try:
        parsed = tool.parse(arguments)
    except InvalidArguments as problem:
        raise CallFailed(str(problem)) from None
    limit = tool.timeout or ctx.limits.call or DEFAULT_CALL_SECONDS
    with observe_tool_call(tool.name, arguments=arguments):
        return await run_within(ctx, limit, _invoke(ctx, tool, parsed, limit), tool.name)


async def _invoke(ctx: Context, tool: Tool, arguments: dict[str, Any], limit: float) -> Any:
    try:
        if tool.blocking:
            value, error = await run_in_thread(tool.name, lambda: tool.invoke(arguments, ctx, limit))
            if error is not None:
                raise error
        else:
            value = tool.invoke(arguments, ctx, limit)
        return await value if inspect.isawaitable(value) else value
    except (RookeryError, Truncation, CallFailed):
        raise
    except Exception as error:
        raise CallFailed(f"{tool.name} failed: {describe(error)}") from error


def to_plain_data(value: Any) -> Any:
    """Return `value` unchanged if it can be encoded as JSON, otherwise a text for it."""
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return render(value)
    return value


def bind_arguments(tool: Tool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Encode positional and keyword arguments of a tool as a JSON object, by parameter name."""
    names = list(tool.parameters.get("properties", {}))
    if len(args) > len(names):
        raise CallFailed(f"{tool.name} takes {len(names)} arguments, not {len(args)}")
    positional = dict(zip(names, args, strict=False))
    if twice := positional.keys() & kwargs.keys():
        raise CallFailed(f"{tool.name} got {', '.join(sorted(twice))} twice")
    return msgspec.json.encode({**positional, **kwargs}).decode()


async def run_sub_model_tool(ctx: Context, tools: Mapping[str, Tool], call: ToolCall, limit: int) -> str:
    """Run a tool call of a sub-model and return the text of its result message, of about `limit` bytes at most.

    If the call fails, the text says why.
    """
    tool = tools.get(call.name)
    if tool is None:
        return f"There is no tool named {clip(call.name, 100)!r}. The tools are: {', '.join(tools) or 'none'}."
    try:
        return clip(render(await call_tool(ctx, tool, call.arguments)), limit)
    except CallFailed as problem:
        return clip(str(problem), limit)
