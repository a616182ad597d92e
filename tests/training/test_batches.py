"""Batches, compared with a reference implementation that works token by token."""

import math
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Extra, Failed, Group, Rollout, Truncated, Usage, UsageError, floats, ints
from rookery.training import Batch, BatchConfig, BatchError, check_batch, compute_token_weights, make_batch
from tests.training.kit import configs, group, group_of_rewards, many_groups, reference, rollout, same, segment

COLUMNS = ("tokens", "mask", "logprobs", "versions", "advantages", "weights")


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(many_groups(prompted=False, missing=True), configs)
def test_batch_agrees_with_the_reference(groups: list[Group], config: BatchConfig) -> None:
    batch = make_batch(groups, config)
    check_batch(batch, groups)
    expected = reference(groups, config)
    rows = np.repeat(batch.segments.rollout, batch.lengths)
    found = np.array([rows, *(getattr(batch, name) for name in COLUMNS)], dtype=np.float64).T
    same(found, np.array(expected["columns"], dtype=np.float64).reshape(-1, 7))
    assert dict(zip(batch.rollouts.id, batch.rollouts.trained.tolist(), strict=True)) == expected["trained"]


@settings(max_examples=30, deadline=None)
@given(many_groups(missing=True), configs)
def test_segment_selection_changes_no_denominator(groups: list[Group], config: BatchConfig) -> None:
    made = [
        make_batch(groups, msgspec.structs.replace(config, segments=which))
        for which in ("all", "trained", "nonzero")
    ]
    for batch in made:
        assert (batch.rollouts.weight == made[0].rollouts.weight).all()
        assert batch.denominator == made[0].denominator
        # Any loss: here one that differs for each token id. What is left out has an advantage of zero.
        loss = (batch.weights * batch.advantages * np.sin(batch.tokens)).sum(dtype=np.float64)
        first = (made[0].weights * made[0].advantages * np.sin(made[0].tokens)).sum(dtype=np.float64)
        assert abs(loss - first) < 1e-6
    assert len(made[0]) >= len(made[1]) >= len(made[2])
    assert all(batch.segments.trained.all() for batch in made[1:])
    assert made[2].advantages[made[2].mask].all()


@settings(max_examples=30, deadline=None)
@given(many_groups(), st.sampled_from(["token-mean", "seq-mean-token-mean", "prompt-mean"]))
def test_weights_of_means_add_up_to_one(groups: list[Group], normalise: Any) -> None:
    batch = make_batch(groups, BatchConfig(normalise=normalise))
    total = batch.weights.sum(dtype=np.float64)
    assert abs(total - 1) < 1e-5 or (total == 0 and not batch.mask.any())


def test_rollout_with_five_segments_counts_once() -> None:
    five = [segment([0, 1, 1], first=10 * n, turns=(n,)) for n in range(5)]
    groups = [group(0, rollout(0, 0, 1.0, five), rollout(0, 1, 0.0, [segment([0, 1])]), rollout(0, 2, 0.0, []))]
    batch = make_batch(groups, BatchConfig(normalise="seq-mean-token-mean"))
    check_batch(batch, groups)
    assert batch.rollouts.advantage.tolist() == [1.0, -0.5, -0.5]  # three rollouts, not six segments
    of = np.repeat(batch.segments.rollout, batch.lengths)
    assert batch.weights[of == 0].sum() == pytest.approx(0.5)
    assert batch.weights[of == 1].sum() == pytest.approx(0.5)
    assert batch.denominator == 2.0  # the third has no token that trains
    assert batch.segments.number.tolist() == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize(
    ("normalise", "length", "expected", "count"),
    [
        ("token-mean", None, [1 / 9, 1 / 9, 0, 1 / 9], 9),
        ("seq-mean-token-mean", None, [1 / 6, 1 / 12, 0, 1 / 9], 3),
        ("seq-mean-token-sum", None, [1 / 3, 1 / 3, 0, 1 / 3], 3),
        ("seq-mean-token-sum-norm", 100, [1 / 300, 1 / 300, 0, 1 / 300], 3),
        ("prompt-mean", None, [1 / 12, 1 / 12, 0, 1 / 6], 2),
    ],
)
def test_hand_computed_normalisations(
    normalise: Any, length: int | None, expected: list[float], count: float
) -> None:
    trained, groups = np.array([2, 4, 0, 3]), np.array([0, 0, 1, 2])
    weights, counted = compute_token_weights(trained, groups, normalise, length=length)
    np.testing.assert_allclose(weights, expected)
    assert counted == count


