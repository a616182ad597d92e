"""Render the result of a REPL cell as text for the model. Pure functions.

The output of a cell is limited to a number of characters. The text about how the cell ended, and whether the
REPL's state was lost, is never cut.
"""

from typing import Any

from rookery.core import ExecResult
from rookery.environments.text import NO_OUTPUT, join_cell_parts
from rookery.workers import Cell


def truncate_middle(text: str, limit: int, dropped: int = 0) -> str:
    """Shorten `text` to `limit` characters, keeping its head and tail.

    A line in the middle says how much was cut. `dropped` is the number of bytes that were already missing there.
    """
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate would break later encoders
    if len(text) <= limit and not dropped:
        return text
    kept = min(limit, len(text))
    cut = [f"{len(text) - kept:,} characters"] if len(text) > kept else []
    cut += [f"{dropped:,} bytes"] if dropped else []
    return f"{text[: kept - kept // 2]}\n… {' and '.join(cut)} cut …\n{text[len(text) - kept // 2 :]}"


def render_cell(cell: Cell, limit: int) -> str:
    """Render the result of a Python cell."""
    outputs = [part.rstrip("\n") for part in (cell.stdout, cell.stderr, cell.error or cell.value) if part]
    parts = (
        [truncate_middle("\n".join(outputs), limit, cell.stdout_dropped + cell.stderr_dropped)] if outputs else []
    )
    return join_cell_parts(cell, parts)


def render_script(result: ExecResult, limit: int) -> str:
    """Render the result of a bash script."""
    outputs = [
        data.decode("utf-8", "replace").rstrip("\n") for data in (result.stdout, result.stderr) if data.strip()
    ]
    parts = (
        [truncate_middle("\n".join(outputs), limit, result.stdout_dropped + result.stderr_dropped)]
        if outputs
        else []
    )
    if result.status != "exited":
        parts.append(f"[{result.status}: {result.detail}]" if result.detail else f"[{result.status}]")
    elif result.detail:
        parts.append(f"[exit code {result.exit_code}; {result.detail}]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(parts) or NO_OUTPUT


def format_budget(left: dict[str, Any], used: int = 0, context: int | None = None, *, warn: bool = False) -> str:
    """Return the line that follows the result of each cell and says what is left of the budget.

    If `warn`, add that `used` tokens of `context`, the model's context length, are used.
    """
    fields = [f"{left['calls_left']:,} sub-calls"]
    if "tokens_left" in left:
        fields.append(f"{left['tokens_left']:,} tokens for them")
    if "seconds_left" in left:
        fields.append(f"{left['seconds_left']:,.0f} s")
    line = f"[left: {', '.join(fields)}]"
    if warn and context:
        line += (
            f"\n[warning: this conversation has about {used:,} of its {context:,} tokens. "
            "Print less, keep what you know in variables or files, and answer soon.]"
        )
    return line
