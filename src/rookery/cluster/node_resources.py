"""Find out what this machine offers as a node: CPUs, GPUs, free memory, labels. Runs in the node's agent.

The environment variable `ROOKERY_NODE_LABELS` (`zone=b,disk=fast`) adds labels to those of the launcher, and
`ROOKERY_NODE_ATTEMPTS` limits the number of concurrent attempts on the node.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from rookery.cluster.placement import NodeResources
from rookery.core import UsageError

LABELS_VARIABLE = "ROOKERY_NODE_LABELS"
ATTEMPTS_VARIABLE = "ROOKERY_NODE_ATTEMPTS"


def read_resources(node: str, labels: Mapping[str, str]) -> NodeResources:
    """Return the resources of this machine, which always has the label `node` with the name of the node.

    Raise `UsageError` if an environment variable is not valid.
    """
    attempts = os.environ.get(ATTEMPTS_VARIABLE, "0")
    if not attempts.isdecimal():
        raise UsageError(f"{ATTEMPTS_VARIABLE} must be a number of attempts, not {attempts!r}")
    return NodeResources(
        cpus=len(os.sched_getaffinity(0)),
        gpus=sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*")),
        attempts=int(attempts),
        labels={"node": node, **labels, **parse_labels(os.environ.get(LABELS_VARIABLE, ""))},
    )


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
    """Return the fraction of this machine's memory that is available, or 1 if it is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line}
        return sizes["MemAvailable"] / sizes["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return 1.0


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
