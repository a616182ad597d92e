"""Runs programs: each run in a sandbox of its own, in one process group, on one event loop.

Promises:
- no run sees a file, a process or a variable of another: a program's cases are runs of their own, and what a
  compiler made is copied into each of their sandboxes;
- expected outputs never enter a sandbox;
- a sandbox that fails is replaced, up to a budget; then the result is `failed` with its cause, and no exception;
- however a run ends, cancelled too, its sandbox is closed when it returns;
- at most `concurrency` sandboxes are open at once, over all programs and cases of one `Programs`.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from math import inf, isfinite
from typing import Any, Final, Self

import msgspec

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.core.errors import describe
from rookery.sandboxes import Command, Sandbox
from rookery.scoring.boxes import (
    TRIES,
    Gate,
    OpenBox,
    Providers,
    bounded_exec,
    in_fresh_box,
    limited,
    write_files,
)
from rookery.scoring.outputs import verdict_of
from rookery.scoring.programs import (
    DEFAULT_PROGRAM_LIMITS,
    NO_PROGRAM_LIMITS,
    Case,
    CaseResult,
    Compiled,
    Program,
    ProgramLimits,
    ProgramResult,
    encoded,
)

BINARY: Final = "main"
COMPILERS: Final[dict[str, tuple[str, ...]]] = {
    "c": ("gcc", "-O2", "-std=gnu17", "-o", BINARY),
    "c++": ("g++", "-O2", "-std=gnu++20", "-o", BINARY),
}
COMPILE_LIMITS: Final = ProgramLimits(wall=60.0, memory=2 << 30, output=64 << 10, pids=64, disk=256 << 20)
MOST_BINARY: Final = 128 << 20
MOST_COMPILED: Final = 8_000
"""Characters of what a compiler said that are kept."""


def default_concurrency() -> int:
    """Sandboxes at once: programs wait a little for processes, and more than this only queue in the kernel."""
    return max(4, 4 * len(os.sched_getaffinity(0)))


class Programs(AbstractAsyncContextManager["Programs", None]):
    """Runs programs on the event loop it was opened on.

    `providers`: shared ones, which stay open; else it has its own and closes them.
    """

    def __init__(
        self,
        sandbox: SandboxSpec | str | None = None,
        *,
        concurrency: int | None = None,
        providers: Providers | None = None,
    ) -> None:
        self.wanted = sandbox if isinstance(sandbox, SandboxSpec) else SandboxSpec(provider=sandbox or "")
        self.concurrency = concurrency or default_concurrency()
        self.gate: Gate = asyncio.Semaphore(self.concurrency)
        self._own = providers is None
        self._providers = providers or Providers()
        self._spec: SandboxSpec | None = None

    async def __aenter__(self) -> Self:
        try:
            self._spec = await self._providers.settle(self.wanted)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._own:
            await self._providers.close()

    @property
    def spec(self) -> SandboxSpec:
        """What sandboxes are, but for a program's limits."""
        assert self._spec is not None, "not open"
        return self._spec

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox; the caller closes it."""
        return await self._providers.create(spec)

    async def run(self, program: Program, limits: ProgramLimits | None = None) -> ProgramResult:
        """What came of it; raises nothing but its cancellation and our own bugs."""
        return await run_program(program, limits or NO_PROGRAM_LIMITS, self.spec, self.create, self.gate)

    async def stream(
        self, programs: Iterable[Program], limits: ProgramLimits | None = None
    ) -> AsyncGenerator[ProgramResult, None]:
        """Results in order; what is left when it is closed is cancelled, and has ended when that returns."""
        waiting: deque[asyncio.Task[ProgramResult]] = deque()
        todo = iter(programs)
        try:
            while True:
                while len(waiting) < 2 * self.concurrency and (program := next(todo, None)) is not None:
                    waiting.append(asyncio.create_task(self.run(program, limits)))
                if not waiting:
                    return
                result = await asyncio.shield(waiting[0])
                waiting.popleft()
                yield result
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


# ---- one program


async def run_program(
    program: Program,
    limits: ProgramLimits,
    spec: SandboxSpec,
    open_box: OpenBox,
    gate: Gate,
    last: float = inf,
) -> ProgramResult:
    """Compile the program if needed, then run it once, or once for each case.

    `last`: the event loop's time after which cases that have not ended have the verdict `time`.
    """
    limits = program.limits.over(limits).over(DEFAULT_PROGRAM_LIMITS)
    files = program.all_files
    made: Compiled | None = None
    try:
        if program.language in COMPILERS:
            made, binary = await _compiled(program, files, limits, spec, open_box, gate)
            if binary is None:
                return _uncompiled(program, made)
            files = {path: data for path, data in files.items() if path != program.main} | {BINARY: binary}
    except SandboxError as error:
        return _failed(program, error)
    if not program.cases:
        one, tries = await _case(program, Case(stdin=program.stdin), False, files, limits, spec, open_box, gate)
        return _whole(program, one, (), made, tries)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_in_time(_case(program, case, True, files, limits, spec, open_box, gate), last))
            for case in program.cases
        ]
    results = tuple(task.result()[0] for task in tasks)
    shown = next((result for result in results if result.verdict != "passed"), results[0])
    return _whole(program, shown, results, made, max(task.result()[1] for task in tasks))


async def _in_time(run: Coroutine[Any, Any, tuple[CaseResult, int]], last: float) -> tuple[CaseResult, int]:
    try:
        async with asyncio.timeout_at(last if isfinite(last) else None):
            return await run
    except TimeoutError:
        return CaseResult(status="time_limit", verdict="time", detail="the time for all cases was over"), 1


async def _case(
    program: Program,
    case: Case,
    judged: bool,
    files: dict[str, bytes],
    limits: ProgramLimits,
    spec: SandboxSpec,
    open_box: OpenBox,
    gate: Gate,
) -> tuple[CaseResult, int]:
    limits = case.limits.over(limits)
    command = Command(
        argv=(*_argv(program), *program.argv),
        stdin=encoded(case.stdin),
        env=program.env,
        wall=limits.wall,
        cpu_seconds=limits.cpu,
        warm=program.language == "python",
    )

    async def work(box: Sandbox) -> ExecResult:
        await write_files(box, files, executable=BINARY if program.language in COMPILERS else "")
        return await bounded_exec(box, command)

    try:
        result, tries = await in_fresh_box(open_box, limited(spec, limits), work, gate)
    except SandboxError as error:
        return CaseResult(status="failed", detail=str(error), cause=error.code), TRIES
    verdict = verdict_of(result, case.stdout, program.tolerance) if judged else None
    return (
        CaseResult(
            status=result.status,
            verdict=verdict,
            exit_code=result.exit_code,
            signal=result.signal,
            stdout=result.stdout.decode("utf-8", "replace"),
            stderr=result.stderr.decode("utf-8", "replace"),
            stdout_dropped=result.stdout_dropped,
            stderr_dropped=result.stderr_dropped,
            usage=result.usage,
            detail=result.detail,
        ),
        tries,
    )


def _argv(program: Program) -> tuple[str, ...]:
    if program.language == "python":
        return ("python3", program.main)
    return ("bash", program.main) if program.language == "bash" else (f"./{BINARY}",)


async def _compiled(
    program: Program,
    files: dict[str, bytes],
    limits: ProgramLimits,
    spec: SandboxSpec,
    open_box: OpenBox,
    gate: Gate,
) -> tuple[Compiled, bytes | None]:
    """How the compiler ended, and what it made. The program's own limits are for its runs."""
    argv = (*COMPILERS[program.language], program.main, "-lm")
    binary: bytes | None = None

    async def work(box: Sandbox) -> ExecResult:
        nonlocal binary
        await write_files(box, files)
        result = await bounded_exec(box, Command(argv=argv, wall=COMPILE_LIMITS.wall))
        if result.ok:
            try:
                binary = await box.read(BINARY, limit=MOST_BINARY)
            except OSError as error:
                detail = f"what it made cannot be used: {describe(error)}"
                return ExecResult(status="exited", exit_code=1, stderr=detail.encode())
        return result

    result = (await in_fresh_box(open_box, compiling(spec, limits), work, gate)).result
    if result.exit_code == 127 and result.detail:
        raise SandboxError(
            f"a {program.language} program needs {argv[0]}, and the sandbox has none: install it, or choose an "
            "image that has it",
            cause="sandbox.refused",
        )
    said = (result.stderr + result.stdout).decode("utf-8", "replace")[:MOST_COMPILED]
    made = Compiled(status=result.status, exit_code=result.exit_code, output=said, usage=result.usage)
    return made, binary


