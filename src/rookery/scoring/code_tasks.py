"""Tasks whose answer is a program: `id`, `prompt`, and `tests` or `cases`.

Promises:
- an invalid row is a `TaskError` that names the field, before anything runs;
- a row says how it is graded in one way only.
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
    cases_of,
    limits_of,
)

FIELDS: Final = (
    *("id", "prompt", "tests", "cases", "entry_point", "solution", "limits", "language", "tolerance"),
    *("timeout_seconds", "memory_limit_bytes"),
)


class CodeTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a submission is graded by."""

    id: str
    prompt: str = ""
    tests: str | list[str] = ""
    """Python: assertions, `check(candidate)`, functions `test…`, or classes of unittest's; or a list of
    assertions."""
    cases: tuple[Case, ...] = ()
    entry_point: str = ""
    """The function that the tests call; needed for `check(candidate)`, else the tests' text tells."""
    solution: str = ""
    """A program that is right: decides whether a failing grader is the task's fault."""
    limits: ProgramLimits = NO_PROGRAM_LIMITS
    language: Language = "python"
    tolerance: float | None = None


def code_task(row: Mapping[str, Any], *, name: str = "") -> CodeTask:
    """The task of a JSONL row; fields that are not ours are passed over."""
    given = {field: row[field] for field in FIELDS if row.get(field) is not None}
    identity = str(given.get("id", name))
    try:
        return _task(identity, given)
    except RookeryError as error:
        raise TaskError(f"task {identity!r}: {error}") from error


def _task(identity: str, row: dict[str, Any]) -> CodeTask:
    for field in ("entry_point", "solution"):
        if not isinstance(row.get(field, ""), str):
            raise TaskError(f"{field} must be text, got {type(row[field]).__name__}")
    tests = row.get("tests", "")
    texts = isinstance(tests, list) and all(isinstance(one, str) for one in tests)
    if not isinstance(tests, str) and not texts:
        raise TaskError("tests must be Python source, or a list of assertions")
    if bool(tests) == bool(row.get("cases")):
        raise TaskError("give either tests or cases" + (", not both" if tests else ""))
    language = row.get("language", "python")
    if language not in LANGUAGES:
        raise TaskError(f"language must be one of {', '.join(LANGUAGES)}, got {language!r:.80}")
    if tests and language != "python":
        raise TaskError(f"tests are Python: a {language} program is graded by cases")
    if row.get("entry_point") and not row["entry_point"].isidentifier():
        raise TaskError(f"entry_point must be a name, got {row['entry_point']!r:.80}")
    limits = dict(row.get("limits") or {}) if isinstance(row.get("limits") or {}, dict) else row["limits"]
    if isinstance(limits, dict):
        for field, limit in (("timeout_seconds", "wall"), ("memory_limit_bytes", "memory")):
            if field in row:
                limits.setdefault(limit, row[field])
    prompt = row.get("prompt", "")
    return CodeTask(
        id=identity,
        prompt=prompt if isinstance(prompt, str) else "",
        tests=tests,
        cases=cases_of(row.get("cases"), "cases"),
        entry_point=row.get("entry_point", ""),
        solution=row.get("solution", ""),
        limits=limits_of(limits, "limits"),
        language=language,
        tolerance=row.get("tolerance"),
    )
