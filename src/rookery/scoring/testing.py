"""Run unit tests against a submission, in fresh sandboxes.

In the form `separate` tests and submission are in two sandboxes, and lines of plain data are carried between them.
In the form `shared` they are one process, which is labelled weaker.

Guarantees:
- `separate`: the submission's sandbox holds nothing of the tests, and it has no access to the tests' process or to
  the verdicts: what it says is taken for a return value, whatever it is;
- a submission that ends, floods or overruns a limit costs the case that it did so in, and gets a few fresh
  sandboxes for the next ones; the end of the tests themselves is told apart from it;
- `shared`: the tests enter the process after the submission has run, and a verdict counts only with a nonce that
  came with them, at the end of all of them;
- whatever bytes either program sends, the result is a report: a line that cannot be read is a crash;
- every wait is bounded by the case's wall time, and however it ends, both sandboxes are closed.
"""

import asyncio
import secrets
from contextlib import AsyncExitStack
from math import inf
from typing import Any, Final, Literal, TypeAlias

import msgspec

from rookery.core import SandboxError, SandboxSpec
from rookery.sandboxes import Command, Sandbox
from rookery.scoring import inside
from rookery.scoring.boxes import Gate, OpenBox, closed, limited
from rookery.scoring.forms import Form, Uses
from rookery.scoring.programs import VERDICTS, ProgramLimits, Verdict
from rookery.scoring.wires import TAIL, BadLine, Wire, line_of, parsed

RESTARTS: Final = 3
"""Fresh sandboxes for a submission that ended under a case."""
START_SECONDS: Final = 30.0
"""For a sandbox's Python to be there: our time, not the submission's."""
GRACE: Final = 0.5
"""Seconds that tests have more than the submission they wait for."""
OVER: Final = "the time for the whole grading was over"
PROBE_SECONDS: Final = 10.0
"""For tests to show, without a submission, what they pass to one."""

GraderEnd: TypeAlias = Literal["ended", "time", "memory", "output", "crash", "lost", "no_tests"]


class TestResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One test, by the name it has in its source."""

    name: str
    verdict: Verdict
    detail: str = ""


class TestReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the tests said, and how they themselves ended."""

    form: Form
    end: GraderEnd
    tests: tuple[TestResult, ...] = ()
    detail: str = ""
    printed: str = ""
    """The end of what the submission printed, and of what the tests did."""
    decided: str = ""
    """What the submission's own methods decided in a test, and the tests could not check; empty: nothing."""


class _Side:
    """Opens sandboxes with one of our programs in them."""

    def __init__(self, spec: SandboxSpec, open_box: OpenBox, stack: AsyncExitStack) -> None:
        self._spec = spec
        self._open_box = open_box
        self._stack = stack

    async def start(self, program: str, cpu: float | None = None) -> Wire:
        box: Sandbox = await self._open_box(self._spec)
        self._stack.push_async_callback(closed, box)
        command = Command(argv=inside.words(program), warm=True, cpu_seconds=cpu)
        return Wire(await box.start(command), box)


