"""The Python REPL of the `rlm` environment: an interpreter with a variable `context` and functions such as `llm`.

Runs in a runner process; the interpreter is a worker in the sandbox. The variable `context` and the functions are
defined again after the interpreter's state was lost. If a cell exceeds a limit or crashes, the model is told
whether the state before that cell was restored or lost. Time spent in the functions does not count against the
cell's time limit.
"""

import inspect
from typing import Any, Protocol

import msgspec

from rookery.core import TaskError, WorkerRecoveryError
from rookery.environments.rlm.contexts import PlacedContext
from rookery.environments.rlm.functions import ReplFunctions
from rookery.environments.rlm.observations import render_cell
from rookery.environments.rlm.options import RlmOptions
from rookery.sandboxes.protocol import Sandbox
from rookery.workers import CellLimits, HostFunction, Worker, WorkerLimits

CALL_SECONDS = 1e6
"""Time limit of one function call: in practice none, since sub-calls, tools and the rollout have own deadlines."""
MAX_CALLS = 100_000
_LOAD_EXPRESSIONS = {
    "none": "None",
    "text": "open({name!r}, encoding='utf-8', errors='replace', newline='').read()",
    "json": "__import__('json').load(open({name!r}, encoding='utf-8'))",
    "bytes": "open({name!r}, 'rb').read()",
    "folder": "__import__('pathlib').Path({name!r}).resolve()",
}
_PRELUDE = '''
def _prelude():
    import builtins, sys
    most = 3 << 20
    def llm_batch(prompts, system=None, max_tokens=None):
        """Call many sub-models at once. Return their texts in order, None for each that failed; see stderr."""
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


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a cell in a REPL, as the model sees it."""

    text: str
    status: str
    timed_out: bool = False
    """True if the cell exceeded its time limit."""
    recovered: str = "none"
    """`none`: the state is intact; `kept`: the state before the cell was restored; `reset`: the state was lost."""


class Repl(Protocol):
    """A persistent interpreter (Python or bash) in a sandbox that runs a model's code."""

    functions: ReplFunctions

    async def run(self, code: str) -> CellResult: ...

    async def close(self) -> None: ...


def worker_limits(options: RlmOptions) -> WorkerLimits:
    """Return the limits that these options mean for the worker, the Python interpreter of a REPL."""
    return WorkerLimits(
        wall=options.cell_seconds, memory=options.cell_memory, display=max(16, options.max_output), calls=MAX_CALLS
    )


class PythonRepl:
    """A REPL that runs cells in a worker: a persistent Python interpreter in a sandbox."""

    def __init__(
        self, worker: Worker, functions: ReplFunctions, placed: PlacedContext, options: RlmOptions
    ) -> None:
        self.functions = functions
        self.worker = worker
        """The worker that runs the cells. The REPL closes it."""
        self._placed = placed
        self._options = options
        self._losses_seen = 0
        self._cells_started = 0
        """Number of the model's cells that were started."""

    @classmethod
    async def open(
        cls,
        sandbox: Sandbox,
        functions: ReplFunctions,
        placed: PlacedContext,
        options: RlmOptions,
        limits: WorkerLimits,
    ) -> "PythonRepl":
        """Start an interpreter and load the task's context into its variable `context`.

        Raise `TaskError` if the context cannot be loaded.
        """
        worker = await Worker.open(sandbox, limits=limits, functions=_make_host_functions(functions))
        repl = cls(worker, functions, placed, options)
        try:
            problem, _ = await repl._load_context()
            if problem:
                raise TaskError(f"the task's context could not be loaded into the Python REPL: {problem}")
        except BaseException:
            await worker.close()
            raise
        return repl

    async def run(self, code: str) -> CellResult:
        try:
            return await self._run(code)
        except WorkerRecoveryError as error:
            # Loading the context is a cell too, but not one of the policy.
            error.after_cell = self._cells_started > 0
            raise

    async def _run(self, code: str) -> CellResult:
        before = ""
        if await self.worker.ready() != self._losses_seen:  # the state was lost between two cells
            before = _describe_reload(*await self._load_context())
        self._cells_started += 1
        cell = await self.worker.run(code)
        after = _describe_reload(*await self._load_context()) if cell.recovered == "reset" else ""
        notice = " ".join(filter(None, (before, cell.notice, after)))
        cell = msgspec.structs.replace(cell, notice=notice)
        return CellResult(
            text=render_cell(cell, self._options.max_output),
            status=cell.status,
            timed_out=cell.status == "time_limit",
            recovered=cell.recovered,
        )

    async def _load_context(self) -> tuple[str, str]:
        """Load the task's long context (text, data or files) into the interpreter's variable `context`.

        Return an error message, empty on success, and the worker's notice about lost state.
        """
        load = f"context = {_LOAD_EXPRESSIONS[self._placed.kind].format(name=self._placed.name)}"
        # Loading has its own time limit, since the model did not ask for it.
        cell = await self.worker.run(_PRELUDE + load, limits=CellLimits(wall=120.0))
        self._losses_seen = self.worker.losses
        if cell.ok:
            return "", cell.notice
        return (cell.error or cell.detail or cell.status).strip().splitlines()[-1], cell.notice

    async def close(self) -> None:
        await self.worker.close()


def _describe_reload(problem: str, notice: str) -> str:
    """Return a notice for the model that its context was, or could not be, loaded into a new interpreter."""
    status = f"`context` could not be loaded again: {problem}." if problem else "`context` was loaded again."
    return f"{notice} {status}".strip()


def _make_host_functions(functions: ReplFunctions) -> dict[str, HostFunction]:
    def bind(name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await functions.tool(name, args, kwargs)

        return call

    calls: dict[str, Any] = {
        "llm": functions.llm,
        "_llm_batch": functions.llm_batch,
        "answer": functions.answer,
        "budget": functions.budget,
        **({"rlm": functions.rlm} if functions.tree.options.max_depth >= 2 else {}),
        **{name: bind(name) for name in functions.tools},
    }
    assert all(inspect.iscoroutinefunction(call) for call in calls.values())
    return {name: HostFunction(call=call, timeout=CALL_SECONDS) for name, call in calls.items()}
