"""Rewards and graders: turn what a rollout produced into a finite reward, or raise the fault that prevented it.

Guarantees:
- A reward that is missing, not a number, not finite or out of range is a fault of the code that returned it. It
  never becomes 0.
- The parts and metrics of a score are finite numbers as well.
"""

from rookery.scoring.rewards import Score, check_reward

__all__ = ["Score", "check_reward"]
