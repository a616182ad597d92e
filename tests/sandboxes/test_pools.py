"""Pools of prewarmed sandboxes: what is started, who gets it, and what is closed."""

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
                lambda expected: ("expect", expected)
            ),
            st.just(("started", None)),
            st.just(("failed", None)),
            st.just(("claimed", None)),
            st.booleans().map(lambda paused: ("pause", paused)),
            st.integers(0, 5).map(lambda count: ("creating", count)),
            st.sampled_from(SPECS).map(lambda spec: ("taken", spec)),
        ),
        max_size=30,
    ),
)
def test_plan_respects_expectation_and_budget(
    max_warm: int, memory: int, max_starting: int, events: list[tuple[str, Any]]
) -> None:
    plan = PoolPlan(PoolBudget(max_warm=max_warm, memory=memory * MB, max_starting=max_starting))
    for event, what in events:
        if event == "expect":
            plan.expect(what)
            for entry, count in plan.surplus():
                entry.ready -= count
        elif event == "pause":
            plan.paused = what
        elif event == "creating":
            plan.creating = what
        elif event == "claimed":
            for entry in plan.entries.values():
                entry.claimed += entry.claimed < entry.starting
        elif event == "taken":
            entry = plan.get_entry(what)
            entry.expected = max(0, entry.expected - 1)
            entry.ready -= entry.ready > 0
        else:
            for entry in plan.entries.values():
                if entry.starting:
                    entry.starting -= 1
                    entry.ready += event == "started" and entry.expected > entry.ready and not entry.claimed
                    entry.claimed -= entry.claimed > 0
                    break
        while (entry := plan.next_to_start()) is not None:
            assert not plan.paused
            assert entry.total - entry.claimed < entry.expected
            claimed = plan.creating + sum(one.claimed for one in plan.entries.values())
            later = sum(one.starting - one.claimed for one in plan.entries.values())
            assert later < max(1, max_starting - claimed)
            entry.starting += 1
        entries = plan.entries.values()
        assert sum(entry.total for entry in entries) <= max_warm
        assert sum(entry.total * (entry.spec.memory or 0) for entry in entries) <= memory * MB
        assert sum(entry.starting for entry in entries) <= max_starting


def test_plan_starts_sandboxes_in_expected_order() -> None:
    plan = PoolPlan(PoolBudget(max_warm=3, max_starting=9))
    plan.expect([(SPECS[1], 2), (SPECS[0], 5)])
    order = []
    while (entry := plan.next_to_start()) is not None:
        entry.starting += 1
        order.append(entry.spec)
    assert order == [SPECS[1], SPECS[1], SPECS[0]]


def test_invalid_budget_is_refused() -> None:
    with pytest.raises(UsageError, match="max_starting"):
        PoolBudget(max_starting=0)
    with pytest.raises(UsageError, match="memory"):
        PoolBudget(memory=-1)


@given(st.integers(1, 64), st.integers(1, 8), st.sampled_from(SPECS))
def test_plan_limits_parallel_starts(max_warm: int, max_starting: int, spec: SandboxSpec) -> None:
    plan = PoolPlan(PoolBudget(max_warm=max_warm, memory=None, max_starting=max_starting))
    plan.expect([(spec, 500)])
    while (entry := plan.next_to_start()) is not None:
        while plan.next_to_start() is not None:
            entry.starting += 1
        assert entry.starting <= max_starting
        entry.ready, entry.starting = entry.ready + entry.starting, 0
    assert plan.get_entry(spec).ready == min(max_warm, 500)


# ---- with real sandboxes


class CountingProvider:
    """Provider that records its creations. Those of the pool wait for `start_gate`; all raise `error` if set."""

    def __init__(self, provider: Any) -> None:
        self.provider = provider
        self.name, self.isolated = provider.name, provider.isolated
        self.attempts: list[str] = []
        self.alive = 0
        self.start_gate = asyncio.Event()
        self.start_gate.set()
        self.error: SandboxError | None = None

    def check(self, spec: SandboxSpec) -> Any:
        return self.provider.check(spec)

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> Sandbox:
        self.attempts.append(attempt)
        if attempt == "pool":
            await self.start_gate.wait()
        if self.error is not None:
            raise self.error
        return await self.provider.create(spec, attempt=attempt, timeout=timeout)

    async def close(self) -> None:
        await self.provider.close()


