"""The structs of `rookery.core` are frozen, can be encoded, and reject contradictory field values."""

import math
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery import core
from rookery.core import (
    DEFAULT_LIMITS,
    Cancelled,
    Completed,
    Extra,
    Failed,
    Group,
    Limits,
    Message,
    Outcome,
    Rollout,
    Sampling,
    Segment,
    Span,
    Task,
    Taskset,
    Truncated,
    Turn,
    derive_seed,
    floats,
    ints,
    label,
)
from tests.core.strategies import names, structs, values_of

STRUCTS = pytest.mark.parametrize("kind", structs(core), ids=lambda kind: kind.__name__)


@pytest.mark.long
@STRUCTS
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_struct_round_trips_through_json_msgpack_and_pickle(kind: Any, data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind) == value
    assert msgspec.json.decode(msgspec.json.encode(value), type=kind) == value
    assert msgspec.convert(msgspec.to_builtins(value), kind) == value
    assert pickle.loads(pickle.dumps(value)) == value


@STRUCTS
def test_every_struct_is_frozen(kind: Any) -> None:
    assert kind.__struct_config__.frozen


@given(value=values_of(Outcome))
def test_outcome_decodes_to_the_same_variant(value: Outcome) -> None:
    assert isinstance(value, Completed | Truncated | Failed | Cancelled)
    again = msgspec.json.decode(msgspec.json.encode(value), type=Outcome)
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Completed(), "completed"),
        *((Truncated(reason), f"truncated.{reason}") for reason in ("turns", "tokens", "context", "time", "lost")),
        *((Cancelled(reason), f"cancelled.{reason}") for reason in ("user", "filtered", "stale", "shutdown")),
        (Failed("infra", "sandbox.lost", "gone"), "sandbox.lost"),
    ],
)
def test_every_outcome_has_one_label(outcome: Outcome, expected: str) -> None:
    assert label(outcome) == expected


@given(value=values_of(Outcome))
def test_label_accepts_every_outcome(value: Outcome) -> None:
    assert isinstance(label(value), str)


# ---- arrays that describe the same tokens must have the same length


def segment(**changes: Any) -> Segment:
    whole: dict[str, Any] = {
        "tokens": ints([1, 2, 3, 4]),
        "mask": b"\0\0\1\1",
        "logprobs": floats([0, 0, -1, -2]),
        "versions": (Span(2, 4, 7),),
    }
    return Segment(**whole | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": ints([1, 2, 3])},
        {"tokens": ints([1, 2, 3, 4]) + b"\0"},
        {"mask": b"\0\0\1"},
        {"mask": b"\0\0\1\2", "versions": (Span(2, 3, 7),)},
        {"logprobs": floats([0, 0, -1])},
        {"versions": ()},
        {"versions": (Span(1, 3, 7),)},
        {"versions": (Span(2, 5, 7),)},
        {"versions": (Span(2, 3, 7),)},
        {"versions": (Span(3, 4, 7), Span(2, 3, 7))},
        {"versions": (Span(2, 4, 7), Span(3, 4, 7))},
        {"versions": (Span(2, 2, 7), Span(2, 4, 7))},
        {"extras": {"experts": Extra("uint8", 2, bytes(7))}},
    ],
)
def test_segment_rejects_arrays_of_different_lengths(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        segment(**changes)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(segment()), **msgspec.to_builtins(changes)}, Segment)


def test_segment_counts_tokens_and_trained_tokens() -> None:
    assert (len(segment()), segment().trained) == (4, 2)
    assert segment(mask=bytes(4), versions=()).trained == 0


def turn(**changes: Any) -> Turn:
    whole: dict[str, Any] = {"attempt": "0.0.1", "index": 0, "response": Message("assistant", "x")}
    return Turn(**whole | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampled": ints([1, 2]), "logprobs": floats([-1.0])},
        {"sampled": b"", "logprobs": floats([-1.0])},
        {"sampled": b"\1\2\3"},
        {"prompt": b"\1\2\3\4\5"},
        {"sampled": ints([1, 2]), "extras": {"kept": Extra("bool", 1, b"\1")}},
    ],
)
def test_turn_requires_a_logprob_for_every_sampled_token_or_for_none(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        turn(**changes)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_are_little_endian_int32(values: list[int]) -> None:
    data = ints(values)
    assert [int.from_bytes(data[at : at + 4], "little", signed=True) for at in range(0, len(data), 4)] == values
    assert ints(iter(values)) == ints(tuple(values)) == data


# ---- limits and sampling: set fields override inherited ones


@pytest.mark.parametrize("name", Limits.__struct_fields__)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, -math.inf])
def test_limit_must_be_finite_and_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"limits\.{name}\b"):
        Limits(**{name: value})


