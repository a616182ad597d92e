"""Measure and trace model calls, tool calls, agents, requests for sandboxes and gradings.

Runs in runner processes and gateway shards.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rookery.core import RookeryError, Sampling, Truncation, Turn
from rookery.core.errors import describe
from rookery.telemetry import catalogue, tracing
from rookery.telemetry.tracing import CurrentSpan

if TYPE_CHECKING:
    from opentelemetry.trace import Span


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
    catalogue.MODEL_CALLS.add(role, "ok")
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


class Operation:
    """How an operation ended: `result` is `ok` unless the caller or an exception changes it."""

    def __init__(self) -> None:
        self.result = "ok"
        self.output: str | None = None
        """The result of a tool, which its span contains if the user asks for content."""


@contextmanager
def observe_tool_call(name: str, call_id: str = "", arguments: str = "") -> Iterator[Operation]:
    """Measure and trace a call of the tool `name` inside the block."""
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": call_id or None,
    }
    content = tracing.active is not None and tracing.active.settings.content
    if content:
        attributes["gen_ai.tool.call.arguments"] = arguments[: tracing.MAX_CONTENT]
    began = time.monotonic()
    with _traced(f"execute_tool {name}", attributes) as (operation, span):
        try:
            yield operation
        except BaseException as error:
            operation.result = classify_error(error)
            raise
        finally:
            catalogue.TOOL_CALLS.add(name, operation.result)
            catalogue.TOOL_SECONDS.observe(time.monotonic() - began, name)
            if content and span is not None and operation.output is not None:
                span.set_attribute("gen_ai.tool.call.result", operation.output[: tracing.MAX_CONTENT])


@contextmanager
def observe_agent(name: str) -> Iterator[None]:
    """Measure and trace the execution of the command-line agent `name` inside the block."""
    began = time.monotonic()
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    with _traced(f"invoke_agent {name}", attributes) as (operation, _):
        try:
            yield
        except BaseException as error:
            operation.result = classify_error(error)
            raise
        finally:
            catalogue.AGENT_SECONDS.observe(time.monotonic() - began, name)


@contextmanager
def observe_sandbox_request(provider: str) -> Iterator[None]:
    """Measure and trace an attempt's request for a sandbox inside the block."""
    began = time.monotonic()
    with _traced("open_sandbox", {"rookery.sandbox.provider": provider}) as (operation, _):
        try:
            yield
            catalogue.SANDBOX_SECONDS.observe(time.monotonic() - began, provider)
        except BaseException as error:
            operation.result = classify_error(error)
            raise
        finally:
            catalogue.SANDBOX_REQUESTS.add(provider, operation.result)


@contextmanager
def observe_grading(grader: str) -> Iterator[None]:
    """Measure and trace a grading by the kind of grader `grader` inside the block."""
    began = time.monotonic()
    with _traced(f"grade {grader}", {"rookery.grader": grader}) as (operation, _):
        try:
            yield
        except BaseException as error:
            operation.result = classify_error(error)
            raise
        finally:
            catalogue.GRADINGS.add(grader, operation.result)
            catalogue.GRADING_SECONDS.observe(time.monotonic() - began, grader)


@contextmanager
def _traced(name: str, attributes: dict[str, Any]) -> "Iterator[tuple[Operation, Span | None]]":
    """Make a new span current inside the block, if this process sends traces. An exception fails the span."""
    operation = Operation()
    if tracing.active is None:
        yield operation, None
        return
    current = CurrentSpan(tracing.active.start(name, attributes))
    detail = ""
    try:
        yield operation, current.span
    except BaseException as error:
        detail = describe(error)
        raise
    finally:
        current.end("" if operation.result == "ok" else operation.result, detail)
