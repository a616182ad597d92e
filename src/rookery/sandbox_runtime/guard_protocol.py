"""Messages between the process that owns a sandbox and the guard or pid 1 that runs the sandbox's commands.

A message is a fixed struct, optionally followed by NUL-separated text. Both sides import this module. JSON and
pickle are avoided because they are slow to import.
"""

import struct

from rookery.sandbox_runtime.lightweight import _signal

CHANNEL_FD = 3
"""File descriptor of the guard's end of the socket pair."""
REQUEST = struct.Struct("<BIddqIiiB")
"""A request of the owner: operation, command number, wall seconds, CPU seconds, memory in bytes (or start ticks),
argument count, uid, gid, flags."""
REPORT = struct.Struct("<BIBidqdI")
"""A report to the owner: kind, command number, reason, wait status (or errno), CPU seconds, peak memory in
bytes, wall seconds, number of processes that could not be killed."""
HELLO, SPAWN, KILL, INTERRUPT, DISCARD, KILL_ALL = range(6)
"""Operations of a request."""
READY, ENDED, INTERRUPTED, ALL_KILLED = range(4)
"""Kinds of a report."""
EXITED, TIME_LIMIT, PROCESS_LIMIT, KILLED, NOT_STARTED, NO_DIRECTORY = range(6)
"""Reasons why a command ended. With `NOT_STARTED` and `NO_DIRECTORY` the status is an errno."""
FLAG_BODY_IN_FILE, FLAG_WARM = 1, 2
"""Flags of a request. `FLAG_BODY_IN_FILE`: the text is in a file, whose descriptor is the last one of the message.
`FLAG_WARM`: the command may be forked from a Python interpreter that is already running."""
MAX_MESSAGE = 64 << 10
INTERRUPT_SIGNAL = _signal.SIGRTMAX - 3
"""Signal that makes a persistent shell abandon the script that it is executing."""
