"""Small matters of text: numbers, times and what others wrote, as a person reads them.

Promises:
- nothing that a model, a sandbox or a file wrote can move the cursor, change colours or hide text on a terminal;
- a long text is cut at a bound and says how much was left out.
"""

import os
import shlex
import shutil
import sys
import time
import unicodedata
from pathlib import Path

import click

_KEPT = frozenset("\n\t")
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))


def clean(text: str) -> str:
    """The text with control and invisible characters written out, so that a terminal shows what is there."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char if char in _KEPT or unicodedata.category(char) not in _HIDDEN else _written(char) for char in text
    )


def _written(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()


def line(text: str, limit: int = 160) -> str:
    """One clean line of at most `limit` characters."""
    flat = " ".join(clean(text).split())
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"


def clip(text: str, limit: int) -> str:
    """At most `limit` characters of a text: its head and its tail, and how much lies between."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """`12ms`, `0.4s`, `12s`, `3m 05s`, `2h 10m`."""
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


def age(then: float, now: float | None = None) -> str:
    seconds = max(0.0, (time.time() if now is None else now) - then)
    return "now" if seconds < 1 else f"{duration(seconds)} ago"


def amount(count: float) -> str:
    """Of bytes."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GB"


def rate(count: float, seconds: float) -> str:
    """Per second, with as many digits as it deserves."""
    if seconds <= 0:
        return "-"
    value = count / seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def shown_path(path: Path) -> str:
    """Relative to the present folder where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve())) or "."
    except ValueError:
        return str(path)


def quoted(path: Path) -> str:
    """As one would type it into a shell."""
    return shlex.quote(shown_path(path))


def program() -> str:
    """This command as one would type it again: the path it was called by where no `rookery` is on PATH."""
    called = sys.argv[0]
    if Path(called).name != "rookery":
        return "rookery"
    found = shutil.which("rookery")
    same = found is not None and Path(called).exists() and Path(found).samefile(called)
    return "rookery" if same else shlex.quote(called)


def columns() -> int:
    """How wide a line may be: the terminal's width, or what a log can take."""
    return max(60, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 120


def tell(text: str, *, err: bool = True) -> bool:
    """Writes a line; False when nobody reads any more, which must not change what a run comes to."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        return False
    return True


def dim(text: str) -> str:
    return click.style(text, dim=True) if text else text


def bold(text: str) -> str:
    return click.style(text, bold=True) if text else text


def status_word(status: str) -> str:
    """A run's status in its colour."""
    colours = {"finished": "green", "running": "cyan", "stopped": "yellow", "interrupted": "yellow"}
    return click.style(status, fg=colours.get(status, "red"))


def table(rows: list[list[str]], *, right: frozenset[int] = frozenset(), indent: str = "") -> list[str]:
    """Aligned columns; styles do not count as width. The last column is not padded."""
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


def colours_wanted() -> bool | None:
    """None leaves it to whether the stream is a terminal; NO_COLOR is never ignored."""
    return False if os.environ.get("NO_COLOR") else None
