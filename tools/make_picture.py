"""Draw docs/images/demo.svg, the picture of a run in the README: the real output of two commands in a terminal.

Usage: python tools/make_picture.py
"""

import fcntl
import io
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"
COLUMNS, LINES = 88, 60
COMMANDS = (("rookery", "demo"), ("rookery", "show", "latest", "1.1"))


def run_in_terminal(command: tuple[str, ...], folder: str) -> str:
    """Run a command in a pseudo-terminal and return its output with escape sequences."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color")
        os.execv(sys.executable, (sys.executable, "-m", "rookery.cli", *command[1:]))  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    output = b""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the command has ended
            break
        if not data:
            break
        output += data
    os.waitpid(pid, 0)
    return output.decode().replace("\r\n", "\n")


def leave_out_progress(output: str) -> str:
    """Remove the progress display, which overwrites itself, and the hints after the summary."""
    head, _, rest = output.partition("\x1b[?25l")
    summary = rest.rpartition("\x1b[2K")[2]
    return head.rstrip() + "\n" + summary.partition("\nrun directory")[0].rstrip() + "\n"


def main() -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            output = run_in_terminal(command, folder)
            console.print(Text.from_ansi(f"\x1b[1m$ {' '.join(command)}\x1b[0m\n" + leave_out_progress(output)))
    svg = console.export_svg(title="rookery demo")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no fonts from other hosts
    svg = svg.replace("font-family: Fira Code, monospace", "font-family: ui-monospace, Menlo, Consolas, monospace")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(svg)


if __name__ == "__main__":
    main()
