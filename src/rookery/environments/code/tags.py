"""Code in a model's text, and what came of it as text for the model. Pure.

Promises:
- the first `<code>` of a text is its cell; one that a stop string ended is complete without its end tag;
- an observation is one `<result>`, on one line where what it holds is one line;
- whatever a program wrote, an observation has one beginning and one end: tags in its output are not ours;
- a submission is the last fenced program of the final answer; else its answer tag, else the last cell that ran.
"""

import re
from typing import Final

from rookery.environments.results import NOTHING, clip
from rookery.workers import Cell

BEGIN: Final = "<code>"
END: Final = "</code>"
_OURS: Final = re.compile(r"<(/?)(result|code)>")
_FENCE: Final = re.compile(
    r"^(?P<fence>`{3,}|~{3,})[^\n]*\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def code_of(text: str) -> str | None:
    """The cell in a text, without its tags; None where there is none."""
    _, begin, rest = text.partition(BEGIN)
    if not begin:
        return None
    code = rest.partition(END)[0]
    return code.removeprefix("\r").removeprefix("\n").rstrip()


def closed(text: str) -> bool:
    """Whether the cell of a text has its end tag."""
    return END in text.partition(BEGIN)[2]


def observation(cell: Cell, limit: int) -> str:
    """A cell's result between tags."""
    text = _OURS.sub(r"<\1\2 >", described(cell, limit))
    return f"<result>\n{text}\n</result>" if "\n" in text else f"<result>{text}</result>"


def described(cell: Cell, limit: int) -> str:
    """What a cell printed, its value or its error, and what became of it where it did not end well."""
    printed = clip(cell.stdout, limit, cell.stdout_dropped).rstrip("\n")
    complained = clip(cell.stderr, limit, cell.stderr_dropped).rstrip("\n")
    ended = clip(cell.error, limit).rstrip("\n") if cell.error else cell.value
    parts = [part for part in (printed, complained, ended) if part]
    if cell.status not in ("ok", "runtime", "syntax"):
        parts.append(f"[{cell.status}: {cell.notice or cell.detail}]")
    elif cell.notice:
        parts.append(f"[{cell.notice}]")
    figures = ", ".join(cell.figures)
    if figures:
        parts.append(f"[figures: {figures}]")
    return "\n".join(parts) or NOTHING


def submission_of(answer: str, cells: list[str]) -> str:
    """The program that a rollout hands in."""
    fenced = [found["body"] for found in _FENCE.finditer(answer)]
    if fenced:
        return fenced[-1]
    tagged = _ANSWER.findall(answer)
    if tagged:
        return str(tagged[-1]).strip("\n")
    return cells[-1] if cells else ""
