"""The nodes of a cluster, as the supervisor sees them. Runs in the supervisor's process.

- A node is lost if its connection is lost, if it sends nothing for `LOST_SECONDS`, if its launcher reports its
  death, or if it does not confirm a pause in time. Its attempts fail with fault infra and cause `machine.lost`,
  and run again on other nodes.
- Results of a lost node are ignored: its connections are closed, and its attempts have ended. A node that can be
  reached again joins as a new one.
- The result of an attempt is accepted only when its tokens are in the run's directory. So a recorded rollout does
  not depend on the node on which it ran.
- A node is also lost if the tokens of a result are not collected within `UNCOLLECTED_SECONDS`, for example because
  their file was removed. A collector that is silent for `COLLECTOR_LOST_SECONDS` is killed and started again.
- The run stops if it has no node for `NO_NODE_SECONDS`.
"""

import asyncio
import os
import random
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rookery.cluster import messages
from rookery.cluster.agent import AgentConfig
from rookery.cluster.authentication import AuthenticationError, accept_clients, listen
from rookery.cluster.placement import NodeLoad, choose_node, compute_limit_per_cpu
from rookery.cluster.remote_runner import RemoteRunner
from rookery.core import Extent, JournalError, UsageError
from rookery.core.errors import describe, suggestion
from rookery.engine.background_tasks import BackgroundTasks
from rookery.engine.framing import FramedConnection
from rookery.engine.runner_handle import RunnerHandle
from rookery.engine.runner_pool import RunnerPool, Stopped
from rookery.engine.runner_protocol import (
    Pause,
    Paused,
    Resume,
    RunSettings,
)
from rookery.engine.scheduler import NO_REQUIREMENTS, Requirements
from rookery.gateway.client import GatewayAddress
from rookery.journal.tokens import OVERHEAD
from rookery.telemetry import REGISTRY
from rookery.upstreams.protocol import PauseMode

NO_NODE_SECONDS = 300.0
MAX_COLLECTOR_DEATHS = 10
COLLECTOR_LOST_SECONDS = 60.0
UNCOLLECTED_SECONDS = 120.0
"""Seconds that a result waits for more of its token files. It is longer than `COLLECTOR_LOST_SECONDS`, so that no
node is blamed for the collector."""
LEAVE_SECONDS = 30.0
"""Seconds that the nodes get to remove what they have of the run when it ends."""
MAX_CANDIDATES = 16
"""Number of random nodes among which the node of an attempt is chosen, so that the time of the choice is bounded.
If none of them can take the attempt, all nodes are considered."""
PAUSE_SLACK_SECONDS = 15.0
"""A node that has not confirmed a pause this many seconds after its timeout is fenced."""


class NodeLauncher(Protocol):
    """Starts one agent on each node of a cluster, also on nodes that join later."""

    async def connect(self) -> str:
        """Connect to the cluster and return the address of this machine at which its nodes reach it."""
        ...

    def start_agents(self, supervisor: AgentConfig, on_lost: Callable[[str, str], None]) -> None:
        """Start the agents in the background, each with `supervisor` and the name of its node.

        `on_lost` is called with the name of a node that has died and the reason.
        """
        ...

    @property
    def cpus(self) -> int:
        """The number of CPUs of all nodes that should be part of the run."""
        ...

    async def close(self) -> None: ...


