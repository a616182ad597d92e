"""Recovery of workers: what survives, what is reported, and recovery that fails."""

# ruff: noqa: E501  (a cell is read best as it is)

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path

import msgspec
import pytest

from rookery.core import SandboxError, SandboxSpec, UsageError, WorkerRecoveryError
from rookery.sandbox_runtime import processes
from rookery.sandboxes import Command, Provider, ProviderHome, Sandbox
from rookery.sandboxes.local.provider import LocalProvider
from rookery.workers import CellLimits, Worker, WorkerLimits, sandbox_for
from tests.sandboxes.conftest import find_marked_processes
from tests.sandboxes.hostile.inspection import get_keeper_pid
from tests.sandboxes.hostile.test_warm_and_users import INTERPRETER
from tests.waiting import wait_until
from tests.workers.conftest import LIMITS, MB, OpenWorker
from tests.workers.random_cells import RandomCells

pytestmark = pytest.mark.asyncio(loop_scope="module")
SPIN = "while True: pass"
SHORT_LIMITS = CellLimits(wall=0.1)
TAKE_ALL_PROCESSES = """
import os, time
taken = 0
while True:
    try:
        while True:
            if os.fork() == 0: time.sleep(1000)
            taken += 1
    except OSError:
        print(taken, flush=True)
        input()
"""
"""Forks until the limit and prints the number of forks; repeats that for each line of input."""


async def kill_monitor(worker: Worker, home: ProviderHome) -> None:
    """Kill the monitor and wait until the worker has noticed."""
    assert worker.process is not None
    ended = worker.process.ended
    async with asyncio.timeout(60):
        while not ended.done():
            for monitor in find_monitors(home)[:1]:  # may be a dying process of the monitor before
                with contextlib.suppress(ProcessLookupError):
                    os.kill(monitor, signal.SIGKILL)
            await asyncio.wait({ended}, timeout=0.2)


def find_monitors(home: ProviderHome) -> list[int]:
    """Return the pids of the monitors of a home's workers."""
    named = []
    for pid in find_marked_processes(home.run):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text() == "worker\n":
                named.append(pid)
    # A child has the name of the monitor for a moment.
    return [pid for pid in named if (processes.read_stat(pid) or ("", 0))[1] not in named]


@pytest.mark.parametrize(
    ("seed", "cells"),
    [(0, 40), (1, 40), pytest.param(2, 1000, marks=[pytest.mark.long, pytest.mark.timeout(300)])],
)
async def test_random_cells_match_a_model(worker: Worker, seed: int, cells: int) -> None:
    random_cells = RandomCells(worker, seed)
    for _ in range(cells):
        await random_cells.step()
    assert worker.restarts_left == 16


@pytest.mark.long
async def test_processes_of_earlier_cells_continue(worker: Worker) -> None:
    cell = await worker.run("import subprocess\np = subprocess.Popen(['sleep', '1000'])\nq = p.pid\nq")
    pid = cell.value
    cell = await worker.run(f"subprocess.Popen(['sleep', '1000'])\n{SPIN}", limits=CellLimits(cpu_seconds=0.5))
    assert re.findall(r"\b1\b", cell.notice) == ["1", "1"]  # one process was killed with the cell, one continues
    assert (await worker.run(f"open('/proc/{pid}/stat').read().rpartition(') ')[2][0]")).value in ("'S'", "'R'")
    assert (await worker.run(f"import os\nos.kill({pid}, 9)")).status == "ok"


async def test_savepoint_keeps_files_and_closes_pipes(worker: Worker) -> None:
    await worker.run(
        "import os, subprocess\nf = open('log', 'w')\np = subprocess.Popen(['cat'], stdin=-1, stdout=-1)\nr, w = os.pipe()"
    )
    assert (await worker.savepoint()).made
    cell = await worker.run("p.stdin.close()\np.wait(), os.close(w), os.read(r, 1)", limits=CellLimits(wall=20))
    assert cell.value == "(0, None, b'')", cell
    await worker.run("r, w = os.pipe()\nf.write('a') and f.flush()")
    cell = await worker.run("f.write('b'); f.flush(); os._exit(1)")
    assert (cell.status, cell.recovered) == ("crash", "kept")
    assert re.search(r"\b4\b", cell.notice)  # pipes and sockets of earlier cells that were closed
    assert (await worker.run("os.read(r, 1)")).value == "b''"
    assert (await worker.run("f.write('c') and f.close()\nopen('log').read()")).value == "'abc'"


