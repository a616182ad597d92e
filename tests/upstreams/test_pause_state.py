"""Pauses of an upstream are idempotent, bounded, and undone after every failure."""

import asyncio
from typing import Any

import pytest

from rookery.core import Sampling, UpstreamError, ints
from rookery.upstreams import ModelRequest
from rookery.upstreams.pause import PausableUpstream, PauseState
from tests.upstreams.oracle import Oracle
from tests.waiting import advance_clock, run_timers, wait_until

REQUEST = ModelRequest(model="m", tokens=ints([5, 2]), sampling=Sampling(max_tokens=3))
LONG = ModelRequest(model="m", tokens=ints([6, 2]), sampling=Sampling(max_tokens=200))


@pytest.fixture
def oracle() -> Oracle:
    return Oracle(ending=10**9)


@pytest.fixture
def upstream(oracle: Oracle) -> PausableUpstream:
    return PausableUpstream(oracle)


class Later:
    """A callable that is not a coroutine function but returns an awaitable."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def __call__(self) -> Any:
        return self.work()


async def long_call(upstream: PausableUpstream, oracle: Oracle) -> Any:
    reached = oracle.reached(oracle.sampled + 5)
    call = asyncio.create_task(upstream.complete(LONG, timeout=60))
    await reached.wait()
    return call


async def quiet(upstream: PausableUpstream) -> None:
    """Assert that all background tasks have ended."""
    while upstream.background_tasks:
        await asyncio.gather(*upstream.background_tasks, return_exceptions=True)


async def test_state_properties_follow_the_pause(upstream, oracle):
    assert (upstream.paused, upstream.mode, upstream.version, upstream.in_flight) == (False, None, 1, 0)
    assert upstream.state() == PauseState(version=1)
    await upstream.pause("keep", deadline=100)
    state = upstream.state()
    assert (upstream.paused, upstream.mode, state.mode, state.version) == (True, "keep", "keep", 1)
    assert 90 < state.left <= 100
    await upstream.resume(7)
    assert (upstream.paused, upstream.mode, upstream.version, oracle.version) == (False, None, 7, 7)


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_pausing_twice_is_pausing_once(upstream, oracle, mode):
    call = await long_call(upstream, oracle)
    await asyncio.gather(upstream.pause(mode), upstream.pause(mode), upstream.pause("keep"))
    await upstream.pause(mode)
    assert oracle.control_calls == ([] if mode == "drain" else [mode])
    await asyncio.gather(upstream.resume(2), upstream.resume(2))
    await upstream.resume(2)
    assert oracle.control_calls.count("thaw") == (0 if mode == "drain" else 1)
    assert (await call).sampled_tokens == 200
    assert upstream.version == 2


async def test_resuming_without_a_pause_names_the_version(upstream, oracle):
    await upstream.resume()
    assert upstream.version == 1
    await upstream.resume(5)
    assert ((await upstream.complete(REQUEST, timeout=60)).version, oracle.control_calls) == (5, [])


@pytest.mark.parametrize(
    ("first", "then", "control_calls"),
    [
        ("keep", "abort", ["keep", "abort", "thaw"]),
        ("keep", "drain", ["keep", "thaw"]),
        ("drain", "abort", ["abort", "thaw"]),
        ("abort", "keep", ["abort", "thaw"]),
        ("abort", "drain", ["abort", "thaw"]),
    ],
)
async def test_stronger_mode_replaces_a_weaker_one(upstream, oracle, first, then, control_calls):
    call = await long_call(upstream, oracle)
    if first == "drain":
        draining = asyncio.create_task(upstream.pause(first))
        await asyncio.sleep(0)
        await asyncio.gather(draining, upstream.pause(then))
    else:
        await upstream.pause(first)
        await upstream.pause(then)
    stronger = max(first, then, key=["keep", "drain", "abort"].index)
    assert upstream.mode == stronger
    if stronger != "keep":
        assert oracle.under_way == 0
    await upstream.resume(2)
    await quiet(upstream)
    if first != "drain":
        assert oracle.control_calls == control_calls
    assert (await call).sampled_tokens == 200
    assert oracle.gate.is_set()


async def test_resume_during_a_drain_ends_it_with_an_error(upstream, oracle):
    call = await long_call(upstream, oracle)
    draining = asyncio.create_task(upstream.pause("drain"))
    await asyncio.sleep(0)
    await upstream.resume(2)
    with pytest.raises(UpstreamError) as caught:
        await draining
    assert caught.value.code == "upstream.paused"
    assert not upstream.paused
    await call


async def test_pause_right_after_a_resume_leaves_the_engine_frozen(upstream, oracle):
    call = await long_call(upstream, oracle)
    await upstream.pause("keep")
    resuming = asyncio.create_task(upstream.resume(2))
    await asyncio.sleep(0)
    await upstream.pause("keep")
    await resuming
    await quiet(upstream)
    assert not oracle.gate.is_set(), "the last pause freezes the inference engine"
    await upstream.pause("drain")
    assert call.done()
    await upstream.resume(3)
    await quiet(upstream)
    assert oracle.gate.is_set()


# ---------------------------------------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_missing_resume_ends_in_a_clear_error_at_the_deadline(upstream, oracle, mode, caplog, monkeypatch):
    under_way = await long_call(upstream, oracle) if mode == "keep" else None
    await upstream.pause(mode, deadline=30)
    waiting = [asyncio.create_task(upstream.complete(REQUEST, timeout=60)) for _ in range(3)]
    await wait_until(lambda: upstream.waiting == 3)
    advance_clock(monkeypatch, 30)
    for call in waiting:
        with pytest.raises(UpstreamError) as caught:
            await call
        assert (caught.value.code, caught.value.fault) == ("upstream.paused", "infra")
    await quiet(upstream)
    assert (upstream.paused, upstream.version, upstream.waiting) == (False, 1, 0)
    assert oracle.gate.is_set()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert (await upstream.complete(REQUEST, timeout=60)).version == 1
    if under_way is not None:
        assert (await under_way).sampled_tokens == 200
    await upstream.resume(2)
    assert upstream.version == 2, "a late resume still sets the version"


async def test_later_deadline_replaces_an_earlier_one(upstream, monkeypatch):
    await upstream.pause("keep", deadline=100)
    await upstream.pause("keep", deadline=1000)
    advance_clock(monkeypatch, 200)
    await run_timers()
    assert upstream.paused
    await upstream.pause("keep", deadline=100)
    advance_clock(monkeypatch, 200)
    await run_timers()
    assert upstream.paused, "an earlier deadline has no effect"
    advance_clock(monkeypatch, 700)
    await wait_until(lambda: not upstream.paused)


# ------------------------------------------------------------------------------------------------- failing paths


async def test_pause_that_fails_is_undone(upstream, oracle):
    call = await long_call(upstream, oracle)
    oracle.fail_freeze = UpstreamError("no", cause="upstream.error")
    with pytest.raises(UpstreamError):
        await upstream.pause("keep")
    await quiet(upstream)
    assert (upstream.paused, oracle.control_calls) == (False, ["keep", "thaw"])
    assert (await call).sampled_tokens == 200


async def test_pause_whose_caller_is_cancelled_is_undone(upstream, oracle):
    call = await long_call(upstream, oracle)
    pausing = asyncio.create_task(upstream.pause("drain"))
    await asyncio.sleep(0)
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert not upstream.paused
    await call


async def test_thaw_that_fails_is_retried_and_then_raised(upstream, oracle):
    await upstream.pause("abort")
    oracle.fail_thaw = 1
    await upstream.resume(2)
    assert oracle.control_calls == ["abort", "thaw", "thaw"]
    await upstream.pause("abort")
    oracle.fail_thaw = 100
    with pytest.raises(UpstreamError):
        await upstream.resume(3, timeout=0.01)
    assert (upstream.paused, upstream.version) == (False, 3)


async def test_closing_fails_waiting_calls(upstream, oracle):
    await upstream.pause("abort")
    call = asyncio.create_task(upstream.complete(REQUEST, timeout=60))
    await asyncio.sleep(0)
    await upstream.close()
    with pytest.raises(UpstreamError):
        await call
    assert oracle.closed


# ---------------------------------------------------------------------------------------------------------- sync


@pytest.mark.parametrize("kind", ["coroutine", "function", "awaitable", "none"])
@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_sync_loads_while_nothing_is_sampled(upstream, oracle, mode, kind):
    loaded: list[int] = []
    call = await long_call(upstream, oracle)

    def load() -> None:
        loaded.append(oracle.sampled)

    async def slowly() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        load()

    update = {"coroutine": slowly, "function": load, "awaitable": Later(slowly), "none": None}[kind]
    async with upstream.sync(2, update, mode=mode):
        assert upstream.paused
        assert loaded == ([oracle.sampled] if update else [])
    assert (upstream.paused, upstream.version) == (False, 2)
    assert (await call).sampled_tokens == 200


@pytest.mark.parametrize("where", ["load", "block", "pause"])
async def test_sync_resumes_with_the_old_version_after_an_exception(upstream, oracle, where):
    call = await long_call(upstream, oracle)

    def load() -> None:
        if where == "load":
            raise OSError("no such weights")

    if where == "pause":
        oracle.fail_freeze = UpstreamError("no")
    with pytest.raises((OSError, UpstreamError, ZeroDivisionError)):
        async with upstream.sync(2, load):
            raise ZeroDivisionError
    await quiet(upstream)
    assert (upstream.paused, upstream.version) == (False, 1)
    assert oracle.gate.is_set()
    assert (await call).version == 1


async def test_sync_resumes_when_it_is_cancelled(upstream, oracle):
    call = await long_call(upstream, oracle)
    loading = asyncio.Event()

    async def load() -> None:
        loading.set()
        await asyncio.Event().wait()

    async def sync() -> None:
        async with upstream.sync(2, load):
            raise AssertionError

    syncing = asyncio.create_task(sync())
    await loading.wait()
    syncing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await syncing
    await quiet(upstream)
    assert (upstream.paused, upstream.version, oracle.gate.is_set()) == (False, 1, True)
    await call


async def test_load_that_does_not_end_is_abandoned_at_the_deadline(upstream, oracle):
    with pytest.raises(UpstreamError) as caught:
        async with upstream.sync(2, asyncio.Event().wait, deadline=0.05):
            raise AssertionError
    await quiet(upstream)
    assert caught.value.code == "upstream.paused"
    assert (upstream.paused, upstream.version, oracle.gate.is_set()) == (False, 1, True)


async def test_timeout_raised_by_the_load_propagates_unchanged(upstream):
    async def load() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        async with upstream.sync(2, load):
            raise AssertionError


# ---- upstreams that start paused


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_upstream_can_start_paused(oracle, mode):
    upstream = PausableUpstream(oracle, state=PauseState(mode=mode, version=4, left=60))
    assert (upstream.paused, upstream.mode, upstream.version) == (True, mode, 4)
    call = asyncio.create_task(upstream.complete(REQUEST, timeout=60))
    await asyncio.sleep(0)
    assert (upstream.waiting, oracle.requests) == (1, [])
    await upstream.pause(mode)
    assert oracle.control_calls == [], "the state is unchanged"
    await upstream.resume(5)
    assert (await call).version == 5


async def test_upstream_that_starts_paused_has_a_deadline(oracle, monkeypatch):
    upstream = PausableUpstream(oracle, state=PauseState(mode="abort", version=4, left=30))
    call = asyncio.create_task(upstream.complete(REQUEST, timeout=60))
    await wait_until(lambda: upstream.waiting == 1)
    advance_clock(monkeypatch, 30)
    with pytest.raises(UpstreamError):
        await call
    assert upstream.version == 4


async def test_state_of_one_upstream_initialises_another(upstream, oracle):
    await upstream.pause("abort", deadline=50)
    other = PausableUpstream(Oracle(), state=upstream.state())
    assert (other.mode, other.version) == ("abort", 1)
    assert 40 < other.state().left <= 50
    other = PausableUpstream(Oracle(), state=PauseState(version=9))
    assert (other.paused, other.version) == (False, 9)
