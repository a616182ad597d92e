"""Starting a program from words that lie in a message, without a copy of them. Stand-alone.

Promises:
- of what a program is given nothing stays in our memory but the message itself;
- the new process becomes, effectively, who we really are; then it goes to its folder, then it is the program.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes import procs
else:
    import procs

if TYPE_CHECKING:
    from typing import Any

_libc = ctypes.CDLL(None)
_RESETIDS, _SETSIGDEF, _SETSIGMASK, _SETSID = 0x01, 0x04, 0x08, 0x80
_ROOM = 1024
"""More than any C library needs for its records of these kinds."""


class Launcher:
    """posix_spawn: vfork inside, so its cost does not grow with our heap."""

    def __init__(self) -> None:
        self._attributes = ctypes.create_string_buffer(_ROOM)
        self._actions = ctypes.create_string_buffer(_ROOM)
        self._pid = ctypes.c_int(0)
        _checked(_libc.posix_spawnattr_init(self._attributes))
        signals = ctypes.create_string_buffer(_ROOM)
        _checked(_libc.sigemptyset(signals))
        _checked(_libc.posix_spawnattr_setsigmask(self._attributes, signals))
        for number in procs.DEFAULTED:
            _checked(_libc.sigaddset(signals, int(number)))
        _checked(_libc.posix_spawnattr_setsigdefault(self._attributes, signals))
        flags = _RESETIDS | _SETSIGDEF | _SETSIGMASK | _SETSID
        _checked(_libc.posix_spawnattr_setflags(self._attributes, ctypes.c_short(flags)))

    def spawn(
        self, programs: Sequence[bytes], room: Any, bounds: Sequence[int], count: int, fds: Sequence[int]
    ) -> tuple[int, int]:
        """The pid, or 0 and the errno. The first of the programs that is one.

        `bounds` says where the parts of a message in `room` begin: the folder, `count` words, the variables, and
        one past its end. There must be room for a NUL behind it.
        """
        room[bounds[-1] - 1 : bounds[-1]] = b"\0"
        held = ctypes.c_char.from_buffer(room)
        base = ctypes.addressof(held)
        words = struct.pack(f"{count + 1}P", *(base + at for at in bounds[1 : count + 1]), 0)
        pairs = struct.pack(f"{len(bounds) - count - 1}P", *(base + at for at in bounds[count + 1 : -1]), 0)
        actions = self._actions
        _checked(_libc.posix_spawn_file_actions_init(actions))
        problem = 2
        try:
            _checked(_libc.posix_spawn_file_actions_addchdir_np(actions, ctypes.c_void_p(base + bounds[0])))
            for at, fd in enumerate(fds):
                _checked(_libc.posix_spawn_file_actions_adddup2(actions, fd, at))
            for program in programs:
                problem = _libc.posix_spawn(
                    ctypes.byref(self._pid), program, actions, self._attributes, words, pairs
                )
                if not problem:
                    return self._pid.value, 0
            return 0, problem
        finally:
            _libc.posix_spawn_file_actions_destroy(actions)


def _checked(problem: int) -> None:
    if problem:
        raise OSError(problem, os.strerror(problem))
