"""Grading slots within a process and between processes."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from rookery.environments.swe.grading_slots import GradingSlots

HOLDER = """
import asyncio, sys
from rookery.environments.swe.grading_slots import GradingSlots

async def main():
    async with GradingSlots(1, sys.argv[1]).acquire():
        print("acquired", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_holders_never_exceed_the_slots() -> None:
    slots = GradingSlots(3, f"test-{os.getpid()}-a")
    holders = peak = done = 0

    async def hold_slot() -> None:
        nonlocal holders, peak, done
        async with slots.acquire():
            holders += 1
            peak = max(peak, holders)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            holders -= 1
            done += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(hold_slot())
    assert (peak, done, holders) == (3, 30, 0)


async def test_slot_is_released_when_its_holder_is_cancelled_or_fails() -> None:
    slots = GradingSlots(1, f"test-{os.getpid()}-b")

    async def hold(entered: asyncio.Event) -> None:
        async with slots.acquire():
            entered.set()
            await asyncio.Event().wait()

    entered = asyncio.Event()
    task = asyncio.create_task(hold(entered))
    await entered.wait()
    waiting = asyncio.create_task(hold(asyncio.Event()))
    await asyncio.sleep(0)
    for hold_slot in (waiting, task):
        hold_slot.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hold_slot
    with pytest.raises(ValueError, match="inside"):
        async with slots.acquire():
            raise ValueError("inside")
    async with asyncio.timeout(60), slots.acquire():
        pass


async def test_slot_is_shared_by_processes_and_released_when_its_holder_dies() -> None:
    name = f"test-{os.getpid()}-c"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, name], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert await asyncio.to_thread(holder.stdout.readline) == b"acquired\n"
        slots = GradingSlots(1, name)

        async def enter() -> None:
            async with slots.acquire():
                pass

        waiting = asyncio.create_task(enter())
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        holder.send_signal(signal.SIGKILL)
        await asyncio.to_thread(holder.wait)
        async with asyncio.timeout(60):
            await waiting
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
