"""`check_batch` detects damaged batches."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rookery.core import Group
from rookery.training import Batch, BatchConfig, BatchError, check_batch, make_batch
from tests.training.kit import group, group_of_rewards, many_groups, rollout, segment

RECORDED = ("tokens", "mask", "logprobs", "versions")


def batch_of_two() -> Batch:
    return make_batch([group_of_rewards(0, 1.0, 0.0)])


def moved(batch: Batch, *names: str, by: int = 1) -> Batch:
    return batch.replace_columns(**{name: np.roll(getattr(batch, name), by) for name in names})


def without(batch: Batch, index: int) -> dict[str, Any]:
    """Return all columns without one token."""
    return batch.map_columns(lambda _, column: np.delete(column, index, axis=0))


def at_token(number: int) -> str:
    """Return a pattern for a message that names a token of segment 0 of rollout 0.0."""
    return rf"\b{number}\b.*\b0\b.*\b0\.0\b"


DAMAGE: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "a shifted mask": (lambda batch: moved(batch, "mask"), at_token(0)),
    "a mask shifted the other way": (lambda batch: moved(batch, "mask", by=-1), at_token(1)),
    "shifted logprobs": (lambda batch: moved(batch, "logprobs", by=-1), at_token(1) + ".*logprobs"),
    "everything shifted but the tokens": (
        lambda batch: moved(batch, "mask", "logprobs", "versions", "advantages", "weights", by=-1),
        at_token(0),
    ),
    "shifted tokens": (lambda batch: moved(batch, "tokens"), at_token(0)),
    "a dropped version": (
        lambda batch: batch.replace_columns(
            versions=np.where(np.arange(len(batch)) == 2, -1, batch.versions).astype(np.int32)
        ),
        at_token(2),
    ),
    "all versions the same": (
        lambda batch: batch.replace_columns(versions=np.where(batch.mask, 9, -1).astype(np.int32)),
        at_token(0),
    ),
    "a lost token": (lambda batch: batch.replace_columns(**without(batch, 2)), r"offsets.*\b7\b"),
    "a lost token, offsets corrected": (
        lambda batch: batch.replace_columns(**without(batch, 2), offsets=np.array([0, 3, 7])),
        at_token(0),
    ),
    "a doubled token": (
        lambda batch: batch.replace_columns(
            **batch.map_columns(lambda _, column: np.insert(column, 2, column[2], axis=0)),
            offsets=np.array([0, 5, 9]),
        ),
        at_token(0),
    ),
    "a doubled segment": (
        lambda batch: msgspec.structs.replace(
            batch,
            **batch.map_columns(lambda _, column: np.concatenate([column[:4], column])),
            offsets=np.array([0, 4, 8, 12]),
            segments=batch.segments.take(np.array([0, 0, 1])),
        ),
        "^",
    ),
    "a column of the wrong length": (
        lambda batch: batch.replace_columns(weights=batch.weights[:-1]),
        r"weights.*\[7\]",
    ),
    "a column of the wrong type": (
        lambda batch: batch.replace_columns(logprobs=batch.logprobs.astype(np.float64)),
        "logprobs.*float64",
    ),
    "a logprob that became NaN": (
        lambda batch: batch.replace_columns(logprobs=np.where(batch.mask, np.nan, 0).astype(np.float32)),
        at_token(2) + ".*logprob",
    ),
    "weights of a mean taken anew": (
        lambda batch: batch.replace_columns(weights=batch.weights * 2),
        at_token(2) + ".*weights",
    ),
    "another rollout's advantages": (
        lambda batch: batch.replace_columns(advantages=-batch.advantages),
        at_token(2) + ".*advantages",
    ),
    "the first token trains": (
        lambda batch: batch.replace_columns(
            mask=np.ones(len(batch), dtype=bool), versions=np.full(len(batch), 3, dtype=np.int32)
        ),
        at_token(0),
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_detected_and_located(name: str) -> None:
    damage, location = DAMAGE[name]
    batch = batch_of_two()
    check_batch(batch)
    with pytest.raises(BatchError, match=location):
        check_batch(damage(batch))


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(many_groups(missing=True), st.sampled_from(RECORDED), st.integers(-3, 3), st.data())
def test_any_change_of_recorded_data_is_detected(
    groups: list[Group], name: str, by: int, data: st.DataObject
) -> None:
    batch = make_batch(groups, BatchConfig(without_logprob="mask"))
    check_batch(batch, groups)
    column = getattr(batch, name)
    assume(len(column))
    if by:
        changed = np.roll(column, by)
    else:  # one value becomes its neighbour's
        index = data.draw(st.integers(0, len(column) - 1))
        changed = column.copy()
        changed[index] = column[index - 1]
    assume(changed.tobytes() != column.tobytes())
    with pytest.raises(BatchError):
        check_batch(batch.replace_columns(**{name: changed}))


@settings(max_examples=25, deadline=None)
@given(many_groups(), st.integers(1, 3))
def test_columns_shifted_together_are_detected(groups: list[Group], by: int) -> None:
    """Columns agree with each other but not with the tokens, which no rule about columns detects."""
    batch = make_batch(groups)
    names = ("mask", "logprobs", "versions", "advantages", "weights")
    damaged = moved(batch, *names, by=-by)
    assume(any(getattr(batch, name).tobytes() != getattr(damaged, name).tobytes() for name in RECORDED))
    with pytest.raises(BatchError):
        check_batch(damaged)


def test_batch_is_compared_with_its_groups() -> None:
    groups = [group_of_rewards(0, 1.0, 0.0)]
    batch = make_batch(groups)
    check_batch(batch, groups)
    for mask, first in (([0, 1, 1, 1], 100), ([0, 0, 1, 1], 101)):
        others = [group(0, rollout(0, 0, 1.0, [segment(mask, first=first)]), rollout(0, 1, 0.0))]
        made = make_batch(others)
        with pytest.raises(BatchError, match=r"\b0\.0\b"):
            check_batch(made, groups)
    with pytest.raises(BatchError):
        check_batch(batch, [group_of_rewards(1, 1.0, 0.0)])
