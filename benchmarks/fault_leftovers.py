"""Find what a run has left on this machine: processes, mounts, cgroups, containers and files.

The fault campaign calls it on its own machine and, as a Ray task, on the nodes of a cluster.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rookery.cluster.agent import find_base_folder
from rookery.core import RookeryError
from rookery.sandboxes.docker.client import BlockingEngineClient, api_path, find_socket, label_filter
from rookery.sandboxes.docker.orphans import RUN
from rookery.sandboxes.local.keeper_reaper import CGROUPS_FILE, KeeperCgroups


def read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def list_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def belongs_to(pid: int, marks: Iterable[str]) -> bool:
    """Return whether the command line, the environment or an open file of a process contains one of the marks."""
    folder = Path(f"/proc/{pid}")
    try:
        data = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        data += b"\n".join(bytes(one.readlink()) for one in (folder / "fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return False
    return any(mark.encode() in data for mark in marks)


def find_cgroups(folder: Path) -> dict[str, KeeperCgroups]:
    """Return where the keepers of runs and nodes below a directory create their cgroups, by their directories."""
    found = {}
    for depth in ("*/*", "*/*/*"):
        for path in folder.glob(f"{depth}/sandboxes/keeper-*/{CGROUPS_FILE}"):
            try:
                found[str(path)] = msgspec.json.decode(path.read_bytes(), type=KeeperCgroups)
            except (OSError, msgspec.DecodeError):  # it is being written or removed
                continue
    return found


def find_leftovers(marks: Iterable[str], run: str) -> list[str]:
    """Return descriptions of processes, mounts, containers and files of a run that are on this machine.

    `marks` are texts, such as directories, by which processes and mounts of the run are recognised.
    """
    marks = [*marks, run]
    found = []
    for pid in list_pids():
        if pid != os.getpid() and belongs_to(pid, marks):
            command = read_command(pid).replace(bytes(1), b" ").decode(errors="replace")
            found.append(f"process {pid}: {command[:200]}")
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    found += [f"mount {line}" for line in mounts if any(mark in line for mark in marks)]
    found += [f"container {name}" for name in _list_containers(run)]
    return found + [str(path) for path in find_base_folder("").glob(f"{run}-*")]


def find_left_cgroups(known: Iterable[KeeperCgroups]) -> list[str]:
    """Return the cgroups that are left of the keepers that used these names."""
    return [
        f"cgroup {path}"
        for one in known
        for parent in one.above
        for path in Path(parent).glob(f"{one.prefix}*")
        if path.is_dir()
    ]


def _list_containers(run: str) -> list[str]:
    try:
        client = BlockingEngineClient(find_socket())
        path = api_path("containers", "json", all="1", filters=label_filter(f"{RUN}={run}"))
        return [str(one["Id"]) for one in client.call("GET", path)]
    except RookeryError:  # this machine has no container engine, so it has no containers
        return []