class _Submission:
    """The submission's side, started when it is first needed, and again after it ended."""

    def __init__(self, side: _Side, source: str, limits: ProgramLimits) -> None:
        self._side = side
        self._source = line_of({"source": source})
        self._limits = limits
        self._wire: Wire | None = None
        self._left = 1 + RESTARTS
        self._last: tuple[Verdict, str] | None = None
        self._final = False
        """Whether every call is answered with `_last`: it does not load, or has used up its sandboxes."""

    @property
    def tail(self) -> bytes:
        return self._wire.tail if self._wire is not None else self._kept

    _kept = b""

    async def ask(self, line: bytes, until: float) -> tuple[bytes, bytes, float]:
        """The kind and data of what the tests are to be told, and until when they may take; loading has its own
        time."""
        if self._final and self._last is not None:
            return *self._dead(*self._last), until
        if self._wire is None:
            if self._left == 0:
                self._final = True
                return *self._dead(*(self._last or ("crash", "it ended too often"))), until
            until = await self._load()
            if self._wire is None:
                return *self._dead(*(self._last or ("crash", ""))), until
        reply = await self._exchange(b"c", line, until)
        if reply is None:
            return *self._dead(*(self._last or ("crash", ""))), until
        return b"r", reply, until

    async def _load(self) -> float:
        """Runs the module. That is a case's time too: whoever loops there has it all."""
        self._left -= 1
        loop = asyncio.get_running_loop()
        self._wire = await self._side.start("submission", self._limits.cpu)
        until = loop.time() + (self._limits.wall or START_SECONDS)
        reply = await self._exchange(b"s", self._source, until, loading=True)
        if reply is None:
            self._final = True
        return loop.time() + (self._limits.wall or START_SECONDS)

    async def _exchange(self, kind: bytes, data: bytes, until: float, *, loading: bool = False) -> bytes | None:
        wire = self._wire
        assert wire is not None
        try:
            async with asyncio.timeout_at(until):
                await wire.send(kind, data)
                line = await wire.line()
        except TimeoutError:
            await self._ended("time", f"killed after {self._limits.wall:g} s")
            return None
        except BrokenPipeError:
            line = None
        if line is None:
            verdict, detail = await wire.ended()
            if verdict == "lost":
                raise SandboxError(f"the submission's sandbox was lost under its tests: {detail}")
            await self._ended(verdict, detail)
            return None
        if line[:1] == b"x" and loading:
            await self._ended("crash", _told(line[1:]))
            return None
        if line[:1] != b"r":
            await self._ended("crash", "what it answered is no answer")
            return None
        return line[1:]

    async def _ended(self, verdict: Verdict, detail: str) -> None:
        wire, self._wire = self._wire, None
        self._last = (verdict, detail)
        if wire is not None:
            self._kept = wire.tail
            await wire.aclose()
            await closed(wire.box)  # before the next one: a grading holds two sandboxes

    @staticmethod
    def _dead(verdict: str, detail: str) -> tuple[bytes, bytes]:
        return b"d", msgspec.json.encode({"verdict": verdict, "detail": detail})


def _told(data: bytes) -> str:
    """Return why a submission does not load, in its own words, bounded."""
    try:
        plain = parsed(data)
        return f"it does not load: {plain['name']!s:.100}: {plain['said']!s:.1000}"
    except (BadLine, LookupError, TypeError, RecursionError):
        return "it does not load"