def test_groups_with_fewer_than_two_valid_members_have_zero_advantage() -> None:
    groups = [
        group_of_rewards(0, 1.0, None, None),
        group_of_rewards(1, None, None),
        group_of_rewards(2, 1.0, 1.0),
        group_of_rewards(3, 0.0, 1.0),
    ]
    batch = make_batch(groups)
    check_batch(batch, groups)
    assert batch.groups.kind == ("short", "failed", "uniform", "informative")
    assert batch.groups.valid.tolist() == [1, 0, 2, 2]
    assert batch.rollouts.advantage.tolist() == [0, 0, 0, 0, 0, 0, 0, -1, 1]
    assert batch.rollouts.use == ("train", "missing", "missing", "missing", "missing", *["train"] * 4)
    assert np.isnan(batch.rollouts.reward).tolist() == [False, True, True, True, True, *[False] * 4]
    assert batch.denominator == 10.0  # zero advantages count
    left = make_batch(groups, BatchConfig(uninformative="leave_out"))
    check_batch(left, groups)
    assert left.denominator == 4.0
    assert left.counts.left_out_tokens == 6
    assert left.rollouts.use[0] == "leave_out"
    nothing = make_batch([group_of_rewards(1, None, None)])
    check_batch(nothing)
    assert len(nothing) == 0
    assert nothing.denominator == 0.0


def test_truncated_rollouts_follow_their_rule_by_reason() -> None:
    def made(**config: Any) -> Batch:
        groups = [
            group(
                0,
                rollout(0, 0, 1.0),
                rollout(0, 1, 0.0, outcome=Truncated("time")),
                rollout(0, 2, 0.0, outcome=Truncated("tokens")),
            )
        ]
        batch = make_batch(groups, BatchConfig(**config))
        check_batch(batch, groups)
        return batch

    assert made().rollouts.advantage.tolist() == [1.0, -0.5, -0.5]
    masked = made(truncated="mask", truncated_by={"tokens": "leave_out"})
    assert masked.rollouts.advantage.tolist() == [1.0, -1.0, 0.0]
    assert masked.rollouts.use == ("train", "mask", "leave_out")
    assert masked.rollouts.truncated == ("", "time", "tokens")
    assert masked.counts.masked_tokens == 2
    assert masked.counts.left_out_tokens == 2
    assert masked.denominator == 2.0  # tokens that train
    assert masked.segments.rollout.tolist() == [0]
    assert made(truncated="mask", segments="all").segments.trained.tolist() == [2, 0, 0]


def test_token_without_a_logprob_is_never_silently_trained() -> None:
    groups = [group(0, rollout(0, 0, 1.0, [segment([0, 1, 1, 1], logprob=math.nan)]), rollout(0, 1, 0.0))]
    with pytest.raises(BatchError, match=r"\b3\b.*\b0\.0\b.*without_logprob"):
        make_batch(groups, strict=True)
    with pytest.raises(BatchError, match="without_logprob"):
        make_batch(groups, BatchConfig(without_logprob="refuse"))
    masked = make_batch(groups, BatchConfig(without_logprob="mask"))
    assert masked.counts.without_logprob == 3
    assert masked.segments.rollout.tolist() == [1]
    assert np.isfinite(masked.logprobs).all()
    trained = make_batch(groups, BatchConfig(without_logprob="train"))
    assert trained.counts.trained_without_logprob == 3
    assert np.isnan(trained.logprobs[trained.mask]).sum() == 3
    check_batch(trained, groups)


def test_first_token_of_a_segment_does_not_train() -> None:
    batch = make_batch([group(0, rollout(0, 0, 1.0, [segment([1, 1, 1])]), rollout(0, 1, 0.0))])
    assert batch.mask.tolist() == [False, True, True, False, False, True, True]
    assert batch.counts.unpredicted == 1
    check_batch(batch)