class Node:
    """A node that has joined the run, with its connection and its runners."""

    def __init__(self, pool: "NodePool", name: str, number: int) -> None:
        self.pool = pool
        self.name = name
        self.number = number
        self.load = NodeLoad(name)
        self.settings: RunSettings | None = None
        """The settings for the node's runners; None until the node is ready."""
        self.gateway: GatewayAddress | None = None
        self.runners: dict[str, RemoteRunner] = {}
        self.connection = FramedConnection(messages.from_agent_decoder, self._on_message, self._on_lost)
        self.heard = asyncio.get_running_loop().time()
        self.ended = asyncio.Event()
        self.leaving = False

    @property
    def _metrics_source(self) -> str:
        return f"{self.pool.runner_pool.settings.folder}/node-{self.number}"

    def forget_metrics(self) -> None:
        """Drop the gauges of the node's gateway. What it counted stays."""
        REGISTRY.forget(self._metrics_source)

    @property
    def gateway_name(self) -> str:
        return f"the gateway of node {self.name}"

    def send(self, message: messages.ToAgent) -> None:
        if not self.ended.is_set():
            self.connection.send(message)

    def _on_message(self, message: messages.FromAgent) -> None:
        if self.ended.is_set():  # it was received together with the message that ended the membership
            return
        self.heard = asyncio.get_running_loop().time()
        match message:
            case messages.NodeBeat(memory, cpu):
                self.count_running()
                self.load.update(memory, cpu)
                self.send(messages.Beat())
            case messages.Collected():
                self.pool.on_collected(message)
            case messages.NodeMetrics(metrics):
                REGISTRY.absorb(self._metrics_source, metrics)
            case messages.NodeReady():
                self._on_ready(message)
            case messages.RunnerExited(name, code, log_tail):
                if (runner := self.runners.get(name)) is not None:
                    runner.on_exit(code, log_tail)
            case messages.RunnerAlarm(name, frame):
                if (runner := self.runners.get(name)) is not None:
                    runner.on_alarm(frame)
            case Paused(number, problem):
                self.pool.runner_pool.pauses.confirm(self.gateway_name, number, problem)
            case messages.NodeFailed(detail):
                self.lose(detail)

    def _on_ready(self, ready: messages.NodeReady) -> None:
        pool = self.pool.runner_pool
        self.load.resources = ready.resources
        self.load.memory_at_join = self.load.memory
        self.gateway = ready.gateway
        runner_count = max(pool.size, pool.size * len(self.pool.nodes))
        self.settings = msgspec.structs.replace(pool.settings, folder=ready.folder, runner_count=runner_count)
        self.pool.count_cpus()
        pool.owner.record_event("node.joined", {"node": self.name, "cpus": ready.resources.cpus})
        if ready.problem:
            pool.owner.record_event("keeper.failed", {"node": self.name, "detail": ready.problem})
        if self.gateway is not None and pool.pauses.mode is not None:
            self.send(Pause(pool.pauses.number, pool.pauses.mode, 0.0))
        for _ in range(pool.size):
            pool.add_runner(self.name)

    def count_running(self, *, planned: bool = False) -> int:
        """Count the node's running attempts, for its load. With `planned`, also those that are planned for it."""
        count = 0
        for runner in self.runners.values():
            count += len(runner.running) + (runner.planned if planned else 0)
        self.load.running = count
        return count

    def count_gpus(self) -> None:
        """Count the GPUs that the node's running attempts need, for its load."""
        pool = self.pool.runner_pool
        self.load.gpus_used = sum(
            pool.requirements_of(dispatch.spec.task).gpus
            for runner in self.runners.values()
            for dispatch in runner.running.values()
        )

    def find_shared_runner(self, *, planned: bool = False) -> RunnerHandle | None:
        """Return the runner with the fewest attempts that accepts any attempt, or None.

        With `planned`, attempts that are planned for a runner count, too.
        """
        best, least = None, 0
        for runner in self.runners.values():
            count = len(runner.running) + (runner.planned if planned else 0)
            if (best is None or count < least) and runner.is_shared:
                best, least = runner, count
        return best

    def check(self, late: float) -> None:
        """Lose the node if it is silent, or if the tokens of a result are not collected.

        This process is late itself by `late` seconds, for which silence proves nothing.
        """
        now = asyncio.get_running_loop().time()
        self.heard += late
        if now - self.heard > messages.LOST_SECONDS:
            self.lose(f"nothing was received from it for {messages.LOST_SECONDS:g} seconds")
        for runner in list(self.runners.values()):
            runner.collecting_since += late
            if runner.is_collecting and now - runner.collecting_since > UNCOLLECTED_SECONDS:
                self.lose(f"tokens of {runner.name} have not arrived for {UNCOLLECTED_SECONDS:g} seconds")

    def leave_if_drained(self) -> None:
        """Let the node leave if it is being drained and its last runner has ended."""
        if self.load.draining and not self.runners and not self.leaving:
            self.leaving = True
            self.send(messages.Leave())

    def _on_lost(self, error: BaseException | None) -> None:
        if self.leaving:
            self.ended.set()
            self.pool.remove(self, "")
        else:
            self.lose(f"its connection was lost{f' ({describe(error)})' if error is not None else ''}")

    def lose(self, detail: str) -> None:
        """End the membership of the node: close its connections and end its attempts as `machine.lost`."""
        if self.ended.is_set():
            return
        self.ended.set()
        self.connection.abort()
        self.pool.remove(self, detail)
        for runner in list(self.runners.values()):
            runner.on_node_lost(f"node {self.name} was lost: {detail}")
        self.runners.clear()


