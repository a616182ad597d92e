"""The places for grading, within a process and between processes."""

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
        print("in", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_no_more_are_inside_than_there_are_slots() -> None:
    gate = GradingSlots(3, f"test-{os.getpid()}-a")
    inside = most = done = 0

    async def one() -> None:
        nonlocal inside, most, done
        async with gate.acquire():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            inside -= 1
            done += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(one())
    assert (most, done, inside) == (3, 30, 0)


async def test_a_slot_is_free_when_its_holder_is_cancelled_or_fails() -> None:
    gate = GradingSlots(1, f"test-{os.getpid()}-b")

    async def hold(entered: asyncio.Event) -> None:
        async with gate.acquire():
            entered.set()
            await asyncio.Event().wait()

    entered = asyncio.Event()
    task = asyncio.create_task(hold(entered))
    await entered.wait()
    waiting = asyncio.create_task(hold(asyncio.Event()))
    await asyncio.sleep(0)
    for one in (waiting, task):
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
    with pytest.raises(ValueError, match="inside"):
        async with gate.acquire():
            raise ValueError("inside")
    async with asyncio.timeout(10), gate.acquire():
        pass


async def test_a_slot_counts_for_all_processes_and_is_free_when_its_holder_dies() -> None:
    name = f"test-{os.getpid()}-c"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, name], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert await asyncio.to_thread(holder.stdout.readline) == b"in\n"
        gate = GradingSlots(1, name)

        async def enter() -> None:
            async with gate.acquire():
                pass

        waiting = asyncio.create_task(enter())
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        holder.send_signal(signal.SIGKILL)
        await asyncio.to_thread(holder.wait)
        async with asyncio.timeout(20):
            await waiting
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
