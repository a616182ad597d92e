"""Rendering beside the event loop."""

import asyncio
import threading

import pytest

from rookery.core import Message, UsageError
from rookery.gateway.chat_renderers.embedded_renderer import EmbeddedRenderer
from rookery.gateway.chat_renderers.threaded import ThreadedRenderer

LONG = [Message("user", "x" * 5_000)]
HI = [Message("user", "Hi.")]


class Gated(EmbeddedRenderer):
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
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("chat-renderer-")}


async def test_long_inputs_run_in_a_thread_and_short_ones_inline() -> None:
    rendering = Gated()
    rendering.gate.release(2)
    off = ThreadedRenderer(rendering)
    assert await off.render(LONG, (), None) == EmbeddedRenderer().render(LONG, (), None)
    await off.render(HI, (), None)
    assert rendering.threads[0].startswith("chat-renderer-")
    assert rendering.threads[1] == threading.current_thread().name
    await off.close()


async def test_every_method_returns_what_the_renderer_returns() -> None:
    plain, off = EmbeddedRenderer(), ThreadedRenderer(EmbeddedRenderer(), inline_limit=0)
    prompt = await off.render(HI, (), None)
    assert prompt == plain.render(HI, (), None)
    assert await off.extend(prompt, prompt[-4:], HI, (), None) == plain.extend(prompt, prompt[-4:], HI, (), None)
    assert await off.parse(prompt, prompt[4:8], (), prompt_length=3) == plain.parse(
        prompt, prompt[4:8], (), prompt_length=3
    )
    reader, other = plain.new_reply_parser(prompt, ()), plain.new_reply_parser(prompt, ())
    assert reader.feed(prompt[8:12]) == other.feed(prompt[8:12])
    assert await off.finish(reader) == other.finish()
    await off.close()


async def test_event_loop_runs_while_a_thread_renders() -> None:
    rendering = Gated()
    off = ThreadedRenderer(rendering)
    call = asyncio.create_task(off.render(LONG, (), None))
    await until(rendering.begun)
    await asyncio.sleep(0)
    assert not call.done()
    rendering.gate.release()
    assert await call
    await off.close()


async def test_exception_is_raised_in_the_caller() -> None:
    off = ThreadedRenderer(EmbeddedRenderer(), inline_limit=0)
    with pytest.raises(UsageError):
        await off.render([Message("user", ({"type": "image_url"},))], (), None)
    assert await off.render(HI, (), None)
    await off.close()


async def test_at_most_max_queued_jobs_wait() -> None:
    rendering = Gated()
    off = ThreadedRenderer(rendering, threads=1, max_queued=2)
    calls = [asyncio.create_task(off.render(LONG, (), None)) for _ in range(6)]
    await until(rendering.begun)
    assert off._jobs.qsize() <= 1
    rendering.gate.release(6)
    assert len(await asyncio.gather(*calls)) == 6
    await off.close()


async def test_job_of_a_cancelled_caller_is_not_started() -> None:
    rendering = Gated()
    off = ThreadedRenderer(rendering, threads=1, max_queued=2)
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


async def test_close_stops_threads_and_fails_queued_calls() -> None:
    rendering = Gated()
    off = ThreadedRenderer(rendering, threads=1, max_queued=2)
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


async def test_unused_renderer_can_be_closed() -> None:
    await ThreadedRenderer(EmbeddedRenderer()).close()


@pytest.mark.parametrize("wrong", [{"threads": -1}, {"max_queued": 0}, {"inline_limit": -1}])
def test_invalid_limits_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        ThreadedRenderer(EmbeddedRenderer(), **wrong)
