"""Decide which node gets the next attempt. Used by the supervisor; does no I/O.

- An attempt goes to the node with the fewest running attempts relative to its weight. The weight is the number
  of CPUs times the node's relative speed, so that a slow node gets less.
- A node gets at most `MAX_OVERLOAD` times its share of the run's concurrency, also if the other nodes are gone.
- A node that is short of memory or is being drained gets none.
"""

from collections.abc import Iterable
from math import ceil

import msgspec

MIN_MEMORY = 0.03
"""A node gets no attempts while less than this fraction of its memory is available."""
MAX_OVERLOAD = 2.0
MIN_SPEED = 0.25
"""A slow node is never weighted below this fraction, so that its speed continues to be measured."""
DECAY = 0.95


class NodeLoad(msgspec.Struct):
    """The load and the speed of a node, by which attempts are placed."""

    name: str
    cpus: int
    running: int = 0
    memory: float = 1.0
    """The fraction of the node's memory that is available."""
    draining: bool = False
    seconds: float = 0.0
    """The decayed mean duration of the attempts that ended on this node; 0 if none has ended."""

    def observe(self, seconds: float) -> None:
        """Take the duration of an attempt that has ended into account."""
        self.seconds = DECAY * self.seconds + (1 - DECAY) * seconds if self.seconds else seconds


def weigh(nodes: Iterable[NodeLoad]) -> dict[str, float]:
    """Return the weight of each node by name: CPUs times its speed relative to the fastest node."""
    nodes = list(nodes)
    fastest = min((node.seconds for node in nodes if node.seconds), default=0.0)
    return {
        node.name: node.cpus * (max(MIN_SPEED, fastest / node.seconds) if node.seconds else 1.0) for node in nodes
    }


def choose_node(nodes: Iterable[NodeLoad], *, concurrency: int, total_cpus: int) -> str | None:
    """Return the name of the node that should get the next attempt, or None if no node can take one.

    `concurrency` is the limit of the whole run, and `total_cpus` the number of CPUs of all nodes of the cluster.
    """
    nodes = list(nodes)
    weights = weigh(nodes)
    best: NodeLoad | None = None
    for node in nodes:
        share = concurrency * node.cpus / max(1, total_cpus)
        if node.draining or node.memory < MIN_MEMORY or node.running >= ceil(MAX_OVERLOAD * share):
            continue
        if best is None or node.running / weights[node.name] < best.running / weights[best.name]:
            best = node
    return best.name if best is not None else None
