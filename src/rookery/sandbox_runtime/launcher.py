"""Start a guard or a keeper, the daemons that own sandboxes, as a child of the process that uses the sandboxes.

The child gets one end of a socket pair as file descriptor 3, a log file as standard error, and the environment
variables that the caller passes. It inherits nothing else: no other file descriptor, no terminal, no changed
signal handler.
"""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from rookery.sandbox_runtime import processes
from rookery.sandbox_runtime.guard_protocol import CHANNEL_FD

_MAIN = str(Path(__file__).with_name("__main__.py"))


def command_line(module: str) -> list[str]:
    """Return the arguments with which a Python interpreter runs the `main` of a Rookery module."""
    return ["-I", "-S", _MAIN, module]


def start_program(module: str, env: Mapping[str, str], log: Path) -> tuple[int, socket.socket]:
    """Start a module as a child process. Return its pid and the parent's non-blocking end of the socket pair.

    `log` is the file that receives the child's standard error. The function is not a coroutine, so that no
    cancellation can happen before the caller holds the pid.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ours.setblocking(False)
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, *command_line(module)],  # a relocated Python finds its library by this path
            {**env, "LC_ALL": "C.UTF-8"},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), CHANNEL_FD),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=processes.RESET_SIGNALS,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return pid, ours
