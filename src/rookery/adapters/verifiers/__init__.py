"""Environment server for verifiers 0.4 and prime-rl: `rookery serve ENV --protocol verifiers`.

The server speaks verifiers' protocol: a ZeroMQ ROUTER socket with msgpack frames and the methods `health`, `run`
and `cancel`. prime-rl's orchestrator loads the tasks from a generated package and sends one task per request.

Guarantees:
- Each segment is one branch of the trace. Token IDs, mask and log probabilities of a branch are the segment's, so
  every sampled token trains once.
- A failed rollout is an episode with `ok` False, no trace and the cause as the error's type. prime-rl trains and
  normalises without it.
- A malformed request is answered with `success` False, and the server continues.
- A `cancel` request, or the end of the server, cancels the rollout.
"""

from rookery.adapters.verifiers.server import VerifiersServer

__all__ = ["VerifiersServer"]
