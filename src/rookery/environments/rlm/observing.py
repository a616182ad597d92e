"""What came of a cell, as text for the model. Pure.

Promises:
- at most `limit` characters of what a cell wrote, its head and its tail, with how much was cut between them;
- what ended a cell, and what became of its state, is never cut;
- whatever a program wrote, an observation has one beginning and one end: tags in its output are not ours.
"""

import re
from typing import Any, Final

from rookery.core import ExecResult
from rookery.environments.results import NOTHING
from rookery.workers import Cell

_OURS: Final = re.compile(r"<(/?)(result|code)>")


def capped(text: str, limit: int, dropped: int = 0) -> str:
    """Head and tail; `dropped` bytes are missing in its middle already."""
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate would break every encoder behind us
    if len(text) <= limit and not dropped:
        return text
    kept = min(limit, len(text))
    cut = [f"{len(text) - kept:,} characters"] if len(text) > kept else []
    cut += [f"{dropped:,} bytes"] if dropped else []
    return f"{text[: kept - kept // 2]}\n… {' and '.join(cut)} cut …\n{text[len(text) - kept // 2 :]}"


def of_cell(cell: Cell, limit: int) -> str:
    """Of Python."""
    wrote = [part.rstrip("\n") for part in (cell.stdout, cell.stderr, cell.error or cell.value) if part]
    parts = [capped("\n".join(wrote), limit, cell.stdout_dropped + cell.stderr_dropped)] if wrote else []
    if cell.status not in ("ok", "runtime", "syntax"):
        parts.append(f"[{cell.status}: {cell.notice or cell.detail}]")
    elif cell.notice:
        parts.append(f"[{cell.notice}]")
    if cell.figures:
        parts.append(f"[figures: {', '.join(cell.figures)}]")
    return "\n".join(parts) or NOTHING


def of_script(result: ExecResult, limit: int) -> str:
    """Of bash."""
    wrote = [
        data.decode("utf-8", "replace").rstrip("\n") for data in (result.stdout, result.stderr) if data.strip()
    ]
    parts = [capped("\n".join(wrote), limit, result.stdout_dropped + result.stderr_dropped)] if wrote else []
    if result.status != "exited":
        parts.append(f"[{result.status}: {result.detail}]" if result.detail else f"[{result.status}]")
    elif result.detail:
        parts.append(f"[exit code {result.exit_code}; {result.detail}]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(parts) or NOTHING


def budget_line(left: dict[str, Any], used: int = 0, context: int | None = None, *, warn: bool = False) -> str:
    """What the tree may still use, after each cell."""
    said = [f"{left['calls_left']:,} sub-calls"]
    if "tokens_left" in left:
        said.append(f"{left['tokens_left']:,} tokens for them")
    if "seconds_left" in left:
        said.append(f"{left['seconds_left']:,.0f} s")
    line = f"[left: {', '.join(said)}]"
    if warn and context:
        line += (
            f"\n[warning: this conversation has about {used:,} of its {context:,} tokens. "
            "Print less, keep what you know in variables or files, and answer soon.]"
        )
    return line


def tagged(text: str) -> str:
    """Between tags."""
    text = _OURS.sub(r"<\1\2 >", text)
    return f"<result>\n{text}\n</result>" if "\n" in text else f"<result>{text}</result>"
