"""Data types for programs and their results, validated on construction.

Guarantees:
- An invalid program (no source, a file outside the working directory, an invalid limit) raises `UsageError` with
  the name of the field before anything runs. The same holds for programs parsed from JSON.
- A result has the status that the sandbox reported for the program. If the sandbox itself failed, the status is
  `failed`, with a cause.
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
"""The verdict on a submission in one test or test case. `time`, `memory` and `output`: it exceeded that limit.
`crash`: it raised an exception, exited with another code than 0, or ended in another way."""
VERDICTS: Final[tuple[Verdict, ...]] = ("passed", "wrong_answer", "time", "memory", "output", "crash")
ProgramStatus: TypeAlias = ExecStatus | Literal["failed"]

LANGUAGES: Final = ("python", "bash", "c", "c++")
ENTRY_FILES: Final[dict[str, str]] = {"python": "main.py", "bash": "main.sh", "c": "main.c", "c++": "main.cpp"}
MAX_FILES: Final = 1_000
MAX_BYTES: Final = 64 << 20
"""Maximum total size of a program's files."""
MAX_CASES: Final = 10_000


class ProgramLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Resource limits of a program. A limit that is None is unset.

    The limits of a test case override those of its program. These override the limits of the call that runs the
    program, and these override `DEFAULT_PROGRAM_LIMITS`.
    """

    wall: float | None = None
    """Wall time in seconds for the program alone; the start-up time of the sandbox does not count."""
    cpu: float | None = None
    """CPU time in seconds. If it is unset everywhere, only `wall` limits the time."""
    memory: int | None = None
    """Memory in bytes: of all processes of the program together if the provider supports that, else of each."""
    output: int | None = None
    """Maximum bytes captured of stdout, and of stderr. If a longer stdout has to be compared with an expected
    output, the verdict is `output`."""
    pids: int | None = None
    """Maximum number of processes at a time."""
    disk: int | None = None
    """Disk space in bytes."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None:
                continue
            whole = name not in ("wall", "cpu")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "an integer" if whole else "a number"
                raise UsageError(f"limits.{name} must be {kind} above 0, got {value!r:.80}")
            if not isfinite(value) or not 0 < value < 1 << 60:
                raise UsageError(f"limits.{name} must be a finite number above 0, got {value!r:.80}")

    def over(self, below: "ProgramLimits") -> "ProgramLimits":
        """Return these limits, with the unset ones taken from `below`."""
        if self is NO_PROGRAM_LIMITS:
            return below
        values = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(below, **values) if values else below


