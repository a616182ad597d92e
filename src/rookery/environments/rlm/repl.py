"""A Python REPL for a model: a worker, with the context in it and functions to call.

Promises:
- `context` and the functions are there in every Python that starts, also after the state was lost;
- a cell that overruns a limit or crashes costs that cell; what was kept is told to the model in words;
- time in functions is not the cell's own.
"""

import inspect
from typing import Any, Protocol

import msgspec

from rookery.core import TaskError, WorkerRecoveryError
from rookery.environments.rlm.contexts import MOST_PART, Placed
from rookery.environments.rlm.observing import of_cell
from rookery.environments.rlm.options import Options
from rookery.environments.rlm.verbs import Verbs
from rookery.sandboxes.protocol import Sandbox
from rookery.workers import CellLimits, HostFunction, Worker, WorkerLimits

UNBOUNDED = 1e6
"""Seconds: each sub-call and each tool has its own deadline, and so has the rollout."""
CALLS = 100_000
_LOAD = {
    "none": "None",
    "text": "open({name!r}, encoding='utf-8', errors='replace', newline='').read()",
    "json": "__import__('json').load(open({name!r}, encoding='utf-8'))",
    "bytes": "open({name!r}, 'rb').read()",
    "folder": "__import__('pathlib').Path({name!r}).resolve()",
}
_BATCH = '''
def _prelude():
    import builtins, sys
    most = 3 << 20
    def llm_batch(prompts, system=None, max_tokens=None):
        """Asks many sub-models at once. The texts in order; None for one that failed, and why on stderr."""
        prompts = list(prompts)
        found, part, size = [], [], 0
        for at, prompt in enumerate(prompts):
            part.append(prompt)
            size += 6 * len(prompt) if isinstance(prompt, str) and not prompt.isascii() else 2 * len(str(prompt))
            if size > most or at + 1 == len(prompts):
                found += _llm_batch(part, system, max_tokens)
                part, size = [], 0
        failed = [(at, one["error"]) for at, one in enumerate(found) if "error" in one]
        if failed:
            at, why = failed[0]
            print(f"llm_batch: {len(failed)} of {len(found)} failed; #{at}: {why}", file=sys.stderr)
        return [one.get("text") for one in found]
    builtins.llm_batch = llm_batch
_prelude()
del _prelude
'''


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a cell."""

    text: str
    status: str
    late: bool = False
    recovered: str = "none"


class Repl(Protocol):
    """Where a model's code runs."""

    verbs: Verbs

    async def run(self, code: str) -> Observed: ...

    async def close(self) -> None: ...


def worker_limits(options: Options) -> WorkerLimits:
    return WorkerLimits(
        wall=options.cell_seconds, memory=options.cell_memory, display=max(16, options.max_output), calls=CALLS
    )


class PythonRepl:
    """One worker."""

    def __init__(self, worker: Worker, verbs: Verbs, placed: Placed, options: Options) -> None:
        self.verbs = verbs
        self._worker = worker
        self._placed = placed
        self._options = options
        self._seen = 0
        self._cells = 0
        """Cells of the model that were begun."""

    @classmethod
    async def open(
        cls, sandbox: Sandbox, verbs: Verbs, placed: Placed, options: Options, limits: WorkerLimits
    ) -> "PythonRepl":
        async def read_file(name: str) -> bytes:
            return await sandbox.read(name, limit=MOST_PART, timeout=60.0)

        verbs.read_file = read_file
        worker = await Worker.open(sandbox, limits=limits, functions=_functions(verbs))
        repl = cls(worker, verbs, placed, options)
        try:
            trouble, _ = await repl._prelude()
            if trouble:
                raise TaskError(f"the context could not be loaded into Python: {trouble}")
        except BaseException:
            await worker.close()
            raise
        return repl

    async def run(self, code: str) -> Observed:
        try:
            return await self._run(code)
        except WorkerRecoveryError as error:
            error.after_cell = self._cells > 0  # loading the context is a cell too, and none of the policy's
            raise

    async def _run(self, code: str) -> Observed:
        before = ""
        if await self._worker.ready() != self._seen:  # it was lost between two cells
            before = _back(*await self._prelude())
        self._cells += 1
        cell = await self._worker.run(code)
        after = _back(*await self._prelude()) if cell.recovered == "reset" else ""
        notice = " ".join(filter(None, (before, cell.notice, after)))
        cell = msgspec.structs.replace(cell, notice=notice)
        return Observed(
            text=of_cell(cell, self._options.max_output),
            status=cell.status,
            late=cell.status == "time_limit",
            recovered=cell.recovered,
        )

    async def _prelude(self) -> tuple[str, str]:
        """What goes wrong, or nothing; and what the worker has to say."""
        load = f"context = {_LOAD[self._placed.kind].format(name=self._placed.name)}"
        # Loading is our own doing: it has its own time.
        cell = await self._worker.run(_BATCH + load, limits=CellLimits(wall=120.0))
        self._seen = self._worker.losses
        if cell.ok:
            return "", cell.notice
        return (cell.error or cell.detail or cell.status).strip().splitlines()[-1], cell.notice

    async def close(self) -> None:
        await self._worker.close()


def _back(trouble: str, notice: str) -> str:
    said = f"`context` could not be loaded again: {trouble}." if trouble else "`context` was loaded again."
    return f"{notice} {said}".strip()


def _functions(verbs: Verbs) -> dict[str, HostFunction]:
    def named(name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await verbs.tool(name, args, kwargs)

        return call

    calls: dict[str, Any] = {
        "llm": verbs.llm,
        "_llm_batch": verbs.llm_batch,
        "answer": verbs.answer,
        "budget": verbs.budget,
        **({"rlm": verbs.rlm} if verbs.tree.options.max_depth >= 2 else {}),
        **{name: named(name) for name in verbs.tools},
    }
    assert all(inspect.iscoroutinefunction(call) for call in calls.values())
    return {name: HostFunction(call=call, timeout=UNBOUNDED) for name, call in calls.items()}
