"""Messages between a sandbox's owner and its guard or pid 1: fixed structs, optionally with NUL-separated text.

Both sides import this module. JSON and pickle are avoided because they are slow to import.
"""

import struct

from rookery.sandbox_runtime.lightweight import _signal

CHANNEL_FD = 3
"""File descriptor of the guard's end of the socket pair."""
REQUEST = struct.Struct("<BIddqIiiB")
"""Operation, command number, wall seconds, CPU seconds, memory (or start ticks), argument count, uid, gid,
flags."""
REPORT = struct.Struct("<BIBidqdI")
"""Kind, command number, reason, wait status (or errno), CPU seconds, peak bytes, wall seconds, survivors."""
HELLO, SPAWN, KILL, INTERRUPT, DISCARD, KILL_ALL = range(6)
"""Operations of a request."""
READY, ENDED, INTERRUPTED, ALL_KILLED = range(4)
"""Kinds of a report."""
EXITED, TIME_LIMIT, PROCESS_LIMIT, KILLED, NOT_STARTED, NO_DIRECTORY = range(6)
"""Reasons why a command ended. With `NOT_STARTED` and `NO_DIRECTORY` the status is an errno."""
FLAG_BODY_IN_FILE, FLAG_WARM = 1, 2
"""The text is in a file whose descriptor comes last; a warm Python interpreter may be used."""
MAX_MESSAGE = 64 << 10
INTERRUPT_SIGNAL = _signal.SIGRTMAX - 3
"""Signal that makes a shell abandon its present script."""