NO_PROGRAM_LIMITS: Final = ProgramLimits()
DEFAULT_PROGRAM_LIMITS: Final = ProgramLimits(wall=10.0, memory=512 << 20, output=1 << 20, pids=64, disk=128 << 20)


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A test case: an input and its expected output.

    If `stdout` is None, every output passes if the program exits with code 0.
    """

    stdin: str | bytes = b""
    stdout: str | None = None
    limits: ProgramLimits = NO_PROGRAM_LIMITS

    def __post_init__(self) -> None:
        _check_text("stdin", self.stdin)
        if self.stdout is not None and not isinstance(self.stdout, str):
            raise UsageError(f"stdout must be a string, got {type(self.stdout).__name__}")
        if not isinstance(self.limits, ProgramLimits):
            raise UsageError(f"limits must be ProgramLimits, got {type(self.limits).__name__}")


class Program(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A program: its source or files, its input, and the test cases that judge it."""

    source: str | bytes = b""
    """The content of the entry file."""
    language: Language = "python"
    files: dict[str, str | bytes] = {}
    """More files of the program: content by path, relative to the working directory."""
    entry: str = ""
    """Path of the file to run or compile. If it is empty, the default of the language is used (`main.py`,
    `main.sh`, `main.c`, `main.cpp`)."""
    argv: tuple[str, ...] = ()
    stdin: str | bytes = b""
    env: dict[str, str] = {}
    cases: tuple[Case, ...] = ()
    """Test cases, each run in its own sandbox. Without cases the program runs once, with `stdin`."""
    tolerance: float | None = None
    """Maximum absolute or relative difference of numbers in an output from the expected output; None: compare as
    text."""
    limits: ProgramLimits = NO_PROGRAM_LIMITS
    id: str = ""
    """Identifies the program for the caller; copied to the result."""

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise UsageError(f"language must be one of {', '.join(LANGUAGES)}, got {self.language!r:.80}")
        _check_text("source", self.source)
        _check_text("stdin", self.stdin)
        if not isinstance(self.files, dict) or len(self.files) > MAX_FILES:
            raise UsageError(f"files must be a dict of at most {MAX_FILES} paths")
        for path, content in self.files.items():
            _check_path("files", path)
            _check_text(f"files[{path!r:.80}]", content)
        _check_argv("argv", self.argv)
        if self.entry:
            _check_path("entry", self.entry)
        if not isinstance(self.env, dict) or not all(
            _is_variable(name, value) for name, value in self.env.items()
        ):
            raise UsageError(
                "env must map names to strings; neither may contain NUL, and names may not contain '='"
            )
        if not isinstance(self.cases, tuple) or not all(isinstance(case, Case) for case in self.cases):
            raise UsageError("cases must be a tuple of Case objects")
        if len(self.cases) > MAX_CASES:
            raise UsageError(f"cases must have at most {MAX_CASES} entries, got {len(self.cases)}")
        if not isinstance(self.limits, ProgramLimits):
            raise UsageError(f"limits must be ProgramLimits, got {type(self.limits).__name__}")
        number = self.tolerance
        if number is not None and (not isinstance(number, int | float) or not 0 <= number < float("inf")):
            raise UsageError(f"tolerance must be a finite number of at least 0, got {number!r:.80}")
        if not self.source and self.main not in self.files:
            raise UsageError(f"nothing to run: source is empty and files has no {self.main!r}")
        if self.source and self.main in self.files:
            raise UsageError(f"source and files[{self.main!r:.80}] both define the program: pass only one of them")
        if self.size > MAX_BYTES:
            raise UsageError(f"files are {self.size} bytes in total, more than the maximum of {MAX_BYTES}")

    @property
    def main(self) -> str:
        """Path of the entry file."""
        return self.entry or ENTRY_FILES[self.language]

    @property
    def all_files(self) -> dict[str, bytes]:
        """The contents of all files, including the entry file, by path."""
        found = {path: encode_content(content) for path, content in self.files.items()}
        return {self.main: encode_content(self.source), **found} if self.source else found

    @property
    def size(self) -> int:
        """Total size of the source and all files. Text counts in characters, other contents in bytes."""
        return len(self.source) + sum(map(len, self.files.values()))


class CompileResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a compilation."""

    status: ExecStatus
    exit_code: int | None = None
    output: str = ""
    usage: ExecUsage = ExecUsage()

    @property
    def ok(self) -> bool:
        """True if the compiler exited with code 0."""
        return self.status == "exited" and self.exit_code == 0


class RunResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a program, with its output."""

    status: ProgramStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = ""
    """Captured standard output; invalid UTF-8 is replaced."""
    stderr: str = ""
    stdout_dropped: int = 0
    """Bytes of standard output beyond the limit `output`, which were not captured."""
    stderr_dropped: int = 0
    usage: ExecUsage = ExecUsage()
    detail: str = ""
    cause: str = ""
    """Stable code that says why the sandbox failed; empty unless `status` is `failed`."""

    @property
    def ok(self) -> bool:
        """True if the program exited with code 0."""
        return self.status == "exited" and self.exit_code == 0

    def get_run_fields(self) -> dict[str, Any]:
        """Return the fields of this class, to copy them into another result."""
        return {name: getattr(self, name) for name in RunResult.__struct_fields__}