def test_extras_have_one_layout_or_are_refused() -> None:
    def made(*extras: dict[str, Extra], **config: Any) -> Batch:
        parts = [segment([0, 1, 1], turns=(n,), extras=one) for n, one in enumerate(extras)]
        return make_batch([group(0, rollout(0, 0, 1.0, parts))], BatchConfig(strict=True, **config))

    def experts(*values: int) -> Extra:
        return Extra("int32", 8, ints(values))

    first, second = experts(1, 2, 3, 4, 5, 6), experts(7, 8, 9, 10, 11, 12)
    batch = made({"experts": first}, {"experts": second})
    assert batch.extras["experts"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]
    check_batch(batch)
    with pytest.raises(BatchError, match="experts"):
        made({"experts": first}, {})
    with pytest.raises(BatchError, match="experts"):
        made({"experts": first}, {}, extras=("experts",))
    with pytest.raises(BatchError, match=r"int16.*int32"):
        made({"experts": first}, {"experts": Extra("int16", 8, second.data)})
    with pytest.raises(BatchError, match="bfloat16"):
        made({"kept": Extra("bfloat16", 2, bytes(6))})
    with pytest.raises(BatchError, match="int64"):
        made({"kept": Extra("int64", 4, bytes(12))})
    assert made({"experts": first}, {}, extras=()).extras == {}


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ([group_of_rewards(0, 1.0, 0.0), group_of_rewards(0, 1.0, 0.0)], r"\b0\b.*\bt0\b"),
        ([group(0, rollout(0, 0, 1.0), rollout(0, 0, 1.0))], r"\b0\b.*\bt0\b"),
        ([group(0, rollout(0, 0, 1.0, [segment([0, 1]), segment([0, 1])]))], r"\b0\.0\b.*\b0\b"),
        ([group(0, rollout(0, 0, 1.0, usage=Usage(turns=1, sampled_tokens=1)))], r"\b0\.0\b.*\b1\b.*\b2\b"),
        ([group(0, rollout(0, 0, 1.0, [], usage=Usage(turns=1, sampled_tokens=9)))], "load_tokens=True"),
        ([group_of_rewards(0, 1.0, math.nan)], r"\b0\.1\b.*\bt0\b.*\b1\b.*\bnan\b"),
        ([group(0, rollout(0, 0, 1.0, [segment([0, 1], version=-1)]))], r"-1\b"),
        ([group(0, rollout(0, 0, 1.0, [segment([0, 1], version=2**31)]))], str(2**31)),
    ],
)
def test_inconsistent_segments_are_refused(groups: list[Group], named: str) -> None:
    with pytest.raises(BatchError, match=named):
        make_batch(groups, strict=True)


def test_mask_shifted_against_the_logprobs_is_refused() -> None:
    right, wrong = segment([0, 1, 1, 0]), segment([0, 0, 1, 1])
    moved = msgspec.structs.replace(right, mask=wrong.mask, versions=wrong.versions)
    for which in ("trained", "nonzero"):
        with pytest.raises(BatchError, match=r"\b1\b.*\b0\.0\b"):
            make_batch([group(0, rollout(0, 0, 1.0, [moved]))], BatchConfig(segments=which), strict=True)  # type: ignore[arg-type]


def _broken(kind: str, group_index: int, member: int) -> Rollout:
    """Return a rollout with a reward that cannot be put into a batch."""
    good = segment([0, 1, 1, 0])
    match kind:
        case "one logprob":
            logprobs = floats([0.0, -0.5, math.nan, 0.0])
            parts, fields = [msgspec.structs.replace(good, logprobs=logprobs)], {}
        case "shifted mask":
            wrong = segment([0, 0, 1, 1])
            parts, fields = [msgspec.structs.replace(good, mask=wrong.mask, versions=wrong.versions)], {}
        case "turn twice":
            parts, fields = [segment([0, 1]), segment([0, 1])], {}
        case "too many tokens":
            parts, fields = [good], {"usage": Usage(turns=1, sampled_tokens=1)}
        case "version":
            parts, fields = [segment([0, 1], version=-1)], {}
        case "extras":
            parts, fields = [segment([0, 1], extras={"experts": Extra("int32", 4, ints([1, 2]))})], {}
        case _:
            parts, fields = [good], {}
    return rollout(group_index, member, math.inf if kind == "reward" else 1.0, parts, **fields)  # type: ignore[arg-type]


BROKEN = {
    "one logprob": "upstream.logprobs",
    "shifted mask": "bug.batch",
    "turn twice": "bug.batch",
    "too many tokens": "bug.batch",
    "version": "bug.batch",
    "extras": "bug.batch",
    "reward": "bug.batch",
}


ALONE = [kind for kind in BROKEN if kind != "extras"]
"""Broken whatever the others are like; extras are wrong only if most rollouts have others."""


@pytest.mark.parametrize("kind", BROKEN)
def test_untrainable_rollout_is_left_out_and_counted(kind: str) -> None:
    def groups(bad: Rollout) -> list[Group]:
        return [group(0, rollout(0, 0, 1.0), bad, rollout(0, 2, 0.0)), group_of_rewards(1, 1.0, 0.0)]

    given = groups(_broken(kind, 0, 1))
    batch = make_batch(given)
    check_batch(batch, given)
    assert batch.counts.left_out_rollouts == 1
    assert [bool(why) for why in batch.rollouts.problem] == [False, True, False, False, False]
    assert batch.rollouts.outcome[1] == BROKEN[kind]
    assert batch.rollouts.use[1] == "missing"
    # Everything else is as if that rollout had failed in the run.
    without = make_batch(groups(rollout(0, 1, None)))
    for name in ("tokens", "mask", "logprobs", "versions", "advantages", "weights", "offsets"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(without, name))
    assert batch.denominator == without.denominator
    with pytest.raises(BatchError):
        make_batch(given, strict=True)
    with pytest.raises(BatchError):
        make_batch(given, BatchConfig(strict=True))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from([None, "", "", "", *ALONE]), min_size=1, max_size=5), max_size=4))
