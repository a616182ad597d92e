"""Processes as tests look at them. Whatever ends meanwhile is not there; nothing else is overlooked for it."""

from collections.abc import Collection
from pathlib import Path

from rookery.sandbox_runtime.processes import list_children


def below(pid: int, without: Collection[int] = ()) -> list[int]:
    """Every process below one, parents first; nothing of the trees `without`."""
    found, todo = list[int](), [pid]
    while todo:
        here = [child for child in list_children(todo.pop(0)) if child not in without]
        found += here
        todo += here
    return found


def cmdline(pid: int) -> bytes:
    """What it was started as; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
