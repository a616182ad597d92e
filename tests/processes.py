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


def list_open_files(directory: Path) -> list[str]:
    """List the files below a directory that this process has open, once for each descriptor."""
    return [target for target in _list_descriptors() if target.startswith(f"{directory}/")]


def count_sockets() -> int:
    """Return how many sockets this process has open."""
    return sum(target.startswith("socket:") for target in _list_descriptors())


def _list_descriptors() -> list[str]:
    """Return the target of every descriptor of this process."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return targets


def send_signal(pids: Iterable[int], number: Signals) -> None:
    """Send a signal to each process that has not ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
