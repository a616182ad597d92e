"""`run_code`, `stream_code` and `run_code_sync`: run many programs, each in its own sandbox, from any Python code.

A background thread of the calling process runs all programs on its own event loop. It opens sandbox providers on
first use and keeps them open for later calls from any thread or event loop. A caller that blocks its own event
loop delays no program.

Guarantees:
- Results arrive in the order of the programs, however long each one takes.
- At most `2 * concurrency` programs are taken from the source before the caller receives the first of their
  results. The source may therefore be infinite, and the caller may be slow.
- One bad program never affects another. If a sandbox fails, only the result of its own program reports that.
- A call that is cancelled, or whose generator is closed, cancels its programs and waits up to 30 s for their end.
- When the process exits normally, all sandboxes are closed. A forked child process starts its own thread.
"""

import asyncio
import concurrent.futures.thread  # noqa: F401  (registers its exit handler on import, which must happen before ours)
import contextlib
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from functools import partial
from typing import Any, Final

import msgspec

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.scoring.fresh_sandboxes import SharedProviders
from rookery.scoring.program_runner import ProgramRunner, default_concurrency
from rookery.scoring.programs import Case, CaseResult, Program, ProgramLimits, ProgramResult

ProgramSource = Iterable[Program] | AsyncIterable[Program]
OutputCheck = Callable[[str, Case], bool]
"""A user's function `check(stdout, case)` that decides whether a test case passed. It is called on the event loop
that receives the results, only if the program exited with code 0 and its whole standard output was captured."""
END_SECONDS: Final = 30.0


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class _SandboxThread:
    """The background thread that owns the sandbox providers and runs the programs."""

    def __init__(self) -> None:
        self.loop = _new_event_loop()
        self.providers: SharedProviders | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rookery-programs", daemon=True)
        self._thread.start()
        if not self._ready.wait(END_SECONDS):
            raise SandboxError(
                f"the background thread that runs sandboxes did not start within {END_SECONDS:g} s",
                cause="sandbox.create",
            )

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._open())
        self._ready.set()
        self.loop.run_forever()

    async def _open(self) -> None:
        self.providers = SharedProviders()

    def end(self) -> None:
        """Cancel running programs, close the sandboxes and stop the thread."""
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


_thread: _SandboxThread | None = None
_lock = threading.Lock()


def _get_thread() -> _SandboxThread:
    global _thread  # noqa: PLW0603  (one per process)
    with _lock:
        if _thread is None:
            _thread = _SandboxThread()
        return _thread


def stop_thread() -> None:
    global _thread
    with _lock:
        thread, _thread = _thread, None
    if thread is not None:
        thread.end()


