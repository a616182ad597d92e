"""Terminal records: what the journal keeps and a trainer gets."""

from typing import Any

import msgspec

from rookery.core.errors import failed
from rookery.core.outcomes import SCORED, Outcome
from rookery.core.tasks import Task
from rookery.core.turns import Segment


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one frame of token data lies: file name in the run's `tokens` folder, offset, length, crc32."""

    file: str
    offset: int
    length: int
    crc: int


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts over the policy's turns; other roles are in `others`, by role, as sampled tokens."""

    turns: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    tool_calls: int = 0
    others: dict[str, int] = {}
    drifted: int = 0
    """Turns whose prompt did not begin with the tokens that they continue, or was not told."""
    without_tokens: int = 0
    """Turns whose token IDs the model server did not return. They cannot train."""


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of each stage; `model` and `sandbox` are the parts of them spent waiting there."""

    queue: float = 0.0
    setup: float = 0.0
    run: float = 0.0
    score: float = 0.0
    teardown: float = 0.0
    model: float = 0.0
    sandbox: float = 0.0
    paused: float = 0.0


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One try at a rollout. Its id is the rollout's id with the number of the try."""

    id: str
    number: int
    outcome: Outcome
    runner: str = ""
    started: float = 0.0
    ended: float = 0.0
    evidence: dict[str, Any] = {}
    """Observations that decided the outcome: `upstream` lists what was seen of silent model servers."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The terminal record of one member of a group. Every member of a group has one, all of this shape."""

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
    """Numbers worth watching that are not part of the reward."""
    info: dict[str, Any] = {}
    """What the environment wanted to keep, as plain data."""
    attempts: tuple[Attempt, ...] = ()
    usage: Usage = Usage()
    timing: Timing = Timing()
    tokens: tuple[Extent, ...] = ()
    """Where the turns of the last attempt lie."""
    segments: list[Segment] = []
    """Filled when a group is handed to a consumer; the journal keeps `tokens` instead."""

    @property
    def valid(self) -> bool:
        """Whether it counts: it has a reward, and so belongs in loss, baseline and denominators."""
        return self.reward is not None and isinstance(self.outcome, SCORED)


def rollout_place(rollout_id: str) -> tuple[int, int] | None:
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
        """One entry for each member, None where there is no reward."""
        return [rollout.reward for rollout in self.rollouts]


def failed_record(record: Rollout, error: Exception, *, cause: str) -> Rollout:
    """Return a valid record as `Failed` in `load`: same identity and usage, no reward, no segments.

    `cause` is for exceptions that carry none. A record that is not valid keeps its outcome.
    """
    if not record.valid:
        return msgspec.structs.replace(record, segments=[]) if record.segments else record
    outcome = failed(error, "load", cause=cause)
    return msgspec.structs.replace(record, outcome=outcome, reward=None, rewards={}, segments=[])
