"""Decide which node gets the next attempt. Used by the supervisor; does no I/O.

- An attempt goes to the node with the fewest running attempts relative to its weight. The weight is the number
  of CPUs times the fraction of their time that is free times the node's relative speed. So a node that is slow, or
  busy with other programs, gets less.
- A node gets at most `MAX_OVERLOAD` times its share of the run's concurrency, also if the other nodes are gone.
  Its GPUs and its own limit may allow less.
- A node gets no attempt that would probably leave less than `MIN_MEMORY` of its memory available. What an attempt
  needs is estimated from the memory that became unavailable since the node joined.
- A task with labels runs only on nodes that have all of them, and one whose sandboxes need GPUs only on nodes that
  have enough free ones. A node that is being drained gets nothing.
"""

from collections.abc import Sequence
from math import ceil, inf

import msgspec

from rookery.engine.scheduler import NO_REQUIREMENTS, Requirements

MIN_MEMORY = 0.03
"""This fraction of a node's memory is kept free of attempts."""
MAX_OVERLOAD = 2.0
MIN_SPEED = 0.25
"""A slow node is never weighted below this fraction, so that its speed continues to be measured."""
MIN_FREE_CPU = 0.25
"""A busy node is never weighted below this fraction: the run itself may keep its cores busy."""
DECAY = 0.95
CPU_DECAY = 0.8


class NodeResources(msgspec.Struct, frozen=True, array_like=True):
    """The resources of a node, as its agent reports them when it joins."""

    cpus: int = 1
    gpus: int = 0
    attempts: int = 0
    """Maximum number of concurrent attempts, for example because sandboxes are limited; 0 means no limit."""
    labels: dict[str, str] = {}

    def meets(self, required: Requirements, gpus_used: int = 0) -> bool:
        """Return whether the node has these labels, and as many GPUs besides `gpus_used`."""
        return required.gpus <= self.gpus - gpus_used and required.labels <= self.labels.items()


class NodeLoad(msgspec.Struct):
    """The load and the speed of a node, by which attempts are placed."""

    name: str
    resources: NodeResources = NodeResources()
    running: int = 0
    gpus_used: int = 0
    """Number of GPUs that the running attempts need."""
    memory: float = 1.0
    """The fraction of the node's memory that was available at its last heartbeat."""
    cpu: float = 1.0
    """The decayed mean of the fraction of the node's CPU time that was free."""
    memory_at_join: float = 1.0
    running_at_beat: int = 0
    """Number of running attempts at the last heartbeat."""
    draining: bool = False
    seconds: float = 0.0
    """The decayed mean duration of the attempts that ended on this node; 0 if none has ended."""

    def observe(self, seconds: float) -> None:
        """Take the duration of an attempt that has ended into account."""
        self.seconds = DECAY * self.seconds + (1 - DECAY) * seconds if self.seconds else seconds

    def update(self, memory: float, cpu: float) -> None:
        """Take a heartbeat into account, with the fractions of memory and CPU time that are available now."""
        self.memory, self.running_at_beat = memory, self.running
        self.cpu = CPU_DECAY * self.cpu + (1 - CPU_DECAY) * cpu

    @property
    def memory_after_next(self) -> float:
        """The fraction of the memory that will probably be available after one more attempt has started."""
        used = max(0.0, self.memory_at_join - self.memory) / max(1, self.running_at_beat)
        return self.memory - used * max(1, self.running + 1 - self.running_at_beat)

    def can_run(self, required: Requirements, limit_per_cpu: float) -> bool:
        """Return whether the node can take one more attempt."""
        return (
            not self.draining
            and self.running < min(ceil(limit_per_cpu * self.resources.cpus), self.resources.attempts or inf)
            and self.meets(required)
            and self.memory_after_next >= MIN_MEMORY
        )

    def meets(self, required: Requirements) -> bool:
        """Return whether the node has these labels, and as many free GPUs."""
        return required is NO_REQUIREMENTS or self.resources.meets(required, self.gpus_used)

    def weigh(self, fastest: float) -> float:
        """Return the weight of the node. Its speed is relative to a node whose attempts take `fastest` seconds."""
        speed = max(MIN_SPEED, fastest / self.seconds) if self.seconds else 1.0
        return self.resources.cpus * max(MIN_FREE_CPU, self.cpu) * speed


def compute_limit_per_cpu(concurrency: int, total_cpus: int) -> float:
    """Return how many attempts a node may run at most for each of its CPUs."""
    return MAX_OVERLOAD * concurrency / max(1, total_cpus)


def choose_node(
    nodes: Sequence[NodeLoad],
    *,
    concurrency: int,
    total_cpus: int,
    required: Requirements = NO_REQUIREMENTS,
) -> NodeLoad | None:
    """Return the node that should get the next attempt, or None if no node can take one.

    `concurrency` is the limit of the whole run, and `total_cpus` the number of CPUs of all nodes of the cluster.
    """
    fastest = min((node.seconds for node in nodes if node.seconds), default=0.0)
    limit_per_cpu = compute_limit_per_cpu(concurrency, total_cpus)
    best, least = None, inf
    for node in nodes:
        load = node.running / node.weigh(fastest)
        if load < least and node.can_run(required, limit_per_cpu):
            best, least = node, load
    return best