def _reset_after_fork() -> None:
    """Forget the thread in a forked child: it and its sandboxes belong to the parent process."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()


# This handler must run before the interpreter shuts down its thread pools, because closing needs one. Handlers run
# in reverse order of registration, so it runs before the executor's own handler, which the import above
# registered.
getattr(threading, "_register_atexit")(stop_thread)  # noqa: B009  (there is no public API for this)
os.register_at_fork(after_in_child=_reset_after_fork)


class _PendingProgram:
    """A program submitted to the background thread.

    `done` is a future of the caller's event loop. It receives the result when the program has ended.
    """

    def __init__(self, thread_loop: asyncio.AbstractEventLoop, make: Callable[[], Any]) -> None:
        caller_loop = asyncio.get_running_loop()
        self.done: asyncio.Future[ProgramResult] = caller_loop.create_future()
        self._thread_loop = thread_loop
        self._task: asyncio.Task[ProgramResult] | None = None
        self._cancelled = False

        def start() -> None:
            if self._cancelled:
                self._notify(caller_loop, None)
                return
            self._task = thread_loop.create_task(make())
            self._task.add_done_callback(partial(self._notify, caller_loop))

        thread_loop.call_soon_threadsafe(start)

    def _notify(self, caller_loop: asyncio.AbstractEventLoop, task: "asyncio.Task[ProgramResult] | None") -> None:
        with contextlib.suppress(RuntimeError):  # the caller's event loop has ended
            caller_loop.call_soon_threadsafe(self._resolve, task)

    def _resolve(self, task: "asyncio.Task[ProgramResult] | None") -> None:
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

        self._thread_loop.call_soon_threadsafe(stop)


async def stream_code(
    programs: ProgramSource,
    limits: ProgramLimits | None = None,
    *,
    sandbox: SandboxSpec | str | None = None,
    concurrency: int | None = None,
    check: OutputCheck | None = None,
) -> AsyncGenerator[ProgramResult, None]:
    """Run programs, each in its own sandbox, and yield their results in the order of the programs.

    `limits` apply where a program sets none. `sandbox` is a spec or the name of a provider. `concurrency` is the
    maximum number of sandboxes open at once. `check` replaces the comparison with the expected output of a case.
    Call `aclose()` on the generator if you stop before its end.
    """
    limit = _check_concurrency(concurrency)
    service = _get_thread()
    runner = await asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(_open_runner(service, sandbox, limit), service.loop)
    )
    running: deque[tuple[Program, _PendingProgram]] = deque()
    source = _iterate(programs)
    try:
        more = True
        while True:
            while more and len(running) < 2 * limit:
                program = await anext(source, None)
                if program is None:
                    more = False
                    break
                running.append((program, _PendingProgram(service.loop, partial(runner.run, program, limits))))
            if not running:
                return
            program, pending = running[0]
            result = await asyncio.shield(pending.done)
            running.popleft()
            yield result if check is None else apply_check(check, program, result)
    finally:
        for _, pending in running:
            pending.cancel()
        if running:
            await _wait_for_all([pending.done for _, pending in running])
        await source.aclose()


async def _wait_for_all(futures: "list[asyncio.Future[ProgramResult]]") -> None:
    """Wait up to `END_SECONDS` for cancelled programs to end, even if this task is cancelled meanwhile."""
    ending = asyncio.ensure_future(asyncio.wait(futures, timeout=END_SECONDS))
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise
    finally:
        for future in futures:
            if future.done() and not future.cancelled():
                future.exception()  # mark the exception as retrieved


async def _open_runner(service: _SandboxThread, sandbox: SandboxSpec | str | None, limit: int) -> ProgramRunner:
    return await ProgramRunner(sandbox, concurrency=limit, providers=service.providers).__aenter__()


def _check_concurrency(concurrency: int | None) -> int:
    if concurrency is None:
        return default_concurrency()
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= 4096:
        raise UsageError(f"concurrency must be an integer from 1 to 4096, got {concurrency!r:.80}")
    return concurrency


async def _iterate(programs: ProgramSource) -> AsyncGenerator[Program, None]:
    if isinstance(programs, AsyncIterable):
        async for program in programs:
            yield _check_program(program)
    else:
        for program in programs:
            yield _check_program(program)


def _check_program(program: object) -> Program:
    if not isinstance(program, Program):
        raise UsageError(
            f"programs must be Program objects, got {type(program).__name__}: write Program(source=…)"
        )
    return program


async def run_code(
    programs: ProgramSource,
    limits: ProgramLimits | None = None,
    *,
    sandbox: SandboxSpec | str | None = None,
    concurrency: int | None = None,
    on_result: Callable[[int, ProgramResult], object] | None = None,
    check: OutputCheck | None = None,
) -> list[ProgramResult]:
    """Run programs, each in its own sandbox, and return their results in the order of the programs.

    `on_result(number, result)` is called for each program in order, as soon as its result and all results before
    it are available. The other arguments are those of `stream_code`.
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
    check: OutputCheck | None = None,
) -> list[ProgramResult]:
    """Run programs like `run_code`, for code without an event loop.

    If an event loop is running in this thread, it is blocked until the call returns.
    """

    async def main() -> list[ProgramResult]:
        return await run_code(
            programs, limits, sandbox=sandbox, concurrency=concurrency, on_result=on_result, check=check
        )

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    return _run_in_thread(main)


def _run_in_thread(main: Callable[[], Any]) -> list[ProgramResult]:
    """Run the coroutine that `main` returns in another thread; Ctrl-C in this thread cancels it."""
    state: dict[str, Any] = {}
    started = threading.Event()

    async def run_tracked() -> list[ProgramResult]:
        state["loop"], state["task"] = asyncio.get_running_loop(), asyncio.current_task()
        started.set()
        results: list[ProgramResult] = await main()
        return results

    def call() -> None:
        try:
            state["result"] = asyncio.run(run_tracked())
        except BaseException as error:  # noqa: BLE001  (raised again in the calling thread)
            state["error"] = error
        finally:
            started.set()

    thread = threading.Thread(target=call, name="rookery-run-code", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        started.wait(END_SECONDS)
        if "task" in state:
            with contextlib.suppress(RuntimeError):  # its event loop has already ended
                state["loop"].call_soon_threadsafe(state["task"].cancel)
        thread.join(END_SECONDS)
        raise
    if "error" in state:
        raise state["error"]
    results: list[ProgramResult] = state["result"]
    return results


def apply_check(check: OutputCheck, program: Program, result: ProgramResult) -> ProgramResult:
    """Return the result with the verdicts of the user's `check`.

    Cases in which the program failed, or whose standard output was captured only in part, keep their verdict.
    """
    if not program.cases or not result.cases:
        return result
    cases = tuple(
        _check_case(check, case, one) if one.ok and not one.stdout_dropped else one
        for case, one in zip(program.cases, result.cases, strict=True)
    )
    shown = next((one for one in cases if one.verdict != "passed"), cases[0])
    return msgspec.structs.replace(result, cases=cases, **shown.get_run_fields())


def _check_case(check: OutputCheck, case: Case, one: CaseResult) -> CaseResult:
    right = check(one.stdout, case)
    if not isinstance(right, bool):
        raise UsageError(f"check must return True or False, got {right!r:.80}")
    return msgspec.structs.replace(one, verdict="passed" if right else "wrong_answer")
