"""`Context.within`: deadlines by the clock of the stage."""

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


async def test_a_block_that_takes_too_long_is_cancelled_with_a_timeout_error() -> None:
    attempt = Attempt()
    with pytest.raises(TimeoutError):
        await sleep_within(attempt, 0.02)


async def test_a_block_that_ends_in_time_is_not_disturbed() -> None:
    attempt = Attempt()
    async with attempt.ctx.within(FOREVER):
        result = 42
    assert result == 42


async def test_time_for_which_the_clock_is_paused_does_not_count() -> None:
    attempt = Attempt()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await sleep_within(attempt, 0.2, paused=0.5)
    assert time.monotonic() - began >= 0.5 + 0.2


async def test_the_inner_of_two_nested_deadlines_ends_its_own_block_only() -> None:
    attempt = Attempt()
    async with attempt.ctx.within(FOREVER):
        with pytest.raises(TimeoutError):
            await sleep_within(attempt, 0.02)
        still_running = True
    assert still_running


async def test_other_exceptions_pass_unchanged() -> None:
    attempt = Attempt()
    with pytest.raises(KeyError):
        async with attempt.ctx.within(FOREVER):
            raise KeyError("own")
