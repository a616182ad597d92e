"""Describe the present state of a run for `Engine.status`, with the sandboxes and replicas of all its processes.

Runs in the supervisor's process. Runners report their state with their heartbeats, so that it is known without
`--metrics`. The shards of the gateway are asked.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import RookeryError
from rookery.engine.group_channel import GroupChannel
from rookery.engine.runner_protocol import ReplicaCalls, RunnerState
from rookery.engine.supervisor import Supervisor
from rookery.journal import EnvironmentTotals
from rookery.telemetry import Snapshot, catalogue

GATEWAY_SECONDS: Final = 1.0
"""Seconds that the gateway gets to answer."""
MIN_INTERVAL: Final = 2.0
"""Minimum number of seconds between two requests to the gateway. Progress displays ask for the state often."""


class LiveState:
    """The resources that a run uses at present."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._gateway = RunnerState()
        """The last answer of the gateway."""
        self._next = 0.0

    async def describe_run(
        self, folder: Path, channels: Mapping[str, GroupChannel], counts: Mapping[str, EnvironmentTotals]
    ) -> dict[str, Any]:
        """Return the state of the run with its streams and its environments, by name, as plain data."""
        supervisor = self._supervisor
        version = supervisor.pool.pauses.version
        return {
            "run": str(folder),
            "stopped": str(supervisor.stopped or ""),
            "paused": supervisor.pool.paused,
            "in_flight": supervisor.pool.running,
            "waiting_for_upstream": supervisor.outage.waited,
            "runners": len(supervisor.pool.runners),
            "nodes": supervisor.pool.cluster.describe() if supervisor.pool.cluster is not None else [],
            "runner_deaths": supervisor.pool.deaths,
            **supervisor.counts,
            "policy_version": version,
            **await self.describe(),
            "images": [
                msgspec.structs.asdict(image)
                for runner in supervisor.pool.runners
                for image in runner.images.values()
            ],
            "environments": {
                name: {
                    **msgspec.structs.asdict(total),
                    "mean_reward": total.mean_reward,
                    "stopped": str(supervisor.stopped_environments.get(name, "")),
                }
                for name, total in counts.items()
                if name
            },
            "streams": {
                name: {
                    "admitted": channel.admitted,
                    "taken": channel.taken,
                    "waiting": len(channel.ready),
                    "staleness": channel.staleness(version),
                }
                for name, channel in channels.items()
            },
        }

    async def describe(self) -> dict[str, Any]:
        """Return the open sandboxes, the prewarmed ones, and the replicas with their calls, as plain data."""
        if self._supervisor.gateway is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + MIN_INTERVAL
            try:
                async with asyncio.timeout(GATEWAY_SECONDS):
                    metrics = await self._supervisor.gateway.read_metrics()
                self._gateway = RunnerState(replicas=read_replicas(metrics))
            except (RookeryError, TimeoutError):
                self._gateway = RunnerState()  # the state of the runners is still of use
        return add_states([*(runner.read_state() for runner in self._supervisor.pool.runners), self._gateway])


def add_states(states: list[RunnerState]) -> dict[str, Any]:
    """Return the sum of what several processes reported. A replica is healthy if all of them consider it so."""
    sandboxes: Counter[str] = Counter()
    prewarmed: Counter[str] = Counter()
    replicas: dict[tuple[str, str], dict[str, Any]] = {}
    for state in states:
        sandboxes.update(state.sandboxes)
        prewarmed.update(state.prewarmed)
        for one in state.replicas:
            empty = {"role": one.role, "replica": one.replica, "healthy": True, "calls": 0, "limit": 0}
            total = replicas.setdefault((one.role, one.replica), empty)
            total["healthy"] = total["healthy"] and one.healthy
            total["calls"] += one.calls
            total["limit"] += one.limit
    return {"sandboxes": dict(sandboxes), "prewarmed": dict(prewarmed), "replicas": list(replicas.values())}


def read_replicas(metrics: Snapshot) -> tuple[ReplicaCalls, ...]:
    """Return the replicas that a snapshot of metrics describes."""
    healthy = metrics.get(catalogue.UPSTREAM_UP.name, {})
    limits = metrics.get(catalogue.UPSTREAM_LIMIT.name, {})
    return tuple(
        ReplicaCalls(
            role=labels[0],
            replica=labels[1],
            healthy=bool(healthy.get(labels, [1.0])[0]),
            calls=int(calls[0]),
            limit=int(limits.get(labels, [0.0])[0]),
        )
        for labels, calls in metrics.get(catalogue.UPSTREAM_CALLS.name, {}).items()
    )
