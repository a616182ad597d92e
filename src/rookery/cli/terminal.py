"""Format text, numbers and tables for the terminal.

Guarantees:
- text from models, sandboxes and files cannot move the cursor, change colours or hide text;
- a long text is truncated and says how much is left out.
"""

import os
import shlex
import shutil
import sys
import time
import unicodedata
from pathlib import Path

import click

_ALLOWED_CONTROLS = frozenset("\n\t")
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))


def escape_controls(text: str) -> str:
    """Return the text with control characters and invisible characters escaped, except newlines and tabs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char in _ALLOWED_CONTROLS or unicodedata.category(char) not in _HIDDEN else _escape(char)
        for char in text
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()


def one_line(text: str, limit: int = 160) -> str:
    """Return the text as one line of at most `limit` characters, with control characters escaped."""
    flat = " ".join(escape_controls(text).split())
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"


def truncate_middle(text: str, limit: int) -> str:
    """Return a text longer than `limit` with its middle replaced by the number of characters left out."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


def plural(count: int, noun: str) -> str:
    """Return the count and the noun, in the plural unless the count is 1."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith('x') else 's'}"


def format_duration(seconds: float) -> str:
    """Return a duration as text, such as `12ms`, `0.4s`, `12s`, `3m 05s` or `2h 10m`."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f}ms" if seconds >= 0.001 else "0s"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours < 48 else f"{hours // 24}d {hours % 24}h"


def format_age(then: float, now: float | None = None) -> str:
    seconds = max(0.0, (time.time() if now is None else now) - then)
    return "now" if seconds < 1 else f"{format_duration(seconds)} ago"


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, such as `1.5 GB`. Units are powers of 1024."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GB"


def format_rate(count: float, seconds: float) -> str:
    """Return `count` per second as text, or `-` if no time has passed."""
    if seconds <= 0:
        return "-"
    value = count / seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def relative_path(path: Path) -> str:
    """Return the path relative to the working directory if it is inside it, else the path unchanged."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve())) or "."
    except ValueError:
        return str(path)


def shell_quote(path: Path) -> str:
    """Return the path, relative if possible, quoted for a shell."""
    return shlex.quote(relative_path(path))


def program_name() -> str:
    """Return the command to type: `rookery`, or the path of this program if `rookery` is not on PATH."""
    called = sys.argv[0]
    if Path(called).name != "rookery":
        return "rookery"
    found = shutil.which("rookery")
    same = found is not None and Path(called).exists() and Path(found).samefile(called)
    return "rookery" if same else shlex.quote(called)


def terminal_width() -> int:
    """Return the width of the terminal in columns, at least 60; 120 if stdout is not a terminal."""
    return max(60, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 120


def write_line(text: str, *, err: bool = True) -> bool:
    """Write a line to stderr, or to stdout if `err` is False.

    Return False instead of raising if the pipe is closed, which must not change the outcome of a run.
    """
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        return False
    return True


def dim(text: str) -> str:
    return click.style(text, dim=True) if text else text


def bold(text: str) -> str:
    return click.style(text, bold=True) if text else text


def style_status(status: str) -> str:
    """Return the status of a run with a colour for the terminal."""
    colours = {"finished": "green", "running": "cyan", "stopped": "yellow", "interrupted": "yellow"}
    return click.style(status, fg=colours.get(status, "red"))


def format_table(rows: list[list[str]], *, right: frozenset[int] = frozenset(), indent: str = "") -> list[str]:
    """Return the rows as lines with aligned columns. The columns in `right` are aligned to the right.

    Terminal styles do not count as width, and lines have no trailing spaces.
    """
    if not rows:
        return []
    widths = [max(len(click.unstyle(row[at])) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for at, cell in enumerate(row):
            pad = " " * (widths[at] - len(click.unstyle(cell)))
            cells.append(pad + cell if at in right else cell + pad)
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def color_setting() -> bool | None:
    """Return False if NO_COLOR is set, else None, which lets click decide."""
    return False if os.environ.get("NO_COLOR") else None