class CaseResult(RunResult, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a program in one test case, with the verdict."""

    verdict: Verdict | None = None
    """None if there is no verdict because the program has no test cases or the sandbox failed."""


class ProgramResult(RunResult, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a program.

    If the program has test cases, the fields of `RunResult` are those of the first case that did not pass, or of
    the first case if all passed.
    """

    id: str = ""
    cases: tuple[CaseResult, ...] = ()
    compile: CompileResult | None = None
    """None if the language needs no compiler, or if the sandbox of the compiler failed."""
    attempts: int = 1
    """The largest number of sandboxes in which one execution of the program was tried."""

    @property
    def passed(self) -> bool:
        """True if every case passed; without cases, whether the program exited with code 0."""
        return all(case.verdict == "passed" for case in self.cases) if self.cases else self.ok

    @property
    def share(self) -> float:
        """The fraction of the cases that passed; without cases, 1 if the program exited with code 0, else 0."""
        if not self.cases:
            return float(self.ok)
        return sum(case.verdict == "passed" for case in self.cases) / len(self.cases)


def parse_program(data: object, where: str = "program") -> Program:
    """Parse a program from decoded JSON, in which bytes are written as `{"base64": "…"}`.

    Raise `UsageError` with the name of the invalid field; `where` is the prefix of that name.
    """
    fields = _check_fields(where, data, Program.__struct_fields__)
    made = dict(fields)
    for name in ("source", "stdin"):
        if name in fields:
            made[name] = _parse_content(f"{where}.{name}", fields[name])
    files = fields.get("files", {})
    if not isinstance(files, dict):
        raise UsageError(f"{where}.files must be an object that maps paths to contents")
    made["files"] = {
        path: _parse_content(f"{where}.files[{path!r:.80}]", content) for path, content in files.items()
    }
    if "argv" in fields:
        if not isinstance(fields["argv"], list):
            raise UsageError(f"{where}.argv must be a list of strings, got {type(fields['argv']).__name__}")
        made["argv"] = tuple(fields["argv"])
    if not isinstance(fields.get("id", ""), str):
        raise UsageError(f"{where}.id must be a string, got {type(fields['id']).__name__}")
    made["limits"] = parse_limits(fields.get("limits"), f"{where}.limits")
    made["cases"] = parse_cases(fields.get("cases"), f"{where}.cases")
    try:
        return Program(**made)
    except UsageError as error:
        raise UsageError(f"{where}.{error}") from error


def parse_cases(data: object, where: str) -> tuple[Case, ...]:
    """Parse test cases from decoded JSON. `where` is the prefix of field names in errors."""
    if data is None:
        return ()
    if not isinstance(data, list):
        raise UsageError(f"{where} must be a list, got {type(data).__name__}")
    return tuple(_parse_case(f"{where}[{at}]", one) for at, one in enumerate(data))


def _parse_case(where: str, data: object) -> Case:
    fields = _check_fields(where, data, Case.__struct_fields__)
    stdin = _parse_content(f"{where}.stdin", fields.get("stdin", ""))
    try:
        limits = parse_limits(fields.get("limits"), f"{where}.limits")
        return Case(stdin=stdin, stdout=fields.get("stdout"), limits=limits)
    except UsageError as error:
        raise error if str(error).startswith(where) else UsageError(f"{where}.{error}") from error


def parse_limits(data: object, where: str = "limits") -> ProgramLimits:
    """Parse limits from decoded JSON. `where` is the prefix of field names in errors."""
    if data is None:
        return NO_PROGRAM_LIMITS
    fields = _check_fields(where, data, ProgramLimits.__struct_fields__)
    fields |= {name: whole(value) for name, value in fields.items() if name not in ("wall", "cpu")}
    try:
        return ProgramLimits(**fields)
    except UsageError as error:
        raise UsageError(f"{where}{str(error).removeprefix('limits')}") from error


def encode_content(content: str | bytes) -> bytes:
    """Return the content of a file as bytes; text is encoded as UTF-8."""
    return content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")


def _check_fields(where: str, data: object, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise UsageError(f"{where} must be an object, got {type(data).__name__}")
    for name in data:
        if name not in known:
            raise UsageError(f"{where}.{name!s:.80} is not a known field; the fields are {', '.join(known)}")
    return dict(data)


def _parse_content(where: str, data: object) -> str | bytes:
    if isinstance(data, str):
        return data
    if isinstance(data, dict) and set(data) == {"base64"} and isinstance(data["base64"], str):
        try:
            return base64.b64decode(data["base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise UsageError(f"{where}.base64 is not valid base64: {error}") from error
    raise UsageError(f'{where} must be a string or {{"base64": "…"}}, got {type(data).__name__}')


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str | bytes):
        raise UsageError(f"{name} must be str or bytes, got {type(value).__name__}")
    if isinstance(value, str):
        try:
            value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise UsageError(f"{name} cannot be encoded as UTF-8: {error.reason}") from error


def _check_argv(name: str, words: object) -> None:
    if not isinstance(words, tuple) or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise UsageError(f"{name} must be a tuple of strings without NUL")


def _check_path(name: str, path: object) -> None:
    if not isinstance(path, str) or not path or "\0" in path or len(path) > 4_000:
        raise UsageError(f"{name} must be the path of a file, got {path!r:.80}")
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or path.endswith("/"):
        raise UsageError(f"{name} must be a path inside the working directory, got {path!r:.80}")


def _is_variable(name: object, value: object) -> bool:
    return (
        isinstance(name, str)
        and isinstance(value, str)
        and bool(name)
        and "=" not in name
        and "\0" not in name + value
    )
