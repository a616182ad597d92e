"""Execute programs in fresh sandboxes, on one event loop.

Guarantees:
- Every execution has its own sandbox and sees no file, process or variable of another. A program with test cases
  is executed once per case. A compiled binary is copied into each of these sandboxes.
- If a sandbox fails, the execution is tried in at most `MAX_TRIES` sandboxes. After that the result has the status
  `failed` with a cause; no exception is raised.
- However an execution ends, even by cancellation, its sandbox is closed.
- At most `concurrency` sandboxes are open at once, over all programs and cases of one `ProgramRunner`.

Outputs are compared in this process: the expected ones are not sent to a sandbox.
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
from rookery.scoring.fresh_sandboxes import (
    MAX_TRIES,
    OpenSandbox,
    SandboxGate,
    SharedProviders,
    apply_limits,
    exec_with_deadline,
    run_in_fresh_sandbox,
    write_files,
)
from rookery.scoring.outputs import get_verdict
from rookery.scoring.programs import (
    DEFAULT_PROGRAM_LIMITS,
    NO_PROGRAM_LIMITS,
    Case,
    CaseResult,
    CompileResult,
    Program,
    ProgramLimits,
    ProgramResult,
    encode_content,
)

BINARY: Final = "main"
COMPILERS: Final[dict[str, tuple[str, ...]]] = {
    "c": ("gcc", "-O2", "-std=gnu17", "-o", BINARY),
    "c++": ("g++", "-O2", "-std=gnu++20", "-o", BINARY),
}
COMPILE_LIMITS: Final = ProgramLimits(wall=60.0, memory=2 << 30, output=64 << 10, pids=64, disk=256 << 20)
MAX_BINARY: Final = 128 << 20
MAX_COMPILER_OUTPUT: Final = 8_000
"""Maximum number of characters of the compiler's output in a result."""


def default_concurrency() -> int:
    """Return how many sandboxes to open at once by default: four for each CPU that this process may use.

    Programs rarely wait for I/O, so more of them would only wait for a CPU.
    """
    return max(4, 4 * len(os.sched_getaffinity(0)))


class ProgramRunner(AbstractAsyncContextManager["ProgramRunner", None]):
    """Context manager that runs programs on the event loop on which it was entered.

    `sandbox` is a spec or the name of a provider; by default the provider is chosen. `concurrency` is the
    maximum number of sandboxes open at once. Pass `providers` to share open providers; otherwise the runner
    opens its own and closes them at the end.
    """

    def __init__(
        self,
        sandbox: SandboxSpec | str | None = None,
        *,
        concurrency: int | None = None,
        providers: SharedProviders | None = None,
    ) -> None:
        self.requested_spec = sandbox if isinstance(sandbox, SandboxSpec) else SandboxSpec(provider=sandbox or "")
        self.concurrency = concurrency or default_concurrency()
        self.gate: SandboxGate = asyncio.Semaphore(self.concurrency)
        self._own = providers is None
        self._providers = providers or SharedProviders()
        self._spec: SandboxSpec | None = None

    async def __aenter__(self) -> Self:
        try:
            self._spec = await self._providers.resolve(self.requested_spec)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the providers that this runner opened."""
        if self._own:
            await self._providers.close()

    @property
    def spec(self) -> SandboxSpec:
        """The spec of the sandboxes, with the provider filled in and without the limits of a program."""
        assert self._spec is not None, "ProgramRunner is not open: use it in an async with statement"
        return self._spec

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create a sandbox, which the caller must close."""
        return await self._providers.create(spec)

    async def run(self, program: Program, limits: ProgramLimits | None = None) -> ProgramResult:
        """Run one program. A failure of its sandbox is reported in the result, not raised."""
        return await run_program(program, limits or NO_PROGRAM_LIMITS, self.spec, self.create, self.gate)

    async def stream(
        self, programs: Iterable[Program], limits: ProgramLimits | None = None
    ) -> AsyncGenerator[ProgramResult, None]:
        """Run programs and yield their results in the order of the programs.

        Closing the generator cancels the remaining programs and waits for their end.
        """
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
    open_sandbox: OpenSandbox,
    gate: SandboxGate,
    deadline: float = inf,
) -> ProgramResult:
    """Compile the program if needed, then run it once or, if it has test cases, once for each case.

    Cases that have not ended at `deadline` (event loop time) get the verdict `time`. A failure of a sandbox is
    reported in the result.
    """
    limits = program.limits.over(limits).over(DEFAULT_PROGRAM_LIMITS)
    files = program.all_files
    made: CompileResult | None = None
    try:
        if program.language in COMPILERS:
            made, binary = await _compile(program, files, limits, spec, open_sandbox, gate)
            if binary is None:
                return _compile_failure(program, made)
            files = {path: data for path, data in files.items() if path != program.main} | {BINARY: binary}
    except SandboxError as error:
        return _sandbox_failure(program, error)
    if not program.cases:
        one, tries = await _run_case(
            program, Case(stdin=program.stdin), False, files, limits, spec, open_sandbox, gate
        )
        return _program_result(program, one, (), made, tries)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                _run_before(_run_case(program, case, True, files, limits, spec, open_sandbox, gate), deadline)
            )
            for case in program.cases
        ]
    results = tuple(task.result()[0] for task in tasks)
    shown = next((result for result in results if result.verdict != "passed"), results[0])
    return _program_result(program, shown, results, made, max(task.result()[1] for task in tasks))


