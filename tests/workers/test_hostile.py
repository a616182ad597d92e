"""Cells that never end, exceed limits or break their interpreter: each has a status, and the state survives."""

# ruff: noqa: E501  (a cell is read best as it is)

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from rookery.sandboxes import Provider, Sandbox
from rookery.workers import CellLimits, Worker, sandbox_for
from tests.workers.conftest import LIMITS

pytestmark = pytest.mark.asyncio(loop_scope="module")

START_PROCESS_TREE = """
import os, subprocess
for way in ("sleep 1000", "setsid sleep 1000 & sleep 1000", "trap '' TERM INT HUP; (setsid sh -c 'sleep 1000 & sleep 1000' &) ; sleep 1000"):
    subprocess.Popen(["sh", "-c", way])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: pass
    os._exit(0)
"""


WAIT_FOR_PROCESSES = """
import os
def alive():
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and open(f"/proc/{name}/stat").read().rpartition(") ")[2][0] not in "ZX":
                found.append(name)
        except OSError:
            pass
    return len(found)
while alive() > 5: os.sched_yield()
alive() <= 5
"""


@dataclass(frozen=True)
class FailingCell:
    name: str
    source: str
    status: str | tuple[str, ...]
    recovered: str = "kept"
    limits: CellLimits | None = None
    needs_isolation: bool = False
    """True if it must not run without isolation, because it signals every process that it can."""
    named: str = ""
    """What the notice must mention."""


