"""Warm sandboxes: what is started ahead, what is handed out, and what is left."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.sandboxes import open_provider
from rookery.sandboxes.pools import Pool, PoolBudget, PoolPlan
from rookery.sandboxes.protocol import Command, ProviderHome, Sandbox

MB = 1 << 20
SPECS = [SandboxSpec(memory=memory * MB, env={"n": str(memory)}) for memory in (64, 128, 256)]


# ---- the plan


@given(
    st.integers(0, 8),
    st.integers(0, 1024),
    st.integers(1, 4),
    st.lists(
        st.one_of(
            st.lists(st.tuples(st.sampled_from(SPECS), st.integers(0, 6)), max_size=3).map(
                lambda w: ("expect", w)
            ),
            st.just(("started", None)),
            st.just(("failed", None)),
            st.just(("claimed", None)),
            st.booleans().map(lambda back: ("hold", back)),
            st.integers(0, 5).map(lambda asked: ("asked", asked)),
            st.sampled_from(SPECS).map(lambda spec: ("taken", spec)),
        ),
        max_size=30,
    ),
)
def test_plan_respects_expectation_and_budget(
    most: int, memory: int, at_once: int, deeds: list[tuple[str, Any]]
) -> None:
    plan = PoolPlan(PoolBudget(max_warm=most, memory=memory * MB, max_starting=at_once))
    for deed, what in deeds:
        if deed == "expect":
            plan.expect(what)
            for entry, count in plan.surplus():
                entry.ready -= count
        elif deed == "hold":
            plan.paused = what
        elif deed == "asked":
            plan.creating = what
        elif deed == "claimed":
            for entry in plan.entries.values():
                entry.claimed += entry.claimed < entry.starting
        elif deed == "taken":
            entry = plan.get_entry(what)
            entry.expected = max(0, entry.expected - 1)
            entry.ready -= entry.ready > 0
        else:
            for entry in plan.entries.values():
                if entry.starting:
                    entry.starting -= 1
                    entry.ready += deed == "started" and entry.expected > entry.ready and not entry.claimed
                    entry.claimed -= entry.claimed > 0
                    break
        while (entry := plan.next_to_start()) is not None:
            assert not plan.paused
            assert entry.total - entry.claimed < entry.expected
            waited_for = plan.creating + sum(one.claimed for one in plan.entries.values())
            later = sum(one.starting - one.claimed for one in plan.entries.values())
            assert later < max(1, at_once - waited_for)
            entry.starting += 1
        shelves = plan.entries.values()
        assert sum(entry.total for entry in shelves) <= most
        assert sum(entry.total * (entry.spec.memory or 0) for entry in shelves) <= memory * MB
        assert sum(entry.starting for entry in shelves) <= at_once


def test_plan_starts_sandboxes_in_expected_order() -> None:
    plan = PoolPlan(PoolBudget(max_warm=3, max_starting=9))
    plan.expect([(SPECS[1], 2), (SPECS[0], 5)])
    order = []
    while (entry := plan.next_to_start()) is not None:
        entry.starting += 1
        order.append(entry.spec)
    assert order == [SPECS[1], SPECS[1], SPECS[0]]


def test_invalid_budget_is_refused() -> None:
    with pytest.raises(UsageError, match="at least"):
        PoolBudget(max_starting=0)
    with pytest.raises(UsageError, match="memory"):
        PoolBudget(memory=-1)


@given(st.integers(1, 64), st.integers(1, 8), st.sampled_from(SPECS))
def test_plan_limits_parallel_starts(most: int, at_once: int, spec: SandboxSpec) -> None:
    plan = PoolPlan(PoolBudget(max_warm=most, memory=None, max_starting=at_once))
    plan.expect([(spec, 500)])
    while (entry := plan.next_to_start()) is not None:
        while plan.next_to_start() is not None:
            entry.starting += 1
        assert entry.starting <= at_once
        entry.ready, entry.starting = entry.ready + entry.starting, 0
    assert plan.get_entry(spec).ready == min(most, 500)


# ---- with real sandboxes


class Made:
    """A provider that counts what it makes, and waits where it is told to."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.name, self.isolated = inner.name, inner.isolated
        self.attempts: list[str] = []
        self.alive = 0
        self.door = asyncio.Event()
        self.door.set()
        self.error: SandboxError | None = None

    def check(self, spec: SandboxSpec) -> Any:
        return self.inner.check(spec)

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> Sandbox:
        self.attempts.append(attempt)
        if attempt == "pool":
            await self.door.wait()
        if self.error is not None:
            raise self.error
        return await self.inner.create(spec, attempt=attempt, timeout=timeout)

    async def close(self) -> None:
        await self.inner.close()


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Made]:
    provider = Made(open_provider("subprocess", ProviderHome(folder=tmp_path / "boxes", run="run")))
    try:
        yield provider
    finally:
        await provider.close()
    leases = tmp_path / "boxes" / "leases"
    assert not leases.exists() or not list(leases.iterdir())


