"""Add up the sandboxes and replicas that the processes of a run use at present, for `Engine.status`.

Runs in the supervisor's process. Runners report their state with their heartbeats, so that it is known without
`--metrics`. The shards of the gateway are asked.
"""

import asyncio
from collections import Counter
from typing import Any, Final

from rookery.core import RookeryError
from rookery.engine.runner_protocol import ReplicaCalls, RunnerState
from rookery.engine.supervisor import Supervisor
from rookery.telemetry import Snapshot, catalogue

GATEWAY_SECONDS: Final = 1.0
"""Seconds that the gateway gets to answer."""


async def describe_live_state(supervisor: Supervisor) -> dict[str, Any]:
    """Return the open sandboxes, the prewarmed ones, and the replicas with their calls, as plain data."""
    states = [runner.read_state() for runner in supervisor.pool.runners]
    if supervisor.gateway is not None:
        try:
            async with asyncio.timeout(GATEWAY_SECONDS):
                states.append(RunnerState(replicas=read_replicas(await supervisor.gateway.read_metrics())))
        except (RookeryError, TimeoutError):
            pass  # the state of the runners is still of use
    return add_states(states)


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
            *labels,
            healthy=bool(healthy.get(labels, [1.0])[0]),
            calls=int(calls[0]),
            limit=int(limits.get(labels, [0.0])[0]),
        )
        for labels, calls in metrics.get(catalogue.UPSTREAM_CALLS.name, {}).items()
    )
