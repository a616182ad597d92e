"""Rewards and graders: turn the result of a rollout into a finite reward, or raise an error that names the fault.

Guarantees:
- A reward that is missing, not a number, not finite or out of range raises an error that blames the code that
  returned it. It never becomes 0.
- The parts and metrics of a score are finite numbers as well.
"""

from rookery.scoring.rewards import Score, Ungraded, check_reward, check_score

__all__ = ["Score", "Ungraded", "check_reward", "check_score"]
