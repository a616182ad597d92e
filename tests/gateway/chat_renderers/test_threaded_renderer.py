"""`ThreadedRenderer` runs long rendering jobs in threads, so that the event loop keeps running."""

import asyncio
import threading

import pytest

from rookery.core import Message, UsageError
from rookery.gateway.chat_renderers.embedded_renderer import EmbeddedRenderer
from rookery.gateway.chat_renderers.threaded import ThreadedRenderer
from tests.waiting import wait_until

LONG = [Message("user", "x" * 5_000)]
HI = [Message("user", "Hi.")]


class BlockingRenderer(EmbeddedRenderer):
    """Renderer that waits for the test before each call and notes the thread that it ran in."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.threads: list[str] = []

    def render(self, messages, tools, tool_choice):
        self.threads.append(threading.current_thread().name)
        self.started.release()
        assert self.permits.acquire(timeout=60)
        return super().render(messages, tools, tool_choice)


async def wait_for(semaphore: threading.Semaphore) -> None:
    assert await asyncio.to_thread(semaphore.acquire, timeout=60)


def renderer_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("chat-renderer-")}


async def test_long_inputs_run_in_a_thread_and_short_ones_inline() -> None:
    renderer = BlockingRenderer()
    renderer.permits.release(2)
    threaded = ThreadedRenderer(renderer)
    assert await threaded.render(LONG, (), None) == EmbeddedRenderer().render(LONG, (), None)
    await threaded.render(HI, (), None)
    assert renderer.threads[0].startswith("chat-renderer-")
    assert renderer.threads[1] == threading.current_thread().name
    await threaded.close()


async def test_every_method_returns_what_the_renderer_returns() -> None:
    plain, threaded = EmbeddedRenderer(), ThreadedRenderer(EmbeddedRenderer(), inline_limit=0)
    prompt = await threaded.render(HI, (), None)
    assert prompt == plain.render(HI, (), None)
    assert await threaded.extend(prompt, prompt[-4:], HI, (), None) == plain.extend(
        prompt, prompt[-4:], HI, (), None
    )
    assert await threaded.parse(prompt, prompt[4:8], (), prompt_length=3) == plain.parse(
        prompt, prompt[4:8], (), prompt_length=3
    )
    parser, other_parser = plain.new_reply_parser(prompt, ()), plain.new_reply_parser(prompt, ())
    assert parser.feed(prompt[8:12]) == other_parser.feed(prompt[8:12])
    assert await threaded.finish(parser) == other_parser.finish()
    await threaded.close()


async def test_event_loop_runs_while_a_thread_renders() -> None:
    renderer = BlockingRenderer()
    threaded = ThreadedRenderer(renderer)
    call = asyncio.create_task(threaded.render(LONG, (), None))
    await wait_for(renderer.started)
    await asyncio.sleep(0)
    assert not call.done()
    renderer.permits.release()
    assert await call
    await threaded.close()


async def test_exception_is_raised_in_the_caller() -> None:
    threaded = ThreadedRenderer(EmbeddedRenderer(), inline_limit=0)
    with pytest.raises(UsageError):
        await threaded.render([Message("user", ({"type": "image_url"},))], (), None)
    assert await threaded.render(HI, (), None)
    await threaded.close()


async def test_at_most_max_queued_jobs_wait() -> None:
    renderer = BlockingRenderer()
    threaded = ThreadedRenderer(renderer, threads=1, max_queued=2)
    calls = [asyncio.create_task(threaded.render(LONG, (), None)) for _ in range(6)]
    await wait_for(renderer.started)
    assert threaded._jobs.qsize() <= 1
    renderer.permits.release(6)
    assert len(await asyncio.gather(*calls)) == 6
    await threaded.close()


async def test_job_of_a_cancelled_caller_is_not_started() -> None:
    renderer = BlockingRenderer()
    threaded = ThreadedRenderer(renderer, threads=1, max_queued=2)
    first = asyncio.create_task(threaded.render(LONG, (), None))
    await wait_for(renderer.started)
    second = asyncio.create_task(threaded.render(LONG, (), None))
    third = asyncio.create_task(threaded.render(LONG, (), None))
    await asyncio.sleep(0)
    for task in (first, second):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    renderer.permits.release(3)
    assert await third
    assert len(renderer.threads) == 2
    await threaded.close()


async def test_close_stops_threads_and_fails_queued_calls() -> None:
    renderer = BlockingRenderer()
    threaded = ThreadedRenderer(renderer, threads=1, max_queued=2)
    calls = [asyncio.create_task(threaded.render(LONG, (), None)) for _ in range(4)]
    await wait_for(renderer.started)
    closing = asyncio.create_task(threaded.close())
    await asyncio.sleep(0)
    renderer.permits.release(1)
    await closing
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], bytes)
    assert all(isinstance(one, UsageError) for one in results[1:])
    await threaded.close()
    await wait_until(lambda: not renderer_threads())
    with pytest.raises(UsageError):
        await threaded.render(HI, (), None)


async def test_unused_renderer_can_be_closed() -> None:
    await ThreadedRenderer(EmbeddedRenderer()).close()


@pytest.mark.parametrize("limits", [{"threads": -1}, {"max_queued": 0}, {"inline_limit": -1}])
def test_invalid_limits_are_rejected(limits: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        ThreadedRenderer(EmbeddedRenderer(), **limits)
