"""A fork server: a warm Python interpreter inside a sandbox that forks itself once per command.

It runs as the user of its commands and is as little trusted as they are. Pid 1 starts it from a bundle and
talks to it over file descriptor 3.

- The server never reads the arguments of a command: only the fork that becomes the command does.
- A command is a child of pid 1 and does not run before pid 1 has accepted it.
- The server exits when its connection to pid 1 is closed.
"""

from __future__ import annotations

import array
import os
import socket
import sys
import time

from rookery.sandbox_runtime.python import warm_interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import NoReturn

CONNECTION_FD, PROGRAM_FD = 3, 4
MAX_FDS = 7
READY, START = b"ready", b"start"
REPARENT_SECONDS = 1.0


def main(initial_modules: dict[str, ModuleType]) -> NoReturn:
    """Prepare this interpreter for forks, then serve. `initial_modules` are the modules of a new interpreter."""
    os.close(PROGRAM_FD)
    del sys.path[0]
    warm = warm_interpreter.Warm(initial_modules)
    warm_interpreter.calibrate()
    warm_interpreter.warm_up(warm)
    sys.modules.clear()
    sys.modules.update(initial_modules)
    sys.argv[:] = [""]
    serve(warm)


def serve(warm: warm_interpreter.Warm) -> NoReturn:
    connection = socket.socket(fileno=CONNECTION_FD)
    connection.send(READY)
    while True:
        data, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(4 * MAX_FDS))
        if not data:
            os._exit(0)
        fds = array.array("i")
        for _, _, raw in ancillary:
            fds.frombytes(raw)
        try:
            pid = os.fork()
            if pid == 0:
                _fork_orphan(warm, data, list(fds))
            os.waitpid(pid, 0)
        except OSError:
            pass  # the process limit is reached: pid 1 notices that the command's socket is closed
        finally:
            for fd in fds:
                os.close(fd)


def _fork_orphan(warm: warm_interpreter.Warm, data: bytes, fds: list[int]) -> NoReturn:
    """Fork the command and exit at once, so that pid 1 becomes the command's parent."""
    try:
        if os.fork() == 0:
            _become_command(warm, data, fds)
    finally:
        os._exit(0)


def _become_command(warm: warm_interpreter.Warm, data: bytes, fds: list[int]) -> NoReturn:
    try:
        connection, body, streams = fds[0], fds[1], fds[2:]
        text = os.pread(body, os.fstat(body).st_size - 1, 0)
        count, _, interpreter = data.partition(b" ")
        argc = int(count)
        directory, *strings = text.split(b"\0")
        os.setsid()
        os.chdir(directory)
        end = time.monotonic() + REPARENT_SECONDS
        while os.getppid() != 1 and time.monotonic() < end:
            os.sched_yield()
        os.write(connection, READY)
        if os.read(connection, 16) != START:
            os._exit(1)
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
        os.closerange(len(streams), max(*fds, CONNECTION_FD) + 1)
        warm_interpreter.become_command(warm, os.fsdecode(interpreter), strings[:argc], strings[argc:])
    finally:
        os._exit(1)
