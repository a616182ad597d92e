"""Decide whether a rollout gets a new attempt. Used by the supervisor; does no I/O.

- Only failures with fault infra are retried, up to a budget of charged attempts.
- An attempt that something else ended, such as a crash of its runner or an outage of the inference engine, is
  repeated without being charged, up to `MAX_UNCHARGED` times.
- A sandbox that its own programs exhausted (`sandbox.exhausted`) is not retried: the rollout ends as
  `Truncated("lost")` with the minimum reward.
- If the sandbox is lost during the policy's own command in two charged attempts in a row, on a healthy host, the
  policy is responsible: the rollout ends as `Truncated("lost")` with the minimum reward.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from rookery.core import Attempt, Failed, Outcome, Truncated

MAX_UNCHARGED = 20
"""Number of uncharged attempts that a rollout may have. After that many it fails, because the machine is probably
at fault."""


class Retry(msgspec.Struct, frozen=True):
    """Start a new attempt after `delay` seconds."""

    delay: float


class EndRollout(msgspec.Struct, frozen=True):
    """End the rollout with this outcome. With `minimum_reward`, it gets the lowest reward of the environment."""

    outcome: Outcome
    minimum_reward: bool = False


RetryDecision: TypeAlias = Retry | EndRollout


def find_hung_replicas(attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """Return the replicas that were found hung in these attempts. The next attempt avoids them if it can."""
    seen = (one for attempt in attempts for one in attempt.evidence.get("upstream", ()))
    return tuple(dict.fromkeys(one["replica"] for one in seen if one["verdict"] == "hung"))


class RetryPolicy(msgspec.Struct, frozen=True):
    """Limits the failed attempts of a rollout with fault infra, and sets the exponential back-off between them."""

    attempts: int = 3
    base: float = 0.5
    """Maximum delay in seconds before the second attempt. It doubles with each further attempt, up to `cap`. The
    actual delay is random, between half of it and all of it."""
    cap: float = 30.0
    """The longest delay in seconds."""

    def decide(self, attempts: Sequence[Attempt], jitter: float) -> RetryDecision:
        """Decide on a retry after the last of `attempts` has ended. `jitter` is a random number in [0, 1)."""
        last = attempts[-1]
        if not isinstance(last.outcome, Failed) or last.outcome.fault != "infra":
            return EndRollout(last.outcome)
        if last.outcome.cause == "sandbox.exhausted":
            return EndRollout(Truncated("lost"), minimum_reward=True)
        charged = [attempt for attempt in attempts if attempt.charged]
        if last.charged and last.policy_loss and len(charged) > 1 and charged[-2].policy_loss:
            return EndRollout(Truncated("lost"), minimum_reward=True)
        if not last.charged:
            return Retry(0.0) if len(attempts) - len(charged) < MAX_UNCHARGED else EndRollout(last.outcome)
        if len(charged) >= self.attempts:
            return EndRollout(last.outcome)
        return Retry(min(self.cap, self.base * 2.0 ** min(len(charged) - 1, 60)) * (0.5 + jitter / 2))
