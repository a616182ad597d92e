"""Messages between the supervisor, the agents of the nodes and the collector. All of them are msgpack.

The messages between the supervisor and a runner are the same on a cluster as on one machine: see
`rookery.engine.runner_protocol`. An agent gets the same `Pause` and `Resume` as a runner, for the node's gateway,
and replies with `Paused`.
"""

from typing import Literal, TypeAlias

import msgspec

from rookery.cluster.placement import NodeResources
from rookery.engine.runner_protocol import Pause, Paused, Resume, RunSettings
from rookery.gateway.client import GatewayAddress
from rookery.telemetry import Snapshot

BEAT_SECONDS = 1.0
FENCE_SECONDS = 10.0
"""An agent that has received nothing from the supervisor for this long kills its runners and sandboxes."""
LOST_SECONDS = 15.0
"""A node from which the supervisor has received nothing for this long is lost. It is longer than `FENCE_SECONDS`,
so that a node that cannot be reached has stopped its attempts before they start again elsewhere."""


class Join(msgspec.Struct, frozen=True):
    """The first message on a connection: what it is for, the node, and the runner's name if it is a runner's."""

    role: Literal["agent", "runner", "files"]
    node: str
    name: str = ""


# ---- from the supervisor to an agent


class Welcome(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """The settings of the run, and the port of the collector on the supervisor's host."""

    settings: RunSettings
    collector: int
    needs_gateway: bool
    shared: str = ""
    """The path of a file in the run's directory `tokens`, if the nodes write their token files there themselves. A
    node that does not see this file does not share the directory."""


class StartRunner(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Start a runner process that connects to the supervisor under this name.

    `writer` is the prefix of its files, which is unique in the run, also if the run is resumed.
    """

    name: str
    writer: str


class KillRunner(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Send SIGKILL to a runner. With `stack`, let it write its stack to its log first."""

    name: str
    stack: bool = False


class Beat(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """Reply to a `NodeBeat`: the supervisor still counts on this node."""


class Leave(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """Remove everything that belongs to the run from the node, and exit."""


# ---- from an agent to the supervisor


class NodeReady(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """The node accepts runners. `folder` is the run's directory on the node."""

    folder: str
    resources: NodeResources
    gateway: GatewayAddress | None
    problem: str = ""
    """The reason why the node's keeper could not be started; empty if it was, or if none is needed."""


class NodeBeat(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Sent every `BEAT_SECONDS`, with the fractions of the node's memory and CPU time that are available."""

    memory: float
    cpu: float


class RunnerExited(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """A runner has ended with this exit status (negative: the signal). `log` is the end of its log."""

    name: str
    code: int
    log: str


class RunnerAlarm(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """A runner reported a blocked event loop: the encoded `LoopBlocked`."""

    name: str
    frame: bytes


class NodeMetrics(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Metrics of the node's gateway since the last message, if the run serves metrics."""

    metrics: Snapshot


class NodeFailed(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """The node cannot run attempts of this run, for example because its disk is full."""

    detail: str


# ---- between an agent and the collector


class OpenFile(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """Ask how much of a file was collected. The collector replies with `Collected`."""

    file: str


class FileChunk(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """The bytes of a file from `offset` on. The collector replies with `Collected` when they are written."""

    file: str
    offset: int
    data: bytes


class Collected(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """The first `size` bytes of a file are in the run's directory.

    The collector sends it to the agent and to the supervisor. If the nodes share the run's directory, the agent
    sends it to the supervisor.
    """

    file: str
    size: int


# ---- between the supervisor and the collector


class CollectorStart(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """The first message to the collector: the run's directory, and the key of the nodes."""

    folder: str
    key: bytes


class CollectorFailed(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """The collector cannot write a file. The run stops."""

    detail: str


class CollectorBeat(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Sent every `BEAT_SECONDS`: the collector is running."""


ToAgent: TypeAlias = Welcome | StartRunner | KillRunner | Pause | Resume | Beat | Leave
FromAgent: TypeAlias = (
    NodeReady | NodeBeat | RunnerExited | RunnerAlarm | NodeMetrics | Paused | NodeFailed | Collected
)
FromCollector: TypeAlias = Collected | CollectorFailed | CollectorBeat

join_decoder = msgspec.msgpack.Decoder(Join)
to_agent_decoder = msgspec.msgpack.Decoder(ToAgent)
from_agent_decoder = msgspec.msgpack.Decoder(FromAgent)
to_collector_decoder = msgspec.msgpack.Decoder(OpenFile | FileChunk)
collected_decoder = msgspec.msgpack.Decoder(Collected)
collector_start_decoder = msgspec.msgpack.Decoder(CollectorStart)
from_collector_decoder = msgspec.msgpack.Decoder(FromCollector)