async def test_buffered_output_is_written_once(worker: Worker) -> None:
    await worker.run("import sys\nf = open('once', 'w')\nsys.stdout.write('half a line')")
    cell = await worker.run("import os\nos._exit(1)")
    assert cell.stdout == ""
    cell = await worker.run("print('.')")
    assert cell.stdout == ".\n"


async def test_threads_prevent_a_savepoint(worker: Worker) -> None:
    await worker.run(
        "import threading\nend = threading.Event()\nt = threading.Thread(target=end.wait)\nt.start()\nx = 1"
    )
    saved = await worker.savepoint()
    assert not saved.made
    assert "2" in saved.reason  # threads
    cell = await worker.run("import os\nos._exit(1)")
    assert (cell.status, cell.recovered) == ("crash", "reset")
    assert saved.reason in cell.notice
    assert (await worker.run("'x' in globals()")).value == "False"
    assert worker.restarts_left == 15
    await worker.run(
        "import threading\nend = threading.Event()\nt = threading.Thread(target=end.wait)\nt.start()\nx = 2"
    )
    await worker.run("end.set(); t.join()")
    assert (await worker.savepoint()).made
    assert (await worker.run("import os\nos._exit(1)")).recovered == "kept"


async def test_await_works_after_a_restore(worker: Worker) -> None:
    await worker.run("import asyncio\nasync def f(): return 3\nawait f()")
    assert (await worker.run(f"await f()\n{SPIN}", limits=SHORT_LIMITS)).recovered == "kept"
    assert (await worker.run("await asyncio.sleep(0.01)\nawait f()")).value == "3"


async def test_death_between_cells_is_reported_by_the_next_cell(worker: Worker, sandbox: Sandbox) -> None:
    await worker.run("import os, subprocess\nx = 5")
    assert (await worker.savepoint()).made
    pid = (
        await worker.run(
            "subprocess.Popen(['sh', '-c', f'while [ ! -e go ]; do sleep 0.01; done; kill -9 {os.getpid()}'])\nos.getpid()"
        )
    ).value
    assert (await worker.savepoint()).made
    await sandbox.write("go", b"")
    await wait_until(lambda: worker._notes)
    cell = await worker.run("x, os.getpid()")
    assert cell.ok
    assert cell.value.startswith("(5, ")
    assert pid not in cell.value
    assert cell.notice
    assert (await worker.run("x")).notice == ""


