"""Final records of rollouts and groups, as stored in the journal and passed to trainers."""

from typing import Any, Final

import msgspec

from rookery.core.errors import failed_outcome
from rookery.core.outcomes import SCORED, Outcome
from rookery.core.sandboxes import SandboxUsage
from rookery.core.tasks import Task
from rookery.core.turns import Segment

SUBMISSIONS: Final = "submissions"
"""Key in `Rollout.info` of the stored submissions of a SWE task: texts by the number of the step, from 0."""


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Location of a recorded turn on disk: file name in the run's `tokens` directory, offset, length, CRC-32."""

    file: str
    offset: int
    length: int
    crc: int


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts over the policy's turns (model calls) in one attempt.

    `others` holds the number of tokens that other model roles sampled, such as a judge, by role.
    """

    turns: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    tool_calls: int = 0
    others: dict[str, int] = {}
    drifted: int = 0
    """Turns whose prompt tokens are unknown, or do not start with the tokens of the turn that they continue."""
    without_tokens: int = 0
    """Turns whose token IDs the inference engine did not return. They cannot train."""
    other_prompts: dict[str, int] = {}
    """Number of prompt tokens of other model roles, by role."""


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds that each stage of an attempt took, including pauses.

    `model` and `sandbox` are the seconds that were spent waiting for model calls and for sandboxes. `paused` is
    how long the stages' clocks were stopped.
    """

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
    """Observations that explain the outcome. The entry `upstream` lists what was seen of replicas that did
    not reply."""
    charged: bool = True
    """False if the attempt does not count against the retry budget, because something outside the attempt ended
    it."""
    policy_loss: bool = False
    """True if the sandbox was lost during a command of the policy while the host was healthy."""
    sandboxes: tuple[SandboxUsage, ...] = ()
    """Resources that the attempt's sandboxes used, in the order of their creation."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The final record of one rollout: one of the k tries of a group at its task."""

    id: str
    group: int
    member: int
    task: str
    environment: str = ""
    """Name of the task's environment in a mixture; empty in a run of one environment."""
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
    """The location of the turns of the last attempt in the run's directory."""
    segments: list[Segment] = []
    """Token sequences for training. They are loaded from `tokens` when the group is delivered to a consumer; the
    journal does not store them."""

    @property
    def valid(self) -> bool:
        """True if the rollout has a reward and counts in loss, baseline and denominators."""
        return self.reward is not None and isinstance(self.outcome, SCORED)

    @property
    def ungraded(self) -> bool:
        """True if the rollout ended as Completed or Truncated, and nothing graded it. It has no reward."""
        return self.reward is None and isinstance(self.outcome, SCORED)


def parse_rollout_id(rollout_id: str) -> tuple[int, int] | None:
    """Return the group and the member of a rollout's ID, such as `12.3` or `r12.3` (as exports write it).

    Return None if the text is not such an ID.
    """
    group, _, member = rollout_id.removeprefix("r").partition(".")
    return (int(group), int(member)) if group.isdecimal() and member.isdecimal() else None


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The k rollouts of one task that share a baseline, in order of `member`."""

    index: int
    task: Task
    rollouts: tuple[Rollout, ...]

    @property
    def environment(self) -> str:
        """Name of the task's environment in a mixture; empty in a run of one environment."""
        return self.task.environment

    @property
    def valid(self) -> tuple[Rollout, ...]:
        return tuple(rollout for rollout in self.rollouts if rollout.valid)

    @property
    def rewards(self) -> list[float | None]:
        """The reward of each member, in order. It is None for a member that failed, was cancelled or
        is ungraded."""
        return [rollout.reward for rollout in self.rollouts]


def mark_failed(record: Rollout, error: Exception, *, cause: str) -> Rollout:
    """Return a copy of a valid record with a `Failed` outcome in stage `load`, without reward and segments.

    `cause` is the cause code for exceptions that are not a `RookeryError`. A record that is not valid keeps its
    outcome and loses its segments.
    """
    if not record.valid:
        return msgspec.structs.replace(record, segments=[]) if record.segments else record
    outcome = failed_outcome(error, "load", cause=cause)
    return msgspec.structs.replace(record, outcome=outcome, reward=None, rewards={}, segments=[])
