"""verl 0.9 and newer: `RookeryManager` for whole groups, `agent_loop.RookeryAgentLoop` for single rollouts.

Guarantees:
- A failed rollout has no row in verl's TransferQueue, so verl's baseline does not count it.
- Exactly the sampled tokens train, with the log probabilities of verl's inference servers.
- verl, torch and Ray are imported only when they are used.
"""

from rookery.adapters.verl.dataset import write_dataset
from rookery.adapters.verl.manager import RookeryManager

__all__ = ["RookeryManager", "write_dataset"]
