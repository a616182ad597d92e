"""Pausing model calls, so that the weights of the policy can be replaced while rollouts run.

- `PausableUpstream` wraps the upstream of one process and pauses the calls that this process has in flight.
- `ShardPause` keeps the pause of a gateway in a file and applies it in every shard.
- `PauseCoordinator` pauses all runner processes of a run, and the run's gateway, on behalf of several holders.

The engine and the gateway only forward requests to these classes.
"""

from rookery.upstreams.pause.coordinator import PauseCoordinator
from rookery.upstreams.pause.shards import ShardPause
from rookery.upstreams.pause.upstream import PausableUpstream, PauseState, run_load

__all__ = ["PausableUpstream", "PauseCoordinator", "PauseState", "ShardPause", "run_load"]
