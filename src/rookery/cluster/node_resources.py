"""Find out what this machine offers as a node: CPUs, GPUs, labels, free memory and CPU time. Used by the agent.

The environment variable `ROOKERY_NODE_LABELS` (`zone=b,disk=fast`) adds labels to those of the launcher, and
`ROOKERY_NODE_ATTEMPTS` limits the number of concurrent attempts on the node.
"""

import os
from collections.abc import Collection
from pathlib import Path

from rookery.cluster.placement import NodeResources
from rookery.core import UsageError

LABELS_VARIABLE = "ROOKERY_NODE_LABELS"
ATTEMPTS_VARIABLE = "ROOKERY_NODE_ATTEMPTS"
CGROUPS = Path("/sys/fs/cgroup")


def read_resources(node: str, known: NodeResources | None = None) -> NodeResources:
    """Return the resources of this machine, which always has the label `node` with the name of the node.

    CPUs, GPUs and labels that are `known` to the launcher are taken from there. Raise `UsageError` if an
    environment variable is not valid.
    """
    attempts = os.environ.get(ATTEMPTS_VARIABLE, "0")
    if not attempts.isdecimal():
        raise UsageError(f"{ATTEMPTS_VARIABLE} must be a number of attempts, not {attempts!r}")
    if known is None:
        gpus = sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))
        known = NodeResources(cpus=len(os.sched_getaffinity(0)), gpus=gpus)
    labels = {"node": node, **known.labels, **parse_labels(os.environ.get(LABELS_VARIABLE, ""))}
    return NodeResources(known.cpus, known.gpus, int(attempts), labels)


def parse_labels(text: str) -> dict[str, str]:
    """Parse labels of the form `name=value,name=value`."""
    labels = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, separator, value = part.partition("=")
        if not separator or not name:
            raise UsageError(f"{LABELS_VARIABLE} must have the form name=value,name=value, but contains {part!r}")
        labels[name] = value
    return labels


def read_available_memory() -> float:
    """Return the fraction of the memory that is available, or 1 if it is not known.

    In a container with a memory limit, it is the fraction of that limit.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line}
        available = sizes["MemAvailable"] / sizes["MemTotal"]
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except (OSError, KeyError, ValueError, IndexError):
        return 1.0
    for number, controllers, path in groups:
        if number == "0" or controllers == "memory":
            # Also the cgroups above it; those that this container cannot see are skipped.
            for folder in (Path(path), *Path(path).parents):
                available = min(available, read_cgroup_memory(CGROUPS / controllers / folder.relative_to("/")))
    return available


def read_cgroup_memory(cgroup: Path) -> float:
    """Return the fraction of a cgroup's memory limit that is available, or 1 if it has none.

    Page cache that was not used for long counts as available.
    """
    limit, usage, cache = (
        ("memory.max", "memory.current", "inactive_file")
        if (cgroup / "memory.max").exists()
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        statistics = dict(line.split(maxsplit=1) for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / usage).read_text()) - int(statistics[cache])
        return min(1.0, max(0.0, 1.0 - used / int((cgroup / limit).read_text())))
    except (OSError, KeyError, ValueError, ZeroDivisionError):
        return 1.0


class CpuMeter:
    """Measures which fraction of the CPU time of the cores that this process may use is free."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._busy, self._total = read_core_ticks(self._cores)

    def read_free(self) -> float:
        """Return the fraction since the last call, or 1 if it is not known."""
        (busy, total), before = read_core_ticks(self._cores), (self._busy, self._total)
        self._busy, self._total = busy, total
        return 1.0 - (busy - before[0]) / (total - before[1]) if total > before[1] else 1.0


def read_core_ticks(cores: Collection[int]) -> tuple[int, int]:
    """Return the busy and the total clock ticks of these cores since the machine started."""
    names = {f"cpu{core}" for core in cores}
    busy = total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name in names:
            ticks = [int(value) for value in values[:8]]
            total += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4]  # idle, and idle while a disk was busy
    return busy, total


def list_cores() -> list[int]:
    """Return the numbers of the CPU cores that this process may use.

    Hardware threads of the same physical core are neighbours in the list.
    """

    def find_physical(core: int) -> int:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
            return int(siblings.replace("-", ",").split(",")[0])
        except (OSError, ValueError):
            return core

    return sorted(os.sched_getaffinity(0), key=lambda core: (find_physical(core), core))
