"""Persistent Python workers: run cells in an interpreter inside a sandbox, with limits and recovery.

A cell is a piece of Python source that is executed in the interpreter's global namespace, as in a notebook.

Guarantees:
- state persists from cell to cell. If a cell exceeds a limit or crashes the interpreter, the worker returns to the
  state before that cell. It uses a savepoint: a fork of the interpreter, taken in the background after a cell. If
  no savepoint could be taken, the state is reset to an empty interpreter;
- `Cell.status` tells all outcomes apart, and `Cell.recovered` says whether the state was restored or lost.

Data from the sandbox is never unpickled or evaluated outside of the sandbox. The sandbox needs Python 3.8 or newer
with its standard library, and nothing else.

    async with await Worker.open(sandbox, limits=WorkerLimits(wall=5), functions={"search": search}) as worker:
        cell = await worker.run("x = 6 * 7\\nx")   # cell.status == "ok", cell.value == "42"

| name | purpose |
|---|---|
| `Worker.open(sandbox, *, limits, functions, restarts, cwd, env, timeout)` | starts a worker; a context manager |
| `worker.run(source, *, limits, on_output, figures, files) -> Cell` | runs a cell; a failed cell does not raise |
| `worker.savepoint() -> Savepoint` | waits until it is known whether the current state has a savepoint |
| `worker.ready() -> int` | restarts a worker that ended between cells; returns how often its state was lost |
| `WorkerLimits`, `CellLimits` | limits of a worker; limits of one cell, where None means the worker's limit |
| `HostFunction(call=…, timeout=…)` | function outside of the sandbox that cells can call; a callable also works |
| `sandbox_for(limits, spec)` | returns a spec with enough memory and processes for a worker and its savepoint |
| `WorkerRecoveryError` | raised if the worker cannot be restarted; the engine then ends the attempt |
"""

from rookery.core import WorkerRecoveryError
from rookery.workers.cells import Cell, CellStatus, Recovered
from rookery.workers.host_functions import HostFunction
from rookery.workers.limits import CellLimits, WorkerLimits, sandbox_for
from rookery.workers.worker import Savepoint, Worker

__all__ = [
    "Cell",
    "CellLimits",
    "CellStatus",
    "HostFunction",
    "Recovered",
    "Savepoint",
    "Worker",
    "WorkerLimits",
    "WorkerRecoveryError",
    "sandbox_for",
]