@pytest.fixture
async def counting(tmp_path: Path) -> AsyncIterator[CountingProvider]:
    provider = CountingProvider(
        open_provider("subprocess", ProviderHome(folder=tmp_path / "sandboxes", run="run"))
    )
    try:
        yield provider
    finally:
        await provider.close()
    leases = tmp_path / "sandboxes" / "leases"
    assert not leases.exists() or not list(leases.iterdir())


SPEC = SandboxSpec(provider="subprocess", memory=64 * MB)


async def wait_until_settled(pool: Pool) -> None:
    """Wait until the pool neither starts nor closes a sandbox."""
    async with asyncio.timeout(60):
        while tasks := pool.background_tasks:
            await asyncio.wait(tasks)


async def run_script(sandbox: Sandbox, script: str) -> str:
    return (await sandbox.exec(Command(argv=("sh", "-c", script)))).stdout.decode().strip()


async def test_warm_sandbox_is_used_once(counting: CountingProvider) -> None:
    pool = Pool(counting)
    pool.expect([(SPEC, 2)])
    await wait_until_settled(pool)
    assert counting.attempts == ["pool", "pool"]
    sandboxes = [await pool.create(SPEC, attempt=f"0.{n}.1") for n in range(3)]
    assert (pool.hits, pool.misses) == (2, 1)
    assert len({sandbox.id for sandbox in sandboxes}) == 3
    await sandboxes[0].write("mine", b"x")
    await sandboxes[0].close()
    pool.expect([(SPEC, 1)])
    await wait_until_settled(pool)
    fresh = await pool.create(SPEC, attempt="1.0.1")
    assert await run_script(fresh, "ls") == ""
    await pool.close()


async def test_pool_starts_only_as_many_as_expected(counting: CountingProvider) -> None:
    pool = Pool(counting, PoolBudget(max_warm=500, memory=None))
    pool.expect([(SPEC, 1)])
    await wait_until_settled(pool)
    assert len(counting.attempts) == 1
    await pool.create(SPEC, attempt="0.0.1")
    await wait_until_settled(pool)
    assert len(counting.attempts) == 1
    await pool.close()


async def test_dead_warm_sandbox_is_replaced(counting: CountingProvider) -> None:
    pool = Pool(counting)
    pool.expect([(SPEC, 1)])
    await wait_until_settled(pool)
    (dead,) = pool.warm_sandboxes
    await dead.close()
    sandbox = await pool.create(SPEC, attempt="0.0.1")
    assert await run_script(sandbox, "echo alive") == "alive"
    assert (pool.hits, pool.misses, pool.unresponsive) == (0, 1, 1)
    await pool.close()


async def test_sandboxes_that_are_no_longer_expected_are_closed(counting: CountingProvider) -> None:
    pool = Pool(counting)
    pool.expect([(SPEC, 3)])
    await wait_until_settled(pool)
    sandboxes = pool.warm_sandboxes
    pool.expect([])
    await wait_until_settled(pool)
    for sandbox in sandboxes:
        with pytest.raises(SandboxError):
            await sandbox.exec(Command(argv=("true",)))
    await pool.close()