def compiling(spec: SandboxSpec, limits: ProgramLimits) -> SandboxSpec:
    """Return the spec of a sandbox to compile in.

    A compiler gets what the spec of the sandboxes allows, up to `COMPILE_LIMITS`, and no less than the program.
    """
    roomy = limited(spec, COMPILE_LIMITS)
    found: dict[str, int] = {}
    for name in ("memory", "pids", "disk"):
        most: int | None = getattr(spec, name)
        room: int = min(getattr(roomy, name), most) if most else getattr(roomy, name)
        found[name] = max(room, getattr(limits, name) or 0)
    return msgspec.structs.replace(roomy, **found)


def _uncompiled(program: Program, made: Compiled) -> ProgramResult:
    result = CaseResult(
        status=made.status, exit_code=made.exit_code, stderr=made.output, detail="it does not compile"
    )
    cases = (msgspec.structs.replace(result, verdict="crash"),) * len(program.cases)
    return _whole(program, result, cases, made, 1)


def _failed(program: Program, error: SandboxError) -> ProgramResult:
    one = CaseResult(status="failed", detail=str(error), cause=error.code)
    return _whole(program, one, (one,) * len(program.cases), None, TRIES)


def _whole(
    program: Program, shown: CaseResult, cases: tuple[CaseResult, ...], made: Compiled | None, tries: int
) -> ProgramResult:
    return ProgramResult(id=program.id, **shown.told(), cases=cases, compile=made, attempts=tries)
