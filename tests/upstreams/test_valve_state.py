"""The valve's pauses: idempotent, bounded, and undone on every failing path."""

import asyncio
from typing import Any

import pytest

from rookery.core import Sampling, UpstreamError, ints
from rookery.upstreams import ModelRequest
from rookery.upstreams.valve import Valve, ValveState
from tests.upstreams.oracle import Oracle

ASK = ModelRequest(model="m", tokens=ints([5, 2]), sampling=Sampling(max_tokens=3))
LONG = ModelRequest(model="m", tokens=ints([6, 2]), sampling=Sampling(max_tokens=200))


@pytest.fixture
def oracle() -> Oracle:
    return Oracle(ending=10**9)


@pytest.fixture
def valve(oracle: Oracle) -> Valve:
    return Valve(oracle)


class Later:
    """A callable that is no coroutine function, and whose result is to be awaited."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def __call__(self) -> Any:
        return self.work()


async def long_call(valve: Valve, oracle: Oracle) -> Any:
    reached = oracle.reached(oracle.sampled + 5)
    call = asyncio.create_task(valve.complete(LONG, timeout=60))
    await reached.wait()
    return call


async def quiet(valve: Valve) -> None:
    """What goes on in the background has ended."""
    while valve._tasks:
        await asyncio.gather(*valve._tasks, return_exceptions=True)


async def test_the_state_can_be_read(valve, oracle):
    assert (valve.paused, valve.mode, valve.version, valve.under_way) == (False, None, 1, 0)
    assert valve.state() == ValveState(version=1)
    await valve.pause("keep", deadline=100)
    state = valve.state()
    assert (valve.paused, valve.mode, state.mode, state.version) == (True, "keep", "keep", 1)
    assert 90 < state.left <= 100
    await valve.resume(7)
    assert (valve.paused, valve.mode, valve.version, oracle.version) == (False, None, 7, 7)


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_pausing_twice_is_pausing_once(valve, oracle, mode):
    call = await long_call(valve, oracle)
    await asyncio.gather(valve.pause(mode), valve.pause(mode), valve.pause("keep"))
    await valve.pause(mode)
    assert oracle.told == ([] if mode == "drain" else [mode])
    await asyncio.gather(valve.resume(2), valve.resume(2))
    await valve.resume(2)
    assert oracle.told.count("thaw") == (0 if mode == "drain" else 1)
    assert (await call).sampled_tokens == 200
    assert valve.version == 2


async def test_resuming_without_a_pause_names_the_version(valve, oracle):
    await valve.resume()
    assert valve.version == 1
    await valve.resume(5)
    assert ((await valve.complete(ASK, timeout=60)).version, oracle.told) == (5, [])


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        ("keep", "abort", ["keep", "abort", "thaw"]),
        ("keep", "drain", ["keep", "thaw"]),
        ("drain", "abort", ["abort", "thaw"]),
        ("abort", "keep", ["abort", "thaw"]),
        ("abort", "drain", ["abort", "thaw"]),
    ],
)
async def test_a_stronger_mode_replaces_a_weaker_one(valve, oracle, first, then, told):
    call = await long_call(valve, oracle)
    if first == "drain":
        draining = asyncio.create_task(valve.pause(first))
        await asyncio.sleep(0)
        await asyncio.gather(draining, valve.pause(then))
    else:
        await valve.pause(first)
        await valve.pause(then)
    stronger = max(first, then, key=["keep", "drain", "abort"].index)
    assert valve.mode == stronger
    if stronger != "keep":
        assert oracle.under_way == 0
    await valve.resume(2)
    await quiet(valve)
    if first != "drain":
        assert oracle.told == told
    assert (await call).sampled_tokens == 200
    assert oracle.gate.is_set()


async def test_a_resume_during_a_drain_ends_it_with_an_error(valve, oracle):
    call = await long_call(valve, oracle)
    draining = asyncio.create_task(valve.pause("drain"))
    await asyncio.sleep(0)
    await valve.resume(2)
    with pytest.raises(UpstreamError, match="ended before it was complete") as caught:
        await draining
    assert caught.value.code == "upstream.paused"
    assert not valve.paused
    await call


async def test_a_pause_right_after_a_resume_finds_the_engine_as_it_needs_it(valve, oracle):
    call = await long_call(valve, oracle)
    await valve.pause("keep")
    resuming = asyncio.create_task(valve.resume(2))
    await asyncio.sleep(0)
    await valve.pause("keep")
    await resuming
    await quiet(valve)
    assert not oracle.gate.is_set(), "frozen, as the last pause wants it"
    await valve.pause("drain")
    assert call.done()
    await valve.resume(3)
    await quiet(valve)
    assert oracle.gate.is_set()


# ---------------------------------------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_a_missing_resume_ends_in_a_clear_error_at_the_deadline(valve, oracle, mode, caplog):
    under_way = await long_call(valve, oracle) if mode == "keep" else None
    await valve.pause(mode, deadline=0.05)
    waiting = [asyncio.create_task(valve.complete(ASK, timeout=60)) for _ in range(3)]
    for call in waiting:
        with pytest.raises(UpstreamError, match="not resumed") as caught:
            await call
        assert (caught.value.code, caught.value.fault) == ("upstream.paused", "infra")
    await quiet(valve)
    assert (valve.paused, valve.version, valve.waiting) == (False, 1, 0)
    assert oracle.gate.is_set()
    assert "nobody resumed" in caplog.text
    assert (await valve.complete(ASK, timeout=60)).version == 1
    if under_way is not None:
        assert (await under_way).sampled_tokens == 200
    await valve.resume(2)
    assert valve.version == 2, "late, but it says which weights there are"


async def test_a_later_deadline_replaces_an_earlier_one(valve):
    await valve.pause("keep", deadline=0.02)
    await valve.pause("keep", deadline=100)
    await asyncio.sleep(0.05)
    assert valve.paused
    await valve.pause("keep", deadline=0.01)
    await asyncio.sleep(0.03)
    assert valve.paused, "an earlier one does not"
    await valve.resume()


# ------------------------------------------------------------------------------------------------- failing paths


async def test_a_pause_that_fails_is_undone(valve, oracle):
    call = await long_call(valve, oracle)
    oracle.fail_freeze = UpstreamError("no", cause="upstream.error")
    with pytest.raises(UpstreamError, match="no"):
        await valve.pause("keep")
    await quiet(valve)
    assert (valve.paused, oracle.told) == (False, ["keep", "thaw"])
    assert (await call).sampled_tokens == 200


async def test_a_pause_whose_caller_is_cancelled_is_undone(valve, oracle):
    call = await long_call(valve, oracle)
    pausing = asyncio.create_task(valve.pause("drain"))
    await asyncio.sleep(0)
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert not valve.paused
    await call


async def test_a_thaw_that_fails_is_tried_again_and_then_raised(valve, oracle):
    await valve.pause("abort")
    oracle.fail_thaw = 1
    await valve.resume(2)
    assert oracle.told == ["abort", "thaw", "thaw"]
    await valve.pause("abort")
    oracle.fail_thaw = 100
    with pytest.raises(UpstreamError, match="listen"):
        await valve.resume(3, timeout=0.01)
    assert (valve.paused, valve.version) == (False, 3)


async def test_closing_lets_go_of_who_waits(valve, oracle):
    await valve.pause("abort")
    call = asyncio.create_task(valve.complete(ASK, timeout=60))
    await asyncio.sleep(0)
    await valve.close()
    with pytest.raises(UpstreamError):
        await call
    assert oracle.closed


# ---------------------------------------------------------------------------------------------------------- sync


@pytest.mark.parametrize("kind", ["coroutine", "function", "awaitable", "none"])
@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_a_sync_loads_while_nothing_is_sampled(valve, oracle, mode, kind):
    loaded: list[int] = []
    call = await long_call(valve, oracle)

    def load() -> None:
        loaded.append(oracle.sampled)

    async def slowly() -> None:
        await asyncio.sleep(0.01)
        load()

    given = {"coroutine": slowly, "function": load, "awaitable": Later(slowly), "none": None}[kind]
    async with valve.sync(2, given, mode=mode):
        assert valve.paused
        assert loaded == ([oracle.sampled] if given else [])
    assert (valve.paused, valve.version) == (False, 2)
    assert (await call).sampled_tokens == 200


@pytest.mark.parametrize("where", ["load", "block", "pause"])
async def test_a_sync_resumes_with_the_old_version_where_something_raises(valve, oracle, where):
    call = await long_call(valve, oracle)

    def load() -> None:
        if where == "load":
            raise OSError("no such weights")

    if where == "pause":
        oracle.fail_freeze = UpstreamError("no")
    with pytest.raises((OSError, UpstreamError, ZeroDivisionError)):
        async with valve.sync(2, load):
            raise ZeroDivisionError
    await quiet(valve)
    assert (valve.paused, valve.version) == (False, 1)
    assert oracle.gate.is_set()
    assert (await call).version == 1


async def test_a_sync_resumes_when_it_is_cancelled(valve, oracle):
    call = await long_call(valve, oracle)
    loading = asyncio.Event()

    async def load() -> None:
        loading.set()
        await asyncio.Event().wait()

    async def sync() -> None:
        async with valve.sync(2, load):
            raise AssertionError

    syncing = asyncio.create_task(sync())
    await loading.wait()
    syncing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await syncing
    await quiet(valve)
    assert (valve.paused, valve.version, oracle.gate.is_set()) == (False, 1, True)
    await call


async def test_a_load_that_does_not_end_is_given_up_at_the_deadline(valve, oracle):
    with pytest.raises(UpstreamError) as caught:
        async with valve.sync(2, asyncio.Event().wait, deadline=0.05):
            raise AssertionError
    await quiet(valve)
    assert caught.value.code == "upstream.paused"
    assert (valve.paused, valve.version, oracle.gate.is_set()) == (False, 1, True)


async def test_a_timeout_of_the_loads_own_is_the_loads_own(valve):
    async def load() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        async with valve.sync(2, load):
            raise AssertionError


# ---------------------------------------------------------------------------------------------------- born paused


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_a_valve_can_be_born_paused(oracle, mode):
    valve = Valve(oracle, state=ValveState(mode=mode, version=4, left=60))
    assert (valve.paused, valve.mode, valve.version) == (True, mode, 4)
    call = asyncio.create_task(valve.complete(ASK, timeout=60))
    await asyncio.sleep(0)
    assert (valve.waiting, oracle.requests) == (1, [])
    await valve.pause(mode)
    assert oracle.told == [], "that is what it is already"
    await valve.resume(5)
    assert (await call).version == 5


async def test_one_that_was_born_paused_has_a_deadline_too(oracle):
    valve = Valve(oracle, state=ValveState(mode="abort", version=4, left=0.03))
    with pytest.raises(UpstreamError, match="not resumed"):
        await valve.complete(ASK, timeout=60)
    assert valve.version == 4


async def test_the_state_of_one_makes_another(valve, oracle):
    await valve.pause("abort", deadline=50)
    other = Valve(Oracle(), state=valve.state())
    assert (other.mode, other.version) == ("abort", 1)
    assert 40 < other.state().left <= 50
    other = Valve(Oracle(), state=ValveState(version=9))
    assert (other.paused, other.version) == (False, 9)
