"""Random groups, and a reference implementation of batches that works token by token."""

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rookery.core import (
    Cancelled,
    Completed,
    Extra,
    Failed,
    Group,
    Outcome,
    Rollout,
    Segment,
    Span,
    Task,
    Truncated,
    floats,
    ints,
)
from rookery.training import BatchConfig

REASONS = ("turns", "tokens", "context", "time", "lost")


def segment(
    mask: Sequence[int],
    *,
    first: int = 100,
    version: int = 3,
    logprob: float = -0.5,
    turns: tuple[int, ...] = (0,),
    extras: dict[str, Extra] | None = None,
) -> Segment:
    """Make a segment with this mask. Every trained token has its own span and version."""
    n = len(mask)
    return Segment(
        tokens=ints(range(first, first + n)),
        mask=bytes(mask),
        logprobs=floats(logprob - at / 64 if on else 0.0 for at, on in enumerate(mask)),
        versions=tuple(Span(at, at + 1, version) for at, on in enumerate(mask) if on),
        turns=turns,
        extras=extras or {},
    )


def rollout(
    group: int,
    member: int,
    reward: float | None,
    segments: Sequence[Segment] | None = None,
    outcome: Outcome | None = None,
    **fields: Any,
) -> Rollout:
    default: Outcome = Completed() if reward is not None else Failed("infra", "sandbox.lost", "gone")
    parts = [segment([0, 0, 1, 1])] if segments is None else segments
    return Rollout(
        id=f"{group}.{member}",
        group=group,
        member=member,
        task=f"t{group}",
        outcome=outcome or default,
        reward=reward,
        segments=list(parts) if reward is not None else [],
        seed=1000 * group + member,
        **fields,
    )


def group(index: int, *rollouts: Rollout) -> Group:
    return Group(index=index, task=Task(id=f"t{index}"), rollouts=rollouts)


def group_of_rewards(index: int, *rewards: float | None) -> Group:
    return group(index, *(rollout(index, member, reward) for member, reward in enumerate(rewards)))


@st.composite
def segments(draw: st.DrawFn, turn: int, *, prompted: bool = True, missing: bool = False) -> Segment:
    """Generate a segment of one to three turns; with `missing`, some log probabilities are NaN."""
    mask: list[int] = []
    spans: list[Span] = []
    turns = draw(st.integers(1, 3))
    for number in range(turns):
        mask += [0] * draw(st.integers(1 if prompted and not number else 0, 5))
        start, length = len(mask), draw(st.integers(1, 6))
        mask += [1] * length
        middle, version = start + draw(st.integers(1, length)), draw(st.integers(0, 5))
        spans.append(Span(start, middle, version))
        if middle < len(mask):
            spans.append(Span(middle, len(mask), version + 1))
    mask += [0] * draw(st.integers(0, 3))
    n = len(mask)
    none = st.sampled_from([math.nan, -math.inf, math.inf, 0.5]) if missing else st.nothing()
    values = st.floats(-20, 0, width=32) | none
    return Segment(
        tokens=ints(draw(st.lists(st.integers(0, 300), min_size=n, max_size=n))),
        mask=bytes(mask),
        logprobs=floats(draw(values) if on else 0.0 for on in mask),
        versions=tuple(spans),
        turns=tuple(range(turn, turn + turns)),
        extras={"experts": Extra("int16", 4, draw(st.binary(min_size=4 * n, max_size=4 * n)))},
    )


@st.composite
def rollouts(draw: st.DrawFn, group_index: int, member: int, **kind: Any) -> Rollout:
    outcome: Outcome = draw(
        st.one_of(
            st.just(Completed()),
            st.just(Completed()),
            st.sampled_from(REASONS).map(Truncated),  # type: ignore[arg-type]
            st.sampled_from(
                [Failed("infra", "sandbox.lost", "x"), Failed("bug", "bug.reward", "y"), Cancelled("stale")]
            ),
        )
    )
    valid = isinstance(outcome, Completed | Truncated)
    reward = draw(st.sampled_from([0.0, 0.25, 1.0])) if valid else None
    count = draw(st.sampled_from([0, 1, 1, 2, 5])) if valid else 0
    parts = [draw(segments(10 * number, **kind)) for number in range(count)]
    return rollout(group_index, member, reward, parts, outcome)


@st.composite
def many_groups(draw: st.DrawFn, **kind: Any) -> list[Group]:
    return [
        group(index, *(draw(rollouts(index, member, **kind)) for member in range(draw(st.integers(1, 5)))))
        for index in range(draw(st.integers(0, 4)))
    ]


