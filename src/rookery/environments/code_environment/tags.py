"""Extract code from a model's text, and render the result of a cell as text. Pure functions.

The content of the first `<code>` tag of a text is the cell to run; the end tag may be missing, because it is the
stop string. The result is shown to the model in a `<result>` tag; such tags in the output of a program are
escaped. The submission is the last fenced block of the final answer or, in this order, the content of its last
`<answer>` tag or the last cell that ran.
"""

import re
from typing import Final

from rookery.environments.text import clip, join_cell_parts
from rookery.workers import Cell

BEGIN: Final = "<code>"
END: Final = "</code>"
_TAGS: Final = re.compile(r"<(/?)(result|code)>")
_FENCE: Final = re.compile(
    r"^(?P<fence>`{3,}|~{3,})[^\n]*\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_code(text: str) -> str | None:
    """Return the content of the first `<code>` tag in a text, or None if the text has no such tag."""
    _, begin, rest = text.partition(BEGIN)
    if not begin:
        return None
    code = rest.partition(END)[0]
    return code.removeprefix("\r").removeprefix("\n").rstrip()


def is_closed(text: str) -> bool:
    """Return whether the first `<code>` tag in a text has its end tag."""
    return END in text.partition(BEGIN)[2]


def render_observation(cell: Cell, limit: int) -> str:
    """Render the result of a cell in a `<result>` tag, in about `limit` bytes for each part."""
    return wrap_result(render_cell(cell, limit))


def wrap_result(text: str) -> str:
    """Wrap text in a `<result>` tag. `<result>` and `<code>` tags inside the text are escaped."""
    text = _TAGS.sub(r"<\1\2 >", text)
    return f"<result>\n{text}\n</result>" if "\n" in text else f"<result>{text}</result>"


def render_cell(cell: Cell, limit: int) -> str:
    """Render a cell's output, its value or error, and how it ended if that was not normal.

    Stdout, stderr and the error are each shortened to about `limit` bytes.
    """
    stdout = clip(cell.stdout, limit, cell.stdout_dropped).rstrip("\n")
    stderr = clip(cell.stderr, limit, cell.stderr_dropped).rstrip("\n")
    ending = clip(cell.error, limit).rstrip("\n") if cell.error else cell.value
    parts = [part for part in (stdout, stderr, ending) if part]
    return join_cell_parts(cell, parts)


def extract_submission(answer: str, cells: list[str]) -> str:
    """Return the program that a rollout submits. `answer` is its final message, `cells` are the cells that ran.

    It is the last fenced block of the answer, the content of its last `<answer>` tag, or the last cell.
    """
    fenced = [match["body"] for match in _FENCE.finditer(answer)]
    if fenced:
        return fenced[-1]
    tagged = _ANSWER.findall(answer)
    if tagged:
        return str(tagged[-1]).strip("\n")
    return cells[-1] if cells else ""
