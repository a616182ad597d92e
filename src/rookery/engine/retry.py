"""Whether a rollout gets a new attempt: a pure controller.

Promises:
- only infra faults get a new attempt, up to a budget that is counted;
- what was lost with somebody else's crash is run again without being charged for it, up to a bound;
- a sandbox that its own programs exhausted (`sandbox.exhausted`) gets no new attempt: it ends Truncated(lost) at
  the minimum reward;
- a sandbox lost during the policy's own command, in two charged attempts in a row on a healthy host, is the
  policy's: it ends Truncated(lost) at the minimum reward.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from rookery.core import Attempt, Failed, Outcome, Truncated

UNCHARGED_BOUND = 20
"""Re-runs after other rollouts' crashes; past that the machine is at fault, not the neighbours."""


class Ended(msgspec.Struct, frozen=True):
    """How one attempt ended."""

    outcome: Outcome
    charged: bool = True
    """False: its runner was lost through no doing of its own."""
    policy_loss: bool = False
    """Its sandbox was lost during the policy's own command, and the host was healthy."""


class Again(msgspec.Struct, frozen=True):
    """A new attempt, after `delay` seconds."""

    delay: float


class Final(msgspec.Struct, frozen=True):
    """The rollout's outcome; `minimum`: with the lowest reward of the range."""

    outcome: Outcome
    minimum: bool = False


Decision: TypeAlias = Again | Final


def hung_replicas(attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """Model replicas that these attempts found hung: the next attempt goes elsewhere where it can."""
    seen = (one for attempt in attempts for one in attempt.evidence.get("upstream", ()))
    return tuple(dict.fromkeys(one["replica"] for one in seen if one["verdict"] == "hung"))


class RetryPolicy(msgspec.Struct, frozen=True):
    """How many attempts a rollout may be charged for, and how long to wait between them."""

    attempts: int = 3
    base: float = 0.5
    cap: float = 30.0

    def decide(self, history: Sequence[Ended], jitter: float) -> Decision:
        """`history` is every attempt so far, the last one just ended; `jitter` is in [0, 1)."""
        last = history[-1]
        if not isinstance(last.outcome, Failed) or last.outcome.fault != "infra":
            return Final(last.outcome)
        if last.outcome.cause == "sandbox.exhausted":
            return Final(Truncated("lost"), minimum=True)
        own = [ended for ended in history if ended.charged]
        if last.charged and last.policy_loss and len(own) > 1 and own[-2].policy_loss:
            return Final(Truncated("lost"), minimum=True)
        charged = len(own)
        if not last.charged:
            return Again(0.0) if len(history) - charged < UNCHARGED_BOUND else Final(last.outcome)
        if charged >= self.attempts:
            return Final(last.outcome)
        return Again(min(self.cap, self.base * 2.0 ** min(charged - 1, 60)) * (0.5 + jitter / 2))
