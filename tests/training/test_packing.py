"""Packing, padding and distribution to ranks: no token is lost, and no segment is cut."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Group, UsageError
from rookery.training import (
    IGNORE,
    Batch,
    BatchConfig,
    BatchError,
    check_batch,
    make_attention_mask,
    make_batch,
    make_targets,
    pack,
    pad_batch,
    split_batch,
)
from tests.training.kit import group, many_groups, rollout, segment

COLUMNS = ("tokens", "mask", "logprobs", "versions", "advantages", "weights")


def of_lengths(*lengths: int) -> Batch:
    parts = [segment([0] + [1] * (n - 1), first=100 * at, turns=(at,)) for at, n in enumerate(lengths)]
    return make_batch([group(0, rollout(0, 0, 1.0, parts), rollout(0, 1, 0.0, []))])


@settings(max_examples=40, deadline=None)
@given(many_groups(), st.integers(40, 80), st.sampled_from([None, 0, 7]))
def test_every_segment_is_in_exactly_one_row(groups: list[Group], length: int, pad: int | None) -> None:
    batch = make_batch(groups)
    packed = pack(batch, length, pad=pad)
    seen: list[int] = []
    for row in packed:
        assert len(row) <= length
        assert pad is None or len(row) == length
        for document, one in enumerate(row.segments.tolist()):
            seen.append(one)
            place = slice(row.cu_seqlens[document], row.cu_seqlens[document + 1])
            source = slice(batch.offsets[one], batch.offsets[one + 1])
            for name in COLUMNS:
                assert getattr(row, name)[place].tobytes() == getattr(batch, name)[source].tobytes()
            assert (row.extras["experts"][place] == batch.extras["experts"][source]).all()
            assert (row.seq_idx[place] == document).all()
            assert row.position_ids[place].tolist() == list(range(batch.lengths[one]))
        tail = slice(len(row) - row.padding, None)
        assert (row.tokens[tail] == (pad or 0)).all()
        assert not row.mask[tail].any()
        assert not row.weights[tail].any()
        assert len(row.cu_seqlens) == len(row.segments) + bool(row.padding) + 1
        assert row.max_seqlen == np.diff(row.cu_seqlens).max()
        assert row.cu_seqlens.dtype == row.seq_idx.dtype == np.int32
        assert row.segments.tolist() == sorted(row.segments.tolist())
    assert sorted(seen) == list(range(len(batch.segments)))
    assert pack(batch, length, pad=pad).plan == packed.plan
    tokens = len(batch)
    assert packed.efficiency == pytest.approx(tokens / (len(packed) * length) if tokens else 1.0)
    assert len(packed) <= -(-2 * tokens // length) + 1  # no two rows are both half empty


def test_packing_is_close_to_optimal() -> None:
    assert pack(of_lengths(6, 5, 4, 3, 2), 10).plan == ((0, 2), (1, 3, 4))
    rng = np.random.default_rng(0)
    assert pack(of_lengths(*rng.integers(2, 300, size=400).tolist()), 1024).efficiency > 0.98


def test_oversized_segment_is_refused_or_gets_its_own_row() -> None:
    batch = of_lengths(4, 12, 4)
    for options in ({"strict": True}, {"oversize": "refuse"}):
        with pytest.raises(BatchError, match=r"\b1\b.*\b8\b.*\b12\b.*\b0\.0\b"):
            pack(batch, 8, **options)  # type: ignore[arg-type]
    packed = pack(batch, 8, oversize="alone")
    assert packed.plan == ((0, 2), (1,))
    assert [len(row) for row in packed] == [8, 12]
    assert packed.efficiency == 1.0


@pytest.mark.parametrize("which", ["trained", "all"])
@pytest.mark.parametrize("uninformative", ["count", "leave_out"])
def test_rollout_with_an_oversized_segment_is_left_out_and_counted(which: Any, uninformative: Any) -> None:
    def groups(reward: float | None) -> list[Group]:
        parts = [segment([0, 1, 1], turns=(0,)), segment([0] * 4 + [1] * 8, turns=(1,))]
        return [
            group(0, rollout(0, 0, 1.0), rollout(0, 1, reward, parts), rollout(0, 2, 0.0)),
            group(1, rollout(1, 0, 0.5), rollout(1, 1, 1.0)),
            group(2, rollout(2, 0, 1.0), rollout(2, 1, 1.0)),
        ]

    config = BatchConfig(segments=which, uninformative=uninformative)
    batch = make_batch(groups(0.0), config)
    packed = pack(batch, 8)
    assert packed.left_out == ("0.1",)
    check_batch(packed.batch)
    assert packed.batch.counts.left_out_rollouts == 1
    assert packed.batch.counts.left_out_tokens == batch.counts.left_out_tokens + 10
    assert packed.batch.rollouts.use[1] == "leave_out"
    there = sorted(one for row in packed for one in row.segments.tolist())
    assert there == [at for at, row in enumerate(batch.segments.rollout.tolist()) if row != 1]
    # The others train as if that rollout had failed: same baseline, same denominator.
    without = make_batch(groups(None), config)
    assert packed.batch.denominator == without.denominator
    np.testing.assert_allclose(packed.batch.rollouts.advantage, without.rollouts.advantage)
    for name in ("mask", "advantages", "weights"):
        mine = np.concatenate([getattr(row, name) for row in packed])
        assert sorted(mine.tolist()) == sorted(getattr(without, name).tolist())


def test_leave_out_keeps_columns_replaced_by_the_trainer() -> None:
    batch = make_batch([group(0, rollout(0, 0, 1.0), rollout(0, 1, 0.0, [segment([0] * 9 + [1])]))])
    own = batch.replace_columns(advantages=np.where(batch.mask, 7.0, 0.0).astype(np.float32))
    packed = pack(own, 8)
    assert packed.left_out == ("0.1",)
    assert [row.advantages.max() for row in packed] == [7.0]


def test_leave_out_in_a_selection_changes_no_weight() -> None:
    batch = make_batch([group(0, rollout(0, 0, 1.0), rollout(0, 1, 0.0, [segment([0] * 9 + [1])]))])
    part = pack(batch.select([0, 1][::-1][:1]), 8)
    assert part.left_out == ("0.1",)
    assert len(part) == 0
    check_batch(part.batch)
    assert part.batch.denominator == batch.denominator


def test_hand_computed_rows() -> None:
    (row,) = pack(of_lengths(3, 2), 8, pad=9)
    assert row.tokens.tolist() == [0, 1, 2, 100, 101, 9, 9, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert row.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert row.seq_idx.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert row.max_seqlen == 3
    assert make_targets(row).labels.tolist() == [1, 2, IGNORE, 101, IGNORE, IGNORE, IGNORE, IGNORE]
    assert make_attention_mask(row.seq_idx)[3:5].tolist() == [
        [False, False, False, True, False, False, False, False],
        [False, False, False, True, True, False, False, False],
    ]


@settings(max_examples=30, deadline=None)
@given(many_groups(prompted=False), st.integers(40, 80), st.sampled_from(["left", "right"]))
def test_every_trained_token_is_the_target_of_the_position_before_it(
    groups: list[Group], length: int, side: Any
) -> None:
    batch = make_batch(groups)
    trained = sorted(zip(batch.tokens[batch.mask].tolist(), batch.logprobs[batch.mask].tolist(), strict=True))
    form = pad_batch(batch, side=side)
    for forms in ([form], list(pack(batch, length))):
        found = []
        for one in forms:
            moved = make_targets(one)
            assert ((moved.labels != IGNORE) == moved.mask).all()
            assert (moved.mask == (moved.weights > 0)).all()
            found += zip(moved.labels[moved.mask].tolist(), moved.logprobs[moved.mask].tolist(), strict=True)
            if one is form:
                continue
            last = one.cu_seqlens[1:] - 1
            assert not moved.mask[last].any(), "the last position of a sequence has no target"
        assert sorted(found) == trained
    assert form.attention_mask.sum() == len(batch)
    assert form.position_ids.max(initial=0) == max(batch.lengths.max(initial=1) - 1, 0)
    assert form.tokens[form.attention_mask].tolist() == batch.tokens.tolist()


def test_padding_uses_the_requested_side_and_multiple() -> None:
    batch = of_lengths(3, 2)
    left = pad_batch(batch, side="left", pad=9, multiple=4)
    assert left.tokens.tolist() == [[9, 0, 1, 2], [9, 9, 100, 101]]
    assert left.position_ids.tolist() == [[0, 0, 1, 2], [0, 0, 0, 1]]
    assert left.versions[0].tolist() == [-1, -1, 3, 3]
    right = pad_batch(batch, pad=9)
    assert right.tokens.tolist() == [[0, 1, 2], [100, 101, 9]]
    assert right.attention_mask.tolist() == [[True] * 3, [True, True, False]]


@settings(max_examples=30, deadline=None)
@given(many_groups(), st.integers(1, 5), st.integers(40, 80))
def test_ranks_get_equal_numbers_of_rows_and_their_losses_add_up(
    groups: list[Group], ranks: int, length: int
) -> None:
    batch = make_batch(groups)
    whole = (batch.weights * batch.logprobs).sum(dtype=np.float64)
    packed = pack(batch, length)
    parts = packed.split(ranks)
    assert len(parts) == ranks
    assert len({len(part) for part in parts}) == 1
    total = sum((row.weights * row.logprobs).sum(dtype=np.float64) for part in parts for row in part)
    assert abs(total - whole) < 1e-6
    assert sorted(row for part in parts for row in part.plan if row) == sorted(packed.plan)
    assert all(len(row) > 0 for part in parts for row in part), "an empty row still goes through the model"
    alone = split_batch(batch, ranks)
    assert abs(sum((part.weights * part.logprobs).sum(dtype=np.float64) for part in alone) - whole) < 1e-6
    assert sum(len(part) for part in alone) == len(batch)
    sizes = [len(part) for part in alone]
    assert max(sizes) - min(sizes) <= batch.lengths.max(initial=0)


@pytest.mark.parametrize(
    "call",
    [
        lambda batch: pack(batch, 0),
        lambda batch: pack(batch, 8, oversize="cut"),
        lambda batch: pad_batch(batch, side="top"),
        lambda batch: pad_batch(batch, multiple=0),
        lambda batch: split_batch(batch, 0),
        lambda batch: pack(batch, 8).split(-1),
    ],
)
def test_invalid_arguments_are_refused(call: Any) -> None:
    with pytest.raises(UsageError):
        call(of_lengths(3))
