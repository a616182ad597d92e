"""Final records of rollouts and groups, as stored in the journal and passed to trainers."""

from typing import Any

import msgspec

from rookery.core.errors import failed_outcome
from rookery.core.outcomes import SCORED, Outcome
from rookery.core.tasks import Task
from rookery.core.turns import Segment


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Location of one frame of token data: file name in the run's `tokens` directory, offset, length, CRC-32."""

    file: str
    offset: int
    length: int
    crc: int


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts over the policy's turns. `others` holds the sampled tokens of other roles, by role."""

    turns: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    tool_calls: int = 0
    others: dict[str, int] = {}
    drifted: int = 0
    """Turns whose prompt did not start with the tokens of their parent turn, or is unknown."""
    without_tokens: int = 0
    """Turns whose token IDs the model server did not return. They cannot train."""


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of each stage. `model` and `sandbox` are the parts that were spent waiting for them."""

    queue: float = 0.0
    setup: float = 0.0
    run: float = 0.0
    score: float = 0.0
    teardown: float = 0.0
    model: float = 0.0
    sandbox: float = 0.0
    paused: float = 0.0


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt at a rollout. Its ID is the rollout's ID followed by the attempt's number."""

    id: str
    number: int
    outcome: Outcome
    runner: str = ""
    started: float = 0.0
    ended: float = 0.0
    evidence: dict[str, Any] = {}
    """Observations that decided the outcome. `upstream` lists those of model servers that did not reply."""
    charged: bool = True
    """False if the attempt does not count against the retry budget, because something else ended it."""
    policy_loss: bool = False
    """The sandbox was lost during the policy's own command, and the host was healthy."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The final record of one member of a group."""

    id: str
    group: int
    member: int
    task: str
    outcome: Outcome
    seed: int = 0
    reward: float | None = None
    rewards: dict[str, float] = {}
    """Named parts of the reward."""
    metrics: dict[str, float] = {}
    """Numbers to monitor that are not part of the reward."""
    info: dict[str, Any] = {}
    """Plain data that the environment stored with `ctx.info`."""
    attempts: tuple[Attempt, ...] = ()
    usage: Usage = Usage()
    timing: Timing = Timing()
    tokens: tuple[Extent, ...] = ()
    """Locations of the turns of the last attempt."""
    segments: list[Segment] = []
    """Loaded when a group is delivered to a consumer; the journal stores `tokens` instead."""

    @property
    def valid(self) -> bool:
        """True if the rollout has a reward and counts in loss, baseline and denominators."""
        return self.reward is not None and isinstance(self.outcome, SCORED)


def parse_rollout_id(rollout_id: str) -> tuple[int, int] | None:
    """Return group and member of a rollout's ID such as `12.3`, or `r12.3` as exports write it; else None."""
    group, _, member = rollout_id.removeprefix("r").partition(".")
    return (int(group), int(member)) if group.isdecimal() and member.isdecimal() else None


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The k rollouts of one task that share a baseline, in order of `member`."""

    index: int
    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def valid(self) -> tuple[Rollout, ...]:
        return tuple(rollout for rollout in self.rollouts if rollout.valid)

    @property
    def rewards(self) -> list[float | None]:
        """The reward of each member, or None."""
        return [rollout.reward for rollout in self.rollouts]


def mark_failed(record: Rollout, error: Exception, *, cause: str) -> Rollout:
    """Return a valid record as `Failed` in stage `load`, without reward and segments.

    `cause` is used for exceptions that carry none. A record that is not valid keeps its outcome.
    """
    if not record.valid:
        return msgspec.structs.replace(record, segments=[]) if record.segments else record
    outcome = failed_outcome(error, "load", cause=cause)
    return msgspec.structs.replace(record, outcome=outcome, reward=None, rewards={}, segments=[])
