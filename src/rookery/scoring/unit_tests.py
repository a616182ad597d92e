"""Run unit tests against a submission in fresh sandboxes.

With isolation `separate`, tests and submission run in two sandboxes and exchange lines of plain data. With
isolation `shared` they run in one process, and the grade is labelled as weaker.

Guarantees:
- `separate`: the submission's sandbox contains nothing of the tests and has no access to their process or to
  the verdicts. Whatever it sends is treated as a return value.
- `separate`: a submission that exits, writes too much or exceeds a limit fails the current test. It is started
  again for the next tests, at most `RESTARTS` times. A failure of the tests themselves is reported separately.
- `shared`: the tests enter the process after the submission was loaded, and a verdict counts only with a nonce
  that was sent with the tests.
- Whatever bytes the tests or the submission send, the result is a report. A malformed line counts as a crash.
- Every wait has a time limit: the wall time of a test, plus `START_SECONDS` when an interpreter starts. Both
  sandboxes are always closed.
"""

import asyncio
import secrets
from contextlib import AsyncExitStack
from functools import cache
from math import inf
from typing import Any, Final, Literal

import msgspec

from rookery.core import SandboxError, SandboxSpec
from rookery.sandbox_runtime import bundle
from rookery.sandboxes import Command, Sandbox
from rookery.scoring.fault_attribution import GraderExit
from rookery.scoring.fresh_sandboxes import OpenSandbox, SandboxGate, apply_limits, close_sandbox
from rookery.scoring.line_channel import TAIL, GraderChannel, MalformedLine, decode_line, encode_line
from rookery.scoring.programs import VERDICTS, ProgramLimits, Verdict
from rookery.scoring.test_analysis import Isolation, TestAnalysis

RESTARTS: Final = 3
"""Number of times that a submission that ended during a test is started again in a fresh sandbox."""
START_SECONDS: Final = 30.0
"""Seconds for Python to start in a sandbox. They do not count as time of a test."""
GRACE: Final = 0.5
"""Seconds after the time limit of a test in which its process can still report that the submission timed out."""
OUT_OF_TIME: Final = "the time limit for the whole grading was reached"
PROBE_SECONDS: Final = 10.0
"""Maximum time limit of `probe_tests` in seconds, in addition to `START_SECONDS`."""


class TestResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The name, verdict and failure detail of one test or test case."""

    name: str
    verdict: Verdict
    detail: str = ""


class TestReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The results of all tests, and how their execution ended."""

    isolation: Isolation
    end: GraderExit
    tests: tuple[TestResult, ...] = ()
    detail: str = ""
    printed: str = ""
    """The end of what the submission and the tests printed."""
    decided: str = ""
    """The method of the submission, such as its own `__eq__`, whose answer decided a test and could not be
    verified; empty if there was none."""


@cache
def _command(module: str) -> tuple[str, ...]:
    return bundle.build_command("grader", module)


class _SandboxStarter:
    """Opens sandboxes and starts Rookery's grader programs in them: the test runner or the submission's host."""

    def __init__(self, spec: SandboxSpec, open_sandbox: OpenSandbox, stack: AsyncExitStack) -> None:
        self._spec = spec
        self._open_sandbox = open_sandbox
        self._stack = stack

    async def start(self, program: str, cpu: float | None = None) -> GraderChannel:
        sandbox: Sandbox = await self._open_sandbox(self._spec)
        self._stack.push_async_callback(close_sandbox, sandbox)
        command = Command(argv=_command(program), warm=True, cpu_seconds=cpu)
        return GraderChannel(await sandbox.start(command), sandbox)