SPEC = SandboxSpec(provider="subprocess", memory=64 * MB)


async def settled(pool: Pool) -> None:
    """When nothing is being started or closed."""
    async with asyncio.timeout(30):
        while pool._tasks:
            await asyncio.wait(set(pool._tasks))


async def said(box: Sandbox, script: str) -> str:
    return (await box.exec(Command(argv=("sh", "-c", script)))).stdout.decode().strip()


async def test_warm_sandbox_is_used_once(made: Made) -> None:
    pool = Pool(made)
    pool.expect([(SPEC, 2)])
    await settled(pool)
    assert made.attempts == ["pool", "pool"]
    boxes = [await pool.create(SPEC, attempt=f"0.{n}.1") for n in range(3)]
    assert (pool.hits, pool.misses) == (2, 1)
    assert len({box.id for box in boxes}) == 3
    await boxes[0].write("mine", b"x")
    await boxes[0].close()
    pool.expect([(SPEC, 1)])
    await settled(pool)
    fresh = await pool.create(SPEC, attempt="1.0.1")
    assert await said(fresh, "ls") == ""
    await pool.close()


async def test_pool_starts_only_as_many_as_expected(made: Made) -> None:
    pool = Pool(made, PoolBudget(max_warm=500, memory=None))
    pool.expect([(SPEC, 1)])
    await settled(pool)
    assert len(made.attempts) == 1
    await pool.create(SPEC, attempt="0.0.1")
    await settled(pool)
    assert len(made.attempts) == 1
    await pool.close()


async def test_dead_warm_sandbox_is_replaced(made: Made) -> None:
    pool = Pool(made)
    pool.expect([(SPEC, 1)])
    await settled(pool)
    (dead,) = pool._ready[next(iter(pool._ready))]
    await dead.close()
    box = await pool.create(SPEC, attempt="0.0.1")
    assert await said(box, "echo alive") == "alive"
    assert (pool.hits, pool.misses, pool.unresponsive) == (0, 1, 1)
    await pool.close()


async def test_sandboxes_that_are_no_longer_expected_are_closed(made: Made) -> None:
    pool = Pool(made)
    pool.expect([(SPEC, 3)])
    await settled(pool)
    boxes = list(pool._ready[next(iter(pool._ready))])
    pool.expect([])
    await settled(pool)
    for box in boxes:
        with pytest.raises(SandboxError):
            await box.exec(Command(argv=("true",)))
    await pool.close()


