"""Persistent Python workers: run cells in an interpreter inside a sandbox, with limits and recovery.

Guarantees:
- state persists from cell to cell. A cell that exceeds a limit or crashes the interpreter costs only that cell:
  the worker returns to the state before it, from a savepoint that is taken while nobody waits;
- every outcome has its own status, and the result says what was restored and what was lost;
- nothing that comes out of the sandbox is unpickled or evaluated;
- a sandbox needs Python 3.8 or newer with its standard library, and nothing else.

    async with await Worker.open(sandbox, limits=WorkerLimits(wall=5), functions={"search": search}) as worker:
        cell = await worker.run("x = 6 * 7\\nx")   # cell.status == "ok", cell.value == "42"

| name | purpose |
|---|---|
| `Worker.open(sandbox, *, limits, functions, restarts, cwd, env, timeout)` | starts a worker; a context manager |
| `worker.run(source, *, limits, on_output, figures, files) -> Cell` | runs a cell; never raises for what it did |
| `worker.savepoint() -> Savepoint` | waits until it is known whether there is a savepoint |
| `worker.ready() -> int` | restarts a worker that ended between cells; returns how often its state was lost |
| `WorkerLimits`, `CellLimits` | limits of a worker and of one cell; None in a cell's limits means the worker's |
| `HostFunction(call=…, timeout=…)` | function that cells can call; a plain callable also works |
| `sandbox_for(limits, spec)` | a spec whose sandbox can enforce these limits and hold savepoints |
| `WorkerRecoveryError` | the worker cannot be restarted; it ends the attempt |
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
