"""Programs to run and what came of them: plain data, checked when it is built.

Promises:
- a program that cannot be (no source, a file outside of its folder, a limit that is no limit) is a `UsageError`
  that names the field, before anything runs;
- a program read from JSON names the field in the same way;
- expected outputs are no part of what a sandbox is given;
- a result says how the program ended in the sandbox's own words; a sandbox that failed is `failed`, with a cause,
  and never the program's failure.
"""

import base64
import binascii
from collections.abc import Mapping
from math import isfinite
from pathlib import PurePosixPath
from typing import Any, Final, Literal, TypeAlias

import msgspec

from rookery.core import UsageError
from rookery.core.limits import whole
from rookery.core.sandboxes import ExecStatus, ExecUsage

Language: TypeAlias = Literal["python", "bash", "c", "c++"]
Verdict: TypeAlias = Literal["passed", "wrong_answer", "time", "memory", "output", "crash"]
VERDICTS: Final[tuple[Verdict, ...]] = ("passed", "wrong_answer", "time", "memory", "output", "crash")
ProgramStatus: TypeAlias = ExecStatus | Literal["failed"]

LANGUAGES: Final = ("python", "bash", "c", "c++")
ENTRIES: Final[dict[str, str]] = {"python": "main.py", "bash": "main.sh", "c": "main.c", "c++": "main.cpp"}
MOST_FILES: Final = 1_000
MOST_BYTES: Final = 64 << 20
"""Of a program's files together."""
MOST_CASES: Final = 10_000


class ProgramLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a program may use. None: not said here, the next one down the line decides.

    A case's limits go over its program's, those over the call's, those over the defaults.
    """

    wall: float | None = None
    """Seconds, of the program alone: our own start-up does not count."""
    cpu: float | None = None
    """Seconds of processor time; without it only `wall` limits it."""
    memory: int | None = None
    """Bytes, for all its processes together where the provider can."""
    output: int | None = None
    """Bytes kept of each of stdout and stderr; a graded output that is longer has the verdict `output`."""
    pids: int | None = None
    disk: int | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None:
                continue
            whole = name not in ("wall", "cpu")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "a whole number" if whole else "a number"
                raise UsageError(f"limits.{name} must be {kind} above 0, got {value!r:.80}")
            if not isfinite(value) or not 0 < value < 1 << 60:
                raise UsageError(f"limits.{name} must be a finite number above 0, got {value!r:.80}")

    def over(self, below: "ProgramLimits") -> "ProgramLimits":
        """These limits where they say something, `below` elsewhere."""
        if self is NO_PROGRAM_LIMITS:
            return below
        said = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(below, **said) if said else below


NO_PROGRAM_LIMITS: Final = ProgramLimits()
DEFAULT_PROGRAM_LIMITS: Final = ProgramLimits(wall=10.0, memory=512 << 20, output=1 << 20, pids=64, disk=128 << 20)


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One input, and the output that is expected for it; None: any, as long as the program ends well."""

    stdin: str | bytes = b""
    stdout: str | None = None
    limits: ProgramLimits = NO_PROGRAM_LIMITS

    def __post_init__(self) -> None:
        _text("stdin", self.stdin)
        if self.stdout is not None and not isinstance(self.stdout, str):
            raise UsageError(f"stdout must be text, got a {type(self.stdout).__name__}")
        if not isinstance(self.limits, ProgramLimits):
            raise UsageError(f"limits must be ProgramLimits, got a {type(self.limits).__name__}")


