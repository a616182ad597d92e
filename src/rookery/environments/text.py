r"""Text helpers: shorten long output, render tool results, compare answers.

Text written by the policy is never evaluated as code.
"""

import math
import re
from decimal import Decimal
from typing import Any

import msgspec

from rookery.workers import Cell

NO_OUTPUT = "(no output)"
_MAX_NUMBER_LENGTH = 400
_MINUS = "\N{MINUS SIGN}"
_NUMBER = re.compile(rf"(?<![\w.])[-+{_MINUS}]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,4}})?")


def clip(text: str, limit: int, dropped: int = 0) -> str:
    """Shorten `text` to about `limit` bytes of UTF-8. A line in the middle says how many bytes were cut there.

    `dropped` is the number of bytes that are already missing from the middle of `text`; it is added to that
    number.
    """
    # A lone surrogate, for example from a file name that is not UTF-8, would break later encoders.
    data = text.encode("utf-8", "replace")
    if len(data) <= limit and not dropped:
        return data.decode()
    size = min(limit, len(data))
    head, tail = data[: size - size // 2], data[len(data) - size // 2 :]
    cut = len(data) - size + dropped
    return f"{head.decode(errors='ignore')}\n… {cut} bytes cut …\n{tail.decode(errors='ignore')}"


def render(value: Any) -> str:
    """Convert a tool's return value to text for the model.

    A string is returned as it is, None becomes `(no output)`, bytes are decoded as UTF-8, and other values are
    encoded as JSON. A value that JSON cannot express becomes its `repr`.
    """
    if isinstance(value, str):
        return str(value)
    if value is None:
        return NO_OUTPUT
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON would encode it as null
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        pass
    try:
        import orjson

        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except (TypeError, RecursionError):
        return repr(value)


def match_answer(text: str, answer: str | float) -> bool:
    r"""Return whether a final message gives the expected answer.

    If the text contains `\boxed{…}`, only the content of the last one counts. Otherwise the whole text counts or,
    if a number is expected, the last number in it. Answers match if they are the same text, ignoring surrounding
    white space, or the same number (`1,000` matches `1000.0`).
    """
    expected = str(answer).strip()
    boxed = _find_last_boxed(text)
    candidate = (text if boxed is None else boxed).strip()
    if candidate == expected:
        return True
    number = _parse_number(expected)
    if number is None:
        return False
    if boxed is None:
        numbers = _NUMBER.findall(candidate)
        candidate = numbers[-1] if numbers else ""
    return _parse_number(candidate) == number


def _parse_number(text: str) -> Decimal | None:
    text = text.strip().strip("$%").strip()
    if len(text) > _MAX_NUMBER_LENGTH or not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", "").replace(_MINUS, "-"))


def _find_last_boxed(text: str) -> str | None:
    position = text.rfind(r"\boxed{")
    if position < 0:
        return None
    start = position + len(r"\boxed{")
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return None


def join_cell_parts(cell: Cell, parts: list[str]) -> str:
    """Join the rendered output of a cell, how it ended if that was not normal, and the names of its figures."""
    if cell.status not in ("ok", "runtime", "syntax"):
        parts.append(f"[{cell.status}: {cell.notice or cell.detail}]")
    elif cell.notice:
        parts.append(f"[{cell.notice}]")
    if cell.figures:
        parts.append(f"[figures: {', '.join(cell.figures)}]")
    return "\n".join(parts) or NO_OUTPUT