class _Board:
    """Collects what the tests have reported so far."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.results: dict[int, TestResult] = {}
        self.current: int | None = None
        self.decided = ""

    def take(self, kind: bytes, plain: Any) -> None:
        """Take a report; `BadLine` where it is none."""
        if kind == b"n":
            if not isinstance(plain, list) or not all(isinstance(name, str) for name in plain):
                raise BadLine("the names of tests are not a list of texts")
            self.names = plain
        elif kind == b"b":
            self.current = self._number(plain)
        elif kind == b"v":
            if not isinstance(plain, dict) or plain.get("verdict") not in VERDICTS:
                raise BadLine("a verdict that is none")
            number, detail = self._number(plain.get("n")), plain.get("detail")
            if not isinstance(detail, str):
                raise BadLine("a verdict without a text")
            self.results[number] = TestResult(name=self.names[number], verdict=plain["verdict"], detail=detail)
            self.current = None
            if isinstance(by := plain.get("by"), str):
                self.decided = self.decided or by
        else:
            raise BadLine("a line of no known kind")

    def _number(self, plain: Any) -> int:
        if type(plain) is not int or not 0 <= plain < len(self.names):
            raise BadLine("the number of a test that is none")
        return plain

    def all(self, verdict: Verdict, detail: str) -> tuple[TestResult, ...]:
        """Return all results; tests that did not come to an end have this one."""
        names = self.names or ["tests"]
        missing = [TestResult(name=name, verdict=verdict, detail=detail) for name in names]
        return tuple(self.results.get(at, missing[at]) for at in range(len(names)))


async def run_tests(
    tests: str | list[str],
    submission: str,
    uses: Uses,
    *,
    form: Form,
    entry_point: str = "",
    limits: ProgramLimits,
    spec: SandboxSpec,
    open_box: OpenBox,
    gate: Gate,
    last: float = inf,
) -> TestReport:
    """Run the tests once; `SandboxError` when a sandbox failed. `limits.wall` is for each test.

    `last`: the event loop's time after which tests that have not ended have the verdict `time`.
    """
    given = _given(tests, uses, entry_point)
    async with gate, AsyncExitStack() as stack:
        side = _Side(limited(spec, limits), open_box, stack)
        if form == "separate":
            return await _separate(side, given, submission, limits, last)
        return await _shared(side, given, submission, limits, last)


async def probe_tests(
    tests: str | list[str],
    uses: Uses,
    *,
    entry_point: str = "",
    limits: ProgramLimits,
    spec: SandboxSpec,
    open_box: OpenBox,
    gate: Gate,
) -> str:
    """Run the tests without a submission; return what they pass to one that is not plain data, or an empty text.

    Tests that come to no end here are said to pass plain data: what they do with a submission is not known.
    """
    given = {**_given(tests, uses, entry_point), "probe": True}
    async with gate, AsyncExitStack() as stack:
        wire = await _Side(limited(spec, limits), open_box, stack).start("grader")
        try:
            await wire.send(b"t", line_of(given))
            async with asyncio.timeout(START_SECONDS + min(limits.wall or PROBE_SECONDS, PROBE_SECONDS)):
                line = await wire.line()
            if line is None:
                _as_end((await wire.ended())[0])
            if line is None or line[:1] != b"i":
                return ""
            return str(parsed(line[1:])[1])[:1000]
        except (TimeoutError, BrokenPipeError, BadLine, LookupError, TypeError):
            return ""
        finally:
            await wire.aclose()


def _given(tests: str | list[str], uses: Uses, entry_point: str) -> dict[str, Any]:
    return {"tests": tests, "names": uses.names, "entry_point": entry_point, "probe": False}


async def _separate(
    side: _Side, given: dict[str, Any], source: str, limits: ProgramLimits, last: float
) -> TestReport:
    wire = await side.start("grader")
    submission = _Submission(side, source, limits)
    board = _Board()
    wall = limits.wall or START_SECONDS
    loop = asyncio.get_running_loop()
    end: GraderEnd = "ended"
    detail = ""
    try:
        await wire.send(b"t", line_of(given))
        until = loop.time() + START_SECONDS + wall
        while True:
            async with asyncio.timeout_at(min(until + GRACE, last)):
                line = await wire.line()
            if line is None:
                died, detail = await wire.ended()
                end = _as_end(died)
                break
            kind, data = line[:1], line[1:]
            if kind == b"c":
                told, answer, until = await submission.ask(data, min(until, last))
                until = max(until, loop.time())  # its end, and its sandbox's, took no time of the tests'
                await wire.send(told, answer)
                continue
            plain = parsed(data)
            if kind == b"e":
                end = "ended" if board.names else "no_tests"
                break
            if kind == b"f":
                verdict, detail = _failure(plain)
                end = "crash"
                if verdict != "crash" or detail.startswith("it does not load"):
                    end = "ended"
                    board.names = board.names or ["tests"]
                    return _report("separate", end, board, verdict, detail, wire, submission.tail)
                break
            board.take(kind, plain)
            if kind == b"b":
                until = loop.time() + wall
    except TimeoutError:
        if loop.time() >= last:
            return _report("separate", "ended", board, "time", OVER, wire, submission.tail)
        end, detail = "time", f"a test took longer than {wall:g} s"
    except BadLine as error:
        end, detail = "crash", str(error)
    except BrokenPipeError:
        died, detail = await wire.ended()
        end = _as_end(died)
    finally:
        await wire.aclose()
    return _report("separate", end, board, "crash", detail, wire, submission.tail)


def _as_end(verdict: Verdict | Literal["lost"]) -> GraderEnd:
    if verdict == "lost":
        raise SandboxError("the sandbox of the tests was lost")
    return "crash" if verdict == "passed" or verdict == "wrong_answer" else verdict  # noqa: PLR1714  (mypy follows it)


async def _shared(
    side: _Side, given: dict[str, Any], source: str, limits: ProgramLimits, last: float
) -> TestReport:
    wire = await side.start("grader", limits.cpu)
    board = _Board()
    wall = limits.wall or START_SECONDS
    loop = asyncio.get_running_loop()
    nonce = secrets.token_hex(16)
    end: GraderEnd = "crash"
    detail = ""
    try:
        until = loop.time() + START_SECONDS
        async with asyncio.timeout_at(until):
            await wire.send(b"s", line_of({"source": source}))
        async with asyncio.timeout_at(min(loop.time() + wall, last)):
            line = await wire.line()
        if line is not None and line[:1] == b"r":
            await wire.send(b"t", line_of({**given, "nonce": nonce}))
        elif line is not None and line[:1] == b"x":
            return _report("shared", "ended", board, "crash", f"it does not load: {_pair(line)}", wire, b"")
        until = loop.time() + wall
        while line is not None:
            async with asyncio.timeout_at(min(until, last)):
                line = await wire.line()
            if line is None:
                break
            plain = _with_word(line, nonce)
            if plain is None:
                continue  # somebody else's words
            if line[:1] == b"e":
                end = "ended" if board.names else "no_tests"
                break
            if line[:1] == b"f":
                detail = _failure(plain)[1]
                break
            board.take(line[:1], plain)
            if line[:1] == b"b":
                until = loop.time() + wall
        else:
            detail = "it closed its channel"
        if line is None:
            verdict, detail = await wire.ended()
            end = _as_end(verdict)
    except TimeoutError:
        if loop.time() >= last:
            return _report("shared", "ended", board, "time", OVER, wire, b"")
        end, detail = "time", f"a test took longer than {wall:g} s"
    except BadLine as error:
        end, detail = "crash", str(error)
    except BrokenPipeError:
        verdict, detail = await wire.ended()
        end = _as_end(verdict)
    finally:
        await wire.aclose()
    return _report("shared", end, board, "crash", detail, wire, b"")


def _pair(line: bytes) -> str:
    try:
        return str(parsed(line[1:])[1])[:1000]
    except (BadLine, LookupError, TypeError, RecursionError):
        return ""


def _failure(plain: Any) -> tuple[Verdict, str]:
    """Return the verdict and the detail of tests that could not begin."""
    if not isinstance(plain, list) or len(plain) != 2 or plain[0] not in VERDICTS or not isinstance(plain[1], str):
        raise BadLine("the failure of tests that is none")
    return plain[0], plain[1]


def _with_word(line: bytes, nonce: str) -> Any:
    """Return what a line says, where it has the nonce; else None. `None` itself is returned as an empty list."""
    try:
        plain = parsed(line[1:])
    except BadLine:
        return None
    if not isinstance(plain, list) or len(plain) != 2 or plain[0] != nonce:
        return None
    return [] if plain[1] is None else plain[1]


def _report(
    form: Form, end: GraderEnd, board: _Board, rest: Verdict, detail: str, wire: Wire, tail: bytes
) -> TestReport:
    verdict: Verdict = end if end == "time" or end == "memory" or end == "output" else rest  # noqa: PLR1714
    results = board.all(verdict, detail) if end != "no_tests" else ()
    printed = (tail + wire.tail)[-TAIL:].decode("utf-8", "replace")
    return TestReport(form=form, end=end, tests=results, detail=detail, printed=printed, decided=board.decided)
