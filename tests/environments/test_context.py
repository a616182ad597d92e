"""`Context.within`: deadlines by the stage's clock."""

import asyncio
import time

import pytest

from tests.environments.helpers import Attempt

FOREVER = 3600.0


async def sleep_within(attempt: Attempt, seconds: float, *, paused: float = 0.0) -> None:
    async with attempt.ctx.within(seconds):
        with attempt.ctx.pause_clock():
            await asyncio.sleep(paused)
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


async def test_within_does_not_count_paused_time() -> None:
    attempt = Attempt()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await sleep_within(attempt, 0.2, paused=0.5)
    assert time.monotonic() - began >= 0.5 + 0.2


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
