"""Measure model calls, tool calls and gradings. Runs in runner processes and gateway shards."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rookery.core import RookeryError, Truncation, Turn
from rookery.telemetry import catalogue


def describe_error(error: BaseException) -> str:
    """Return why an operation failed, as a label: a cause code, `truncated`, `cancelled`, or `error`."""
    if isinstance(error, RookeryError):
        return error.code
    if isinstance(error, Truncation):
        return "truncated"
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "error"


def count_model_call(role: str, turn: Turn | None) -> None:
    """Count a model call that was recorded as this turn."""
    catalogue.MODEL_CALLS.add(role, "ok")
    if turn is not None:
        catalogue.MODEL_SECONDS.observe(turn.seconds, role)
        catalogue.PROMPT_TOKENS.add(role, by=turn.prompt_tokens)
        catalogue.SAMPLED_TOKENS.add(role, by=turn.sampled_tokens)
        if turn.queued:
            catalogue.MODEL_QUEUED.add(role, by=turn.queued)


def count_failed_call(role: str, error: BaseException) -> None:
    """Count a model call that ended with an exception."""
    catalogue.MODEL_CALLS.add(role, describe_error(error))


class ToolCallRecord:
    """How a tool call ended. The caller sets `result`, unless an exception ends the call."""

    def __init__(self) -> None:
        self.result = "ok"


@contextmanager
def tool_call(name: str) -> Iterator[ToolCallRecord]:
    """Measure a call of the tool `name` inside the block."""
    record = ToolCallRecord()
    began = time.monotonic()
    try:
        yield record
    except BaseException as error:
        record.result = describe_error(error)
        raise
    finally:
        catalogue.TOOL_CALLS.add(name, record.result)
        catalogue.TOOL_SECONDS.observe(time.monotonic() - began, name)


@contextmanager
def sandbox_request(provider: str) -> Iterator[None]:
    """Measure an attempt's request for a sandbox inside the block."""
    result = "ok"
    began = time.monotonic()
    try:
        yield
    except BaseException as error:
        result = describe_error(error)
        raise
    finally:
        catalogue.SANDBOX_REQUESTS.add(provider, result)
        if result == "ok":
            catalogue.SANDBOX_SECONDS.observe(time.monotonic() - began, provider)


@contextmanager
def grading(grader: str) -> Iterator[None]:
    """Measure a grading by the kind of grader `grader` inside the block."""
    result = "ok"
    began = time.monotonic()
    try:
        yield
    except BaseException as error:
        result = describe_error(error)
        raise
    finally:
        catalogue.GRADINGS.add(grader, result)
        catalogue.GRADING_SECONDS.observe(time.monotonic() - began, grader)