SHORT_LIMITS = CellLimits(wall=0.15)
FAILING_CELLS = [
    FailingCell("a loop", "while True: pass", "time_limit", limits=SHORT_LIMITS, named="0.15"),
    FailingCell(
        "a deep C call",
        "sum(x * x for x in range(10**12)) if 0 else pow(7, 10**8, 10**9) and 2 ** (10**10) % 7",
        ("time_limit", "memory_limit"),
        limits=SHORT_LIMITS,
    ),
    FailingCell(
        "a C call that holds the lock",
        "('a' * 10**7 + 'b').count('a' * 5 * 10**6 + 'c') or sorted(range(10**9))",
        ("time_limit", "memory_limit"),
        limits=SHORT_LIMITS,
    ),
    FailingCell(
        "an except that catches all",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "time_limit",
        limits=SHORT_LIMITS,
    ),
    FailingCell(
        "signals masked",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile True: pass",
        "time_limit",
        limits=SHORT_LIMITS,
    ),
    FailingCell(
        "signals ignored",
        "import signal, time\nfor s in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:\n    signal.signal(s, signal.SIG_IGN)\ntime.sleep(100)",
        "time_limit",
        limits=SHORT_LIMITS,
    ),
    FailingCell(
        "daemon threads",
        "import threading, time\nfor _ in range(4): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\ntime.sleep(100)",
        "time_limit",
        limits=SHORT_LIMITS,
    ),
    FailingCell(
        "a tree of processes",
        START_PROCESS_TREE + "while True: pass",
        "time_limit",
        limits=CellLimits(wall=1),  # time to start them all
    ),
    FailingCell(
        "processor time",
        "while True: pass",
        "time_limit",
        limits=CellLimits(wall=60, cpu_seconds=0.2),
        named="0.2",
    ),
    FailingCell(
        "processor time of children",
        "import os\nfor _ in range(3):\n    if os.fork() == 0:\n        while True: pass\nos.wait()",
        "time_limit",
        limits=CellLimits(wall=60, cpu_seconds=0.3),
        named="0.3",
    ),
    FailingCell(
        "an await without end", "import asyncio\nawait asyncio.sleep(100)", "time_limit", limits=SHORT_LIMITS
    ),
    FailingCell(
        "a repr without end",
        "class R:\n    def __repr__(self):\n        while True: pass\nR()",
        "time_limit",
        limits=SHORT_LIMITS,
    ),
    FailingCell(
        "stopped", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "time_limit", limits=SHORT_LIMITS
    ),
    FailingCell("memory by one object", "bytearray(400 << 20)", "memory_limit"),
    FailingCell(
        "memory by many", "held = []\nwhile True: held.append('x' * 10**6 + str(len(held)))", "memory_limit"
    ),
    FailingCell(
        "memory by many, caught",
        "held = []\ntry:\n    while True: held.append('x' * 10**6 + str(len(held)))\nexcept MemoryError:\n    del held\n    raise ValueError from None",
        "runtime",
        recovered="none",
    ),
    FailingCell(
        "memory by fork",
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        held = bytearray(os.urandom(1 << 20)) * 90\n        time.sleep(100)\ntime.sleep(100)",
        "memory_limit",
    ),
    FailingCell(
        "memory by mmap",
        "import mmap\nm = mmap.mmap(-1, 700 << 20)\nfor at in range(0, len(m), 4096): m[at] = 1\nimport time; time.sleep(100)",
        "memory_limit",
    ),
    FailingCell("a flood", "while True: print('x' * 1000)", "output_limit"),
    FailingCell(
        "a flood of a child", "import subprocess\nsubprocess.run(['sh', '-c', 'yes >&2'])", "output_limit"
    ),
    FailingCell(
        "too many processes",
        "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(100)\ntime.sleep(100)",
        "process_limit",
    ),
    FailingCell("_exit", "import os\nos._exit(0)", "crash", named="0"),
    FailingCell("killed", "import os\nos.kill(os.getpid(), 9)", "crash", named="SIGKILL"),
    FailingCell("a segmentation fault", "import ctypes\nctypes.string_at(0)", "crash", named="SIGSEGV"),
    FailingCell("abort", "import os\nos.abort()", "crash", named="SIGABRT"),
    FailingCell(
        "a stack overflow",
        "import ctypes, sys\nsys.setrecursionlimit(10**8)\nclass A:\n    def __getattr__(self, n): return getattr(self, n + 'x'[:0])\nf = lambda x: [x] and map(f, [x]).__next__()\nf(1)",
        ("crash", "memory_limit", "runtime"),
        recovered="any",
    ),
    FailingCell("exec", "import os\nos.execvp('sleep', ['sleep', '100'])", "crash"),
    FailingCell("closed descriptors", "import os\nos.closerange(0, 4096)", "crash"),
    FailingCell(
        "descriptors that are others now",
        "import os\nos.closerange(0, 4096)\nfds = [os.open('trap', os.O_RDWR | os.O_CREAT) for _ in range(300)]",
        "crash",
    ),
    FailingCell(
        "garbage on descriptors",
        "import os\nfor fd in range(3, 300):\n    try: os.write(fd, b'garbage' * 3)\n    except OSError: pass",
        "crash",
    ),
    FailingCell(
        "a forged answer",
        "import os\nfor fd in range(3, 300):\n    try: os.write(fd, b'\\x1d\\0\\0\\0\\x0e' + b'\\0' * 29)\n    except OSError: pass",
        "crash",
    ),
    FailingCell("a group killed", "import os\nos.killpg(0, 9)", "crash"),
    FailingCell("the monitor killed", "import os\nos.kill(os.getppid(), 9)", "runtime", recovered="none"),
    FailingCell("everyone killed", "import os\nos.kill(-1, 9)", "runtime", recovered="none", needs_isolation=True),
    FailingCell(
        "deleted builtins",
        "import builtins\nfor name in dir(builtins): delattr(builtins, name)",
        ("ok", "runtime"),
        recovered="none",
    ),
    FailingCell(
        "replaced streams",
        "import io, sys\nsys.stdout = io.StringIO()\nsys.stderr = None\nsys.stdin = 3\nprint('gone')",
        "ok",
        recovered="none",
    ),
    FailingCell(
        "closed streams", "import sys, os\nsys.stdout.close()\nos.close(1)\nos.close(2)", "ok", recovered="none"
    ),
    FailingCell("another main", "import sys\nsys.modules.clear()", ("ok", "runtime"), recovered="none"),
    FailingCell("a low recursion limit", "import sys\nsys.setrecursionlimit(60)", "ok", recovered="none"),
    FailingCell(
        "a trace function", "import sys\ndef t(*a): raise KeyError\nsys.settrace(t)", "ok", recovered="none"
    ),
    FailingCell(
        "an alarm for later",
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: 1 / 0)\nsignal.setitimer(signal.ITIMER_REAL, 0.0001)",
        ("ok", "runtime"),
        recovered="none",
    ),
    FailingCell("a fork that goes on", "import os\nx = os.fork() and 1", "ok", recovered="none"),
    FailingCell("exit with a code", "exit(3)", "runtime", recovered="none"),
    FailingCell("an interrupt", "raise KeyboardInterrupt", "runtime", recovered="none"),
    FailingCell(
        "an odd exception",
        "class E(BaseException):\n    def __str__(self): raise SystemExit\nraise E",
        "runtime",
        recovered="none",
    ),
    FailingCell("a huge message", "raise ValueError('x' * 10**7)", "runtime", recovered="none"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_worker(provider: Provider) -> AsyncIterator[Worker]:
    """Yield one worker for all cells: each must leave it usable for the next."""
    sandbox: Sandbox = await provider.create(sandbox_for(LIMITS), attempt="hostile")
    try:
        async with await Worker.open(sandbox, limits=LIMITS, restarts=3) as worker:
            await worker.run("import sys, os, builtins\nstate = {'kept': [1, 2]}")
            yield worker
            assert worker.restarts_left == 3
    finally:
        await sandbox.close()


@pytest.mark.long
@pytest.mark.parametrize("failing", FAILING_CELLS, ids=lambda failing: failing.name.replace(" ", "-"))
async def test_failed_cell_has_a_status_and_state_survives(
    shared_worker: Worker, kind: str, failing: FailingCell
) -> None:
    if failing.needs_isolation and kind == "subprocess":
        return  # as an ordinary user of this machine it would kill other programs
    cell = await shared_worker.run(failing.source, limits=failing.limits)
    wanted = (failing.status,) if isinstance(failing.status, str) else failing.status
    assert cell.status in wanted, cell
    assert failing.recovered in ("any", cell.recovered), cell
    assert failing.named in cell.notice, cell
    assert len(cell.error) < 20_000
    cell = await shared_worker.run(
        "print('here')\nstate['kept'].append(0) or state.pop('x', None)\nstate['kept'].pop()\nstate"
    )
    assert (cell.status, cell.value, cell.stdout) == ("ok", "{'kept': [1, 2]}", "here\n"), cell
    if kind != "subprocess":  # pid 1, the monitor, the interpreter, its savepoint and perhaps an earlier one
        assert (await shared_worker.run(WAIT_FOR_PROCESSES)).value == "True"


async def test_killed_savepoint_leads_to_a_reported_reset(kind: str, open_worker: object) -> None:
    async with open_worker() as worker:  # type: ignore[operator]
        await worker.run("x = 1")
        assert (await worker.savepoint()).made
        cell = await worker.run(
            "import os\nme = os.getpid()\nfor line in open(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read().split():\n"
            "    try: int(line) != me and os.kill(int(line), 9)\n    except ProcessLookupError: pass\nos._exit(1)"
        )
        assert (cell.status, cell.recovered) == ("crash", "reset")
        assert cell.notice
        assert (await worker.run("'x' in globals()")).value == "False"