class _SubmissionProcess:
    """Runs a submission in its own sandbox and forwards calls of the tests to it.

    The sandbox is opened by the first call. After the submission ended, the next call opens a fresh one.
    """

    def __init__(self, starter: _SandboxStarter, source: str, limits: ProgramLimits) -> None:
        self._starter = starter
        self._source = encode_line({"source": source})
        self._limits = limits
        self._channel: GraderChannel | None = None
        self._left = 1 + RESTARTS
        self._last: tuple[Verdict, str] | None = None
        self.loads = True
        """False if the submission's own code raised an exception while it was loaded."""
        self._final = False
        """True if every further call fails with `_last`, because the submission does not load or was restarted too
        often."""

    @property
    def tail(self) -> bytes:
        return self._channel.tail if self._channel is not None else self._tail

    _tail = b""

    async def call(self, line: bytes, until: float) -> tuple[bytes, bytes, float]:
        """Forward a call of the tests to the submission.

        Return the kind and data of the reply, and the event loop time at which the current test times out. This
        time moves if the call had to load the submission first, which has its own time limit.
        """
        if self._final and self._last is not None:
            return *self._make_death_reply(*self._last), until
        if self._channel is None:
            if self._left == 0:
                self._final = True
                return *self._make_death_reply(*(self._last or ("crash", "the submission ended too often"))), until
            until = await self._load()
            if self._channel is None:
                return *self._make_death_reply(*(self._last or ("crash", ""))), until
        reply = await self._exchange(b"c", line, until)
        if reply is None:
            return *self._make_death_reply(*(self._last or ("crash", ""))), until
        return b"r", reply, until

    async def _load(self) -> float:
        """Open a sandbox and load the submission, with a time limit of its own.

        Return the event loop time at which the current test times out. The test gets its full time after loading.
        """
        self._left -= 1
        loop = asyncio.get_running_loop()
        self._channel = await self._starter.start("submission", self._limits.cpu)
        until = loop.time() + (self._limits.wall or START_SECONDS)
        reply = await self._exchange(b"s", self._source, until, loading=True)
        if reply is None:
            self._final = True
        return loop.time() + (self._limits.wall or START_SECONDS)

    async def _exchange(self, kind: bytes, data: bytes, until: float, *, loading: bool = False) -> bytes | None:
        channel = self._channel
        assert channel is not None
        try:
            async with asyncio.timeout_at(until):
                await channel.send(kind, data)
                line = await channel.read_line()
        except TimeoutError:
            await self._end("time", f"the submission was killed after {self._limits.wall:g} s")
            return None
        except BrokenPipeError:
            line = None
        if line is None:
            verdict, detail = await channel.wait()
            if verdict == "lost":
                raise SandboxError(f"the submission's sandbox was lost during its tests: {detail}")
            await self._end(verdict, detail)
            return None
        if line[:1] == b"x" and loading:
            self.loads = False
            await self._end("crash", parse_load_error(line[1:]))
            return None
        if line[:1] != b"r":
            await self._end("crash", "the reply of the submission's process does not follow the protocol")
            return None
        return line[1:]

    async def _end(self, verdict: Verdict, detail: str) -> None:
        channel, self._channel = self._channel, None
        self._last = (verdict, detail)
        if channel is not None:
            self._tail = channel.tail
            await channel.close()
            # Closed before the next one is opened, so that a grading holds at most two sandboxes.
            await close_sandbox(channel.sandbox)

    @staticmethod
    def _make_death_reply(verdict: str, detail: str) -> tuple[bytes, bytes]:
        return b"d", msgspec.json.encode({"verdict": verdict, "detail": detail})


def parse_load_error(data: bytes) -> str:
    """Return the error message, of limited length, of a submission that does not load."""
    try:
        plain = decode_line(data)
        return f"it does not load: {plain['name']!s:.100}: {plain['said']!s:.1000}"
    except (MalformedLine, LookupError, TypeError, RecursionError):
        return "it does not load"


