"""Rendering beside the event loop."""

import asyncio
import threading

import pytest

from rookery.core import Message, UsageError
from rookery.gateway.renderings.embedded import Embedded
from rookery.gateway.renderings.offloop import Offloop

LONG = [Message("user", "x" * 5_000)]
HI = [Message("user", "Hi.")]


class Gated(Embedded):
    """Renders when it is let; says where and how often it did."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.threads: list[str] = []

    def render(self, messages, tools, tool_choice):
        self.threads.append(threading.current_thread().name)
        self.begun.release()
        assert self.gate.acquire(timeout=30)
        return super().render(messages, tools, tool_choice)


async def until(semaphore: threading.Semaphore) -> None:
    assert await asyncio.to_thread(semaphore.acquire, timeout=30)


def ours() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("rendering-")}


async def test_long_work_happens_in_a_thread_and_short_work_where_it_is_asked_for() -> None:
    rendering = Gated()
    rendering.gate.release(2)
    off = Offloop(rendering)
    assert await off.render(LONG, (), None) == Embedded().render(LONG, (), None)
    await off.render(HI, (), None)
    assert rendering.threads[0].startswith("rendering-")
    assert rendering.threads[1] == threading.current_thread().name
    await off.close()


async def test_every_call_answers_as_the_rendering_does() -> None:
    plain, off = Embedded(), Offloop(Embedded(), short=0)
    prompt = await off.render(HI, (), None)
    assert prompt == plain.render(HI, (), None)
    assert await off.extend(prompt, prompt[-4:], HI, (), None) == plain.extend(prompt, prompt[-4:], HI, (), None)
    assert await off.parse(prompt, prompt[4:8], (), at=3) == plain.parse(prompt, prompt[4:8], (), at=3)
    reader, other = plain.reader(prompt, ()), plain.reader(prompt, ())
    assert reader.feed(prompt[8:12]) == other.feed(prompt[8:12])
    assert await off.end(reader) == other.end()
    await off.close()


async def test_the_loop_runs_while_a_thread_works() -> None:
    rendering = Gated()
    off = Offloop(rendering)
    call = asyncio.create_task(off.render(LONG, (), None))
    await until(rendering.begun)
    await asyncio.sleep(0)
    assert not call.done()
    rendering.gate.release()
    assert await call
    await off.close()


async def test_what_it_raised_it_raises_at_the_caller() -> None:
    off = Offloop(Embedded(), short=0)
    with pytest.raises(UsageError, match="reads text only"):
        await off.render([Message("user", ({"type": "image_url"},))], (), None)
    assert await off.render(HI, (), None)
    await off.close()


async def test_no_more_than_waiting_jobs_wait_at_once() -> None:
    rendering = Gated()
    off = Offloop(rendering, threads=1, waiting=2)
    calls = [asyncio.create_task(off.render(LONG, (), None)) for _ in range(6)]
    await until(rendering.begun)
    assert off._jobs.qsize() <= 1
    rendering.gate.release(6)
    assert len(await asyncio.gather(*calls)) == 6
    await off.close()


async def test_a_cancelled_caller_is_free_at_once_and_its_job_is_not_begun() -> None:
    rendering = Gated()
    off = Offloop(rendering, threads=1, waiting=2)
    first = asyncio.create_task(off.render(LONG, (), None))
    await until(rendering.begun)
    second = asyncio.create_task(off.render(LONG, (), None))
    third = asyncio.create_task(off.render(LONG, (), None))
    await asyncio.sleep(0)
    for task in (first, second):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    rendering.gate.release(3)
    assert await third
    assert len(rendering.threads) == 2
    await off.close()


async def test_after_close_no_thread_is_left_and_nobody_waits() -> None:
    rendering = Gated()
    off = Offloop(rendering, threads=1, waiting=2)
    calls = [asyncio.create_task(off.render(LONG, (), None)) for _ in range(4)]
    await until(rendering.begun)
    closing = asyncio.create_task(off.close())
    await asyncio.sleep(0)
    rendering.gate.release(1)
    await closing
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found[0], bytes)
    assert all(isinstance(one, UsageError) for one in found[1:])
    await off.close()
    for thread in off._threads:
        await asyncio.to_thread(thread.join, 30)
    assert ours() == set()
    with pytest.raises(UsageError, match="closed"):
        await off.render(HI, (), None)


async def test_what_was_never_used_closes() -> None:
    await Offloop(Embedded()).close()


@pytest.mark.parametrize("wrong", [{"threads": -1}, {"waiting": 0}, {"short": -1}])
def test_numbers_that_cannot_be_are_said(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="needs a place"):
        Offloop(Embedded(), **wrong)
