"""The program of a warm interpreter inside a box: forks itself for every command. Stand-alone, as `python` is.

It is a process of the user that its commands run as, and as little to be trusted as they are.

Promises:
- it never sees what a command is given: only the fork that becomes the command reads that;
- a command is nobody's child but pid 1's, and does not begin before pid 1 has taken it up;
- it ends with the line to pid 1.
"""

from __future__ import annotations

import array
import os
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from rookery.sandboxes.local import python
else:
    import python

LINE = 3
MOST = 7
HERE, GO = b"here", b"go"
ADOPTED_SECONDS = 1.0


def serve(warm: python.Warm) -> NoReturn:
    line = socket.socket(fileno=LINE)
    line.send(HERE)
    while True:
        data, extra, _, _ = line.recvmsg(1 << 16, socket.CMSG_SPACE(4 * MOST))
        if not data:
            os._exit(0)
        fds = array.array("i")
        for _, _, raw in extra:
            fds.frombytes(raw)
        try:
            pid = os.fork()
            if pid == 0:
                _between(warm, data, list(fds))
            os.waitpid(pid, 0)
        except OSError:
            pass  # too many processes: who asked hears that its line is closed
        finally:
            for fd in fds:
                os.close(fd)


def _between(warm: python.Warm, data: bytes, fds: list[int]) -> NoReturn:
    """Ends at once, so that its own child is pid 1's."""
    try:
        if os.fork() == 0:
            _become(warm, data, fds)
    finally:
        os._exit(0)


def _become(warm: python.Warm, data: bytes, fds: list[int]) -> NoReturn:
    try:
        line, body, streams = fds[0], fds[1], fds[2:]
        text = os.pread(body, os.fstat(body).st_size - 1, 0)
        count, _, program = data.partition(b" ")
        parts = text.split(b"\0")
        os.setsid()
        os.chdir(parts[0])
        end = time.monotonic() + ADOPTED_SECONDS
        while os.getppid() != 1 and time.monotonic() < end:
            os.sched_yield()
        os.write(line, HERE)
        if os.read(line, 16) != GO:
            os._exit(1)
        for at, fd in enumerate(streams):
            os.dup2(fd, at)
        os.closerange(len(streams), max(*fds, LINE) + 1)
        python.become(warm, os.fsdecode(program), [count, *parts[1:]])
    finally:
        os._exit(1)