async def test_cancelled_cell_is_undone_and_reported(worker: Worker) -> None:
    await worker.run("x = 1")
    begun = asyncio.Event()
    task = asyncio.create_task(worker.run(f"x = 2\nprint('begun')\n{SPIN}", on_output=lambda *_: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cell = await worker.run("x")
    assert (cell.value, cell.ok) == ("1", True)
    assert cell.notice


async def test_raising_callback_ends_the_cell(worker: Worker) -> None:
    await worker.run("x = 1")

    def on_output(*_: object) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await worker.run(f"x = 2\nprint('begun')\n{SPIN}", on_output=on_output)
    assert (await worker.run("x")).value == "1"


async def test_no_savepoint_if_memory_cannot_hold_two(open_worker: OpenWorker, kind: str) -> None:
    limits = WorkerLimits(memory=128 * MB)
    async with open_worker(limits, spec=SandboxSpec(memory=200 * MB)) as worker:
        assert (await worker.savepoint()).made
        assert (await worker.run("x = b'x' * (80 << 20)")).ok
        saved = await worker.savepoint()
        if kind != "subprocess":
            assert not saved.made
            assert re.search(r"\d+ MB", saved.reason)
        else:
            assert saved.made  # with `subprocess`, memory is limited per process


async def test_killed_monitor_is_replaced(worker: Worker, home: ProviderHome, kind: str) -> None:
    (monitor,) = find_monitors(home)
    pid = int(
        (await worker.run("import subprocess\nx = 1\nsubprocess.Popen(['setsid', 'sleep', '1000']).pid")).value
    )
    begun = asyncio.Event()
    task = asyncio.create_task(worker.run(f"print(1)\n{SPIN}", on_output=lambda *_: begun.set()))
    await asyncio.wait_for(begun.wait(), 60)
    os.kill(monitor, signal.SIGKILL)
    cell = await task
    assert (cell.status, cell.recovered) == ("crash", "reset")
    assert cell.notice
    assert (await worker.run(f"import os\nos.path.exists('/proc/{pid}')")).value == "False"
    assert worker.restarts_left == 15
    await kill_monitor(worker, home)
    cell = await worker.run("'x' in globals()")
    assert (cell.status, cell.value) == ("ok", "False")
    assert cell.notice


async def test_number_of_restarts_is_limited(open_worker: OpenWorker, home: ProviderHome) -> None:
    async with open_worker(restarts=1) as worker:
        for left in (0, -1):
            await kill_monitor(worker, home)
            if left == 0:
                assert (await worker.run("1")).ok
            else:
                with pytest.raises(WorkerRecoveryError):
                    await worker.run("1")
        with pytest.raises(WorkerRecoveryError):
            await worker.run("1")


async def test_closed_sandbox_is_a_recovery_error(provider: Provider, sandbox: Sandbox) -> None:
    other = await provider.create(sandbox_for(LIMITS), attempt="other")
    try:
        async with (
            await Worker.open(sandbox, limits=LIMITS) as worker,
            await Worker.open(other, limits=LIMITS) as kept,
        ):
            await kept.run("x = 1")
            begun = asyncio.Event()
            task = asyncio.create_task(worker.run(f"print(1)\n{SPIN}", on_output=lambda *_: begun.set()))
            await asyncio.wait_for(begun.wait(), 60)
            await sandbox.close()
            with pytest.raises(WorkerRecoveryError) as caught:
                await task
            assert isinstance(caught.value, SandboxError)
            assert (caught.value.code, caught.value.fault) == ("worker.unrecoverable", "infra")
            with pytest.raises(WorkerRecoveryError):
                await worker.run("1")
            assert (await kept.run("x")).value == "1"
    finally:
        await other.close()


async def test_exhausted_processes_are_a_recovery_error(
    open_worker: OpenWorker, home: ProviderHome, kind: str
) -> None:
    if kind == "subprocess":
        return  # without cgroups, no fork is refused
    async with open_worker(spec=SandboxSpec(memory=512 * MB, pids=24)) as worker:
        taker = await worker.sandbox.start(Command(argv=("python3", "-c", TAKE_ALL_PROCESSES)))
        assert (await worker.savepoint()).made
        output = taker.output()
        taken = last = int((await anext(output))[1])
        await kill_monitor(worker, home)
        async with asyncio.timeout(60):
            while last < taken + 3:  # the monitor, the interpreter, its savepoint
                await taker.send(b"again\n")
                last = int((await anext(output))[1])
        with pytest.raises(WorkerRecoveryError):
            await worker.run("1")


async def test_worker_cannot_open_in_a_closed_sandbox(sandbox: Sandbox) -> None:
    await sandbox.close()
    with pytest.raises(SandboxError) as caught:
        await Worker.open(sandbox, limits=LIMITS)
    assert not isinstance(caught.value, WorkerRecoveryError)


async def test_invalid_limits_are_named(sandbox: Sandbox, worker: Worker) -> None:
    for field, value in (
        ("wall", 0),
        ("wall", float("nan")),
        ("memory", 5),
        ("cpu_seconds", -1),
        ("processes", -1),
        ("display", 1 << 40),
    ):
        with pytest.raises(UsageError, match=rf"limits\.{field}\b"):
            WorkerLimits(**{field: value})
        with pytest.raises(UsageError, match=rf"limits\.{field}\b"):
            CellLimits(**{field: value})
    with pytest.raises(UsageError, match=r"limits\.memory"):
        await worker.run("1", limits=CellLimits(memory=1 << 40))
    with pytest.raises(UsageError, match="sandbox_for"):
        await Worker.open(sandbox, limits=WorkerLimits(memory=1 << 40))
    with pytest.raises(UsageError, match="functions"):
        await Worker.open(sandbox, functions={"not a name": print})


async def test_close_is_idempotent_and_leaves_no_process(open_worker: OpenWorker, home: ProviderHome) -> None:
    async with open_worker() as worker:
        await worker.run("import subprocess\nfor _ in range(3): subprocess.Popen(['setsid', 'sleep', '1000'])")
        await worker.close()
        await worker.close()
        assert find_monitors(home) == []
        seen = await worker.sandbox.exec(
            Command(argv=("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 100[0]'"))
        )
        assert seen.stdout == b"0\n"
        with pytest.raises(SandboxError):
            await worker.run("1")


async def test_dead_keeper_is_a_recovery_error(kind: str, worker: Worker, tmp_path: Path) -> None:
    if kind == "subprocess":
        return  # it has no keeper
    other = LocalProvider(ProviderHome(folder=tmp_path, run=f"keeperless-{os.getpid()}"))
    try:
        sandbox = await other.create(sandbox_for(LIMITS), attempt="keeperless")
        lost = await Worker.open(sandbox, limits=LIMITS)
        await lost.run("x = 1")
        await worker.run("x = 2")
        os.kill(await get_keeper_pid(other), signal.SIGKILL)
        with pytest.raises(WorkerRecoveryError) as caught:
            await lost.run(SPIN)
        assert caught.value.fault == "infra"
        await lost.close()
        assert (await worker.run("x")).value == "2"
    finally:
        await other.close()


VENV = (
    "mkdir -p /tmp/v/bin && ln -s $(readlink -f $(command -v python3)) /tmp/v/bin/python3"
    " && echo home=$(dirname $(readlink -f $(command -v python3))) > /tmp/v/pyvenv.cfg"
)
FORK_SERVERS = "grep -l [s]elf/fd/ /proc/[0-9]*/cmdline | cut -d/ -f3"


async def list_fork_servers(sandbox: Sandbox) -> set[str]:
    return set((await sandbox.exec(Command(argv=("sh", "-c", FORK_SERVERS)))).stdout.decode().split())


async def test_worker_survives_a_dead_fork_server(kind: str, provider: Provider, home: ProviderHome) -> None:
    if kind == "subprocess":
        return  # it has no fork server
    sandbox = await provider.create(sandbox_for(LIMITS), attempt="fork-server")
    try:
        assert (await sandbox.exec(Command(argv=("sh", "-c", VENV)))).ok
        env = {"PATH": f"/tmp/v/bin:{INTERPRETER}:/usr/bin:/bin"}
        warm = Command(argv=("python3", "-c", "pass"), env=env, warm=True)
        async with asyncio.timeout(60):
            while not (old := await list_fork_servers(sandbox)):
                assert (await sandbox.exec(warm)).ok  # the first command only starts the fork server
        async with await Worker.open(sandbox, limits=LIMITS, env=env) as worker:
            assert (await worker.run("x = 1\nimport sys\nsys.prefix")).value == "'/tmp/v'"
            await sandbox.exec(Command(argv=("sh", "-c", f"kill -9 {' '.join(old)}")))
            async with asyncio.timeout(60):
                while old & await list_fork_servers(sandbox):
                    pass
            assert (await worker.run(SPIN, limits=SHORT_LIMITS)).recovered == "kept"
            assert (await worker.run("x")).value == "1"
            await kill_monitor(worker, home)
            cell = await worker.run("'x' in globals()")
            assert (cell.value, bool(cell.notice)) == ("False", True)
    finally:
        await sandbox.close()


async def test_full_disk_is_reported_and_state_kept(open_worker: OpenWorker) -> None:
    spec = msgspec.structs.replace(sandbox_for(LIMITS), disk=8 * MB)
    async with open_worker(spec=spec) as worker:
        await worker.run("x = 1")
        cell = await worker.run("with open('big', 'wb') as f:\n    for _ in range(32): f.write(bytes(1 << 20))")
        assert (cell.status, cell.recovered) == ("disk_limit", "none")
        assert "OSError" in cell.error
        assert (await worker.run("import os\nos.unlink('big')\nx")).value == "1"


async def test_close_ends_the_running_cell(open_worker: OpenWorker) -> None:
    async with open_worker() as worker:
        begun = asyncio.Event()
        task = asyncio.create_task(worker.run(f"print(1)\n{SPIN}", on_output=lambda *_: begun.set()))
        await asyncio.wait_for(begun.wait(), 60)
        await worker.close()
        with pytest.raises(SandboxError):
            await task


async def test_forged_result_cannot_exceed_the_limits(open_worker: OpenWorker) -> None:
    forge = """
import gc
live = [o for o in gc.get_objects() if type(o).__name__ == "Interpreter"][0]
text = b"x" * (1 << 20)
size = len(text).to_bytes(4, "little")
live.connection.send(14, live.token + bytes([0]) + bytes(8), (size + text) * 2 + size * 0)
import time; time.sleep(100)
"""
    async with open_worker() as worker:
        cell = await worker.run(forge)
        assert len(cell.value) < 20_000
        assert len(cell.error) <= 20_000


async def test_ready_counts_state_losses(worker: Worker) -> None:
    assert await worker.ready() == 0
    assert (await worker.savepoint()).made
    assert (await worker.run("import os; os._exit(1)")).recovered == "kept"
    assert await worker.ready() == 0, "going back to a savepoint loses nothing"
    assert worker.process is not None
    await worker.process.kill()
    assert await worker.ready() == 1
    cell = await worker.run("1 + 1")
    assert (cell.value, worker.losses) == ("2", 1)
    assert cell.notice
