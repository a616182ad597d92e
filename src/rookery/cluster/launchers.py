"""Start one agent per node: on this machine, or on the nodes of a Ray cluster. Runs in the supervisor.

- An agent ends with the process that started it, because its standard input is then closed. An agent that dies is
  started again.
- On Ray, one actor per node (hard node affinity, restarted without limit) starts the agent of its node. The
  actors belong to the supervisor's Ray job, so that Ray ends them if the supervisor dies.
- A Ray node without CPUs (`ray start --num-cpus 0`) gets no agent.
- Nodes that join the Ray cluster later get an agent within `POLL_SECONDS`. The death of a node is reported.
- Ray transports only the arguments of these actors. The agents' connections are Rookery's own.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from math import ceil
from typing import Any

import msgspec

from rookery.cluster.agent import AgentConfig
from rookery.cluster.node_pool import NodePool
from rookery.cluster.node_resources import list_cores
from rookery.cluster.placement import NodeResources
from rookery.core import UsageError
from rookery.core.errors import describe

POLL_SECONDS = 1.0
RESTART_SECONDS = 1.0
"""Seconds after which an agent that has died is started again."""
RETRY_SECONDS = 10.0
"""Seconds after which an actor that Ray could not start is started again."""
STOP_SECONDS = 30.0
CONNECT_SECONDS = 10.0
log = logging.getLogger("rookery.cluster")


class AgentProcess:
    """An agent as a child process of this one. A thread starts it, and starts it again if it dies.

    As a Ray actor it is restarted with the same configuration. `prefix` is the beginning of its command line, for
    a program that prepares the process and then executes the rest. `cores` are the numbers of the CPU cores that
    it and its child processes may use; empty means all.
    """

    def __init__(self, config: bytes, prefix: Sequence[str] = (), cores: Collection[int] = ()) -> None:
        self._config = config
        self._prefix = prefix
        self._cores = cores
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        """Held while the agent is started, so that none is started after `stop`."""
        threading.Thread(target=self._maintain, daemon=True).start()

    def _maintain(self) -> None:
        """Start the agent, and start it again whenever it dies, until it leaves the run in an orderly way."""
        while True:
            with self._starting:
                if self._stopping.is_set():
                    return
                try:
                    self._process = self._start()
                except OSError as error:  # tried again; without any node the run stops
                    log.warning("the agent cannot be started: %s", describe(error))
            if self._process is not None and self._process.wait() == 0:
                return
            self._stopping.wait(RESTART_SECONDS)

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "rookery.cluster.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        if self._cores:  # before the agent can start anything, because it has no configuration yet
            os.sched_setaffinity(process.pid, self._cores)
        with suppress(BrokenPipeError):  # it has died already
            process.stdin.write(self._config + b"\n")
            process.stdin.flush()
        return process

    def stop(self) -> None:
        """Let the agent clean its node, and wait until it has ended. Kill it after `STOP_SECONDS`."""
        with self._starting:
            self._stopping.set()
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def encode_config(supervisor: AgentConfig, node: str, resources: NodeResources | None = None) -> bytes:
    """Return the first line of the standard input of a node's agent, without the newline."""
    return msgspec.json.encode(msgspec.structs.replace(supervisor, node=node, resources=resources))


class LocalLauncher:
    """Starts several agents on this machine, to try out a cluster without Ray.

    The address is their number, `N`, or `NxC`: then each agent and its child processes use `C` CPU cores of their
    own.
    """

    def __init__(self, address: str) -> None:
        number, separator, cores = (address or "2").partition("x")
        try:
            self.count, self._cores_per_node = int(number), int(cores) if separator else 0
        except ValueError:
            self.count = 0
        if self.count < 1 or self._cores_per_node < (1 if separator else 0):
            raise UsageError(
                f"the numbers in --cluster local:NODES or local:NODESxCORES must be at least 1, not {address!r}"
            )
        self._cores = list_cores()
        if self.count * self._cores_per_node > len(self._cores):
            raise UsageError(
                f"--cluster local:{address} needs {self.count * self._cores_per_node} cores, but this process may "
                f"use {len(self._cores)}"
            )
        self.agents: dict[str, AgentProcess] = {}

    @property
    def cpus(self) -> int:
        return self.count * (self._cores_per_node or len(self._cores))

    async def connect(self) -> str:
        return "127.0.0.1"

    def start_agents(self, supervisor: AgentConfig, on_lost: Callable[[str, str], None]) -> None:  # noqa: ARG002
        for number in range(1, self.count + 1):
            name = f"node-{number}"
            if name not in self.agents:
                size = self._cores_per_node
                cores = self._cores[(number - 1) * size : number * size]
                self.agents[name] = AgentProcess(encode_config(supervisor, name), cores=cores)

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(agent.stop) for agent in self.agents.values()))
        self.agents.clear()