LAYERED = pytest.mark.parametrize("kind", [Limits, Sampling], ids=lambda kind: kind.__name__)


@pytest.mark.long
@LAYERED
@given(data=st.data())
def test_over_prefers_set_fields_and_inherits_unset_ones(kind: Any, data: st.DataObject) -> None:
    above, below, lowest = (data.draw(values_of(kind)) for _ in range(3))
    result = above.over(below)
    for name in kind.__struct_fields__:
        value = getattr(above, name)
        assert getattr(result, name) == (value if value not in (None, (), {}) else getattr(below, name))
    assert above.over(above) == above == kind().over(above) == above.over(kind())
    assert above.over(below).over(lowest) == above.over(below.over(lowest))


def test_default_limits_give_every_stage_a_deadline() -> None:
    for name in ("queue", "setup", "run", "score", "teardown", "call", "model_call", "turns"):
        assert getattr(DEFAULT_LIMITS, name) is not None


def test_temperature_zero_counts_as_set() -> None:
    assert Sampling(temperature=0.0).over(Sampling(temperature=1.0)).temperature == 0.0


# ---- seeds


def test_derived_seeds_never_change() -> None:
    """Pin the values: a checkpoint written by one release must sample the same in the next."""
    assert derive_seed(0) == 7210762507766007076
    assert derive_seed(0, "main", 0, 0) == 5780469847162204105
    assert derive_seed(7, "train", 12, 3) == 4440214001263900425
    assert derive_seed(-1, "ä") == 5370445201297947115


parts = st.lists(st.integers() | names | st.sampled_from(["", ";", "int:1:3;", "0;str:1:a", "\x1f"]), max_size=4)


@given(st.integers(), parts, st.integers(), parts)
def test_seed_depends_on_the_root_and_every_part(root: int, some: list[Any], other: int, more: list[Any]) -> None:
    assert 0 <= derive_seed(root, *some) < 2**63
    assert derive_seed(root, *some) == derive_seed(root, *some)
    assert (derive_seed(root, *some) == derive_seed(other, *more)) == ((root, some) == (other, more))


def test_separators_inside_seed_parts_do_not_cause_collisions() -> None:
    similar = ["a\x1fint:3", "a;int:1:3", "a", "3"]
    seeds = {derive_seed(0, *key) for key in [("a", 3), ("a", "3"), *((name,) for name in similar)]}
    assert len(seeds) == 6


# ---- rollouts, tasks, messages


@pytest.mark.long
@given(st.lists(values_of(Rollout), max_size=4))
def test_only_scored_completed_or_truncated_rollouts_are_valid(rollouts: list[Rollout]) -> None:
    group = Group(index=0, task=Task(id="t"), rollouts=tuple(rollouts))
    assert group.rewards == [rollout.reward for rollout in rollouts]
    assert list(group.valid) == [rollout for rollout in rollouts if rollout.valid]
    for rollout in rollouts:
        if rollout.reward is None or isinstance(rollout.outcome, Failed | Cancelled):
            assert not rollout.valid


def test_taskset_is_an_ordered_sequence_whose_slices_keep_its_name() -> None:
    tasks = [Task(id=str(n)) for n in range(5)]
    taskset = Taskset(tasks, name="five", source="here")
    assert list(taskset) == tasks
    assert (len(taskset), taskset[1], taskset[-1]) == (5, tasks[1], tasks[4])
    assert (list(taskset[1:3]), taskset[1:3].name) == (tasks[1:3], "five")


def test_message_text_skips_parts_that_are_not_text() -> None:
    parts = ({"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"})
    assert [Message("user", content).text for content in (None, "b", parts)] == ["", "b", "a"]
    task = Task(id="t", prompt=(Message("system", "no"), Message("user", "one"), Message("user", "two")))
    assert task.text == "one\ntwo"
