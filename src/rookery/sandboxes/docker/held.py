"""What is known of a container from outside: its pid 1, its control group, its users.

Promises:
- the death of pid 1 is noticed when it happens, also by owners who cannot see its number;
- what cannot be seen from here is empty, never guessed.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path

from rookery.sandboxes.channel import Channel
from rookery.sandboxes.docker.door import Met
from rookery.sandboxes.local import groups


class DockerChannel(Channel):
    """To pid 1 of a container, which may be another user's, or in processes that we cannot see."""

    def __init__(self, met: Met, end: Callable[[], None]) -> None:
        super().__init__(met.pid, met.sock, None, _death_of(met))
        self._end = end

    def kill_guard(self) -> None:
        # It may be another user's, or a number that we do not know; and who is frozen does not hear a hang-up.
        with contextlib.suppress(OSError):
            super().kill_guard()
        self.hang_up()
        self._end()


def _death_of(met: Met) -> int:
    """A descriptor that tells the death of pid 1, and with it of everything in the container."""
    if met.pid > 0:
        with contextlib.suppress(OSError):
            return os.pidfd_open(met.pid)
    return met.fds.pop("life")


def group_of(pid: int) -> str:
    """The folder of the control group that counts a container's memory; empty where we cannot see it."""
    if pid <= 0:
        return ""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return ""
    paths: dict[str, str] = {}
    for line in lines:
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    for folder, kind, options in groups._mounts():
        name = "" if kind == "cgroup2" else groups.MEMORY
        if (kind == "cgroup2" or groups.MEMORY in options) and paths.get(name, "/") != "/":
            found = f"{folder}{paths[name]}"
            counts = "memory.events" if kind == "cgroup2" else "memory.oom_control"
            if (Path(found) / counts).exists():
                return found
    return ""


def seen_as(pid: int, uid: int) -> int:
    """The number by which we know a user of the container."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines():
            inside, outside, count = map(int, line.split())
            if inside <= uid < inside + count:
                return outside + uid - inside
    return uid


@functools.cache
def has_sixth() -> bool:
    """Whether this machine's kernel speaks the sixth version of the internet protocol."""
    return Path("/proc/sys/net/ipv6/conf/lo").exists()
