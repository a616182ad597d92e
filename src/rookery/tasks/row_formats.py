"""Rows of well-known datasets: convert them to rows of Rookery, and rename columns.

A converter takes a row of a dataset and returns a row with `prompt`, `answer`, `tests` and so on. Converters are
found by name among the entry points of the group `rookery.row_formats`. What a converter does not use is kept in
the task's data.

- A row that does not have the columns of its format is not a valid task; the other rows are not affected.
- Nothing in a row is executed. Compressed test cases are decoded with limits, and without unpickling.
"""

import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from rookery.core.errors import describe
from rookery.core.plugins import load_plugin

GROUP: Final = "rookery.row_formats"
MAX_CASES_BYTES: Final = 256 << 20
"""Maximum size of decompressed test cases."""
Row: TypeAlias = dict[str, Any]
RowConverter: TypeAlias = Callable[[Row], Row]
_TEXTS: Final = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_WITHOUT_VALUES: Final = ("PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "STOP")
"""Instructions of a pickle of one text, apart from the text."""
_BOXED: Final = re.compile(r"\\boxed\s*\{")


class RowFormatError(Exception):
    """A row does not have the format that the user named. The message becomes `Task.invalid`."""


def make_converter(row_format: str = "", columns: Mapping[str, str] | None = None) -> RowConverter | None:
    """Return a function that renames the columns of a row and converts it from `row_format`.

    `columns` maps the names of fields that the format (or, without one, Rookery) expects to the names of columns.
    Return None if there is nothing to do. Raise `UsageError` for an unknown format.
    """
    if not row_format and not columns:
        return None
    convert: RowConverter | None = load_plugin(GROUP, row_format, "row format") if row_format else None
    names = dict(columns or {})

    def apply(row: Row) -> Row:
        renamed = {key: value for key, value in row.items() if key not in names and key not in names.values()}
        for field, column in names.items():
            if column not in row:
                raise RowFormatError(
                    f"the row has no column {column!r}; its columns are {', '.join(map(str, row))}"
                )
            renamed[field] = row[column]
        return convert(renamed) if convert is not None else renamed

    return apply


def _take(row: Row, *names: str, kind: type | tuple[type, ...] = str) -> Any:
    """Remove and return the first of the named columns that the row has; raise `RowFormatError` without one."""
    for name in names:
        if name in row and row[name] is not None:
            value = row.pop(name)
            if not isinstance(value, kind):
                raise RowFormatError(f"the column {name!r} has the wrong type: {type(value).__name__}")
            return value
    raise RowFormatError(
        f"the row has no column {' or '.join(map(repr, names))}; its columns are {', '.join(map(str, row))}"
    )


def _finish(rest: Row, *id_columns: str, **fields: Any) -> Row:
    """Return a row of Rookery with these fields. The other columns become data, and the first ID column the ID."""
    made = {name: value for name, value in fields.items() if value not in (None, "", [])}
    for name in ("id", *id_columns):
        if rest.get(name) not in (None, ""):
            made["id"] = str(rest.pop(name)) if not isinstance(rest[name], int) else rest.pop(name)
            break
    return {**made, "data": {name: value for name, value in rest.items() if name not in made}}


def convert_gsm8k(row: Row) -> Row:
    """Convert a row of GSM8K: `question`, and `answer` that ends with `#### NUMBER`."""
    rest = dict(row)
    question, solution = _take(rest, "question"), _take(rest, "answer")
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise RowFormatError("the column 'answer' does not end with #### and a number")
    return _finish(rest, prompt=question, answer=answer.strip().replace(",", ""), solution=solution)


def convert_math(row: Row) -> Row:
    r"""Convert a row of MATH: `problem`, and `answer`, or `solution` with the answer in its last `\boxed{…}`."""
    rest = dict(row)
    problem = _take(rest, "problem", "question")
    solution = rest.get("solution") if isinstance(rest.get("solution"), str) else ""
    if rest.get("answer") in (None, ""):
        rest.pop("answer", None)
        answer = _find_boxed(solution or "")
        if answer is None:
            raise RowFormatError("the row has no column 'answer', and 'solution' has no \\boxed{…}")
    else:
        answer = str(rest.pop("answer"))
    return _finish(rest, "unique_id", prompt=problem, answer=answer)


def _find_boxed(text: str) -> str | None:
    starts = [match.end() for match in _BOXED.finditer(text)]
    if not starts:
        return None
    depth = 1
    for index in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[starts[-1] : index]
    return None


def convert_humaneval(row: Row) -> Row:
    """Convert a row of HumanEval: `prompt`, `test` with `check`, `entry_point`, `canonical_solution`."""
    rest = dict(row)
    prompt, tests, entry_point = _take(rest, "prompt"), _take(rest, "test"), _take(rest, "entry_point")
    solution = rest.pop("canonical_solution", None)
    return _finish(
        rest,
        "task_id",
        prompt="Complete this function, and answer with the whole program in a ``` block.\n\n"
        f"```python\n{prompt}```",
        tests=tests,
        entry_point=entry_point,
        solution=prompt + solution if isinstance(solution, str) else None,
    )


def convert_mbpp(row: Row) -> Row:
    """Convert a row of MBPP: `text` (or `prompt`), `test_list`, `code`; `test_setup_code` or `test_imports`."""
    rest = dict(row)
    text = _take(rest, "text", "prompt")
    tests = _take(rest, "test_list", kind=list)
    if not tests or not all(isinstance(one, str) for one in tests):
        raise RowFormatError("the column 'test_list' must be a list of assertions")
    setup = rest.pop("test_setup_code", None) or "\n".join(rest.pop("test_imports", None) or ())
    shown = "\n".join(tests)
    return _finish(
        rest,
        "task_id",
        prompt=f"{text}\nAnswer with the whole program in a ``` block. It must pass these tests:\n\n{shown}",
        tests=f"{setup}\n\ndef test_all():\n" + "".join(f"    {line}\n" for line in shown.splitlines())
        if setup
        else tests,
        solution=rest.pop("code", None),
    )


def convert_livecodebench(row: Row) -> Row:
    """Convert a row of LiveCodeBench: `question_content`, `starter_code`, public and private test cases.

    Programs are graded by their output for each input, or by calls of the method that `metadata` names.
    """
    rest = dict(row)
    question, starter = _take(rest, "question_content"), rest.pop("starter_code", None) or ""
    cases = [
        *_read_cases(rest.pop("public_test_cases", None)),
        *_read_cases(rest.pop("private_test_cases", None)),
    ]
    if not cases:
        raise RowFormatError("the row has no test cases in 'public_test_cases' or 'private_test_cases'")
    metadata = rest.pop("metadata", None) or {}
    functional = any(case.get("testtype") == "functional" for case in cases)
    prompt = f"{question}\n\nAnswer with the whole program in a ``` block."
    fields: Row = {}
    if functional:
        prompt += f" It must begin with:\n\n```python\n{starter}\n```"
        fields["tests"] = _make_method_tests(cases, metadata)
    else:
        prompt += " It reads from standard input and writes to standard output."
        fields["cases"] = [
            {"stdin": _get_text(case, "input"), "stdout": _get_text(case, "output")} for case in cases
        ]
    return _finish(rest, "question_id", prompt=prompt, **fields)


def _read_cases(value: Any) -> list[Row]:
    """Return test cases that are a list, JSON, or JSON that is pickled, compressed and base64-encoded."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = _decompress_cases(value)
        except RecursionError:
            raise RowFormatError("the test cases are nested too deeply") from None
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise RowFormatError("test cases must be a list of objects")
    return value


def _decompress_cases(text: str) -> Any:
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), MAX_CASES_BYTES)
        if inflater.unconsumed_tail:
            raise RowFormatError(f"the test cases are larger than {MAX_CASES_BYTES >> 20} MB")
        return json.loads(_read_pickled_text(data))
    except (binascii.Error, zlib.error, ValueError, RecursionError) as error:
        raise RowFormatError(f"the test cases cannot be decoded: {describe(error)[:200]}") from None


def _read_pickled_text(data: bytes) -> str:
    """Return the one text that a pickle contains. Raise `ValueError` for every other pickle.

    The instructions are read, and not executed: even without classes they could allocate any amount of memory.
    """
    texts: list[str] = []
    for instruction, value, _ in pickletools.genops(data):
        if instruction.name in _TEXTS and isinstance(value, str):
            texts.append(value)
        elif instruction.name not in _WITHOUT_VALUES:
            raise ValueError(f"it contains {instruction.name}, and not one text")
    if len(texts) != 1:
        raise ValueError(f"it contains {len(texts)} texts")
    return texts[0]


def _get_text(case: Row, name: str) -> str:
    value = case.get(name)
    if not isinstance(value, str):
        raise RowFormatError(f"a test case has no text in {name!r}")
    return value


def _make_method_tests(cases: list[Row], metadata: Any) -> list[str]:
    try:
        name = (json.loads(metadata) if isinstance(metadata, str) else metadata)["func_name"]
        if not isinstance(name, str) or not name.isidentifier():
            raise RowFormatError("metadata.func_name is not the name of a method")
        tests = []
        for case in cases:
            lines = [line for line in _get_text(case, "input").split("\n") if line.strip()]
            arguments = ", ".join(repr(json.loads(line)) for line in lines)
            tests.append(f"assert Solution().{name}({arguments}) == {json.loads(_get_text(case, 'output'))!r}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RowFormatError(f"the method tests cannot be read: {describe(error)[:200]}") from None
    return tests