class NodePool:
    """Implements `Cluster` of `rookery.engine.cluster` with the nodes that a launcher starts."""

    def __init__(self, launcher: NodeLauncher) -> None:
        self._launcher = launcher
        self._key = secrets.token_bytes(32)
        self._session = secrets.token_hex(3)
        """Distinguishes the files of this process's runners from those of an earlier process of the same run."""
        self.nodes: dict[str, Node] = {}
        self._joined = 0
        self._cpus = 0
        """Number of CPUs of the nodes that are ready."""
        self._concurrency = 1
        self._needs_gateway = False
        self._collected: dict[str, int] = {}
        """Number of collected bytes of each token file."""
        self._writers: dict[str, RemoteRunner] = {}
        self._pool: RunnerPool | None = None
        self._listening: socket.socket | None = None
        self._collecting: socket.socket | None = None
        self._collector: subprocess.Popen[bytes] | None = None
        self._collector_connection: FramedConnection | None = None
        self._shared: Path | None = None
        """The file by which nodes recognise the run's directory, if they write token files there themselves."""
        self._collector_deaths = 0
        """Number of deaths of the collector since it last wrote something."""
        self._collector_heard = 0.0
        self._tasks = BackgroundTasks(self._on_failure)
        self._without_node = 0.0
        self._closing = False

    @property
    def runner_pool(self) -> RunnerPool:
        assert self._pool is not None
        return self._pool

    # ---- start and stop

    async def open(self, pool: RunnerPool, *, concurrency: int, needs_gateway: bool) -> None:
        self.attach(pool, concurrency)
        self._needs_gateway = needs_gateway
        host = await self._launcher.connect()
        self._listening = listen(host)
        self._collecting = listen(host)
        if pool.settings.shared_files:
            self._shared = Path(pool.settings.folder) / "tokens" / f".shared-{self._session}"
            self._shared.parent.mkdir(exist_ok=True)
            for stale in self._shared.parent.glob(".shared-*"):  # of a supervisor that was killed
                stale.unlink()
            self._shared.touch()
        await self._start_collector()
        self._tasks.start(accept_clients(self._listening, self._key, self._admit, self._tasks.start))
        self._tasks.start(self._watch())
        port = self._listening.getsockname()[1]
        self._launcher.start_agents(AgentConfig(host, port, self._key, ""), self._on_launcher_lost)

    def attach(self, pool: RunnerPool, concurrency: int) -> None:
        """Place the attempts of this pool, of which `concurrency` may run at the same time."""
        self._pool = pool
        self._concurrency = concurrency

    async def _start_collector(self) -> None:
        assert self._collecting is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        fds = self._collecting.fileno(), theirs.fileno()
        with theirs:
            self._collector = subprocess.Popen(  # noqa: ASYNC220  (vfork: about a millisecond)
                [sys.executable, "-m", "rookery.cluster.collector", *map(str, fds), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
            )
        connection = FramedConnection(messages.from_collector_decoder, self._on_collector, self._on_collector_lost)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
        connection.send(messages.CollectorStart(self.runner_pool.settings.folder, self._key))
        self._collector_heard = asyncio.get_running_loop().time()
        self._collector_connection = connection

    def _on_collector_lost(self, _: BaseException | None) -> None:
        if self._closing:
            return
        self.runner_pool.owner.record_event("collector.died", {})
        self._collector_deaths += 1
        if self._collector_deaths > MAX_COLLECTOR_DEATHS:
            self.runner_pool.owner.stop(
                Stopped(
                    "the collector of the nodes' token files cannot be started: see the output of this process"
                )
            )
        else:
            self._tasks.start(self._restart_collector())

    async def _restart_collector(self) -> None:
        await self._end_collector()
        await asyncio.sleep(0.5)  # not in a tight loop, if it cannot start at all
        await self._start_collector()

    async def _end_collector(self) -> None:
        process, self._collector = self._collector, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def close(self) -> None:
        self._closing = True
        for node in list(self.nodes.values()):
            node.leaving = True
            node.send(messages.Leave())
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                for node in list(self.nodes.values()):
                    await node.ended.wait()
        except TimeoutError:
            self.runner_pool.owner.record_event("node.left_behind", {"nodes": list(self.nodes)})
        try:
            await self._launcher.close()
        finally:
            await self._close_own()

    async def _close_own(self) -> None:
        await self._tasks.cancel()
        for node in self.nodes.values():
            node.connection.close()
        if self._collector_connection is not None:
            self._collector_connection.close()
        await self._end_collector()
        for sock in (self._listening, self._collecting):
            if sock is not None:
                sock.close()
        if self._shared is not None:
            self._shared.unlink(missing_ok=True)

    def _on_failure(self, error: BaseException) -> None:
        self.runner_pool.owner.stop(Stopped(f"the cluster cannot be used: {describe(error)}"))

    # ---- nodes

    async def _admit(self, sock: socket.socket, join: messages.Join) -> None:
        if self._closing:
            raise AuthenticationError("the run is ending")
        node = self.nodes.get(join.node)
        if join.role == "agent":
            if node is not None:
                node.lose("its agent was started again")
            await self._add_node(join.node, sock)
            return
        runner = node.runners.get(join.name) if node is not None and join.role == "runner" else None
        if runner is None:
            raise AuthenticationError(f"no runner {join.name!r} of node {join.node!r} is expected")
        await runner.attach(sock)

    async def _add_node(self, name: str, sock: socket.socket) -> None:
        self._joined += 1
        node = self.nodes[name] = Node(self, name, self._joined)
        await asyncio.get_running_loop().create_connection(lambda: node.connection, sock=sock)
        assert self._collecting is not None
        port = self._collecting.getsockname()[1]
        node.send(messages.Welcome(self.runner_pool.settings, port, self._needs_gateway, str(self._shared or "")))

    def remove(self, node: Node, detail: str) -> None:
        """Forget a node that was lost. An empty `detail` means that it has left as it was asked to."""
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
        self.count_cpus()
        node.forget_metrics()
        if not detail:
            self.runner_pool.owner.record_event("node.left", {"node": node.name})
        elif not self._closing:
            payload = {"node": node.name, "detail": detail, "attempts": node.count_running()}
            self.runner_pool.owner.record_event("node.lost", payload)
            self.runner_pool.pauses.recheck()

    def count_cpus(self) -> None:
        """Count the CPUs of the nodes that are ready."""
        self._cpus = sum(node.load.resources.cpus for node in self.nodes.values() if node.settings is not None)

    def _on_launcher_lost(self, name: str, detail: str) -> None:
        if (node := self.nodes.get(name)) is not None:
            node.lose(detail)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(messages.BEAT_SECONDS)
            late = loop.time() - before - messages.BEAT_SECONDS
            for node in list(self.nodes.values()):
                node.check(late)
            self._collector_heard += late
            if self._collector is not None and loop.time() - self._collector_heard > COLLECTOR_LOST_SECONDS:
                self._collector.kill()  # it is started again when its connection is lost
            self._without_node = 0.0 if self.nodes else self._without_node + messages.BEAT_SECONDS
            if self._without_node > NO_NODE_SECONDS:
                self.runner_pool.owner.stop(
                    Stopped(
                        f"the cluster has had no node for {NO_NODE_SECONDS:g} seconds: start nodes, then continue "
                        "with `rookery resume`"
                    )
                )

    # ---- tokens

    def _on_collector(self, message: messages.FromCollector) -> None:
        self._collector_heard = asyncio.get_running_loop().time()
        match message:
            case messages.CollectorFailed(detail):
                self.runner_pool.owner.stop(JournalError(detail))
            case messages.Collected():
                self._collector_deaths = 0
                self.on_collected(message)

    def on_collected(self, message: messages.Collected) -> None:
        """Accept the results whose tokens are in the run's directory now."""
        name = message.file.removeprefix("tokens/")
        runner = self._writers.get(name.rpartition("-")[0])
        if runner is not None and message.size > self._collected.get(name, 0):
            self._collected[name] = message.size
            runner.on_collected(name)

    def forget(self, runner: RemoteRunner) -> None:
        """Drop what is known about the files of a runner that has ended."""
        self._writers.pop(runner.writer, None)
        for name in [name for name in self._collected if name.rpartition("-")[0] == runner.writer]:
            del self._collected[name]

    def is_collected(self, tokens: tuple[Extent, ...]) -> bool:
        """Return whether these token frames are in the run's directory."""
        return all(one.offset + OVERHEAD + one.length <= self._collected.get(one.file, 0) for one in tokens)

    # ---- placement

    def create_runner(self, name: str, node: str, required: Requirements) -> RunnerHandle | None:
        found = self.nodes.get(node) if node else self._choose(required)
        if found is None or found.settings is None or found.load.draining:
            return None
        writer = f"{name}.{self._session}"
        runner = self._writers[writer] = RemoteRunner(name, self.runner_pool, found, found.settings, writer)
        return runner

    def _choose(self, required: Requirements, *, planned: bool = False) -> Node | None:
        """Return the node that should get the next attempt with these requirements, if any.

        With `planned`, attempts that are planned for runners count as running.
        """
        nodes = list(self.nodes.values())
        if len(nodes) > MAX_CANDIDATES and required is NO_REQUIREMENTS:
            found = self._choose_among(random.sample(nodes, MAX_CANDIDATES), required, planned)
            if found is not None:
                return found
        return self._choose_among(nodes, required, planned)

    def _choose_among(self, nodes: list[Node], required: Requirements, planned: bool) -> Node | None:
        loads = []
        for node in nodes:
            if node.settings is not None and node.find_shared_runner() is not None:
                node.count_running(planned=planned)
                if required.gpus:
                    node.count_gpus()
                loads.append(node.load)
        concurrency = self._concurrency + (self.runner_pool.settings.warm if planned else 0)
        best = choose_node(loads, concurrency=concurrency, total_cpus=self._total_cpus, required=required)
        return self.nodes[best.name] if best is not None else None

    @property
    def _total_cpus(self) -> int:
        return max(self._launcher.cpus, self._cpus)

    def _can_run(self, node: Node, required: Requirements) -> bool:
        """Return whether a node can take one more attempt with these requirements."""
        node.count_running()
        if required.gpus:
            node.count_gpus()
        return node.load.can_run(required, compute_limit_per_cpu(self._concurrency, self._total_cpus))

    def accepts(self, runner: RunnerHandle, required: Requirements) -> bool:
        node = self.nodes.get(runner.node)
        if node is None:
            return False
        if required.gpus:
            node.count_gpus()
        return node.load.meets(required)

    def can_meet(self, required: Requirements) -> bool:
        return any(node.load.resources.meets(required) for node in self.nodes.values())

    def find_free_runner(
        self, required: Requirements, preferred: RunnerHandle | None = None
    ) -> RunnerHandle | None:
        if preferred is not None and preferred.is_shared:
            node = self.nodes.get(preferred.node)
            if node is not None and self._can_run(node, required):
                return preferred
        node = self._choose(required)
        return node.find_shared_runner() if node is not None else None

    def find_runner_to_prewarm(self, required: Requirements) -> RunnerHandle | None:
        node = self._choose(required, planned=True)
        return node.find_shared_runner(planned=True) if node is not None else None

    async def drain(self, node: str) -> None:
        found = self.nodes.get(node)
        if found is None:
            known = ", ".join(sorted(self.nodes)) or "none"
            raise UsageError(f"there is no node {node!r} (nodes: {known}){suggestion(node, self.nodes)}")
        found.load.draining = True
        for runner in list(found.runners.values()):
            self.runner_pool.retire(runner)
        found.leave_if_drained()
        await found.ended.wait()

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "node": node.name,
                "cpus": node.load.resources.cpus,
                "gpus": node.load.resources.gpus,
                "labels": node.load.resources.labels,
                "runners": len(node.runners),
                "in_flight": node.count_running(),
                "memory_available": round(node.load.memory, 3),
                "cpu_available": round(node.load.cpu, 3),
                "seconds_per_attempt": round(node.load.seconds, 3),
                "draining": node.load.draining,
            }
            for node in self.nodes.values()
        ]

    # ---- pauses

    def pause_targets(self) -> list[str]:
        return [node.gateway_name for node in self.nodes.values() if node.gateway is not None]

    def send_pause(self, number: int, mode: PauseMode, timeout: float) -> None:
        for node in self.nodes.values():
            if node.gateway is not None:
                node.send(Pause(number, mode, timeout))
        self._tasks.start(self._fence_late_nodes(number, timeout + PAUSE_SLACK_SECONDS))

    async def _fence_late_nodes(self, number: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        missing = self.runner_pool.pauses.unconfirmed(number)
        for node in list(self.nodes.values()):
            if not missing.isdisjoint((node.gateway_name, *node.runners)):
                node.lose(f"it did not stop its model calls within {seconds:g} seconds of a pause")

    def send_resume(self, version: int | None) -> None:
        for node in self.nodes.values():
            if node.gateway is not None:
                node.send(Resume(version))
