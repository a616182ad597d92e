"""What a tool returned, as text for the model; and the comparison of a final answer with the expected one.

Promises:
- every value becomes text that any encoder takes; what is cut from a long one is counted in it;
- an answer is compared without evaluating anything the policy wrote.
"""

import math
import re
from decimal import Decimal
from typing import Any

import msgspec

NOTHING = "(no output)"
_MAX_DIGITS = 400
_MINUS = "\N{MINUS SIGN}"
_NUMBER = re.compile(rf"(?<![\w.])[-+{_MINUS}]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,4}})?")


def clip(text: str, limit: int, dropped: int = 0) -> str:
    """At most about `limit` bytes of `text`: its head and its tail, and between them how many bytes were cut.

    `dropped` bytes are already missing in the middle of it; they are counted too.
    """
    # A lone surrogate (a file name that is not UTF-8) would break every encoder behind us.
    data = text.encode("utf-8", "replace")
    if len(data) <= limit and not dropped:
        return data.decode()
    kept = min(limit, len(data))
    head, tail = data[: kept - kept // 2], data[len(data) - kept // 2 :]
    cut = len(data) - kept + dropped
    return f"{head.decode(errors='ignore')}\n… {cut} bytes cut …\n{tail.decode(errors='ignore')}"


def render(value: Any) -> str:
    """Text stays, None is `(no output)`, bytes are read as UTF-8, other values are JSON or else their `repr`."""
    if isinstance(value, str):
        return str(value)
    if value is None:
        return NOTHING
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON would say null
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
    r"""Whether a final message gives the expected answer.

    With a `\boxed{…}` in the text, the last one is what the policy answers, and nothing else counts. Without,
    it is the whole text, or, where a number is expected, the last number in the text. Two answers are equal
    when they are the same text, apart from the space around them, or the same number (`1,000` is `1000.0`).
    """
    expected = str(answer).strip()
    boxed = _last_boxed(text)
    given = (text if boxed is None else boxed).strip()
    if given == expected:
        return True
    number = _number(expected)
    if number is None:
        return False
    if boxed is None:
        found = _NUMBER.findall(given)
        given = found[-1] if found else ""
    return _number(given) == number


def _number(text: str) -> Decimal | None:
    text = text.strip().strip("$%").strip()
    if len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", "").replace(_MINUS, "-"))


def _last_boxed(text: str) -> str | None:
    at = text.rfind(r"\boxed{")
    if at < 0:
        return None
    start = at + len(r"\boxed{")
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return None
