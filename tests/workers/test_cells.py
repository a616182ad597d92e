"""Cells: one namespace, values, streams and errors."""

# ruff: noqa: E501  (a cell is read best as it is)

import asyncio

import pytest

from rookery.sandboxes import Command, Sandbox
from rookery.workers import CellLimits, Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

CELLS_AND_VALUES = [
    ("x = 6 * 7\nx", "42"),
    ("None", ""),
    ("x = 1", ""),
    ("'a' 'b'", "'ab'"),
    ("def f(n): return n if n < 2 else f(n - 1) + f(n - 2)\nf(10)", "55"),
    ("k = 3\n[k * i for i in range(3)]", "[0, 3, 6]"),
    ("class A:\n    y = 1\n    def m(self): return A.y\nA().m()", "1"),
    (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int\n    b: list\nP(1, [2])",
        "P(a=1, b=[2])",
    ),
    ("import pickle\nclass Q:\n    pass\ntype(pickle.loads(pickle.dumps(Q()))) is Q", "True"),
    ("from collections import namedtuple\nN = namedtuple('N', 'a')\nN(range(3))", "N(a=range(0, 3))"),
    ("import asyncio\nawait asyncio.sleep(0)\n7", "7"),
    ("async def g():\n    return 5\nawait g()", "5"),
    ("import asyncio\nasyncio.run(asyncio.sleep(0, 3))", "3"),
    ("__name__", "'__main__'"),
    ("from __future__ import annotations\ndef h(a: nothing): pass\nh.__annotations__", "{'a': 'nothing'}"),
    ("import multiprocessing\nmultiprocessing.Pool(2).map(abs, [-1, 2])", "[1, 2]"),
    ("import subprocess\nsubprocess.run(['echo', 'x'], capture_output=True).stdout", "b'x\\n'"),
    ("import threading\nt = threading.Thread(target=lambda: None); t.start(); t.join()", ""),
    ("exit()", ""),
    ("import sys\nsys.exit(0)", ""),
    ("import inspect\ndef lines(): return 1\ninspect.getsource(lines)", "'def lines(): return 1\\n'"),
]


async def test_cells_return_their_values(worker: Worker) -> None:
    for source, value in CELLS_AND_VALUES:
        cell = await worker.run(source)
        assert (cell.status, cell.value, cell.error) == ("ok", value, ""), (source, cell)
    assert (await worker.run("x, k, f(5)")).value == "(1, 3, 5)"


async def test_output_of_child_processes_is_captured(worker: Worker) -> None:
    cell = await worker.run(
        "import os, sys, subprocess\nprint('a')\nsys.stderr.write('b\\n')\nos.write(1, b'c\\n')\n"
        "subprocess.run(['sh', '-c', 'echo d; echo e >&2'])\nprint('f', end='')"
    )
    assert cell.stdout == "a\nc\nd\nf"
    assert cell.stderr == "b\ne\n"


async def test_output_is_streamed(worker: Worker, sandbox: Sandbox) -> None:
    first = asyncio.Event()
    seen: list[bytes] = []

    def on_output(_stream: str, data: bytes) -> None:
        seen.append(data)
        first.set()

    source = "print('one')\nimport os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('two')"
    task = asyncio.create_task(worker.run(source, on_output=on_output))
    await asyncio.wait_for(first.wait(), 60)
    assert b"".join(seen) == b"one\n"
    await sandbox.write("go", b"")
    assert (await task).stdout == "one\ntwo\n"


async def test_output_is_limited_and_dropped_bytes_counted(worker: Worker) -> None:
    cell = await worker.run("print('x' * 20000)", limits=CellLimits(output=1000))
    assert cell.status == "ok"
    assert len(cell.stdout) == 1000
    assert cell.stdout_dropped == 20001 - 1000


async def test_traceback_shows_only_user_frames(worker: Worker) -> None:
    await worker.run("def f():\n    raise ValueError('no')")
    cell = await worker.run("try:\n    f()\nexcept ValueError as e:\n    raise KeyError('x') from e")
    assert cell.status == "runtime"
    assert "raise ValueError('no')" in cell.error
    assert "KeyError: 'x'" in cell.error
    assert 'File "<cell 1>", line 2, in f' in cell.error
    assert "worker" not in cell.error
    cell = await worker.run("import asyncio\nasync def g():\n    1 / 0\nawait g()")
    assert "base_events" not in cell.error
    assert cell.error.endswith("ZeroDivisionError: division by zero")
    cell = await worker.run("raise SystemExit('bad')")
    assert (cell.status, cell.error) == ("runtime", "SystemExit: bad")