class RayLauncher:
    """Starts an agent on every node of a Ray cluster. The address is that of `ray.init`, empty for the running
    cluster.

    If no Ray cluster is running, a new one is started on this machine, without Ray's usage reports.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise UsageError(
                "a run on a Ray cluster needs the package ray: pip install 'rookery-rl[ray]'"
            ) from error
        self._ray: Any = ray
        self._address = address
        self._started_ray = False
        self._actors: dict[str, Any] = {}
        """The actor of each live node, by Ray's node ID."""
        self._unready: dict[str, Any] = {}
        """References to the results of actors whose start has not been confirmed."""
        self._watching: asyncio.Task[None] | None = None
        self._supervisor: AgentConfig | None = None
        self._on_lost: Callable[[str, str], None] = lambda _node, _why: None
        self.cpus = 1

    async def connect(self) -> str:
        host: str = await asyncio.to_thread(self._connect)
        return host

    def _connect(self) -> str:
        ray = self._ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not ray.is_initialized():
            self._check_address()
            try:
                self._join_or_start()
            except Exception as error:  # Ray raises plain exceptions, for example if its versions differ
                cluster = f"the Ray cluster {self._address}" if self._address else "a Ray cluster"
                raise UsageError(f"{cluster} cannot be joined: {describe(error)}") from error
            self._started_ray = True
        return str(ray.util.get_node_ip_address())

    def _join_or_start(self) -> None:
        options = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": "rookery"}
        try:
            self._ray.init(address=self._address or "auto", **options)
        except ConnectionError:
            if self._address:
                raise
            self._ray.init(include_dashboard=False, **options)

    def _check_address(self) -> None:
        """Raise `UsageError` if nothing listens at the address, where Ray itself would wait for minutes."""
        host, _, port = self._address.rpartition(":")
        if not host or "://" in self._address or not port.isdigit():
            return
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            raise UsageError(f"the Ray cluster {self._address} cannot be reached: {describe(error)}") from error

    def start_agents(self, supervisor: AgentConfig, on_lost: Callable[[str, str], None]) -> None:
        self._supervisor = supervisor
        self._on_lost = on_lost
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            try:
                await self._update_actors()
            except Exception as error:  # noqa: BLE001  (tried again; agents that are connected do not need Ray)
                log.warning("the nodes of the Ray cluster cannot be reached: %s", describe(error))
            await asyncio.sleep(POLL_SECONDS)

    async def _update_actors(self) -> None:
        """Start actors on new nodes, and report dead nodes."""
        nodes = await asyncio.to_thread(self._ray.nodes)
        alive = {node["NodeID"]: node for node in nodes if node["Alive"] and count_cpus(node)}
        self.cpus = sum(map(count_cpus, alive.values()))
        for node_id in alive.keys() - self._actors.keys():
            actor = self._actors[node_id] = await asyncio.to_thread(self._start_actor, alive[node_id])
            self._unready[node_id] = actor.__ray_ready__.remote()
        for node in nodes:
            if not node["Alive"] and self._actors.pop(node["NodeID"], None) is not None:
                self._unready.pop(node["NodeID"], None)
                self._on_lost(name_node(node["NodeID"]), "Ray reports that the node is dead")
        for node_id, reference in list(self._unready.items()):
            if (error := await asyncio.to_thread(self._find_error, reference)) is not None:
                del self._unready[node_id]
                if error:
                    log.warning("the agent of node %s cannot be started: %s", name_node(node_id), error)
                    asyncio.get_running_loop().call_later(RETRY_SECONDS, self._actors.pop, node_id, None)

    def _find_error(self, reference: Any) -> str | None:
        """Return why an actor could not be started, "" if it is running, or None if that is not known yet."""
        if not self._ray.wait([reference], timeout=0)[0]:
            return None
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return describe(error)
        return ""

    def _start_actor(self, node: dict[str, Any]) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        assert self._supervisor is not None
        actor = self._ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(AgentProcess)
        node_id: str = node["NodeID"]
        affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
        gpus = int(node["Resources"].get("GPU", 0))
        resources = NodeResources(count_cpus(node), gpus, labels=node.get("Labels") or {})
        config = encode_config(self._supervisor, name_node(node_id), resources)
        return actor.options(scheduling_strategy=affinity).remote(config)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        actors, self._actors = self._actors, {}
        stopping = [actor.stop.remote() for actor in actors.values()]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS + 5.0)
        for actor in actors.values():
            self._ray.kill(actor)
        if self._started_ray:
            self._ray.shutdown()


def count_cpus(node: dict[str, Any]) -> int:
    """Return the number of CPUs that a Ray node was started with."""
    cpus: float = node["Resources"].get("CPU", 0)
    return ceil(cpus)


def name_node(node_id: str) -> str:
    """Return the name of a Ray node in events and records: the beginning of its ID."""
    return node_id[:12]


def open_local(address: str) -> NodePool:
    """Return a cluster of several nodes on this machine: `--cluster local:N` or `local:NxC` (C cores each)."""
    return NodePool(LocalLauncher(address))


def open_ray(address: str) -> NodePool:
    """Return the Ray cluster at an address: `--cluster ray[:ADDRESS]`."""
    return NodePool(RayLauncher(address))
