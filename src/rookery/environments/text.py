"""Text helpers: shorten long output and render tool results."""

import math
from typing import Any

import msgspec

from rookery.workers import Cell

NO_OUTPUT = "(no output)"


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


def join_cell_parts(cell: Cell, parts: list[str]) -> str:
    """Join the rendered output of a cell, how it ended if that was not normal, and the names of its figures."""
    if cell.status not in ("ok", "runtime", "syntax"):
        parts.append(f"[{cell.status}: {cell.notice or cell.detail}]")
    elif cell.notice:
        parts.append(f"[{cell.notice}]")
    if cell.figures:
        parts.append(f"[figures: {', '.join(cell.figures)}]")
    return "\n".join(parts) or NO_OUTPUT