@pytest.mark.parametrize("source", ["x = = 1", "if 1:\nx", "a\0b", "print('", "return 1", "(" * 300 + ")" * 300])
async def test_syntax_error_runs_nothing(worker: Worker, source: str) -> None:
    cell = await worker.run(f"ran = True\n{source}")
    assert (cell.status, cell.recovered) == ("syntax", "none"), cell
    assert cell.error
    assert "worker" not in cell.error
    assert (await worker.run("'ran' in globals()")).value == "False"


async def test_syntax_error_at_run_time_is_a_runtime_error(worker: Worker) -> None:
    cell = await worker.run("eval('1 +')")
    assert cell.status == "runtime"
    assert 'File "<cell 1>"' in cell.error


async def test_stdin_is_empty(worker: Worker) -> None:
    cell = await worker.run("input()")
    assert cell.status == "runtime"
    assert "EOFError" in cell.error
    assert (await worker.run("import sys\nsys.stdin.read()")).value == "''"


async def test_large_values_are_truncated_cheaply(worker: Worker) -> None:
    cell = await worker.run(
        "looked = 0\nclass C:\n    def __repr__(self):\n        global looked; looked += 1\n        return 'C!'\n[C()] * 10**7"
    )
    assert cell.status == "ok"
    assert cell.value.startswith("[C!, C!")
    assert "more" in cell.value
    assert len(cell.value) < 12_000
    assert int((await worker.run("looked")).value) < 10_000
    for source in ("'x' * 10**7", "2 ** 10**7", "{i: 'v' * 100 for i in range(10**5)}", "[[[0] * 10**6] * 5] * 5"):
        cell = await worker.run(source)
        assert cell.status == "ok", cell
        assert 0 < len(cell.value) < 12_000
    assert (await worker.run("a = []\na.append(a)\na")).value == "[[...]]"


async def test_raising_repr_is_the_cells_error(worker: Worker) -> None:
    cell = await worker.run("class C:\n    def __repr__(self): 1 / 0\nC()")
    assert (cell.status, cell.value) == ("runtime", "")
    assert "ZeroDivisionError" in cell.error


async def test_event_loop_and_tasks_persist(worker: Worker) -> None:
    await worker.run(
        "import asyncio\ndone = []\nasync def later():\n    await asyncio.sleep(0)\n    done.append(1)\n"
        "await asyncio.sleep(0)\ntask = asyncio.ensure_future(later())"
    )
    assert (await worker.run("await task\ndone")).value == "[1]"


async def test_changed_files_and_figures_are_reported(worker: Worker, sandbox: Sandbox) -> None:
    await sandbox.exec(Command(argv=("mkdir", "matplotlib")))
    await sandbox.write("matplotlib/__init__.py", b"")
    await sandbox.write(
        "matplotlib/pyplot.py",
        b"import os\nheld = []\ndef get_fignums(): return held\ndef close(w): held.clear()\n"
        b"class F:\n    def savefig(self, name): open(name, 'w').write(os.environ['MPLBACKEND'])\ndef figure(n): return F()\n",
    )
    cell = await worker.run(
        "import matplotlib.pyplot as plt\nplt.held.append(1)\nopen('a.txt', 'w').close()", files=True
    )
    assert cell.figures == ("figure-1-1.png",)
    assert {"a.txt", "figure-1-1.png"} <= set(cell.files)
    cell = await worker.run("open('b.txt', 'w').close()\n__import__('os').chdir('/')")
    assert cell.files == cell.figures == ()
    assert (await sandbox.read("figure-1-1.png")) == b"Agg"


async def test_savepoints_do_not_disturb_random_state_or_pid(worker: Worker) -> None:
    first = await worker.run(
        "import os, random\nrandom.seed(1)\np = os.getpid()\na = random.random()\nrandom.seed(1)"
    )
    assert first.ok
    assert (await worker.savepoint()).made
    assert (await worker.run("p == os.getpid(), random.random() == a")).value == "(True, True)"
    assert (await worker.run("random.seed(1)")).ok
    assert (await worker.run("os._exit(1)")).recovered == "kept"
    assert (await worker.run("p == os.getpid(), random.random() == a")).value == "(False, True)"
