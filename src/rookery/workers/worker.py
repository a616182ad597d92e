"""A worker: a Python that remembers, in a sandbox, with limits, that recovers.

Promises:
- what one cell defines, the next finds; a cell that fails leaves what it changed, as in any Python;
- a cell that exceeds a limit, crashes the Python or is cancelled is ended with everything that it started, and the
  state is again the one before it; where no savepoint could be kept it is empty; the cell's result says which;
- the end of the Python is noticed when it happens, also between cells;
- every wait is bounded; a stub that does not keep its deadlines is ended by the sandbox and started anew;
- the state may be lost `restarts` times;
- when it cannot be brought back, and only then, `WorkerRecoveryError` is raised, by this call and every later one;
- `close` runs on every path, is idempotent, and leaves no process.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rookery.core import SandboxError, UsageError, WorkerRecoveryError
from rookery.core.closing import AsyncClosing
from rookery.core.errors import describe
from rookery.sandboxes import OnOutput, Sandbox
from rookery.sandboxes.protocol import Counting
from rookery.sandboxes.shell import EXHAUSTING
from rookery.workers import endings
from rookery.workers.cells import Cell
from rookery.workers.functions import HostFunction, checked
from rookery.workers.inside import frames as f
from rookery.workers.limits import CellLimits, WorkerLimits
from rookery.workers.link import Link
from rookery.workers.running import GRACE, Run

MOST_SOURCE = 16 << 20
MOST_NOTES = 3
_FIRST_TAG = 1 << 50


class Savepoint(msgspec.Struct, frozen=True, kw_only=True):
    """Whether there is a way back to the present state."""

    made: bool
    seconds: float = 0.0
    why: str = ""
    """Why there is none."""


class Worker(AsyncClosing):
    """Runs one cell at a time. Use it on the loop it was made on."""

    def __init__(
        self,
        sandbox: Sandbox,
        limits: WorkerLimits,
        declared: dict[str, HostFunction],
        restarts: int,
        cwd: str | None,
        env: Mapping[str, str],
        timeout: float,
    ) -> None:
        self.limits = limits
        self.restarts_left = restarts
        self.losses = 0
        self._sandbox = sandbox
        self._counting = sandbox if isinstance(sandbox, Counting) else None
        self._functions = declared
        self._cwd = cwd
        self._env = env
        self._timeout = timeout
        self._tag = _FIRST_TAG + (secrets.randbits(20) << 20)
        self._number = 0
        self._lock = asyncio.Lock()
        self._link: Link | None = None
        self._hello: asyncio.Future[list[bytes]] | None = None
        self._run: Run | None = None
        self._notes: list[str] = []
        """What happened between cells; the next one tells."""
        self._saved: Savepoint | None = None
        self._saved_news = asyncio.Event()
        self._given_up: WorkerRecoveryError | None = None
        self._closed = False

    @classmethod
    async def open(
        cls,
        sandbox: Sandbox,
        *,
        limits: WorkerLimits | None = None,
        functions: Mapping[str, HostFunction | Callable[..., Any]] | None = None,
        restarts: int = 16,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 30.0,
    ) -> "Worker":
        """Starts a Python in the sandbox; the sandbox stays the caller's.

        `restarts`: how often the state may be lost, for whatever reason. `timeout`: for this call, and for
        bringing the worker back. `UsageError` for limits that cannot be; `SandboxError(sandbox.refused)` where
        this sandbox cannot hold them.
        """
        limits = limits or WorkerLimits()
        declared = checked(functions or {})
        if restarts < 0 or not timeout > 0:
            raise UsageError("restarts is a number from 0 on, and timeout a number of seconds above 0")
        room = sandbox.spec.memory
        if limits.memory is not None and room is not None and limits.memory > room:
            raise UsageError(
                f"limits.memory: the sandbox has {room} bytes in all, so a worker in it cannot have "
                f"{limits.memory}; see `sandbox_for`"
            )
        worker = cls(sandbox, limits, declared, restarts, cwd, dict(env or {}), timeout)
        try:
            await worker._start(sweep=False)
        except WorkerRecoveryError as error:
            # It never was: that is no recovery.
            code = "sandbox.refused" if isinstance(error.__cause__, _Refused) else "sandbox.create"
            if error.code == "sandbox.exhausted":
                code = error.code
            raise SandboxError(f"a worker could not be started: {error}", cause=code) from error
        return worker

    # ---- running cells

    async def run(
        self,
        source: str,
        *,
        limits: CellLimits | None = None,
        on_output: OnOutput | None = None,
        figures: bool = True,
        files: bool = False,
    ) -> Cell:
        """Runs a cell and tells how it ended; never raises for what the cell did.

        `figures`: save matplotlib's open figures as files. `files`: also tell which files changed.
        """
        bounds = self.limits.for_cell(limits)
        text = source.encode("utf-8", "surrogatepass")
        if len(text) > MOST_SOURCE:
            raise UsageError(f"a cell of {len(text)} bytes; {MOST_SOURCE} is the most")
        async with self._lock:
            await self._ready()
            self._number += 1
            run = self._run = Run(self._number, bounds, on_output)
            flags = (f.FIGURES if figures else 0) | (f.FILES if files else 0)
            try:
                return await self._ran(run, text, flags)
            finally:
                self._run = None
                await run.over()

    async def savepoint(self, *, timeout: float = 30.0) -> Savepoint:
        """Waits until it is known whether there is a way back to the present state; `TimeoutError` if not."""
        async with asyncio.timeout(timeout), self._lock:
            await self._ready()
            while self._saved is None and self._link is not None and not self._link.ended.done():
                self._saved_news.clear()
                await self._saved_news.wait()
            return self._saved or Savepoint(made=False, why="the worker is gone")

    async def ready(self) -> int:
        """Brings it back where it ended between cells. How often the state was lost so far: what has to be there
        before a cell is put there again when that changed."""
        async with self._lock:
            await self._ready()
            return self.losses

    async def _ready(self) -> None:
        """A worker that is there, brought back where it ended between cells."""
        if self._closed:
            raise SandboxError("the worker is closed", cause="sandbox.lost")
        if self._given_up is not None:
            raise self._given_up
        if self._link is None or self._link.ended.done():
            detail = await self._post_mortem()
            await self._restart(detail)
            self._notes.append(endings.restarted(detail))

    async def _ran(self, run: "Run", text: bytes, flags: int) -> Cell:
        link = self._link
        assert link is not None
        bounds = run.bounds
        head = f.CELL_HEAD.pack(
            run.number,
            bounds.wall,
            bounds.cpu_seconds or 0.0,
            bounds.memory or 0,
            bounds.output,
            bounds.processes or 0 if bounds.processes is None else max(1, bounds.processes),
            bounds.display,
            bounds.calls,
            flags,
        )
        self._saved = None
        notes, self._notes = self._notes, []
        try:
            await link.send(f.CELL, head, text)
            before = self._struck()  # now, when nobody waits for it
            ended = await self._outcome(run, link)
        except BaseException:
            await self._cancel(run, link)
            raise
        if run.error is not None:
            error = run.error
            await self._cancel(run, link)
            raise error
        if ended is None:
            detail = await self._post_mortem()
            await self._restart(detail)
            cell = endings.lost(run.number, detail, time.monotonic() - run.began)
        else:
            after = self._struck()
            cell = endings.cell_of(ended, bounds, oom=after[0] > before[0], refused=after[1] > before[1])
            if cell.recovered == "reset":
                self._spend(cell.notice)
        notice = " ".join(filter(None, (*notes, *self._notes, cell.notice)))
        self._notes = []
        return msgspec.structs.replace(cell, **run.streams(), notice=notice)

    async def _outcome(self, run: "Run", link: Link) -> "endings.Ended | None":
        """What the stub says of the cell; None when it is gone, or does not answer in time."""
        while not run.done.done():
            if run.error is not None:
                return None
            if link.ended.done():
                return None
            # While a function of ours runs it is that one's deadline that counts.
            limit = run.began + run.bounds.wall + run.outside + GRACE
            left = 1.0 if run.calling else limit - time.monotonic()
            if left <= 0:
                await link.kill()
                return None
            await run.news(link, left)
        return run.done.result()

    async def _cancel(self, run: "Run", link: Link) -> None:
        """Ends the cell, for a caller that does not wait for it any more; the state is again the one before it."""
        try:
            await asyncio.shield(asyncio.ensure_future(self._cancelled(run, link)))
        except asyncio.CancelledError:
            await link.kill()  # twice cancelled: the next call starts anew
            raise

    async def _cancelled(self, run: "Run", link: Link) -> None:
        run.error = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await link.send(f.CANCEL, f.SIZE.pack(run.number))
                run.began = time.monotonic() - run.bounds.wall - run.outside
                ended = await self._outcome(run, link)
                if ended is None or ended.recovery == f.NONE:
                    return
                cell = endings.cell_of(ended, run.bounds)
                self._notes.append(f"Cell {run.number} was cancelled. {cell.notice}")
                if cell.recovered == "reset":
                    self._spend(cell.notice)
                return
        await link.kill()

    def _struck(self) -> tuple[int, int]:
        return self._counting.struck() if self._counting is not None else (0, 0)

    # ---- frames

    def _frame(self, kind: int, payload: bytes) -> None:
        run = self._run
        if kind == f.OUTPUT:
            if run is not None:
                run.output(payload)
        elif kind == f.SAVED:
            last, made, took = f.SAVED_HEAD.unpack_from(payload)
            why = payload[f.SAVED_HEAD.size :].decode("utf-8", "replace")
            if last == self._number:  # else it is about a state that is no more
                self._saved = Savepoint(made=bool(made), seconds=took, why=why)
                self._saved_news.set()
        elif kind == f.DONE:
            ended = endings.Ended.read(payload)
            if run is None or ended.number != run.number or run.done.done():
                raise f.Garbage("an ending of no cell")
            run.done.set_result(ended)
            run.wake()
        elif kind == f.CALL:
            if run is None or f.SIZE.unpack_from(payload)[0] != run.number or run.calling:
                raise f.Garbage("a call of no cell")
            assert self._link is not None
            run.call(self._link, self._functions, payload[4:])
        elif kind == f.DIED:
            what, reason = (text.decode("utf-8", "replace") for text in f.unpacked(payload, 1)[:2])
            kept = payload[0] == f.KEPT
            self._notes = [*self._notes[-MOST_NOTES:], endings.died(what[:200], reason[:200], kept=kept)]
            if not kept:
                self._spend("the Python ended between cells")
        elif kind == f.HELLO and self._hello is not None and not self._hello.done():
            self._hello.set_result(f.unpacked(payload))
        else:
            raise f.Garbage(f"a frame of kind {kind}")

    # ---- starting and starting anew

    async def _start(self, *, sweep: bool) -> None:
        """`WorkerRecoveryError` when there is no stub at its end, and then nothing of it."""
        self._saved = None
        hello = self._hello = asyncio.get_running_loop().create_future()
        together = self._counting is not None and self._counting.held_together
        room = (self._sandbox.spec.memory or 0) if together else 0
        head = f.SETUP_HEAD.pack(self._tag, self.limits.memory or 0, room, f.SWEEP if sweep else 0, self._number)
        try:
            async with asyncio.timeout(self._timeout):
                link = self._link = await Link.start(self._sandbox, self._cwd, self._env, self._frame)
                await link.send(f.SETUP, head, f.packed([name.encode() for name in self._functions]))
                await asyncio.wait({hello, link.ended}, return_when=asyncio.FIRST_COMPLETED)
                if not hello.done():
                    result = await link.result()
                    exhausted = result is not None and result.status in EXHAUSTING
                    cause = "sandbox.exhausted" if exhausted else None
                    raise SandboxError(await self._post_mortem(), cause=cause)
                _capable(hello.result())
        except BaseException as error:
            if self._link is not None:
                await self._link.kill()
                self._link = None
            if isinstance(error, SandboxError | TimeoutError | OSError | _Refused):
                what = (
                    f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else describe(error)
                )
                exhausted = isinstance(error, SandboxError) and error.code == "sandbox.exhausted"
                cause = "sandbox.exhausted" if exhausted else None
                raise WorkerRecoveryError(
                    f"a Python in sandbox {self._sandbox.id}: {what}", cause=cause
                ) from error
            raise

    async def _restart(self, detail: str) -> None:
        if self._link is not None:
            await self._link.kill()
            self._link = None
        if self._closed:
            raise SandboxError("the worker was closed while it ran a cell", cause="sandbox.lost")
        self._spend(detail)
        if self._given_up is None:
            try:
                await self._start(sweep=True)
            except WorkerRecoveryError as error:
                self._given_up = error
        if self._given_up is not None:
            self._given_up.after_cell = self._number > 0
            raise self._given_up

    def _spend(self, what: str) -> None:
        """One of the times that the state may be lost."""
        self.restarts_left -= 1
        self.losses += 1
        if self.restarts_left < 0:
            self._given_up = WorkerRecoveryError(
                f"the worker in sandbox {self._sandbox.id} lost its state more often than it may; "
                f"the last time: {what}"
            )

    async def _post_mortem(self) -> str:
        """Why the stub is gone."""
        link = self._link
        if link is None:
            return "the worker's process ended"
        if link.problem is not None:
            return f"the worker's process said what it never says ({describe(link.problem)})"
        result = await link.result()
        ending = "without a word" if result is None else f"as {result.status} {result.detail}".strip()
        return f"the worker's process ended {ending}" + (f": {link.words[-500:]}" if link.words else "")

    async def close(self) -> None:
        """Ends the Python and everything that its cells left running."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            await asyncio.shield(asyncio.ensure_future(link.close()))


class _Refused(Exception):  # noqa: N818  (no error of anybody's)
    """This platform cannot hold a limit."""


def _capable(said: list[bytes]) -> None:
    """What the stub found that it can do."""
    if len(said) < 3:
        raise SandboxError("the worker's process began with the wrong words")
    if not said[1]:
        raise _Refused(
            "limits.processes: this system cannot tell whose an orphaned process is (no child subreaper)"
        )
