"""Start a program with posix_spawn directly from the bytes of a request message. Runs in pid 1 of a sandbox.

Arguments and environment stay in the message buffer. They are not copied into Python objects, where later forks
of this process could read them. The child takes over the real user and group of pid 1, changes its directory and
executes the program.
"""

from __future__ import annotations

import ctypes
import os
import struct

from rookery.sandbox_runtime import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_libc = ctypes.CDLL(None)
_RESETIDS, _SETSIGDEF, _SETSIGMASK, _SETSID = 0x01, 0x04, 0x08, 0x80
_STRUCT_SIZE = 1024
"""More than any C library needs for `posix_spawnattr_t`, `posix_spawn_file_actions_t` or `sigset_t`."""


class Spawner:
    """Starts programs with posix_spawn, which uses vfork: its cost does not grow with the heap of this process."""

    def __init__(self) -> None:
        self._attributes = ctypes.create_string_buffer(_STRUCT_SIZE)
        self._actions = ctypes.create_string_buffer(_STRUCT_SIZE)
        self._pid = ctypes.c_int(0)
        _check(_libc.posix_spawnattr_init(self._attributes))
        signals = ctypes.create_string_buffer(_STRUCT_SIZE)
        _check(_libc.sigemptyset(signals))
        _check(_libc.posix_spawnattr_setsigmask(self._attributes, signals))
        for number in processes.RESET_SIGNALS:
            _check(_libc.sigaddset(signals, int(number)))
        _check(_libc.posix_spawnattr_setsigdefault(self._attributes, signals))
        flags = _RESETIDS | _SETSIGDEF | _SETSIGMASK | _SETSID
        _check(_libc.posix_spawnattr_setflags(self._attributes, ctypes.c_short(flags)))

    def spawn(
        self, programs: Sequence[bytes], buffer: Any, offsets: Sequence[int], argc: int, fds: Sequence[int]
    ) -> tuple[int, int]:
        """Start the first of the programs that can be executed. Return its pid and 0, or 0 and an errno.

        `offsets` are the starts of the strings in `buffer`: the working directory, `argc` arguments, the
        environment, and one past the end. The buffer must have space for a NUL there.
        """
        buffer[offsets[-1] - 1 : offsets[-1]] = b"\0"
        first = ctypes.c_char.from_buffer(buffer)
        base = ctypes.addressof(first)
        argv = struct.pack(f"{argc + 1}P", *(base + offset for offset in offsets[1 : argc + 1]), 0)
        env_offsets = offsets[argc + 1 : -1]
        environ = struct.pack(f"{len(env_offsets) + 1}P", *(base + offset for offset in env_offsets), 0)
        actions = self._actions
        _check(_libc.posix_spawn_file_actions_init(actions))
        problem = 2
        try:
            _check(_libc.posix_spawn_file_actions_addchdir_np(actions, ctypes.c_void_p(base + offsets[0])))
            for target, fd in enumerate(fds):
                _check(_libc.posix_spawn_file_actions_adddup2(actions, fd, target))
            for program in programs:
                problem = _libc.posix_spawn(
                    ctypes.byref(self._pid), program, actions, self._attributes, argv, environ
                )
                if not problem:
                    return self._pid.value, 0
            return 0, problem
        finally:
            _libc.posix_spawn_file_actions_destroy(actions)


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
