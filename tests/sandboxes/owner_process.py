"""An owner of boxes, as a program of its own that can be killed; and how to wait for the end of what it held."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rookery.core import SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.provider import LocalProvider
from tests.sandboxes.hostile.inspection import get_keeper_pid, inspect_sandbox

SPEC = SandboxSpec(provider="local", memory=64 << 20, pids=32, disk=16 << 20, wall=60.0)
FORKING_PROGRAM = """
import os, time
first = os.getpid()
for _ in range(3):
    os.fork()
if os.getpid() != first:
    os.setsid()
print("up", flush=True)
time.sleep(600)
"""
"""Eight processes in sessions of their own."""


async def start_busy_sandboxes(provider: LocalProvider, count: int) -> list[dict[str, object]]:
    """Boxes with programs that run in them; how the host knows each."""
    known = []
    for _ in range(count):
        sandbox = await provider.create(SPEC, attempt="keeper")
        process = await sandbox.start(Command(argv=("python3", "-c", FORKING_PROGRAM)))
        async for _, chunk in process.output():
            if b"up" in chunk:
                break
        box = inspect_sandbox(sandbox)
        known.append({"name": box.name, "pid": box.pid, "folders": box.folders, "lease": str(box.lease)})
    return known


async def wait_while(what: Callable[[], object], seconds: float = 60.0) -> None:
    """Until it says nothing; the last of what it said is the failure."""
    said: object = None
    try:
        async with asyncio.timeout(seconds):
            while said := what():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"still there after {seconds} s: {said}") from None


def list_cgroup_processes(names: list[str]) -> list[int]:
    """Everyone in the groups of these names."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                lines = Path(f"/proc/{entry}/cgroup").read_text()
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2][0]
            except OSError:
                continue
            if state not in "ZX" and any(name in lines for name in names):
                found.append(int(entry))
    return found


async def main(folder: str) -> None:
    provider = LocalProvider(ProviderHome(folder=Path(folder), run="keeper"))
    known = await start_busy_sandboxes(provider, 3)
    sys.stdout.write(json.dumps({"keeper": await get_keeper_pid(provider), "boxes": known}) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, signal.pause)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
