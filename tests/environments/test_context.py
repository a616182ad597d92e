"""`Context.within`: deadlines by the stage's clock."""

import asyncio

import pytest

from tests.environments.helpers import Attempt
from tests.waiting import advance_clock, run_timers

FOREVER = 3600.0


async def sleep_within(attempt: Attempt, seconds: float) -> None:
    async with attempt.ctx.within(seconds):
        await asyncio.sleep(FOREVER)


async def test_within_cancels_a_block_that_takes_too_long() -> None:
    attempt = Attempt()
    with pytest.raises(TimeoutError):
        await sleep_within(attempt, 0.02)


async def test_within_does_not_affect_a_block_that_ends_in_time() -> None:
    attempt = Attempt()
    async with attempt.ctx.within(FOREVER):
        result = 42
    assert result == 42


async def test_within_does_not_count_paused_time(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(run=FOREVER)
    resumed = asyncio.Event()

    async def pause_within() -> None:
        async with attempt.ctx.within(100.0):
            with attempt.ctx.pause_clock():
                await resumed.wait()
            await asyncio.Event().wait()

    task = asyncio.create_task(pause_within())
    await run_timers()
    advance_clock(monkeypatch, 200.0)
    await run_timers()
    assert not task.done()
    resumed.set()
    await run_timers()
    advance_clock(monkeypatch, 50.0)
    await run_timers()
    assert not task.done()
    advance_clock(monkeypatch, 50.0)
    with pytest.raises(TimeoutError):
        await task


async def test_inner_deadline_cancels_the_inner_block_only() -> None:
    attempt = Attempt()
    async with attempt.ctx.within(FOREVER):
        with pytest.raises(TimeoutError):
            await sleep_within(attempt, 0.02)
        still_running = True
    assert still_running


async def test_within_propagates_other_exceptions() -> None:
    attempt = Attempt()
    with pytest.raises(KeyError):
        async with attempt.ctx.within(FOREVER):
            raise KeyError("own")
