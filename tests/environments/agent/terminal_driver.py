"""Start an agent at a pseudo-terminal, type a prompt, and exit when it waits for the next one. Runs in a sandbox.

    python terminal_driver.py PROMPT_FILE COMMAND…

It waits for what a person would see: the echo of the prompt, the answer file, and the mark of an idle agent in the
window title.
"""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

TIME_LIMIT = 90.0
IDLE_MARK = "\N{EIGHT SPOKED ASTERISK}".encode()


class Terminal:
    """An agent's terminal and its output."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.environ["TERM"] = "xterm-256color"
            os.execvp(command[0], command)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self.output = b""
        self.closed = False
        self._deadline = time.monotonic() + TIME_LIMIT

    def read_until(self, condition: Callable[[], bool]) -> None:
        """Read output until the condition holds, the agent exits, or the time limit kills it."""
        while not self.closed and not condition():
            if time.monotonic() > self._deadline:
                os.kill(self.pid, signal.SIGKILL)
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    data = os.read(self.fd, 1 << 16)
                except OSError:  # raised at the end of a pseudo-terminal
                    data = b""
                self.output += data
                self.closed = not data

    def type(self, text: str) -> None:
        """Type a line and press Enter. Output from before that is discarded."""
        start, last = len(self.output), text.rsplit(maxsplit=1)[-1].encode()
        os.write(self.fd, text.encode())
        self.read_until(lambda: last in self.output[start:])
        self.output = b""
        os.write(self.fd, b"\r")


def main(prompt: str, command: list[str]) -> int:
    terminal = Terminal(command)
    terminal.read_until(lambda: b"permissions" in terminal.output)
    terminal.type(prompt)
    terminal.read_until(lambda: Path("answer.txt").exists())
    terminal.output = b""
    terminal.read_until(lambda: b"\x1b]0;" + IDLE_MARK in terminal.output)
    terminal.type("/exit")
    terminal.read_until(lambda: False)
    return os.waitstatus_to_exitcode(os.waitpid(terminal.pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main(" ".join(Path(sys.argv[1]).read_text(encoding="utf-8").split()), sys.argv[2:]))
