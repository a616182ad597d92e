"""verl 0.9 and newer: `RookeryManager` for whole groups, `RookeryAgentLoop` for single rollouts.

Guarantees:
- A failed rollout has no row in verl's TransferQueue, so verl's baseline does not count it.
- Exactly the sampled tokens train, with the log probabilities of verl's inference servers.
- verl, torch and Ray are imported only when they are used.
"""

from typing import TYPE_CHECKING, Any

from rookery.adapters.verl.dataset import write_dataset
from rookery.adapters.verl.manager import RookeryManager

if TYPE_CHECKING:
    from rookery.adapters.verl.agent_loop import RookeryAgentLoop

__all__ = ["RookeryAgentLoop", "RookeryManager", "write_dataset"]


def __getattr__(name: str) -> Any:
    if name == "RookeryAgentLoop":  # a subclass of a class of verl
        from rookery.adapters.verl.agent_loop import RookeryAgentLoop

        return RookeryAgentLoop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