configs = st.builds(
    BatchConfig,
    baseline=st.sampled_from(["leave_one_out", "mean", "none"]),
    scale=st.sampled_from(["none", "std"]),
    normalise=st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "prompt-mean"]),
    truncated=st.sampled_from(["train", "mask", "leave_out"]),
    truncated_by=st.dictionaries(
        st.sampled_from(REASONS), st.sampled_from(["train", "mask", "leave_out"]), max_size=2
    ),
    without_logprob=st.sampled_from(["mask", "train"]),
    uninformative=st.sampled_from(["count", "leave_out"]),
    segments=st.sampled_from(["trained", "nonzero", "all"]),
)


def reference(groups: list[Group], config: BatchConfig) -> dict[str, Any]:
    """Apply the rules of batches one token at a time. Returns rows of (rollout, token, trains, logprob, version,
    advantage, weight), by segment."""
    found: list[tuple[Rollout, float, str, list[list[list[Any]]]]] = []
    trained: dict[str, int] = {}
    by_group: dict[int, int] = {}
    for one in groups:
        uses = {}
        for member in one.rollouts:
            use = "train" if member.valid else "missing"
            if member.valid and isinstance(member.outcome, Truncated):
                use = config.truncated_by.get(member.outcome.reason, config.truncated)
            uses[member.id] = use
        rewards = {m.id: m.reward for m in one.rollouts if uses[m.id] in ("train", "mask")}
        scores = plain_advantages(rewards, config)
        if config.uninformative == "leave_out" and not any(scores.values()):
            uses = {name: "missing" if use == "missing" else "leave_out" for name, use in uses.items()}
        for member in one.rollouts:
            parts = (
                [] if not member.valid else [_tokens(part, uses[member.id], config) for part in member.segments]
            )
            count = sum(row[1] for part in parts for row in part)
            trained[member.id] = count
            by_group[one.index] = by_group.get(one.index, 0) + count
            found.append((member, scores.get(member.id, 0.0), uses[member.id], parts))
    some = sum(count > 0 for count in trained.values())
    teaching = sum(count > 0 for count in by_group.values())
    columns: list[list[Any]] = []
    for row, (member, score, use, parts) in enumerate(found):
        weight = {
            "token-mean": lambda: 1 / sum(trained.values()),
            "seq-mean-token-mean": lambda name=member.id: 1 / (some * trained[name]),
            "seq-mean-token-sum": lambda: 1 / some,
            "prompt-mean": lambda index=member.group: 1 / (teaching * by_group[index]),
        }[config.normalise]
        for part in parts:
            trains = sum(token[1] for token in part)
            kept = {
                "all": True,
                "trained": use == "train" and trains > 0,
                "nonzero": use == "train" and trains > 0 and score != 0.0,
            }[config.segments]
            if kept:
                columns += [
                    [row, *token, score if token[1] else 0.0, weight() if token[1] else 0.0] for token in part
                ]
    return {"columns": columns, "trained": trained}


def _tokens(part: Segment, use: str, config: BatchConfig) -> list[list[Any]]:
    n = len(part)
    ids, logprobs = struct.unpack(f"<{n}i", part.tokens), struct.unpack(f"<{n}f", part.logprobs)
    versions = {at: span.version for span in part.versions for at in range(span.start, span.end)}
    found: list[list[Any]] = []
    for at in range(n):
        there = math.isfinite(logprobs[at]) and logprobs[at] <= 0
        trains = bool(part.mask[at]) and use == "train" and at > 0
        trains = trains and (there or config.without_logprob == "train")
        logprob = (logprobs[at] if there else math.nan) if trains else 0.0
        found.append([ids[at], trains, logprob, versions[at] if trains else -1])
    return found


def plain_advantages(rewards: dict[str, float | None], config: BatchConfig) -> dict[str, float]:
    values = {name: reward for name, reward in rewards.items() if reward is not None}
    n = len(values)
    if n < 2:
        return dict.fromkeys(values, 0.0)
    total = sum(values.values())
    mean = total / n
    spread = math.sqrt(sum((value - mean) ** 2 for value in values.values()) / (n - 1))
    found = {}
    for name, value in values.items():
        base = {"leave_one_out": (total - value) / (n - 1), "mean": mean, "none": 0.0}[config.baseline]
        score = value - base
        if config.scale == "std":
            score = score / spread if spread else 0.0
        found[name] = score
    return found


def same(left: Any, right: Any) -> None:
    np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-7)
