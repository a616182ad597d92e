"""Outcomes of tool calls: errors, cancellation, deadlines."""

import asyncio
import re
import threading

import pytest

from rookery.core import Limits, RookeryError, SandboxError, TaskError, Truncation, UpstreamError
from rookery.environments import Tool, ToolEnvironment, tool
from rookery.environments.threads import count_stuck_threads
from rookery.environments.tools import CallLimit
from tests.environments.helpers import Attempt, calls, observe_call


@tool
def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


class Own(BaseException):
    pass


def raising(error: BaseException, *, sync: bool) -> Tool:
    def fails() -> None:
        raise error

    async def fails_later() -> None:
        raise error

    return Tool(fails if sync else fails_later, name="fails")


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        AttributeError("bad"),
        SystemExit(3),
        StopIteration("bad"),
        asyncio.CancelledError(),
        TimeoutError("bad"),
        Own("bad"),
        RecursionError("bad"),
        ExceptionGroup("bad", [ValueError("worse")]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_exception_of_a_tool_is_an_observation(error, sync):
    text, attempt = await observe_call(raising(error, sync=sync))
    kind = "RuntimeError" if isinstance(error, StopIteration) and not sync else type(error).__name__
    assert re.match(rf"fails\b.*: {kind}", text)
    assert attempt.ctx.metrics["tool_errors"] == 1
    ((level, fields),) = attempt.logged
    assert level == "warning"
    assert "Traceback" in fields["traceback"]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        SandboxError("gone"),
        UpstreamError("away"),
        RookeryError("x", cause="runner.lost"),
        TaskError("broken"),
        Truncation("context"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_that_are_not_the_policys_propagate(error, sync, parallel, grouped):
    raised = ExceptionGroup("several", [ValueError("first"), error]) if grouped else error
    attempt = Attempt([calls(("fails", ""), ("add", '{"a": 1}')), "42"])
    with pytest.raises(type(error)) as caught:
        await ToolEnvironment([raising(raised, sync=sync), add], parallel=parallel).run(attempt.ctx)
    assert caught.value is error
    assert not any(attempt.watch.waits.values())
    assert attempt.ctx.lost_in_command == isinstance(error, SandboxError)


@pytest.mark.parametrize("parallel", [True, False])
async def test_tool_errors_raise_propagates_the_exception(parallel):
    attempt = Attempt([calls(("fails", ""), ("fails", "")), "42"])
    env = ToolEnvironment([raising(SystemExit(3), sync=True)], tool_errors="raise", parallel=parallel)
    with pytest.raises(SystemExit):
        await env.run(attempt.ctx)
    assert attempt.ctx.metrics["tool_errors"] == 1


@pytest.mark.parametrize("parallel", [True, False])
async def test_cancellation_reaches_the_tool_and_propagates(parallel):
    reached, undone = asyncio.Event(), []

    async def waits() -> None:
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            undone.append(True)

    attempt = Attempt([calls(("waits", ""), ("add", '{"a": 1}')), "42"])
    running = asyncio.create_task(ToolEnvironment([waits, add], parallel=parallel).run(attempt.ctx))
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert undone == [True]
    assert not any(attempt.watch.waits.values())


# ---- deadlines


async def test_async_tool_is_cancelled_at_its_limit():
    undone = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            undone.append(True)

    text, attempt = await observe_call(Tool(waits, timeout=0.01))
    assert re.fullmatch(r"waits\b.*\b0\.01 s\.", text)
    assert undone == [True]
    assert attempt.ctx.metrics["tool_timeouts"] == 1


async def test_blocking_tool_over_its_limit_is_abandoned_and_counted():
    go = threading.Event()
    before = count_stuck_threads()

    def waits() -> None:
        go.wait()

    try:
        text, attempt = await observe_call(waits, limits=Limits(call=0.01))
        assert re.fullmatch(r"waits\b.*\b0\.01 s\.", text)
        assert attempt.ctx.metrics["stuck_threads"] == 1
        assert count_stuck_threads() == before + 1
        (stuck,) = [thread for thread in threading.enumerate() if thread.name == "rookery-waits"]
        assert stuck.daemon
    finally:
        go.set()
    stuck.join()
    assert count_stuck_threads() == before


async def test_pauses_do_not_count_against_a_call():
    go, readings = asyncio.Event(), 0

    def read_stopped_clock() -> float:
        nonlocal readings
        readings += 1
        if readings == 8:
            go.set()
        return 0.0

    async def waits() -> str:
        await go.wait()
        return "in time"

    attempt = Attempt([calls(("waits", "")), "42"], elapsed=read_stopped_clock)
    await ToolEnvironment([Tool(waits, timeout=0.001)]).run(attempt.ctx)
    assert attempt.observations == ["in time"]


async def test_call_ends_at_the_deadline_of_its_stage():
    async def waits() -> None:
        await asyncio.Event().wait()

    attempt = Attempt([calls(("waits", "")), "42"], run=0.02)
    await ToolEnvironment([waits]).run(attempt.ctx)
    assert attempt.observations[0].startswith("waits ")
    assert attempt.ctx.metrics["tool_timeouts"] == 1


async def test_tool_that_ignores_cancellation_is_a_bug(monkeypatch):
    monkeypatch.setattr("rookery.environments.tool_environment.UNWIND", 0.01)
    go = asyncio.Event()

    async def stays() -> None:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue

    attempt = Attempt([calls(("stays", "")), "42"])
    with pytest.raises(RookeryError) as caught:
        await ToolEnvironment([Tool(stays, timeout=0.01)]).run(attempt.ctx)
    assert (caught.value.code, caught.value.fault) == ("bug.uncancellable", "bug")
    go.set()


async def test_tool_with_a_call_limit_parameter_enforces_it_itself():
    async def slow(limit: CallLimit) -> float:
        await asyncio.sleep(3 * limit)
        return float(limit)

    assert (await observe_call(Tool(slow, timeout=0.01)))[0] == "0.01"
