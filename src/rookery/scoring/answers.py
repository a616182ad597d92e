r"""Compare answers as texts and numbers. Pure functions.

Text written by the policy is never evaluated as code.
"""

import re
from decimal import Decimal

_MAX_NUMBER_LENGTH = 400
_MINUS = "\N{MINUS SIGN}"
_NUMBER = re.compile(rf"(?<![\w.])[-+{_MINUS}]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,4}})?")


def match_answer(text: str, answer: str | float) -> bool:
    r"""Return whether a final message gives the expected answer.

    If the text contains `\boxed{…}`, only the content of the last one counts. Otherwise the whole text counts or,
    if a number is expected, the last number in it. Answers match if they are the same text, ignoring surrounding
    white space, or the same number (`1,000` matches `1000.0`).
    """
    expected = str(answer).strip()
    boxed = find_last_boxed(text)
    candidate = (text if boxed is None else boxed).strip()
    if candidate == expected:
        return True
    number = parse_number(expected)
    if number is None:
        return False
    if boxed is None:
        candidate = find_last_number(candidate)
    return parse_number(candidate) == number


def find_last_number(text: str) -> str:
    """Return the last number in `text` as it is written there, or an empty string if there is none."""
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else ""


def parse_number(text: str) -> Decimal | None:
    """Return the number that `text` is, ignoring `$`, `%` and thousands separators; None if it is not one."""
    text = text.strip().strip("$%").strip()
    if len(text) > _MAX_NUMBER_LENGTH or not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", "").replace(_MINUS, "-"))


def find_last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` in `text`, or None if there is none."""
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
