"""`run_code`, `stream_code` and `run_code_sync`: many programs, from anybody's code.

The sandboxes are held by one thread of this process with an event loop of its own, so they stay warm between
calls, whichever loop or thread these come from, and a caller whose loop stands still delays no program.

Promises:
- results come in the order of the programs, however long each took;
- at most twice `concurrency` programs are taken ahead of the result that is waited for, so a source without an
  end, and a slow reader, are fine;
- one bad program never affects another; what its sandbox did is in its own result;
- a call that is cancelled, or left early, has freed all that it held when it returns;
- at the end of the process nothing is left; a child that was forked from it starts anew.
"""

import asyncio
import concurrent.futures.thread  # noqa: F401  (its own end is registered by its import, and must come after ours)
import contextlib
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from functools import partial
from typing import Any, Final

import msgspec

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.scoring.boxes import Providers
from rookery.scoring.programs import Case, CaseResult, Program, ProgramLimits, ProgramResult
from rookery.scoring.running import Programs, default_concurrency

Source = Iterable[Program] | AsyncIterable[Program]
Check = Callable[[str, Case], bool]
"""Whether an output is right for a case: called in the caller's own thread, for runs that ended well."""
END_SECONDS: Final = 30.0


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class _Thread:
    """The thread that holds the sandboxes."""

    def __init__(self) -> None:
        self.loop = _new_event_loop()
        self.providers: Providers | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._turn, name="rookery-programs", daemon=True)
        self._thread.start()
        if not self._ready.wait(END_SECONDS):
            raise SandboxError("the thread that holds the sandboxes did not start", cause="sandbox.create")

    def _turn(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._open())
        self._ready.set()
        self.loop.run_forever()

    async def _open(self) -> None:
        self.providers = Providers()

    def end(self) -> None:
        """Cancels what runs, closes the sandboxes, ends the thread."""
        future = asyncio.run_coroutine_threadsafe(self._close(), self.loop)
        with contextlib.suppress(TimeoutError):
            future.result(END_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(END_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()

    async def _close(self) -> None:
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert self.providers is not None
        await self.providers.close()
        await self.loop.shutdown_default_executor()


_thread: _Thread | None = None
_lock = threading.Lock()


def _service() -> _Thread:
    global _thread  # noqa: PLW0603  (one for each process)
    with _lock:
        if _thread is None:
            _thread = _Thread()
        return _thread


def _end() -> None:
    global _thread
    with _lock:
        thread, _thread = _thread, None
    if thread is not None:
        thread.end()


def _forget() -> None:
    """In a forked child: the thread and what it holds are the parent's."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()


# Before the interpreter ends its threads: closing needs the executor, which is refused after that. Newest first,
# so this runs before the executor's own, which was registered when we imported it.
getattr(threading, "_register_atexit")(_end)  # noqa: B009  (no public name does this)
os.register_at_fork(after_in_child=_forget)


class _Ticket:
    """One program, handed to the thread; `done` is set on the caller's loop once nothing of it runs any more."""

    def __init__(self, there: asyncio.AbstractEventLoop, make: Callable[[], Any]) -> None:
        here = asyncio.get_running_loop()
        self.done: asyncio.Future[ProgramResult] = here.create_future()
        self._there = there
        self._task: asyncio.Task[ProgramResult] | None = None
        self._cancelled = False

        def start() -> None:
            if self._cancelled:
                self._told(here, None)
                return
            self._task = there.create_task(make())
            self._task.add_done_callback(partial(self._told, here))

        there.call_soon_threadsafe(start)

    def _told(self, here: asyncio.AbstractEventLoop, task: "asyncio.Task[ProgramResult] | None") -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop has ended: nobody waits
            here.call_soon_threadsafe(self._settle, task)

    def _settle(self, task: "asyncio.Task[ProgramResult] | None") -> None:
        if self.done.done():
            return
        if task is None or task.cancelled():
            self.done.cancel()
        elif (error := task.exception()) is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(task.result())

    def cancel(self) -> None:
        def stop() -> None:
            self._cancelled = True
            if self._task is not None:
                self._task.cancel()

        self._there.call_soon_threadsafe(stop)


async def stream_code(
    programs: Source,
    limits: ProgramLimits | None = None,
    *,
    sandbox: SandboxSpec | str | None = None,
    concurrency: int | None = None,
    check: Check | None = None,
) -> AsyncGenerator[ProgramResult, None]:
    """Results in the order of the programs, as they come. Close it (`aclose`) when you leave it early."""
    at_once = _concurrency(concurrency)
    service = _service()
    runner = await asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(_opened(service, sandbox, at_once), service.loop)
    )
    waiting: deque[tuple[Program, _Ticket]] = deque()
    source = _pull(programs)
    try:
        more = True
        while True:
            while more and len(waiting) < 2 * at_once:
                program = await anext(source, None)
                if program is None:
                    more = False
                    break
                waiting.append((program, _Ticket(service.loop, partial(runner.run, program, limits))))
            if not waiting:
                return
            program, ticket = waiting[0]
            result = await asyncio.shield(ticket.done)
            waiting.popleft()
            yield result if check is None else checked_by(check, program, result)
    finally:
        for _, ticket in waiting:
            ticket.cancel()
        if waiting:
            await _all_ended([ticket.done for _, ticket in waiting])
        await source.aclose()


async def _all_ended(futures: "list[asyncio.Future[ProgramResult]]") -> None:
    """Waits for the end of what was cancelled, also when it is cancelled itself meanwhile."""
    ending = asyncio.ensure_future(asyncio.wait(futures, timeout=END_SECONDS))
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise
    finally:
        for future in futures:
            if future.done() and not future.cancelled():
                future.exception()  # seen: nobody asks for it any more


async def _opened(service: _Thread, sandbox: SandboxSpec | str | None, at_once: int) -> Programs:
    return await Programs(sandbox, concurrency=at_once, providers=service.providers).__aenter__()


def _concurrency(wanted: int | None) -> int:
    if wanted is None:
        return default_concurrency()
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= 4096:
        raise UsageError(f"concurrency must be a whole number from 1 to 4096, got {wanted!r:.80}")
    return wanted


async def _pull(programs: Source) -> AsyncGenerator[Program, None]:
    if isinstance(programs, AsyncIterable):
        async for program in programs:
            yield _program(program)
    else:
        for program in programs:
            yield _program(program)


def _program(program: object) -> Program:
    if not isinstance(program, Program):
        raise UsageError(
            f"programs must be Program values, got a {type(program).__name__}: write Program(source=…)"
        )
    return program


async def run_code(
    programs: Source,
    limits: ProgramLimits | None = None,
    *,
    sandbox: SandboxSpec | str | None = None,
    concurrency: int | None = None,
    on_result: Callable[[int, ProgramResult], object] | None = None,
    check: Check | None = None,
) -> list[ProgramResult]:
    """Runs programs, each in a sandbox of its own; their results in order.

    `on_result` is told each one with its number, in order, as soon as it and all before it are there.
    """
    results: list[ProgramResult] = []
    stream = stream_code(programs, limits, sandbox=sandbox, concurrency=concurrency, check=check)
    async with contextlib.aclosing(stream):
        async for result in stream:
            results.append(result)
            if on_result is not None:
                on_result(len(results) - 1, result)
    return results


def run_code_sync(
    programs: Iterable[Program],
    limits: ProgramLimits | None = None,
    *,
    sandbox: SandboxSpec | str | None = None,
    concurrency: int | None = None,
    on_result: Callable[[int, ProgramResult], object] | None = None,
    check: Check | None = None,
) -> list[ProgramResult]:
    """As `run_code`, for code without an event loop; also where one runs in this thread, which then stands
    still."""

    async def main() -> list[ProgramResult]:
        return await run_code(
            programs, limits, sandbox=sandbox, concurrency=concurrency, on_result=on_result, check=check
        )

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    return _elsewhere(main)


def _elsewhere(main: Callable[[], Any]) -> list[ProgramResult]:
    """In a thread of its own; a Ctrl-C here reaches it."""
    box: dict[str, Any] = {}
    begun = threading.Event()

    async def watched() -> list[ProgramResult]:
        box["loop"], box["task"] = asyncio.get_running_loop(), asyncio.current_task()
        begun.set()
        found: list[ProgramResult] = await main()
        return found

    def call() -> None:
        try:
            box["result"] = asyncio.run(watched())
        except BaseException as error:  # noqa: BLE001  (raised again by whoever called)
            box["error"] = error
        finally:
            begun.set()

    thread = threading.Thread(target=call, name="rookery-run-code", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        begun.wait(END_SECONDS)
        if "task" in box:
            with contextlib.suppress(RuntimeError):  # it has ended
                box["loop"].call_soon_threadsafe(box["task"].cancel)
        thread.join(END_SECONDS)
        raise
    if "error" in box:
        raise box["error"]
    found: list[ProgramResult] = box["result"]
    return found


def checked_by(check: Check, program: Program, result: ProgramResult) -> ProgramResult:
    """The result with the verdicts of a check of the user's, for runs that ended well and whole."""
    if not program.cases or not result.cases:
        return result
    cases = tuple(
        _judged(check, case, one) if one.ok and not one.stdout_dropped else one
        for case, one in zip(program.cases, result.cases, strict=True)
    )
    shown = next((one for one in cases if one.verdict != "passed"), cases[0])
    return msgspec.structs.replace(result, cases=cases, **shown.told())


def _judged(check: Check, case: Case, one: CaseResult) -> CaseResult:
    right = check(one.stdout, case)
    if not isinstance(right, bool):
        raise UsageError(f"check must return True or False, got {right!r:.80}")
    return msgspec.structs.replace(one, verdict="passed" if right else "wrong_answer")
