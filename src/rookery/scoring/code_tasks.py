"""Tasks whose answer is a program: rows with `id`, `prompt`, and either `tests` or `cases`.

Guarantees:
- An invalid row raises `TaskError` with the name of the field before anything runs.
- A row is graded either by `tests` or by `cases`, never by both.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rookery.core import RookeryError, TaskError
from rookery.scoring.programs import (
    LANGUAGES,
    NO_PROGRAM_LIMITS,
    Case,
    Language,
    ProgramLimits,
    parse_cases,
    parse_limits,
)

FIELDS: Final = (
    *("id", "prompt", "tests", "cases", "entry_point", "solution", "limits", "language", "tolerance"),
    *("timeout_seconds", "memory_limit_bytes"),
)


class CodeTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task whose answer is a program, with the unit tests or test cases that grade a submission."""

    id: str
    prompt: str = ""
    tests: str | list[str] = ""
    """Unit tests: Python source with assertions, `check(candidate)`, functions `test…` or `unittest` classes; or a
    list of assertions. Empty if `cases` grade the submission."""
    cases: tuple[Case, ...] = ()
    """Test cases, each an input with its expected output. Empty if `tests` grade the submission."""
    entry_point: str = ""
    """The submission's function that is passed to `check(candidate)`. Other tests call functions by their
    names."""
    solution: str = ""
    """Source of the reference solution; empty if there is none. If the grader fails with it too, the task is at
    fault."""
    limits: ProgramLimits = NO_PROGRAM_LIMITS
    language: Language = "python"
    tolerance: float | None = None
    """Maximum absolute or relative difference of numbers in the output of a case; None: compare as text."""


def parse_code_task(row: Mapping[str, Any], *, name: str = "") -> CodeTask:
    """Parse a row of a taskset. Unknown fields are ignored. Raise `TaskError` if the row is invalid.

    `name` identifies a row without `id`.
    """
    fields = {field: row[field] for field in FIELDS if row.get(field) is not None}
    task_id = str(fields.get("id", name))
    try:
        return _build_task(task_id, fields)
    except RookeryError as error:
        raise TaskError(f"task {task_id!r}: {error}") from error


def _build_task(task_id: str, row: dict[str, Any]) -> CodeTask:
    for field in ("entry_point", "solution"):
        if not isinstance(row.get(field, ""), str):
            raise TaskError(f"the field {field} of the row must be a string, got {type(row[field]).__name__}")
    tests = row.get("tests", "")
    texts = isinstance(tests, list) and all(isinstance(one, str) for one in tests)
    if not isinstance(tests, str) and not texts:
        raise TaskError("tests must be a string of Python source or a list of strings, each an assertion")
    if bool(tests) == bool(row.get("cases")):
        raise TaskError("exactly one of tests and cases is required" + (", got both" if tests else ""))
    language = row.get("language", "python")
    if language not in LANGUAGES:
        raise TaskError(f"language must be one of {', '.join(LANGUAGES)}, got {language!r:.80}")
    if tests and language != "python":
        raise TaskError(f"tests can grade only Python programs: grade a {language} program by cases")
    if row.get("entry_point") and not row["entry_point"].isidentifier():
        raise TaskError(f"entry_point must be a Python identifier, got {row['entry_point']!r:.80}")
    limits = dict(row.get("limits") or {}) if isinstance(row.get("limits") or {}, dict) else row["limits"]
    if isinstance(limits, dict):
        for field, limit in (("timeout_seconds", "wall"), ("memory_limit_bytes", "memory")):
            if field in row:
                limits.setdefault(limit, row[field])
    prompt = row.get("prompt", "")
    return CodeTask(
        id=task_id,
        prompt=prompt if isinstance(prompt, str) else "",
        tests=tests,
        cases=parse_cases(row.get("cases"), "cases"),
        entry_point=row.get("entry_point", ""),
        solution=row.get("solution", ""),
        limits=parse_limits(limits, "limits"),
        language=language,
        tolerance=row.get("tolerance"),
    )
