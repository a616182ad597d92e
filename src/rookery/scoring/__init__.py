"""Rewards: a finite number in its declared range, or a fault; never a failure turned into a zero.

`programs`, `running` and `service` run programs in sandboxes of their own; `grading` and what it stands on grade
them.

Promises:
- a reward that is missing, not a number, not finite or out of range is a fault of whoever returned it;
- the parts and metrics of a score are finite numbers too.
"""

from rookery.scoring.rewards import Score, checked

__all__ = ["Score", "checked"]
