"""A worker: a persistent Python interpreter in a sandbox, with limits and recovery.

This module runs outside of the sandbox, in the process that opened the worker. In the sandbox, a monitor process
supervises the interpreter and its savepoint, a fork of the interpreter to which the worker can return.

Guarantees:
- what one cell defines, the next cell sees. If a cell raises an exception, its changes until then stay, as in any
  Python session;
- a cell that exceeds a limit, crashes the interpreter or is cancelled is killed together with all processes that
  it started. The worker then returns to the state before that cell or, without a savepoint, to an empty state.
  `Cell.recovered` says which;
- the end of the interpreter is noticed when it happens, also between cells;
- every wait has a deadline. A monitor that does not respond in time is killed and restarted;
- the state may be lost `restarts` times. After that, or if a restart fails, this call and every later one raises
  `WorkerRecoveryError`;
- `close` may be called more than once, and leaves no process running.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rookery.core import SandboxError, UsageError, WorkerRecoveryError
from rookery.core.errors import describe
from rookery.core.lifetimes import AsyncClosesOnExit
from rookery.sandbox_runtime.worker import protocol as p
from rookery.sandboxes import OnOutput, Sandbox
from rookery.sandboxes.protocol import SupportsLimitCounters
from rookery.sandboxes.shell import EXHAUSTION_STATUSES
from rookery.workers import cell_report
from rookery.workers.cell_run import GRACE_SECONDS, CellRun
from rookery.workers.cells import Cell
from rookery.workers.host_functions import HostFunction, check_functions
from rookery.workers.limits import CellLimits, WorkerLimits
from rookery.workers.worker_process import WorkerProcess

MAX_SOURCE = 16 << 20
MAX_NOTES = 3
_FIRST_TAG = 1 << 50


class Savepoint(msgspec.Struct, frozen=True, kw_only=True):
    """State of a savepoint, a fork of the interpreter from which its current state can be restored."""

    made: bool
    seconds: float = 0.0
    """Seconds that it took to make the savepoint."""
    reason: str = ""
    """The reason why there is no savepoint, if `made` is False."""


class Worker(AsyncClosesOnExit):
    """A persistent Python interpreter in a sandbox. Create it with `Worker.open`.

    It runs one cell (a piece of Python source) at a time; concurrent calls of `run` wait for each other. All calls
    must be made on the event loop on which the worker was opened.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        limits: WorkerLimits,
        functions: dict[str, HostFunction],
        restarts: int,
        cwd: str | None,
        env: Mapping[str, str],
        timeout: float,
    ) -> None:
        self.limits = limits
        self.restarts_left = restarts
        self.losses = 0
        self.sandbox = sandbox
        """The sandbox that the interpreter runs in."""
        self._counting = sandbox if isinstance(sandbox, SupportsLimitCounters) else None
        self._functions = functions
        self._cwd = cwd
        self._env = env
        self._timeout = timeout
        self._tag = _FIRST_TAG + (secrets.randbits(20) << 20)
        self._number = 0
        self._lock = asyncio.Lock()
        self.process: WorkerProcess | None = None
        """The interpreter's process; None before its first start and after it was killed."""
        self._hello: asyncio.Future[list[bytes]] | None = None
        self._run: CellRun | None = None
        self._notes: list[str] = []
        """Notices about events between cells; they become part of the next cell's `notice`."""
        self._savepoint: Savepoint | None = None
        self._savepoint_changed = asyncio.Event()
        self._failure: WorkerRecoveryError | None = None
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
        """Start a Python interpreter in `sandbox`. The worker never closes the sandbox; that is up to the caller.

        `functions` are functions outside of the sandbox that cells can call by name. `restarts` is how often the
        interpreter's state may be lost, for any reason, before the worker gives up. `timeout` is the time limit in
        seconds of this call and of every restart. Raise `UsageError` if an argument is invalid, and `SandboxError`
        if the interpreter cannot be started; its cause is `sandbox.refused` if the sandbox's system cannot enforce
        the limits.
        """
        limits = limits or WorkerLimits()
        checked = check_functions(functions or {})
        if restarts < 0 or not timeout > 0:
            raise UsageError(
                f"restarts must be at least 0 and timeout above 0 seconds, not {restarts!r} and {timeout!r}"
            )
        sandbox_memory = sandbox.spec.memory
        if limits.memory is not None and sandbox_memory is not None and limits.memory > sandbox_memory:
            raise UsageError(
                f"limits.memory: {limits.memory} is more than the sandbox's {sandbox_memory} bytes; create the "
                "sandbox with `sandbox_for(limits)`"
            )
        worker = cls(sandbox, limits, checked, restarts, cwd, dict(env or {}), timeout)
        try:
            await worker._start(kill_leftovers=False)
        except WorkerRecoveryError as error:
            # It never ran, so this is not a failed recovery.
            code = "sandbox.refused" if isinstance(error.__cause__, _UnsupportedLimit) else "sandbox.create"
            if error.code == "sandbox.exhausted":
                code = error.code
            raise SandboxError(
                f"the Python worker could not be started in sandbox {sandbox.id}: {error}", cause=code
            ) from error
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
        """Run a cell of Python source and return its result. Failures of the cell are results, not exceptions.

        `limits` override the worker's limits for this cell. `on_output` is called with each chunk of output. If
        `figures`, open matplotlib figures are saved as files in the working directory. If `files`, the result
        lists the files below the working directory that changed. Raise `WorkerRecoveryError` if the worker cannot
        be restarted, and any exception of `on_output` or of a host function that ends the attempt.
        """
        cell_limits = self.limits.for_cell(limits)
        text = source.encode("utf-8", "surrogatepass")
        if len(text) > MAX_SOURCE:
            raise UsageError(f"the source of a cell has {len(text)} bytes; the limit is {MAX_SOURCE}")
        async with self._lock:
            await self._ready()
            self._number += 1
            run = self._run = CellRun(self._number, cell_limits, on_output)
            flags = (p.FIGURES if figures else 0) | (p.FILES if files else 0)
            try:
                return await self._run_cell(run, text, flags)
            finally:
                self._run = None
                await run.close()

    async def savepoint(self, *, timeout: float = 30.0) -> Savepoint:
        """Wait until it is known whether the current state has a savepoint, and return the answer.

        Savepoints are made in the background after each cell. Raise `TimeoutError` after `timeout` seconds.
        """
        async with asyncio.timeout(timeout), self._lock:
            await self._ready()
            while self._savepoint is None and self.process is not None and not self.process.ended.done():
                self._savepoint_changed.clear()
                await self._savepoint_changed.wait()
            return self._savepoint or Savepoint(made=False, reason="the worker has ended")

    async def ready(self) -> int:
        """Restart the worker if it ended between cells. Return how often its state has been lost so far.

        If the number has grown since the caller's last check, variables that the caller had defined are gone.
        """
        async with self._lock:
            await self._ready()
            return self.losses

    async def _ready(self) -> None:
        if self._closed:
            raise SandboxError("the worker is closed", cause="sandbox.lost")
        if self._failure is not None:
            raise self._failure
        if self.process is None or self.process.ended.done():
            detail = await self._explain_exit()
            await self._restart(detail)
            self._notes.append(cell_report.build_restart_notice(detail))

    async def _run_cell(self, run: "CellRun", text: bytes, flags: int) -> Cell:
        process = self.process
        assert process is not None
        limits = run.limits
        head = p.CELL_HEAD.pack(
            run.number,
            limits.wall,
            limits.cpu_seconds or 0.0,
            limits.memory or 0,
            limits.output,
            limits.processes or 0 if limits.processes is None else max(1, limits.processes),
            limits.display,
            limits.calls,
            flags,
        )
        self._savepoint = None
        notes, self._notes = self._notes, []
        try:
            await process.send(p.CELL, head, text)
            before = self._count_limit_hits()  # after sending: the cell does not wait for it
            ended = await self._wait_for_report(run, process)
        except BaseException:
            await self._cancel(run, process)
            raise
        if run.error is not None:
            error = run.error
            await self._cancel(run, process)
            raise error
        if ended is None:
            detail = await self._explain_exit()
            await self._restart(detail)
            cell = cell_report.build_lost_cell(run.number, detail, time.monotonic() - run.began)
        else:
            after = self._count_limit_hits()
            cell = cell_report.build_cell(ended, limits, oom=after[0] > before[0], refused=after[1] > before[1])
            if cell.recovered == "reset":
                self._count_loss(cell.notice)
        notice = " ".join(filter(None, (*notes, *self._notes, cell.notice)))
        self._notes = []
        return msgspec.structs.replace(cell, **run.output_fields(), notice=notice)

    async def _wait_for_report(self, run: "CellRun", process: WorkerProcess) -> "cell_report.CellReport | None":
        """Return the monitor's report of the cell.

        Return None if `run.error` was set, if the monitor ended, or if it missed its deadline and was killed.
        """
        while not run.done.done():
            if run.error is not None:
                return None
            if process.ended.done():
                return None
            # While a host function runs, its own deadline counts.
            limit = run.began + run.limits.wall + run.call_seconds + GRACE_SECONDS
            left = 1.0 if run.calling else limit - time.monotonic()
            if left <= 0:
                await process.kill()
                return None
            await run.wait_for_event(process, left)
        return run.done.result()

    async def _cancel(self, run: "CellRun", process: WorkerProcess) -> None:
        """End a cell that was cancelled or failed with `run.error`, and return to the state before the cell."""
        try:
            await asyncio.shield(asyncio.ensure_future(self._cancel_cell(run, process)))
        except asyncio.CancelledError:
            await process.kill()  # cancelled twice: the next call restarts the worker
            raise

    async def _cancel_cell(self, run: "CellRun", process: WorkerProcess) -> None:
        run.error = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                await process.send(p.CANCEL, p.SIZE.pack(run.number))
                run.began = time.monotonic() - run.limits.wall - run.call_seconds
                ended = await self._wait_for_report(run, process)
                if ended is None or ended.recovery == p.NOT_NEEDED:
                    return
                cell = cell_report.build_cell(ended, run.limits)
                self._notes.append(f"Cell {run.number} was cancelled. {cell.notice}")
                if cell.recovered == "reset":
                    self._count_loss(cell.notice)
                return
        await process.kill()

    def _count_limit_hits(self) -> tuple[int, int]:
        return self._counting.count_limit_hits() if self._counting is not None else (0, 0)

    # ---- frames

    def _on_frame(self, kind: int, payload: bytes) -> None:
        run = self._run
        if kind == p.OUTPUT:
            if run is not None:
                run.add_output(payload)
        elif kind == p.SAVED:
            last, made, seconds = p.SAVED_HEAD.unpack_from(payload)
            reason = payload[p.SAVED_HEAD.size :].decode("utf-8", "replace")
            if last == self._number:  # otherwise it is about an earlier state
                self._savepoint = Savepoint(made=bool(made), seconds=seconds, reason=reason)
                self._savepoint_changed.set()
        elif kind == p.DONE:
            ended = cell_report.CellReport.decode(payload)
            if run is None or ended.number != run.number or run.done.done():
                raise p.MalformedFrame("a report of another cell")
            run.done.set_result(ended)
            run.wake()
        elif kind == p.CALL:
            if run is None or p.SIZE.unpack_from(payload)[0] != run.number or run.calling:
                raise p.MalformedFrame("a call of another cell")
            assert self.process is not None
            run.start_call(self.process, self._functions, payload[4:])
        elif kind == p.DIED:
            cause, reason = (text.decode("utf-8", "replace") for text in p.unpack_texts(payload, 1)[:2])
            restored = payload[0] == p.RESTORED
            self._notes = [
                *self._notes[-MAX_NOTES:],
                cell_report.build_death_notice(cause[:200], reason[:200], restored=restored),
            ]
            if not restored:
                self._count_loss("the interpreter ended between two cells")
        elif kind == p.HELLO and self._hello is not None and not self._hello.done():
            self._hello.set_result(p.unpack_texts(payload))
        else:
            raise p.MalformedFrame(f"a frame of kind {kind}")

    # ---- starting and restarting

    async def _start(self, *, kill_leftovers: bool) -> None:
        """Start the monitor and wait for its first message.

        If `kill_leftovers`, the monitor kills processes that an earlier monitor left behind. If the start fails,
        the process is killed and `WorkerRecoveryError` is raised.
        """
        self._savepoint = None
        hello = self._hello = asyncio.get_running_loop().create_future()
        shared = self._counting is not None and self._counting.memory_limit_is_shared
        sandbox_memory = (self.sandbox.spec.memory or 0) if shared else 0
        head = p.SETUP_HEAD.pack(
            self._tag,
            self.limits.memory or 0,
            sandbox_memory,
            p.KILL_LEFTOVERS if kill_leftovers else 0,
            self._number,
        )
        try:
            async with asyncio.timeout(self._timeout):
                process = self.process = await WorkerProcess.start(
                    self.sandbox, self._cwd, self._env, self._on_frame
                )
                await process.send(p.SETUP, head, p.pack_texts([name.encode() for name in self._functions]))
                await asyncio.wait({hello, process.ended}, return_when=asyncio.FIRST_COMPLETED)
                if not hello.done():
                    result = await process.result()
                    exhausted = result is not None and result.status in EXHAUSTION_STATUSES
                    cause = "sandbox.exhausted" if exhausted else None
                    raise SandboxError(await self._explain_exit(), cause=cause)
                _check_capabilities(hello.result())
        except BaseException as error:
            if self.process is not None:
                await self.process.kill()
                self.process = None
            if isinstance(error, SandboxError | TimeoutError | OSError | _UnsupportedLimit):
                cause_text = (
                    f"no response within {self._timeout:g} s"
                    if isinstance(error, TimeoutError)
                    else describe(error)
                )
                exhausted = isinstance(error, SandboxError) and error.code == "sandbox.exhausted"
                cause = "sandbox.exhausted" if exhausted else None
                raise WorkerRecoveryError(
                    f"the interpreter did not start in sandbox {self.sandbox.id}: {cause_text}", cause=cause
                ) from error
            raise

    async def _restart(self, detail: str) -> None:
        if self.process is not None:
            await self.process.kill()
            self.process = None
        if self._closed:
            raise SandboxError("the worker was closed while a cell was running", cause="sandbox.lost")
        self._count_loss(detail)
        if self._failure is None:
            try:
                await self._start(kill_leftovers=True)
            except WorkerRecoveryError as error:
                self._failure = error
        if self._failure is not None:
            self._failure.after_cell = self._number > 0
            raise self._failure

    def _count_loss(self, what: str) -> None:
        """Count a loss of the interpreter's state, caused by `what`. After too many, every later call fails."""
        self.restarts_left -= 1
        self.losses += 1
        if self.restarts_left < 0:
            self._failure = WorkerRecoveryError(
                f"the worker in sandbox {self.sandbox.id} lost its state more often than `restarts` allows; "
                f"the last time: {what}"
            )

    async def _explain_exit(self) -> str:
        """Return why the monitor, the worker's process in the sandbox, has ended."""
        process = self.process
        if process is None:
            return "the worker's process ended"
        if process.problem is not None:
            return f"the worker's process sent invalid data ({describe(process.problem)})"
        result = await process.result()
        ending = "for an unknown reason" if result is None else f"as {result.status} {result.detail}".strip()
        return f"the worker's process ended {ending}" + (f": {process.stderr[-500:]}" if process.stderr else "")

    async def close(self) -> None:
        """End the interpreter and all processes that its cells left running. May be called more than once."""
        self._closed = True
        process, self.process = self.process, None
        if process is not None:
            await asyncio.shield(asyncio.ensure_future(process.close()))


class _UnsupportedLimit(Exception):  # noqa: N818  (becomes a SandboxError)
    """Raised if the operating system of the sandbox cannot enforce one of the worker's limits."""


def _check_capabilities(capabilities: list[bytes]) -> None:
    """Check the capabilities in the monitor's first message; raise if the worker's limits cannot be enforced."""
    if len(capabilities) < 3:
        raise SandboxError("the worker's first message is malformed")
    if not capabilities[1]:
        raise _UnsupportedLimit(
            "limits.processes cannot be enforced: the sandbox's system cannot track orphaned processes (it has no "
            "child subreaper)"
        )
