"""The engine bench, on the real engine; figures are not judged here."""

import asyncio

import pytest

from rookery.cli.bench.engine import DECILES, IN_FLIGHT, Burst, Stream, measure_stream
from rookery.cli.bench.server import instant_model


async def test_a_stream_has_a_cost_for_every_decile() -> None:
    async with instant_model() as model:
        stream = await measure_stream(model, DECILES * 2 * IN_FLIGHT, timeout=100)
    assert len(stream.deciles) == DECILES
    assert all(cost > 0 for cost in stream.deciles)
    assert all(memory > 0 for memory in stream.memory)


async def test_a_decile_that_cannot_be_measured_is_refused() -> None:
    async with instant_model() as model:
        with pytest.raises(ValueError, match="not measurable"):
            await measure_stream(model, IN_FLIGHT, timeout=100)


async def test_a_burst_ends_when_the_loop_turns() -> None:
    burst, loop = Burst(), asyncio.get_running_loop()
    burst.goes_on(loop)
    assert not burst.ended
    await asyncio.sleep(0)
    assert burst.ended


def test_growth_is_the_last_decile_over_the_first() -> None:
    stream = Stream((2.0, 9.0, 3.0), (100.0, 104.0))
    assert stream.growth == 1.5
    assert stream.memory_growth == 4.0
