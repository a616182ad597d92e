"""Benchmark `remote`: sandboxes on another machine over SSH, beside a bare `ssh HOST true`.

Method:
- the other machine is a private OpenSSH server on loopback (`make ssh-server`), so the figures contain no network;
- the peer is `ssh HOST true` over an SSH connection that is already open (ControlMaster), alternately with `true`
  in an open sandbox;
- figures are medians; a command with an unexpected result fails the benchmark.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks import Progress, Result
from benchmarks.ssh_server import ROOT, SshServer
from rookery.core import SandboxSpec
from rookery.sandboxes.protocol import Command, ProviderHome, Sandbox
from rookery.sandboxes.ssh_provider import HOSTS_VARIABLE, OPTIONS_VARIABLE, SshProvider

NAME = "remote"
PEER = "ssh HOST true, multiplexed"
SANDBOXES = 100
FILES = 500


async def run(quick: bool, progress: Progress) -> list[Result]:
    if os.geteuid() or not (ROOT / "usr/sbin/sshd").exists():
        note = "needs root and `make ssh-server`"
        progress(note)
        return [Result(name="exec_ms", unit="ms", ours=None, peer=PEER, target=">= 0.77x", note=note)]
    rounds = 30 if quick else 200
    with tempfile.TemporaryDirectory(prefix="rookery-bench-") as folder, _start_server(Path(folder)) as server:
        options = f"-F {server.write_config()}"
        os.environ |= {HOSTS_VARIABLE: "here", OPTIONS_VARIABLE: options}
        provider = SshProvider(ProviderHome(folder=Path(folder) / "sandboxes", run="bench"))
        try:
            began = time.perf_counter()
            sandbox = await provider.create(SandboxSpec(), attempt="first")
            first = time.perf_counter() - began
            progress("commands")
            ours, theirs = await _measure_execs(sandbox, options.split(), Path(folder) / "master", rounds)
            progress(f"upload of {FILES} files")
            upload = await _measure_upload(sandbox, Path(folder) / "files")
            progress(f"{SANDBOXES} sandboxes")
            created = await _measure_creation(provider)
        finally:
            await provider.close()
    return [
        # The target is at most 1.3 times the peer's time.
        Result(name="exec_ms", unit="ms", ours=ours, peer=PEER, theirs=theirs, target=">= 0.77x"),
        Result(name="connect_and_create_s", unit="s", ours=first),
        Result(name=f"create_{SANDBOXES}_s", unit="s", ours=created),
        Result(name=f"upload_{FILES}_files_s", unit="s", ours=upload),
    ]


@contextmanager
def _start_server(folder: Path) -> Iterator[SshServer]:
    server = SshServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def _measure_execs(sandbox: Sandbox, options: list[str], master: Path, rounds: int) -> tuple[float, float]:
    multiplexed = [*options, "-o", "ControlMaster=auto", "-o", f"ControlPath={master}", "-o", "ControlPersist=60"]

    async def exec_ms() -> float:
        began = time.perf_counter()
        result = await sandbox.exec(Command(argv=("true",)))
        if not result.ok:
            raise RuntimeError(f"the command failed: {result}")
        return 1e3 * (time.perf_counter() - began)

    async def ssh_ms() -> float:
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            "ssh",
            *multiplexed,
            "here",
            "true",
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        if await process.wait():
            raise RuntimeError("`ssh HOST true` failed")
        return 1e3 * (time.perf_counter() - began)

    await ssh_ms()  # opens the connection
    pairs = [(await exec_ms(), await ssh_ms()) for _ in range(rounds)]
    process = await asyncio.create_subprocess_exec("ssh", *multiplexed, "-q", "-O", "exit", "here")
    await process.wait()
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)


async def _measure_upload(sandbox: Sandbox, folder: Path) -> float:
    await asyncio.to_thread(_write_files, folder)
    began = time.perf_counter()
    await sandbox.upload(folder, "files")
    taken = time.perf_counter() - began
    result = await sandbox.exec(Command(argv=("sh", "-c", "ls files | wc -l")))
    if int(result.stdout) != FILES:
        raise RuntimeError(f"the upload is incomplete: {result}")
    return taken


def _write_files(folder: Path) -> None:
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number}.txt").write_bytes(b"x" * 4096)


async def _measure_creation(provider: SshProvider) -> float:
    began = time.perf_counter()
    made = await asyncio.gather(
        *(provider.create(SandboxSpec(), attempt=str(number)) for number in range(SANDBOXES))
    )
    taken = time.perf_counter() - began
    await asyncio.gather(*(sandbox.close() for sandbox in made))
    return taken
