"""Program that owns sandboxes and can be killed by a test, and helpers to wait for the end of what it owned.

`python -m tests.sandboxes.owner_process FOLDER` creates three sandboxes and prints a JSON object about them.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rookery.core import SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.sandboxes.hostile.inspection import SandboxFootprint, get_keeper_pid, inspect_sandbox
from tests.waiting import wait_until

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
"""Starts eight processes, seven of them in their own sessions."""


async def start_busy_sandboxes(provider: LocalProvider, count: int) -> list[tuple[LocalSandbox, SandboxFootprint]]:
    """Create sandboxes with running programs; return them and what identifies them on the host."""
    started = []
    for _ in range(count):
        sandbox = await provider.create(SPEC, attempt="keeper")
        process = await sandbox.start(Command(argv=("python3", "-c", FORKING_PROGRAM)))
        async for _, chunk in process.output():
            if b"up" in chunk:
                break
        started.append((sandbox, inspect_sandbox(sandbox)))
    return started


async def wait_while(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait as long as `condition` returns something true, which is the failure message after `seconds`."""
    try:
        await wait_until(lambda: not condition(), seconds)
    except TimeoutError:
        raise AssertionError(f"still there after {seconds} s: {condition()}") from None


def list_cgroup_processes(names: list[str]) -> list[int]:
    """Return the living processes in cgroups whose path contains one of these names."""
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
    names = [footprint.name for _, footprint in await start_busy_sandboxes(provider, 3)]
    sys.stdout.write(json.dumps({"keeper": await get_keeper_pid(provider), "names": names}) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, signal.pause)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
