"""A Python that remembers, in a sandbox, with limits, that recovers.

Promises:
- state persists from cell to cell; a cell over its limit, or one that crashes its Python, costs that cell alone:
  the state is again the one before it, from a savepoint that is made while nobody waits;
- every ending has its own word, and the result says in words what was kept and what was undone;
- nothing that comes back from the sandbox is unpickled or evaluated;
- it needs Python 3.8 or newer in the sandbox, with its standard library, and nothing else.

    async with await Worker.open(sandbox, limits=WorkerLimits(wall=5), functions={"search": search}) as worker:
        cell = await worker.run("x = 6 * 7\\nx")   # cell.status == "ok", cell.value == "42"

| name | what it is |
|---|---|
| `Worker.open(sandbox, *, limits, functions, restarts, cwd, env, timeout)` | starts one; a context manager |
| `worker.run(source, *, limits, on_output, figures, files) -> Cell` | runs a cell; never raises for what it did |
| `worker.savepoint() -> Savepoint` | waits until it is known whether there is a way back |
| `worker.ready() -> int` | brings it back where it ended between cells; how often its state was lost so far |
| `WorkerLimits`, `CellLimits` | of the worker and of one cell; a cell's None is the worker's |
| `HostFunction(call=…, timeout=…)` | what cells can call; a bare callable does too |
| `sandbox_for(limits, spec)` | a spec in which these limits hold and savepoints have room |
| `WorkerRecoveryError` | it cannot be brought back: the attempt ends |
"""

from rookery.core import WorkerRecoveryError
from rookery.workers.cells import Cell, CellStatus, Recovered
from rookery.workers.functions import HostFunction
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