def test_broken_rollouts_do_not_affect_others(kinds: list[list[str | None]]) -> None:
    def member(index: int, at: int, kind: str | None, *, broken: bool) -> Rollout:
        if kind and broken:
            return _broken(kind, index, at)
        return rollout(index, at, None if kind or kind is None else float(at % 2))

    given, without = (
        [
            group(index, *(member(index, at, kind, broken=broken) for at, kind in enumerate(members)))
            for index, members in enumerate([["", ""], *kinds])
        ]
        for broken in (True, False)
    )
    batch, expected = make_batch(given), make_batch(without)
    check_batch(batch, given)
    assert batch.counts.left_out_rollouts == sum(bool(kind) for members in kinds for kind in members)
    assert batch.counts.rollouts == expected.counts.rollouts
    for name in ("tokens", "mask", "logprobs", "versions", "advantages", "weights", "offsets"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name))


def test_batch_without_any_logprob_is_refused() -> None:
    with pytest.raises(BatchError) as caught:
        make_batch([group(0, *(rollout(0, at, 1.0, [segment([0, 1, 1], logprob=math.nan)]) for at in range(3)))])
    assert caught.value.code == "upstream.logprobs"


def test_group_with_incomparable_rewards_is_left_out() -> None:
    given = [group_of_rewards(0, 1.7e308, -1.7e308), group_of_rewards(1, 1.0, 0.0)]
    batch = make_batch(given)
    check_batch(batch, given)
    assert batch.counts.left_out_rollouts == 2
    assert batch.groups.kind == ("failed", "informative")
    assert batch.rollouts.advantage.tolist() == [0.0, 0.0, 1.0, -1.0]


def test_groups_of_two_engines_may_have_the_same_index() -> None:
    other = msgspec.structs.replace(group_of_rewards(0, 0.0, 1.0), task=group_of_rewards(7).task)
    assert len(make_batch([group_of_rewards(0, 1.0, 0.0), other]).groups) == 2


def test_batch_can_be_pickled() -> None:
    groups = [group_of_rewards(0, 1.0, 0.0)]
    batch = pickle.loads(pickle.dumps(make_batch(groups)))
    check_batch(batch, groups)
    assert batch.tokens.flags.writeable  # as torch.from_numpy wants it


def test_tokens_without_ids_are_counted() -> None:
    batch = make_batch([group(0, rollout(0, 0, 1.0, usage=Usage(turns=2, sampled_tokens=7)))])
    assert batch.counts.without_ids == 5
    lone = rollout(1, 1, 0.0, [], usage=Usage(turns=1, sampled_tokens=4))  # the engine gave no ids for it
    assert make_batch([group(1, rollout(1, 0, 1.0), lone)]).counts.without_ids == 4
    assert batch.rollouts.turns.tolist() == [2]


def test_failed_rollout_has_only_a_row_in_the_batch() -> None:
    lost = rollout(0, 1, None, outcome=Failed("infra", "upstream.cut", "x"))
    batch = make_batch([group(0, rollout(0, 0, 1.0), lost, rollout(0, 2, 0.0))])
    assert batch.rollouts.outcome == ("completed", "upstream.cut", "completed")
    assert batch.rollouts.advantage.tolist() == [1.0, 0.0, -1.0]
    assert 1 not in batch.segments.rollout


@pytest.mark.parametrize(
    "config",
    [
        {"baseline": "median"},
        {"scale": "range"},
        {"normalise": "sum"},
        {"normalise": "seq-mean-token-sum-norm"},
        {"normalise": "seq-mean-token-sum-norm", "length": 0},
        {"length": 5},
        {"truncated": "drop"},
        {"truncated_by": {"weather": "mask"}},
        {"truncated_by": {"time": "drop"}},
        {"without_logprob": "zero"},
        {"uninformative": "drop"},
        {"segments": "some"},
    ],
)
def test_invalid_config_is_refused_at_construction(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BatchConfig(**config)


@settings(max_examples=30, deadline=None)
@given(many_groups(), st.randoms(use_true_random=False))
def test_losses_of_parts_add_up_to_the_loss_of_the_batch(groups: list[Group], random: Any) -> None:
    batch = make_batch(groups)
    order = list(range(len(batch.segments)))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    parts = [batch.select(order[:cut]), batch.select(order[cut:])]
    for part in parts:
        check_batch(part, groups)
    total = sum((part.weights * part.logprobs).sum(dtype=np.float64) for part in parts)
    assert abs(total - (batch.weights * batch.logprobs).sum(dtype=np.float64)) < 1e-6
    if order:
        with pytest.raises(BatchError):
            batch.select([0, 0])
        with pytest.raises(IndexError):
            batch.select([len(order)])