class _TestProgress:
    """Collects the verdicts that the process of the tests reports."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.results: dict[int, TestResult] = {}
        self.current: int | None = None
        self.decided = ""

    def add(self, kind: bytes, plain: Any) -> None:
        """Process one reported line: test names (`n`), the start of a test (`b`) or its verdict (`v`).

        Raise `MalformedLine` if the line does not follow the protocol.
        """
        if kind == b"n":
            if not isinstance(plain, list) or not all(isinstance(name, str) for name in plain):
                raise MalformedLine("the reported test names are not a list of strings")
            self.names = plain
        elif kind == b"b":
            self.current = self._number(plain)
        elif kind == b"v":
            if not isinstance(plain, dict) or plain.get("verdict") not in VERDICTS:
                raise MalformedLine("the tests reported an unknown verdict")
            number, detail = self._number(plain.get("n")), plain.get("detail")
            if not isinstance(detail, str):
                raise MalformedLine("the tests reported a verdict without a detail")
            self.results[number] = TestResult(name=self.names[number], verdict=plain["verdict"], detail=detail)
            self.current = None
            if isinstance(by := plain.get("by"), str):
                self.decided = self.decided or by
        else:
            raise MalformedLine("the tests sent a line of unknown kind")

    def _number(self, plain: Any) -> int:
        if type(plain) is not int or not 0 <= plain < len(self.names):
            raise MalformedLine("the tests reported a test number that does not exist")
        return plain

    def get_results(self, verdict: Verdict, detail: str) -> tuple[TestResult, ...]:
        """Return the results of all tests. Tests that did not finish get the given verdict."""
        names = self.names or ["tests"]
        missing = [TestResult(name=name, verdict=verdict, detail=detail) for name in names]
        return tuple(self.results.get(at, missing[at]) for at in range(len(names)))


async def run_tests(
    tests: str | list[str],
    submission: str,
    analysis: TestAnalysis,
    *,
    isolation: Isolation,
    entry_point: str = "",
    limits: ProgramLimits,
    spec: SandboxSpec,
    open_sandbox: OpenSandbox,
    gate: SandboxGate,
    deadline: float = inf,
) -> TestReport:
    """Run the tests once against a submission. Raise `SandboxError` if a sandbox fails.

    `analysis` is the result of `analyze_tests(tests)`: which names of the submission the tests use. `limits.wall`
    applies to each test. Tests that have not ended at `deadline` (event loop time) get the verdict `time`.
    """
    message = _test_message(tests, analysis, entry_point)
    async with gate, AsyncExitStack() as stack:
        starter = _SandboxStarter(apply_limits(spec, limits), open_sandbox, stack)
        if isolation == "separate":
            return await _run_separate(starter, message, submission, limits, deadline)
        return await _run_shared(starter, message, submission, limits, deadline)


async def probe_tests(
    tests: str | list[str],
    analysis: TestAnalysis,
    *,
    entry_point: str = "",
    limits: ProgramLimits,
    spec: SandboxSpec,
    open_sandbox: OpenSandbox,
    gate: SandboxGate,
) -> str:
    """Run the tests without a submission, to find out whether they would pass values to it that are not plain
    data.

    Such values cannot be sent to a submission in another sandbox. Return a description of the first one, or an
    empty string if there is none or the tests do not finish in time.
    """
    message = {**_test_message(tests, analysis, entry_point), "probe": True}
    async with gate, AsyncExitStack() as stack:
        channel = await _SandboxStarter(apply_limits(spec, limits), open_sandbox, stack).start("runner")
        try:
            await channel.send(b"t", encode_line(message))
            async with asyncio.timeout(START_SECONDS + min(limits.wall or PROBE_SECONDS, PROBE_SECONDS)):
                line = await channel.read_line()
            if line is None:
                _to_grader_end((await channel.wait())[0])
            if line is None or line[:1] != b"i":
                return ""
            return str(decode_line(line[1:])[1])[:1000]
        except (TimeoutError, BrokenPipeError, MalformedLine, LookupError, TypeError):
            return ""
        finally:
            await channel.close()


def _test_message(tests: str | list[str], analysis: TestAnalysis, entry_point: str) -> dict[str, Any]:
    return {"tests": tests, "names": analysis.names, "entry_point": entry_point, "probe": False}


async def _run_separate(
    starter: _SandboxStarter, message: dict[str, Any], source: str, limits: ProgramLimits, deadline: float
) -> TestReport:
    channel = await starter.start("runner")
    submission = _SubmissionProcess(starter, source, limits)
    progress = _TestProgress()
    wall = limits.wall or START_SECONDS
    loop = asyncio.get_running_loop()
    end: GraderExit = "scored"
    detail = ""
    try:
        await channel.send(b"t", encode_line(message))
        until = loop.time() + START_SECONDS + wall
        while True:
            async with asyncio.timeout_at(min(until + GRACE, deadline)):
                line = await channel.read_line()
            if line is None:
                died, detail = await channel.wait()
                end = _to_grader_end(died)
                break
            kind, data = line[:1], line[1:]
            if kind == b"c":
                kind, reply, until = await submission.call(data, min(until, deadline))
                # Closing the submission's sandbox does not count as time of the tests.
                until = max(until, loop.time())
                await channel.send(kind, reply)
                continue
            plain = decode_line(data)
            if kind == b"e":
                end = "scored" if progress.names else "no_tests"
                break
            if kind == b"f":
                verdict, detail = parse_failure(plain)
                end = "crash"
                if verdict != "crash" or not submission.loads:
                    end = "scored"
                    progress.names = progress.names or ["tests"]
                    return _make_report("separate", end, progress, verdict, detail, channel, submission.tail)
                break
            progress.add(kind, plain)
            if kind == b"b":
                until = loop.time() + wall
    except TimeoutError:
        if loop.time() >= deadline:
            return _make_report("separate", "scored", progress, "time", OUT_OF_TIME, channel, submission.tail)
        end, detail = "time", f"a test took longer than {wall:g} s"
    except MalformedLine as error:
        end, detail = "crash", str(error)
    except BrokenPipeError:
        died, detail = await channel.wait()
        end = _to_grader_end(died)
    finally:
        await channel.close()
    return _make_report("separate", end, progress, "crash", detail, channel, submission.tail)


def _to_grader_end(verdict: Verdict | Literal["lost"]) -> GraderExit:
    if verdict == "lost":
        raise SandboxError("the sandbox of the tests was lost")
    return "crash" if verdict == "passed" or verdict == "wrong_answer" else verdict  # noqa: PLR1714  (mypy follows it)


async def _run_shared(
    starter: _SandboxStarter, message: dict[str, Any], source: str, limits: ProgramLimits, deadline: float
) -> TestReport:
    channel = await starter.start("runner", limits.cpu)
    progress = _TestProgress()
    wall = limits.wall or START_SECONDS
    loop = asyncio.get_running_loop()
    nonce = secrets.token_hex(16)
    end: GraderExit = "crash"
    detail = ""
    try:
        until = loop.time() + START_SECONDS
        async with asyncio.timeout_at(until):
            await channel.send(b"s", encode_line({"source": source}))
        async with asyncio.timeout_at(min(loop.time() + wall, deadline)):
            line = await channel.read_line()
        if line is not None and line[:1] == b"r":
            await channel.send(b"t", encode_line({**message, "nonce": nonce}))
        elif line is not None and line[:1] == b"x":
            return _make_report(
                "shared", "scored", progress, "crash", f"it does not load: {_load_detail(line)}", channel, b""
            )
        until = loop.time() + wall
        while line is not None:
            async with asyncio.timeout_at(min(until, deadline)):
                line = await channel.read_line()
            if line is None:
                break
            plain = parse_with_nonce(line, nonce)
            if plain is None:
                continue  # not from the tests
            if line[:1] == b"e":
                end = "scored" if progress.names else "no_tests"
                break
            if line[:1] == b"f":
                detail = parse_failure(plain)[1]
                break
            progress.add(line[:1], plain)
            if line[:1] == b"b":
                until = loop.time() + wall
        else:
            detail = "the process of the tests closed its channel"
        if line is None:
            verdict, detail = await channel.wait()
            end = _to_grader_end(verdict)
    except TimeoutError:
        if loop.time() >= deadline:
            return _make_report("shared", "scored", progress, "time", OUT_OF_TIME, channel, b"")
        end, detail = "time", f"a test took longer than {wall:g} s"
    except MalformedLine as error:
        end, detail = "crash", str(error)
    except BrokenPipeError:
        verdict, detail = await channel.wait()
        end = _to_grader_end(verdict)
    finally:
        await channel.close()
    return _make_report("shared", end, progress, "crash", detail, channel, b"")


def _load_detail(line: bytes) -> str:
    try:
        return str(decode_line(line[1:])[1])[:1000]
    except (MalformedLine, LookupError, TypeError, RecursionError):
        return ""


def parse_failure(plain: Any) -> tuple[Verdict, str]:
    """Return the verdict and detail that tests reported because they could not start."""
    if not isinstance(plain, list) or len(plain) != 2 or plain[0] not in VERDICTS or not isinstance(plain[1], str):
        raise MalformedLine("the tests could not start and reported a malformed error")
    return plain[0], plain[1]


def parse_with_nonce(line: bytes, nonce: str) -> Any:
    """Return the data of a line that carries the nonce, or None if the line does not carry it.

    JSON `null` is returned as an empty list.
    """
    try:
        plain = decode_line(line[1:])
    except MalformedLine:
        return None
    if not isinstance(plain, list) or len(plain) != 2 or plain[0] != nonce:
        return None
    return [] if plain[1] is None else plain[1]


def _make_report(
    isolation: Isolation,
    end: GraderExit,
    progress: _TestProgress,
    rest: Verdict,
    detail: str,
    channel: GraderChannel,
    tail: bytes,
) -> TestReport:
    verdict: Verdict = end if end == "time" or end == "memory" or end == "output" else rest  # noqa: PLR1714
    results = progress.get_results(verdict, detail) if end != "no_tests" else ()
    printed = (tail + channel.tail)[-TAIL:].decode("utf-8", "replace")
    return TestReport(
        isolation=isolation, end=end, tests=results, detail=detail, printed=printed, decided=progress.decided
    )