async def _run_before(run: Coroutine[Any, Any, tuple[CaseResult, int]], deadline: float) -> tuple[CaseResult, int]:
    try:
        async with asyncio.timeout_at(deadline if isfinite(deadline) else None):
            return await run
    except TimeoutError:
        return CaseResult(
            status="time_limit",
            verdict="time",
            detail="the time limit for all cases together was reached before this case ended",
        ), 1


async def _run_case(
    program: Program,
    case: Case,
    has_verdict: bool,
    files: dict[str, bytes],
    limits: ProgramLimits,
    spec: SandboxSpec,
    open_sandbox: OpenSandbox,
    gate: SandboxGate,
) -> tuple[CaseResult, int]:
    limits = case.limits.over(limits)
    command = Command(
        argv=(*_argv(program), *program.argv),
        stdin=encode_content(case.stdin),
        env=program.env,
        wall=limits.wall,
        cpu_seconds=limits.cpu,
        warm=program.language == "python",
    )

    async def job(sandbox: Sandbox) -> ExecResult:
        await write_files(sandbox, files, executable=BINARY if program.language in COMPILERS else "")
        return await exec_with_deadline(sandbox, command)

    try:
        result, tries = await run_in_fresh_sandbox(open_sandbox, apply_limits(spec, limits), job, gate)
    except SandboxError as error:
        return CaseResult(status="failed", detail=str(error), cause=error.code), MAX_TRIES
    verdict = get_verdict(result, case.stdout, program.tolerance) if has_verdict else None
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


async def _compile(
    program: Program,
    files: dict[str, bytes],
    limits: ProgramLimits,
    spec: SandboxSpec,
    open_sandbox: OpenSandbox,
    gate: SandboxGate,
) -> tuple[CompileResult, bytes | None]:
    """Compile a program; return how the compiler ended, and the binary or None if it produced none."""
    argv = (*COMPILERS[program.language], program.main, "-lm")
    binary: bytes | None = None

    async def job(sandbox: Sandbox) -> ExecResult:
        nonlocal binary
        await write_files(sandbox, files)
        result = await exec_with_deadline(sandbox, Command(argv=argv, wall=COMPILE_LIMITS.wall))
        if result.ok:
            try:
                binary = await sandbox.read(BINARY, limit=MAX_BINARY)
            except OSError as error:
                detail = f"cannot use the compiled binary: {describe(error)}"
                return ExecResult(status="exited", exit_code=1, stderr=detail.encode())
        return result

    result = (await run_in_fresh_sandbox(open_sandbox, get_compile_spec(spec, limits), job, gate)).result
    if result.exit_code == 127 and result.detail:
        raise SandboxError(
            (
                f"the sandbox has no {argv[0]}, which a {program.language} program needs: install it, or "
                "use an image that contains it"
            ),
            cause="sandbox.refused",
        )
    output = (result.stderr + result.stdout).decode("utf-8", "replace")[:MAX_COMPILER_OUTPUT]
    made = CompileResult(status=result.status, exit_code=result.exit_code, output=output, usage=result.usage)
    return made, binary


def get_compile_spec(spec: SandboxSpec, limits: ProgramLimits) -> SandboxSpec:
    """Return the spec of the sandbox in which a program is compiled.

    Time and output are limited by `COMPILE_LIMITS`. Memory, processes and disk are limited by `COMPILE_LIMITS` or
    `spec`, whichever is lower, but never to less than the program itself may use (`limits`).
    """
    spec_for_compiler = apply_limits(spec, COMPILE_LIMITS)
    limits_for_compiler: dict[str, int] = {}
    for name in ("memory", "pids", "disk"):
        most: int | None = getattr(spec, name)
        allowed: int = min(getattr(spec_for_compiler, name), most) if most else getattr(spec_for_compiler, name)
        limits_for_compiler[name] = max(allowed, getattr(limits, name) or 0)
    return msgspec.structs.replace(spec_for_compiler, **limits_for_compiler)


def _compile_failure(program: Program, made: CompileResult) -> ProgramResult:
    result = CaseResult(
        status=made.status, exit_code=made.exit_code, stderr=made.output, detail="the program does not compile"
    )
    cases = (msgspec.structs.replace(result, verdict="crash"),) * len(program.cases)
    return _program_result(program, result, cases, made, 1)


def _sandbox_failure(program: Program, error: SandboxError) -> ProgramResult:
    one = CaseResult(status="failed", detail=str(error), cause=error.code)
    return _program_result(program, one, (one,) * len(program.cases), None, MAX_TRIES)


def _program_result(
    program: Program, shown: CaseResult, cases: tuple[CaseResult, ...], made: CompileResult | None, tries: int
) -> ProgramResult:
    return ProgramResult(id=program.id, **shown.get_run_fields(), cases=cases, compile=made, attempts=tries)