async def test_request_does_not_wait_for_a_slow_start(
    counting: CountingProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.sandboxes.pools.WAIT_SECONDS", 0.05)
    counting.start_gate.clear()
    pool = Pool(counting)
    pool.expect([(SPEC, 4)])
    async with asyncio.timeout(60):
        sandbox = await pool.create(SPEC, attempt="0.0.1")
    assert await run_script(sandbox, "echo here") == "here"
    assert (pool.hits, pool.misses) == (0, 1)
    await pool.close()  # also cancels the starts that never finished


@pytest.fixture
def long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.sandboxes.pools.WAIT_SECONDS", 30.0)


@pytest.mark.usefixtures("long_wait")
async def test_request_takes_a_sandbox_that_is_starting(counting: CountingProvider) -> None:
    counting.start_gate.clear()
    pool = Pool(counting)
    pool.expect([(SPEC, 2)])
    requests = [asyncio.create_task(pool.create(SPEC, attempt=f"0.{n}.1")) for n in range(2)]
    await asyncio.sleep(0)
    counting.start_gate.set()
    sandboxes = await asyncio.gather(*requests)
    assert counting.attempts == ["pool", "pool"]
    assert len({sandbox.id for sandbox in sandboxes}) == 2
    assert pool.hits == 2
    await pool.close()


@pytest.mark.usefixtures("long_wait")
async def test_cancelled_request_leaves_its_sandbox_to_the_next(counting: CountingProvider) -> None:
    counting.start_gate.clear()
    pool = Pool(counting)
    pool.expect([(SPEC, 1)])
    request = asyncio.create_task(pool.create(SPEC, attempt="0.0.1"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    request.cancel()
    await asyncio.wait({request})
    assert request.cancelled()
    pool.expect([(SPEC, 1)])
    counting.start_gate.set()
    await wait_until_settled(pool)
    sandbox = await pool.create(SPEC, attempt="0.0.2")
    assert counting.attempts == ["pool"]
    assert await run_script(sandbox, "echo here") == "here"
    await pool.close()


@pytest.mark.usefixtures("long_wait")
async def test_request_creates_a_sandbox_after_a_failed_start(counting: CountingProvider) -> None:
    counting.start_gate.clear()
    pool = Pool(counting)
    pool.expect([(SPEC, 1)])
    request = asyncio.create_task(pool.create(SPEC, attempt="0.0.1"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    counting.error = SandboxError("out of memory")
    counting.start_gate.set()
    with pytest.raises(SandboxError) as caught:
        await request
    assert caught.value is counting.error
    assert counting.attempts == ["pool", "0.0.1"]
    pool.expect([(SPEC, 5)])
    await wait_until_settled(pool)
    assert counting.attempts == ["pool", "0.0.1"]  # prewarming resumes only after a request succeeded
    counting.error = None
    await pool.create(SPEC, attempt="0.0.2")
    await wait_until_settled(pool)
    assert counting.attempts[2:] == ["0.0.2", "pool", "pool", "pool", "pool"]
    await pool.close()


async def test_paused_pool_prewarms_nothing(counting: CountingProvider) -> None:
    pool = Pool(counting)
    pool.set_paused(paused=True)
    pool.expect([(SPEC, 2)])
    await wait_until_settled(pool)
    await pool.create(SPEC, attempt="0.0.1")
    assert counting.attempts == ["0.0.1"]
    pool.set_paused(paused=False)
    await wait_until_settled(pool)
    assert counting.attempts == ["0.0.1", "pool"]
    await pool.close()


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.long)])
async def test_burst_of_requests_is_paced_and_served(counting: CountingProvider, count: int) -> None:
    running = peak = 0
    create = counting.provider.create

    async def create_counted(spec: SandboxSpec, *, attempt: str, timeout: float) -> Sandbox:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        try:
            sandbox: Sandbox = await create(spec, attempt=attempt, timeout=timeout)
            return sandbox
        finally:
            running -= 1

    counting.provider.create = create_counted
    pool = Pool(counting, PoolBudget(max_warm=8, memory=None, max_starting=2, max_creating=4))
    pool.expect([(SPEC, count)])

    async def use_sandbox(number: int) -> None:
        sandbox = await pool.create(SPEC, attempt=f"0.{number}.1", timeout=300.0)
        assert (await sandbox.exec(Command(argv=("true",)))).ok
        await sandbox.close()

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(use_sandbox(number))
    assert pool.hits + pool.misses == count
    assert peak <= 6
    await pool.close()


async def test_request_times_out_while_it_waits_for_a_slot(counting: CountingProvider) -> None:
    pool = Pool(counting, PoolBudget(max_creating=1))
    counting.start_gate.clear()
    first = asyncio.create_task(pool.create(SPEC, attempt="pool"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(SandboxError) as caught:
        await pool.create(SPEC, attempt="0.1.1", timeout=0.05)
    assert caught.value.code == "sandbox.create"
    assert isinstance(caught.value.__cause__, TimeoutError)
    counting.start_gate.set()
    await first
    await pool.close()


async def test_failed_prewarming_is_reported_to_requests_and_not_repeated(counting: CountingProvider) -> None:
    counting.error = SandboxError("no such image", cause="task.image")
    pool = Pool(counting)
    pool.expect([(SPEC, 50)])
    await wait_until_settled(pool)
    assert len(counting.attempts) <= 4
    with pytest.raises(SandboxError) as caught:
        await pool.create(SPEC, attempt="0.0.1")
    assert caught.value is counting.error
    await pool.close()
