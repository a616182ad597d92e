"""The runs that the viewer shows, by ID. Runs stay open between requests, at most `MAX_OPEN` at a time."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final, TypeVar

from rookery.core import JournalError, RookeryError
from rookery.journal import RunReader
from rookery.trainer.folder import METRICS, read_metrics
from rookery.view.data import NotFoundError, RunData
from rookery.view.runs import ViewedRun, list_viewed_runs, open_viewed_run
from rookery.view.summary import flatten_settings

T = TypeVar("T")
MAX_OPEN: Final = 16
MAX_LISTED: Final = 500
"""Maximum number of runs in the list; the newest are kept."""


class _OpenRun:
    """A run that is open, with a lock, because `RunData` is not thread-safe."""

    def __init__(self, data: RunData) -> None:
        self.data = data
        self.lock = asyncio.Lock()


class Catalogue:
    """Finds runs by ID and reads them in worker threads.

    The ID of a run is its name. A training run that was resumed has one journal per start: its name is the newest,
    and `NAME:JOURNAL` is an older one.
    """

    def __init__(self, root: Path, chosen: list[ViewedRun], *, tokenizer: str = "") -> None:
        self._root = root
        self._chosen = chosen
        self._tokenizer = tokenizer
        self._open: OrderedDict[str, _OpenRun] = OrderedDict()

    def list_runs(self) -> dict[str, tuple[ViewedRun, Path | None]]:
        """Return run and journal by ID, newest first."""
        runs = [open_viewed_run(run.folder) for run in self._chosen] or list_viewed_runs(self._root)
        found: dict[str, tuple[ViewedRun, Path | None]] = {}
        for run in runs[:MAX_LISTED]:
            name, number = run.name, 2
            while name in found:
                name, number = f"{run.name}~{number}", number + 1
            found[name] = (run, run.journals[0] if run.journals else None)
            found |= {f"{name}:{journal.name}": (run, journal) for journal in run.journals[1:]}
        return found

    async def describe_runs(self) -> list[dict[str, Any]]:
        """Return the list of runs, with the totals that their journals store."""
        return await asyncio.to_thread(
            lambda: [describe_run(name, *where) for name, where in self.list_runs().items()]
        )

    async def read(self, run_id: str, read: Callable[[RunData], T]) -> T:
        """Call `read` with the data of a run in a worker thread. Calls for the same run are made one at a time."""
        async with self._locked(run_id) as data:
            return await _read_in_thread(lambda: read(data))

    async def read_two(self, a: str, b: str, read: Callable[[RunData, RunData], T]) -> T:
        """Call `read` with the data of two runs in a worker thread."""
        if a == b:
            return await self.read(a, lambda data: read(data, data))
        first, second = sorted((a, b))  # always in this order, so that two calls cannot wait for each other
        async with self._locked(first) as one, self._locked(second) as two:
            return await _read_in_thread(lambda: read(one, two) if first == a else read(two, one))

    @asynccontextmanager
    async def _locked(self, run_id: str) -> AsyncIterator[RunData]:
        held = self._open.get(run_id)
        if held is None or held.data.run.is_training:  # a training run that is resumed gets a new journal
            run, journal = (await asyncio.to_thread(self.list_runs)).get(run_id, (None, None))
            if run is None:
                raise NotFoundError(f"there is no run {run_id!r:.200}")
            held = self._open.get(run_id)
            if held is None or held.data.journal != journal:
                if held is not None:
                    await self._close_run(run_id)
                held = self._open[run_id] = _OpenRun(RunData(run, journal, tokenizer=self._tokenizer))
        self._open.move_to_end(run_id)
        async with held.lock:
            yield held.data
        for name in list(self._open)[: max(0, len(self._open) - MAX_OPEN)]:
            if name in self._open and not self._open[name].lock.locked():
                await self._close_run(name)

    async def _close_run(self, run_id: str) -> None:
        """Close a run, after the call that reads it."""
        held = self._open.pop(run_id)
        async with held.lock:
            held.data.close()

    async def close(self) -> None:
        """Close all runs, each after the call that reads it."""
        for name in list(self._open):
            await self._close_run(name)


async def _read_in_thread(read: Callable[[], T]) -> T:
    """Call `read` in a worker thread. A caller that is cancelled waits for the thread, which uses the run."""
    reading = asyncio.ensure_future(asyncio.to_thread(read))
    try:
        return await asyncio.shield(reading)
    finally:
        await asyncio.wait({reading})


def describe_run(run_id: str, run: ViewedRun, journal: Path | None) -> dict[str, Any]:
    """Return the entry of a run in the list of runs. An unreadable run has the status `unreadable`."""
    found: dict[str, Any] = {
        "id": run_id,
        "kind": "training" if run.is_training else "run",
        "path": str(run.folder),
    }
    if run.is_training:
        found["evals"] = _read_evals(run.folder)
    if journal is None:
        return {**found, "status": "running", "rollouts": 0}
    try:
        with closing(RunReader(journal)) as reader:
            summary = reader.summary()
            planned = sum(row.k for row in reader.groups()) if summary.status == "running" else 0
    except (JournalError, ValueError) as error:
        return {**found, "status": "unreadable", "detail": str(error), "rollouts": 0}
    return {
        **found,
        "status": summary.status,
        "created": summary.created,
        "environment": summary.env,
        "model": summary.model,
        "rollouts": summary.rollouts,
        "started": planned,
        "labels": summary.labels,
        "mean_reward": summary.mean_reward,
        "settings": flatten_settings(summary.settings),
    }


def _read_evals(folder: Path) -> list[float]:
    """Return the rewards on held-out tasks that a training run measured so far."""
    try:
        rows = read_metrics(folder) if (folder / METRICS).exists() else []
    except RookeryError:
        return []
    return [row["eval_reward"] for row in rows if row.get("eval_reward") is not None]
