"""Process inspection for tests. A process that ends meanwhile counts as absent."""

import contextlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from signal import Signals

from rookery.sandbox_runtime.processes import list_children


def descendants(pid: int, without: Collection[int] = ()) -> list[int]:
    """List the descendants of a process, parents first, skipping the trees rooted at `without`."""
    result, todo = list[int](), [pid]
    while todo:
        children = [child for child in list_children(todo.pop(0)) if child not in without]
        result += children
        todo += children
    return result


def cmdline(pid: int) -> bytes:
    """Return the command line of a process, or empty bytes if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def send_signal(pids: Iterable[int], number: Signals) -> None:
    """Send a signal to each process that has not ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