class Program(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One program: its source or its files, what it is given, and what it is to print."""

    source: str | bytes = b""
    """The content of the entry file."""
    language: Language = "python"
    files: dict[str, str | bytes] = {}
    """Path in the working folder → content."""
    entry: str = ""
    """The file that is run or compiled; empty: the language's own (`main.py`, `main.sh`, `main.c`, `main.cpp`)."""
    argv: tuple[str, ...] = ()
    stdin: str | bytes = b""
    env: dict[str, str] = {}
    cases: tuple[Case, ...] = ()
    """Each is a run of its own, in a sandbox of its own; without any the program runs once, with `stdin`."""
    tolerance: float | None = None
    """Numbers in outputs may differ by this much, absolute or relative."""
    limits: ProgramLimits = NO_PROGRAM_LIMITS
    id: str = ""
    """Comes back with the result."""

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise UsageError(f"language must be one of {', '.join(LANGUAGES)}, got {self.language!r:.80}")
        _text("source", self.source)
        _text("stdin", self.stdin)
        if not isinstance(self.files, dict) or len(self.files) > MOST_FILES:
            raise UsageError(f"files must be an object of at most {MOST_FILES} paths")
        for path, content in self.files.items():
            _path("files", path)
            _text(f"files[{path!r:.80}]", content)
        _words("argv", self.argv)
        if self.entry:
            _path("entry", self.entry)
        if not isinstance(self.env, dict) or not all(_variable(name, value) for name, value in self.env.items()):
            raise UsageError("env must be an object of names to texts, without NUL, and names without '='")
        if not isinstance(self.cases, tuple) or not all(isinstance(case, Case) for case in self.cases):
            raise UsageError("cases must be a tuple of Case")
        if len(self.cases) > MOST_CASES:
            raise UsageError(f"cases must be at most {MOST_CASES}, got {len(self.cases)}")
        if not isinstance(self.limits, ProgramLimits):
            raise UsageError(f"limits must be ProgramLimits, got a {type(self.limits).__name__}")
        number = self.tolerance
        if number is not None and (not isinstance(number, int | float) or not 0 <= number < float("inf")):
            raise UsageError(f"tolerance must be a finite number of at least 0, got {number!r:.80}")
        if not self.source and self.main not in self.files:
            raise UsageError(f"source is empty and files has no {self.main!r}: there is nothing to run")
        if self.source and self.main in self.files:
            raise UsageError(f"source and files[{self.main!r:.80}] are both given: which is the program?")
        if self.size > MOST_BYTES:
            raise UsageError(f"files are {self.size} bytes together, of at most {MOST_BYTES}")

    @property
    def main(self) -> str:
        """The entry file."""
        return self.entry or ENTRIES[self.language]

    @property
    def all_files(self) -> dict[str, bytes]:
        found = {path: encoded(content) for path, content in self.files.items()}
        return {self.main: encoded(self.source), **found} if self.source else found

    @property
    def size(self) -> int:
        return len(self.source) + sum(map(len, self.files.values()))


class Compiled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a compiler ended."""

    status: ExecStatus
    exit_code: int | None = None
    output: str = ""
    usage: ExecUsage = ExecUsage()

    @property
    def ok(self) -> bool:
        return self.status == "exited" and self.exit_code == 0


class Ran(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a program ended, and what it wrote."""

    status: ProgramStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = ""
    """Bytes that are no UTF-8 are replaced."""
    stderr: str = ""
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    usage: ExecUsage = ExecUsage()
    detail: str = ""
    cause: str = ""
    """Where `status` is `failed`: why, as a stable code of the table of causes."""

    @property
    def ok(self) -> bool:
        """It ended by itself, with exit code 0."""
        return self.status == "exited" and self.exit_code == 0

    def told(self) -> dict[str, Any]:
        """The fields above, for a result that is shown as this one."""
        return {name: getattr(self, name) for name in Ran.__struct_fields__}


class CaseResult(Ran, frozen=True, kw_only=True, omit_defaults=True):
    """How one run ended, and what that is worth where an output was expected."""

    verdict: Verdict | None = None
    """None where the program was not judged: it has no cases, or the sandbox failed."""


class ProgramResult(Ran, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a program. With cases, `status` and the rest are those of the first one that did not pass."""

    id: str = ""
    cases: tuple[CaseResult, ...] = ()
    compile: Compiled | None = None
    attempts: int = 1
    """Sandboxes that were tried for the run that took most."""

    @property
    def passed(self) -> bool:
        """Every case has the verdict `passed`; without cases: it ended well."""
        return all(case.verdict == "passed" for case in self.cases) if self.cases else self.ok

    @property
    def share(self) -> float:
        """Of the cases that passed."""
        if not self.cases:
            return float(self.ok)
        return sum(case.verdict == "passed" for case in self.cases) / len(self.cases)


def program_of(plain: object, where: str = "program") -> Program:
    """A program from JSON; `UsageError` names the field. Bytes are written `{"base64": "…"}`."""
    fields = _fields(where, plain, Program.__struct_fields__)
    made = dict(fields)
    for name in ("source", "stdin"):
        if name in fields:
            made[name] = _content(f"{where}.{name}", fields[name])
    files = fields.get("files", {})
    if not isinstance(files, dict):
        raise UsageError(f"{where}.files must be an object of paths to contents")
    made["files"] = {path: _content(f"{where}.files[{path!r:.80}]", content) for path, content in files.items()}
    if "argv" in fields:
        if not isinstance(fields["argv"], list):
            raise UsageError(f"{where}.argv must be a list of texts")
        made["argv"] = tuple(fields["argv"])
    if not isinstance(fields.get("id", ""), str):
        raise UsageError(f"{where}.id must be text")
    made["limits"] = limits_of(fields.get("limits"), f"{where}.limits")
    made["cases"] = cases_of(fields.get("cases"), f"{where}.cases")
    try:
        return Program(**made)
    except UsageError as error:
        raise UsageError(f"{where}.{error}") from error


def cases_of(plain: object, where: str) -> tuple[Case, ...]:
    """Cases from JSON."""
    if plain is None:
        return ()
    if not isinstance(plain, list):
        raise UsageError(f"{where} must be a list")
    return tuple(_case(f"{where}[{at}]", one) for at, one in enumerate(plain))


def _case(where: str, plain: object) -> Case:
    fields = _fields(where, plain, Case.__struct_fields__)
    stdin = _content(f"{where}.stdin", fields.get("stdin", ""))
    try:
        limits = limits_of(fields.get("limits"), f"{where}.limits")
        return Case(stdin=stdin, stdout=fields.get("stdout"), limits=limits)
    except UsageError as error:
        raise error if str(error).startswith(where) else UsageError(f"{where}.{error}") from error


def limits_of(plain: object, where: str = "limits") -> ProgramLimits:
    """Limits from JSON."""
    if plain is None:
        return NO_PROGRAM_LIMITS
    fields = _fields(where, plain, ProgramLimits.__struct_fields__)
    fields |= {name: whole(value) for name, value in fields.items() if name not in ("wall", "cpu")}
    try:
        return ProgramLimits(**fields)
    except UsageError as error:
        raise UsageError(f"{where}{str(error).removeprefix('limits')}") from error


def encoded(content: str | bytes) -> bytes:
    """As a file holds it."""
    return content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")


def _fields(where: str, plain: object, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(plain, Mapping):
        raise UsageError(f"{where} must be an object, got {type(plain).__name__}")
    for name in plain:
        if name not in known:
            raise UsageError(f"{where}.{name!s:.80} is not known; the fields are {', '.join(known)}")
    return dict(plain)


def _content(where: str, plain: object) -> str | bytes:
    if isinstance(plain, str):
        return plain
    if isinstance(plain, dict) and set(plain) == {"base64"} and isinstance(plain["base64"], str):
        try:
            return base64.b64decode(plain["base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise UsageError(f"{where}.base64 is no base64: {error}") from error
    raise UsageError(f'{where} must be text, or {{"base64": "…"}}')


def _text(name: str, value: object) -> None:
    if not isinstance(value, str | bytes):
        raise UsageError(f"{name} must be text or bytes, got a {type(value).__name__}")
    if isinstance(value, str):
        try:
            value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise UsageError(f"{name} is no text that can be encoded: {error.reason}") from error


def _words(name: str, words: object) -> None:
    if not isinstance(words, tuple) or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise UsageError(f"{name} must be a tuple of texts without NUL")


def _path(name: str, path: object) -> None:
    if not isinstance(path, str) or not path or "\0" in path or len(path) > 4_000:
        raise UsageError(f"{name} must name a file, got {path!r:.80}")
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or path.endswith("/"):
        raise UsageError(f"{name} must lie in the working folder: {path!r:.80} does not")


def _variable(name: object, value: object) -> bool:
    return (
        isinstance(name, str)
        and isinstance(value, str)
        and bool(name)
        and "=" not in name
        and "\0" not in name + value
    )
