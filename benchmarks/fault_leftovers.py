"""Find what a run has left on this machine: processes, mounts, cgroups, containers and files.

The fault campaign calls it on its own machine. On a Ray cluster of other machines, `RayMachines` calls it in a Ray
task on every node.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from rookery.cluster.agent import find_base_folder
from rookery.cluster.launchers import name_node
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


def find_cgroups(folder: Path, *patterns: str) -> dict[str, KeeperCgroups]:
    """Return where the keepers of runs and nodes below a directory create their cgroups, by their directories.

    `patterns` match the directories of runs and of agents, relative to `folder`.
    """
    found = {}
    for pattern in patterns:
        for path in folder.glob(f"{pattern}/sandboxes/keeper-*/{CGROUPS_FILE}"):
            try:
                found[str(path)] = msgspec.json.decode(path.read_bytes(), type=KeeperCgroups)
            except (OSError, msgspec.DecodeError):  # it is being written or removed
                continue
    return found


def find_leftovers(
    marks: Iterable[str], run: str, node: str = "", cgroups: Iterable[KeeperCgroups] = ()
) -> list[str]:
    """Return descriptions of processes, mounts, cgroups, containers and files of a run that are on this machine.

    `marks` are texts, such as directories, by which processes and mounts of the run are recognised. `node` is the
    name of this machine as a node of a cluster, and `cgroups` are those of all keepers that the run has had.
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
    found += find_left_cgroups(cgroups)
    return found + [str(path) for path in find_base_folder(node).glob(f"{run}-*")]


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


def find_node_cgroups(node: str) -> dict[str, KeeperCgroups]:
    """Return where the keepers of a node's agents create their cgroups, by their directories. Runs on the node."""
    return find_cgroups(find_base_folder(node), "*")


class RayMachines:
    """The nodes of a Ray cluster on other machines. Its methods wait for Ray tasks on all of them."""

    def __init__(self, address: str) -> None:
        import ray

        self._ray: Any = ray
        self._cgroups: dict[str, dict[str, KeeperCgroups]] = {}
        """Cgroups of each node's keepers, also of dead keepers and nodes, by the node's name."""
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False)

    def update_cgroups(self) -> None:
        """Remember which cgroups the keepers use at present."""
        for node, found in self._call(find_node_cgroups, lambda node: (node,)).items():
            self._cgroups.setdefault(node, {}).update(found)

    def find_leftovers(self, run: str) -> list[str]:
        """Return what a run has left on the nodes that are alive."""

        def choose_arguments(node: str) -> tuple[Any, ...]:
            return [], run, node, list(self._cgroups.get(node, {}).values())

        left = self._call(find_leftovers, choose_arguments)
        return [f"node {node}: {one}" for node, found in left.items() for one in found]

    def _call(self, function: Callable[..., Any], arguments: Callable[[str], tuple[Any, ...]]) -> dict[str, Any]:
        """Call a function on every node, with the arguments for its name, and return the results by that name."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = self._ray.remote(num_cpus=0, max_retries=0)(function)
        calls = {}
        for node in self._ray.nodes():
            if node["Alive"]:
                affinity = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                name = name_node(node["NodeID"])
                calls[name] = remote.options(scheduling_strategy=affinity).remote(*arguments(name))
        return {name: self._ray.get(call) for name, call in calls.items()}
