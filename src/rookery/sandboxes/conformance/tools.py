"""Helpers of the conformance checks: open sandboxes, run scripts, list processes, wait for files."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

from rookery.core import ExecResult, SandboxSpec
from rookery.sandboxes.protocol import Command, Provider, Sandbox

Check: TypeAlias = Callable[[Provider], Awaitable[None]]
SPEC = SandboxSpec(untrusted_ok=True, wall=30.0)


@asynccontextmanager
async def open_sandbox(provider: Provider, spec: SandboxSpec = SPEC) -> AsyncIterator[Sandbox]:
    sandbox = await provider.create(spec, attempt="conformance")
    try:
        yield sandbox
    finally:
        await sandbox.close()


@asynccontextmanager
async def open_fork(sandbox: Sandbox, snapshot: str, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
    fork = await sandbox.fork(snapshot, spec=spec)
    try:
        yield fork
    finally:
        await fork.close()


async def sh(sandbox: Sandbox, script: str, *, wall: float | None = None, output: int | None = None) -> ExecResult:
    return await sandbox.exec(Command(argv=("sh", "-c", script), wall=wall, output=output))


async def find_alive(sandbox: Sandbox, pid_file: str) -> bytes:
    """Return the PIDs, one per line, of those processes listed in the sandbox's file `pid_file` that still run."""
    script = f"""for pid in $(cat {pid_file}); do
        state=$(sed 's/.*) //' /proc/$pid/stat 2>/dev/null | cut -c1)
        case "$state" in ''|Z|X) ;; *) echo $pid;; esac; done"""
    return (await sh(sandbox, script)).stdout


DAEMONS = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
def note():
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
note()
if os.fork() == 0:
    os.setsid()
    note()
    if os.fork() == 0:
        os.setsid()
        note()
        if os.fork() == 0:
            note()
            os.execve(sys.executable, ["sleepy", "-c", "import time; time.sleep(600)"], {})
        os._exit(0)
    time.sleep(600)
if os.fork() == 0:
    if os.fork() == 0:
        note()
        while len(open("pids").readlines()) < 5:
            time.sleep(0.01)
        open("ready", "w").close()
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""
"""A Python program whose processes ignore signals, start new sessions, fork twice and clear their environment. It
writes their PIDs to the file `pids`, and creates the file `ready` when all of them run.
"""


async def run_daemons(sandbox: Sandbox, wall: float) -> ExecResult:
    return await sandbox.exec(Command(argv=("python3", "-c", DAEMONS), wall=wall))


async def wait_for_file(sandbox: Sandbox, path: str) -> None:
    result = await sh(sandbox, f"while [ ! -e {path} ]; do sleep 0.02; done")
    assert result.ok, f"{path} never appeared: {result}"
