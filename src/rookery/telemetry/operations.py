"""Measure and trace model calls, tool calls, agents, requests for sandboxes and gradings.

Runs in runner processes and gateway shards.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from rookery.core import RookeryError, Sampling, Truncation, Turn
from rookery.core.errors import describe
from rookery.telemetry import catalogue, tracing
from rookery.telemetry.tracing import CurrentSpan

OK: Final = "ok"
"""The result of an operation that succeeded, as a label."""


def classify_error(error: BaseException) -> str:
    """Return why an operation failed, as a label: a cause code, `truncated`, `cancelled`, or `error`."""
    if isinstance(error, RookeryError):
        return error.code
    if isinstance(error, Truncation):
        return "truncated"
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "error"


# ---- model calls


def start_model_call(role: str, model: str, provider: str, attempt: str, sampling: Sampling) -> CurrentSpan:
    """Start the span of a model call, and make it current. Call it only while `tracing.active` is set."""
    assert tracing.active is not None
    from opentelemetry.trace import SpanKind

    attributes = tracing.chat_attributes(role, model, provider, attempt, sampling)
    return CurrentSpan(tracing.active.start(f"chat {model}".rstrip(), attributes, kind=SpanKind.CLIENT))


def end_model_call(role: str, turn: Turn | None, current: CurrentSpan | None) -> None:
    """Count a model call that was recorded as this turn, and end its span."""
    catalogue.MODEL_CALLS.add(role, OK)
    if turn is not None:
        catalogue.MODEL_SECONDS.observe(turn.seconds, role)
        catalogue.PROMPT_TOKENS.add(role, by=turn.prompt_tokens)
        catalogue.SAMPLED_TOKENS.add(role, by=turn.sampled_tokens)
        if turn.queued:
            catalogue.MODEL_QUEUED.add(role, by=turn.queued)
    if current is not None:
        if turn is not None:
            current.span.set_attributes(tracing.turn_attributes(turn))
            if tracing.active is not None and tracing.active.settings.content:
                current.span.set_attribute("gen_ai.input.messages", tracing.encode_messages(turn.messages))
                current.span.set_attribute("gen_ai.output.messages", tracing.encode_messages((turn.response,)))
        current.end()


def fail_model_call(role: str, error: BaseException, current: CurrentSpan | None) -> None:
    """Count a model call that ended with an exception, and end its span."""
    result = classify_error(error)
    catalogue.MODEL_CALLS.add(role, result)
    if current is not None:
        current.end(result, describe(error))


# ---- other operations


class ObservedOperation:
    """How an operation ended: `result` is `ok` unless the caller or an exception changes it."""

    def __init__(self) -> None:
        self.result = OK
        self.output: str | None = None
        """The result of a tool, which its span contains if the user asks for content."""


def observe_tool_call(
    name: str, call_id: str = "", arguments: str = ""
) -> AbstractContextManager[ObservedOperation]:
    """Measure and trace a call of the tool `name` inside the block."""
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": call_id or None,
    }
    if tracing.active is not None and tracing.active.settings.content:
        attributes["gen_ai.tool.call.arguments"] = arguments[: tracing.MAX_CONTENT]

    def record(result: str, seconds: float) -> None:
        catalogue.TOOL_CALLS.add(name, result)
        catalogue.TOOL_SECONDS.observe(seconds, name)

    return _observe(f"execute_tool {name}", attributes, record)


def observe_agent(name: str) -> AbstractContextManager[ObservedOperation]:
    """Measure and trace the execution of the command-line agent `name` inside the block."""
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    return _observe(
        f"invoke_agent {name}", attributes, lambda _, seconds: catalogue.AGENT_SECONDS.observe(seconds, name)
    )


def observe_sandbox_request(provider: str) -> AbstractContextManager[ObservedOperation]:
    """Measure and trace an attempt's request for a sandbox inside the block."""

    def record(result: str, seconds: float) -> None:
        catalogue.SANDBOX_REQUESTS.add(provider, result)
        if result == OK:
            catalogue.SANDBOX_SECONDS.observe(seconds, provider)

    return _observe("open_sandbox", {"rookery.sandbox.provider": provider}, record)


def observe_grading(grader: str) -> AbstractContextManager[ObservedOperation]:
    """Measure and trace a grading by the kind of grader `grader` inside the block."""

    def record(result: str, seconds: float) -> None:
        catalogue.GRADINGS.add(grader, result)
        catalogue.GRADING_SECONDS.observe(seconds, grader)

    return _observe(f"grade {grader}", {"rookery.grader": grader}, record)


@contextmanager
def _observe(
    name: str, attributes: dict[str, Any], record: Callable[[str, float], None]
) -> Iterator[ObservedOperation]:
    """Call `record` with the result and the seconds of the block, and trace it if this process sends traces.

    The block runs in a new span, which fails with an exception of the block.
    """
    operation, began, detail = ObservedOperation(), time.monotonic(), ""
    tracer = tracing.active
    current = CurrentSpan(tracer.start(name, attributes)) if tracer is not None else None
    try:
        yield operation
    except BaseException as error:
        operation.result, detail = classify_error(error), describe(error)
        raise
    finally:
        record(operation.result, time.monotonic() - began)
        if tracer is not None and current is not None:
            if tracer.settings.content and operation.output is not None:
                current.span.set_attribute("gen_ai.tool.call.result", operation.output[: tracing.MAX_CONTENT])
            current.end("" if operation.result == OK else operation.result, detail)
