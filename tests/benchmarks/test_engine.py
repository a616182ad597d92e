"""Tests of the benchmark `engine` with a real engine. Figures are not judged."""

import asyncio

import pytest

from benchmarks.engine import DECILES, IN_FLIGHT, BurstDetector, Stream, measure_stream
from benchmarks.instant_model import instant_model


@pytest.mark.long
async def test_stream_measures_every_decile() -> None:
    async with instant_model() as model:
        stream = await measure_stream(model, DECILES * 2 * IN_FLIGHT, timeout=100)
    assert len(stream.deciles) == DECILES
    assert all(cost > 0 for cost in stream.deciles)
    assert all(memory > 0 for memory in stream.memory)


async def test_too_few_rollouts_for_a_decile_are_refused() -> None:
    async with instant_model() as model:
        with pytest.raises(ValueError, match=str(IN_FLIGHT)):
            await measure_stream(model, IN_FLIGHT, timeout=100)


async def test_burst_ends_with_the_next_event_loop_iteration() -> None:
    burst, loop = BurstDetector(), asyncio.get_running_loop()
    burst.restart(loop)
    assert not burst.ended
    await asyncio.sleep(0)
    assert burst.ended


def test_growth_is_the_fitted_last_decile_over_the_first() -> None:
    steady = Stream(tuple(2.0 + n / 9 for n in range(10)), (100.0, 104.0))
    assert steady.growth == pytest.approx(1.5)
    assert steady.memory_growth == 4.0
    # A single slow decile does not count as growth, wherever it is.
    for at in range(10):
        assert Stream(tuple(2.0 + 0.2 * (n == at) for n in range(10)), (0, 0)).growth < 1.06