async def test_request_does_not_wait_for_a_slow_start(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.sandboxes.pools.WAIT_SECONDS", 0.05)
    made.door.clear()
    pool = Pool(made)
    pool.expect([(SPEC, 4)])
    async with asyncio.timeout(30):
        box = await pool.create(SPEC, attempt="0.0.1")
    assert await said(box, "echo here") == "here"
    assert (pool.hits, pool.misses) == (0, 1)
    await pool.close()  # those that never came to be leave nothing


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.sandboxes.pools.WAIT_SECONDS", 30.0)


@pytest.mark.usefixtures("patient")
async def test_request_takes_a_sandbox_that_is_starting(made: Made) -> None:
    made.door.clear()
    pool = Pool(made)
    pool.expect([(SPEC, 2)])
    asked = [asyncio.create_task(pool.create(SPEC, attempt=f"0.{n}.1")) for n in range(2)]
    await asyncio.sleep(0)
    made.door.set()
    boxes = await asyncio.gather(*asked)
    assert made.attempts == ["pool", "pool"]
    assert len({box.id for box in boxes}) == 2
    assert pool.hits == 2
    await pool.close()


@pytest.mark.usefixtures("patient")
async def test_cancelled_request_leaves_its_sandbox_to_the_next(made: Made) -> None:
    made.door.clear()
    pool = Pool(made)
    pool.expect([(SPEC, 1)])
    asked = asyncio.create_task(pool.create(SPEC, attempt="0.0.1"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait({asked})
    assert asked.cancelled()
    pool.expect([(SPEC, 1)])
    made.door.set()
    await settled(pool)
    box = await pool.create(SPEC, attempt="0.0.2")
    assert made.attempts == ["pool"]
    assert await said(box, "echo here") == "here"
    await pool.close()


@pytest.mark.usefixtures("patient")
async def test_request_creates_a_sandbox_after_a_failed_start(made: Made) -> None:
    made.door.clear()
    pool = Pool(made)
    pool.expect([(SPEC, 1)])
    asked = asyncio.create_task(pool.create(SPEC, attempt="0.0.1"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    made.error = SandboxError("no room")
    made.door.set()
    with pytest.raises(SandboxError, match="no room"):
        await asked
    assert made.attempts == ["pool", "0.0.1"]
    pool.expect([(SPEC, 5)])
    await settled(pool)
    assert made.attempts == ["pool", "0.0.1"]  # not again before somebody got one
    made.error = None
    await pool.create(SPEC, attempt="0.0.2")
    await settled(pool)
    assert made.attempts[2:] == ["0.0.2", "pool", "pool", "pool", "pool"]
    await pool.close()


async def test_paused_pool_prewarms_nothing(made: Made) -> None:
    pool = Pool(made)
    pool.set_paused(paused=True)
    pool.expect([(SPEC, 2)])
    await settled(pool)
    await pool.create(SPEC, attempt="0.0.1")
    assert made.attempts == ["0.0.1"]
    pool.set_paused(paused=False)
    await settled(pool)
    assert made.attempts == ["0.0.1", "pool"]
    await pool.close()


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.long)])
async def test_burst_of_requests_is_paced_and_served(made: Made, count: int) -> None:
    under_way = most = 0
    create = made.inner.create

    async def counted(spec: SandboxSpec, *, attempt: str, timeout: float) -> Sandbox:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            box: Sandbox = await create(spec, attempt=attempt, timeout=timeout)
            return box
        finally:
            under_way -= 1

    made.inner.create = counted
    pool = Pool(made, PoolBudget(max_warm=8, memory=None, max_starting=2, max_creating=4))
    pool.expect([(SPEC, count)])

    async def used(number: int) -> None:
        box = await pool.create(SPEC, attempt=f"0.{number}.1", timeout=300.0)
        assert (await box.exec(Command(argv=("true",)))).ok
        await box.close()

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(used(number))
    assert pool.hits + pool.misses == count
    assert most <= 6
    await pool.close()


async def test_request_times_out_while_it_waits_for_a_slot(made: Made) -> None:
    pool = Pool(made, PoolBudget(max_creating=1))
    made.door.clear()
    first = asyncio.create_task(pool.create(SPEC, attempt="pool"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(SandboxError, match="its turn"):
        await pool.create(SPEC, attempt="0.1.1", timeout=0.05)
    made.door.set()
    await first
    await pool.close()


async def test_failed_prewarming_is_reported_to_requests_and_not_repeated(made: Made) -> None:
    made.error = SandboxError("no such image", cause="task.image")
    pool = Pool(made)
    pool.expect([(SPEC, 50)])
    await settled(pool)
    assert len(made.attempts) <= 4
    with pytest.raises(SandboxError, match="no such image"):
        await pool.create(SPEC, attempt="0.0.1")
    await pool.close()
