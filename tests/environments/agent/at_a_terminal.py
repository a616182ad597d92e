"""Runs in a box: starts an agent at a terminal, types a prompt, and leaves when it waits for the next one.

    python at_a_terminal.py PROMPT_FILE COMMAND…

What is waited for is what a person sees: the prompt's echo, the answer's file, and the mark of an idle agent in
the title of the window.
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

SECONDS = 90.0
IDLE = "\N{EIGHT SPOKED ASTERISK}".encode()


class Screen:
    """An agent's terminal, and all that was written on it."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.environ["TERM"] = "xterm-256color"
            os.execvp(command[0], command)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self.seen = b""
        self.over = False
        self._end = time.monotonic() + SECONDS

    def until(self, there: Callable[[], bool]) -> None:
        """Reads on until it is so, until the agent is gone, or until the time is up."""
        while not self.over and not there():
            if time.monotonic() > self._end:
                os.kill(self.pid, signal.SIGKILL)
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    data = os.read(self.fd, 1 << 16)
                except OSError:  # how a terminal says that nobody is there
                    data = b""
                self.seen += data
                self.over = not data

    def type(self, text: str) -> None:
        """A line; what is on the screen before the line is entered is not looked at again."""
        start, last = len(self.seen), text.rsplit(maxsplit=1)[-1].encode()
        os.write(self.fd, text.encode())
        self.until(lambda: last in self.seen[start:])
        self.seen = b""
        os.write(self.fd, b"\r")


def main(prompt: str, command: list[str]) -> int:
    screen = Screen(command)
    screen.until(lambda: b"permissions" in screen.seen)
    screen.type(prompt)
    screen.until(lambda: Path("answer.txt").exists())
    screen.seen = b""
    screen.until(lambda: b"\x1b]0;" + IDLE in screen.seen)
    screen.type("/exit")
    screen.until(lambda: False)
    return os.waitstatus_to_exitcode(os.waitpid(screen.pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main(" ".join(Path(sys.argv[1]).read_text(encoding="utf-8").split()), sys.argv[2:]))
