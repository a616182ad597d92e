"""How our own stand-alone programs (the guard, the keeper) are started.

Promises:
- a stub gets one end of a socket as its descriptor 3, a log for its errors, and nothing else of ours: no variable,
  no other descriptor, no terminal, no changed signal;
- starting one never suspends, so that no cancellation can fall between its start and its having an owner.
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rookery.sandboxes import guard, procs


def launch(words: Sequence[str], env: Mapping[str, str], log: Path) -> tuple[int, socket.socket]:
    """Starts Python with these words (a program and its arguments); its pid, and our end, which does not block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ours.setblocking(False)
        pid = os.posix_spawn(
            sys.executable,
            ["python", "-I", "-S", *words],
            {**env, "LC_ALL": "C.UTF-8"},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), guard.CHANNEL),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=procs.DEFAULTED,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return pid, ours
