"""Rows for the adapters: what trains, what is missing, and what a trainer computes from them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Failed, Group, Truncated, UsageError
from rookery.training import BatchConfig, make_batch
from rookery.training.advantages import compute_advantages
from rookery.training.rows import (
    Row,
    clip_rows,
    count_left_out_tokens,
    describe_row,
    fill_row,
    keep_one_row,
    make_rows,
    mask_incomplete_groups,
    shape_rewards,
    split_by_group,
    split_by_rollout,
    summarize_rows,
)
from tests.training.kit import configs, group, group_of_rewards, many_groups, rollout, segment

REWARDS = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=6)


@given(groups=many_groups(), config=configs)
@settings(max_examples=60)
def test_rows_hold_the_trained_tokens_of_the_batch_once(groups: list[Group], config: BatchConfig) -> None:
    batch, rows = make_batch(groups, config), make_rows(groups, config)
    for name in ("tokens", "logprobs", "versions"):
        parts = [getattr(row, name)[row.mask] for row in rows]
        found = np.concatenate([*parts, np.zeros(0)])
        np.testing.assert_array_equal(found, getattr(batch, name)[batch.mask])
    by_rollout = split_by_rollout(rows)
    assert [part[0].rollout for part in by_rollout] == list(batch.rollouts.id)
    for part, use, advantage in zip(by_rollout, batch.rollouts.use, batch.rollouts.advantage, strict=True):
        for row in part:
            assert row.valid == (use in ("train", "mask"))
            assert row.advantage == (advantage if row.valid else 0.0)
            assert row.record.segments == []
        if not part[0].valid:
            assert [len(row) for row in part] == [0]


@given(groups=many_groups(), length=st.integers(1, 6))
@settings(max_examples=30)
def test_clipped_rows_keep_their_first_tokens(groups: list[Group], length: int) -> None:
    rows = make_rows(groups)
    assert clip_rows(rows, None) == rows
    for row, clipped in zip(rows, clip_rows(rows, length), strict=True):
        assert len(clipped) == min(len(row), length)
        for name in ("tokens", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(clipped, name), getattr(row, name)[:length])
        assert (clipped.reward, clipped.advantage) == (row.reward, row.advantage)
        assert {name: len(extra) for name, extra in clipped.extras.items()} == dict.fromkeys(
            row.extras, len(clipped)
        )


@given(groups=many_groups())
@settings(max_examples=30)
def test_row_is_split_before_its_first_trained_token(groups: list[Group]) -> None:
    for row in make_rows(groups, BatchConfig(without_logprob="train")):
        assert row.prompt_ids + row.response_ids == row.tokens.tolist()
        assert [0] * len(row.prompt_ids) + row.response_mask == row.mask.astype(int).tolist()
        np.testing.assert_array_equal(row.logprobs[row.prompt_length :], np.float32(row.response_logprobs))
        if row.trained:
            assert row.prompt_ids
            assert row.response_mask[0] == 1
            assert row.version_range == (row.versions[row.mask].min(), row.versions[row.mask].max())
        else:
            assert row.version_range is None


def make_mixed_group() -> Group:
    """Return a group with a rollout of two segments, a masked, a missing and a completed rollout."""
    two = [segment([0, 1, 1, 1], turns=(0,)), segment([0, 0, 1], turns=(1,))]
    return group(
        0,
        rollout(0, 0, 1.0, two),
        rollout(0, 1, 0.0, outcome=Truncated("time")),
        rollout(0, 2, None, outcome=Failed("infra", "sandbox.lost", "gone")),
        rollout(0, 3, 0.5),
    )


def test_missing_member_changes_no_advantage() -> None:
    config = BatchConfig(truncated="mask")
    with_missing = make_rows([make_mixed_group()], config)
    members = [one for one in make_mixed_group().rollouts if one.valid]
    without = make_rows([group(0, *members)], config)
    assert [row.advantage for row in with_missing if row.valid] == [row.advantage for row in without]
    assert [(row.member, row.segment, row.valid, row.trained) for row in with_missing] == [
        (0, 0, True, 3),
        (0, 1, True, 1),
        (1, -1, True, 0),
        (2, -1, False, 0),
        (3, 0, True, 2),
    ]
    assert [row.truncated for row in with_missing] == ["", "", "time", "", ""]


def test_one_row_per_rollout_keeps_the_one_with_most_trained_tokens() -> None:
    rows = make_rows([make_mixed_group()])
    kept = keep_one_row(rows)
    assert [(row.member, row.segment) for row in kept] == [(0, 0), (1, 0), (2, -1), (3, 0)]
    assert count_left_out_tokens(rows, kept) == 1


def test_filled_row_has_a_prompt_and_a_response_that_does_not_train() -> None:
    rows = [fill_row(row, 7) for row in make_rows([group_of_rewards(0, 1.0, None)])]
    missing = rows[1]
    assert (missing.prompt_ids, missing.response_ids, missing.response_mask) == ([7], [7], [0])
    assert (missing.response_logprobs, missing.reward, missing.versions.tolist()) == ([0.0], None, [-1, -1])
    assert rows[0].trained == 2


def test_incomplete_groups_are_masked_as_a_whole_and_counted() -> None:
    rows = mask_incomplete_groups(make_rows([make_mixed_group(), group_of_rewards(1, 1.0, 0.0)]))
    broken, whole = split_by_group(rows)
    assert [(len(row), row.reward, row.advantage) for row in broken] == [(0, None, 0.0)] * 4
    assert [row.advantage for row in whole] == [1.0, -1.0]
    summary = summarize_rows(rows)
    assert summary["rookery/missing"] == pytest.approx(4 / 6)
    assert summary["rookery/missing/sandbox.lost"] == pytest.approx(1 / 6)
    assert summary["rookery/missing/left_out"] == pytest.approx(3 / 6)


@given(rewards=REWARDS, weight=st.floats(0.5, 3), fill=st.booleans())
def test_shaped_rewards_minus_their_mean_are_the_advantages(
    rewards: list[float | None], weight: float, fill: bool
) -> None:
    shaped = shape_rewards(rewards, weight=weight, fill_missing=fill)
    assert fill or [one is None for one in shaped] == [one is None for one in rewards]
    seen = [one for one in shaped if one is not None]
    mean = math.fsum(seen) / len(seen) if seen else 0.0
    left = [0.0 if one is None else one - mean for one in shaped]
    assert left == pytest.approx((weight * compute_advantages(rewards)).tolist(), abs=1e-9)


def test_baseline_that_keeps_the_mean_cannot_be_shaped() -> None:
    with pytest.raises(UsageError):
        shape_rewards([1.0, 0.0], baseline="none")


def test_summary_counts_rollouts_and_causes() -> None:
    rows = make_rows([make_mixed_group(), group_of_rewards(1, None, None)])
    summary = summarize_rows(rows)
    assert summary["rookery/missing"] == 0.5
    assert summary["rookery/missing/sandbox.lost"] == 0.5
    assert summary["rookery/reward"] == 0.5
    assert summary["rookery/truncated"] == pytest.approx(1 / 3)
    assert summarize_rows([]) == {}
    described: dict[Row, object] = {row: describe_row(row)["outcome"] for row in rows[:1]}
    assert list(described.values()) == ["completed"]
