"""Pausing model calls, so that the weights of the policy can be replaced while rollouts run.

- `PausableUpstream` wraps the upstream of one process and pauses the calls that this process has in flight.
- `ShardPause` stores the pause of a gateway in a file and applies it in every shard (process) of the gateway.
- `RunnerPause` pauses the upstreams of all model roles in one runner process.
- `PauseCoordinator` pauses all runner processes of a run, and the run's gateway. Several holders (requesters) can
  request pauses at the same time; calls continue when none of them holds one.

The packages `engine` and `gateway` only forward requests to these classes.
"""

from rookery.upstreams.pause.coordinator import PauseCoordinator
from rookery.upstreams.pause.runner import RunnerPause
from rookery.upstreams.pause.shards import ShardPause
from rookery.upstreams.pause.upstream import PausableUpstream, PauseState, run_load

__all__ = ["PausableUpstream", "PauseCoordinator", "PauseState", "RunnerPause", "ShardPause", "run_load"]
