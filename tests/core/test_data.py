"""Core's data: immutable, encodes as it stands, and is not built where its parts contradict each other."""

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
from tests.core.strategies import made, names, structs

STRUCTS = pytest.mark.parametrize("kind", structs(core), ids=lambda kind: kind.__name__)


@STRUCTS
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_type_encodes_to_json_and_msgpack_as_it_stands(kind: Any, data: st.DataObject) -> None:
    value = data.draw(made(kind))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind) == value
    assert msgspec.json.decode(msgspec.json.encode(value), type=kind) == value
    assert msgspec.convert(msgspec.to_builtins(value), kind) == value
    assert pickle.loads(pickle.dumps(value)) == value


@STRUCTS
def test_every_type_is_immutable(kind: Any) -> None:
    assert kind.__struct_config__.frozen


@given(value=made(Outcome))
def test_an_outcome_is_exactly_one_of_four_and_says_which(value: Outcome) -> None:
    assert isinstance(value, Completed | Truncated | Failed | Cancelled)
    again = msgspec.json.decode(msgspec.json.encode(value), type=Outcome)
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (Completed(), "completed"),
        *((Truncated(reason), f"truncated.{reason}") for reason in ("turns", "tokens", "context", "time", "lost")),
        *((Cancelled(reason), f"cancelled.{reason}") for reason in ("user", "filtered", "stale", "shutdown")),
        (Failed("infra", "sandbox.lost", "gone"), "sandbox.lost"),
    ],
)
def test_every_outcome_has_one_label(outcome: Outcome, word: str) -> None:
    assert label(outcome) == word


@given(value=made(Outcome))
def test_label_is_total(value: Outcome) -> None:
    assert isinstance(label(value), str)


# ---- arrays that describe the same tokens have the same length, or the object is not built


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
def test_a_segment_of_unequal_arrays_is_not_built(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        segment(**changes)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(segment()), **msgspec.to_builtins(changes)}, Segment)


def test_a_segment_counts_its_tokens_and_those_that_train() -> None:
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
def test_a_turn_has_a_logprob_for_every_sampled_token_or_for_none(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        turn(**changes)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_are_little_endian_int32(values: list[int]) -> None:
    data = ints(values)
    assert [int.from_bytes(data[at : at + 4], "little", signed=True) for at in range(0, len(data), 4)] == values
    assert ints(iter(values)) == ints(tuple(values)) == data


# ---- limits and sampling: one over the other


@pytest.mark.parametrize("name", Limits.__struct_fields__)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, -math.inf])
def test_a_limit_is_a_finite_number_above_zero(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"limits.{name}"):
        Limits(**{name: value})


OVER = pytest.mark.parametrize("kind", [Limits, Sampling], ids=lambda kind: kind.__name__)


@OVER
@given(data=st.data())
def test_what_is_said_above_counts_and_what_is_not_said_comes_from_below(kind: Any, data: st.DataObject) -> None:
    above, below, lowest = (data.draw(made(kind)) for _ in range(3))
    result = above.over(below)
    for name in kind.__struct_fields__:
        said = getattr(above, name)
        assert getattr(result, name) == (said if said not in (None, (), {}) else getattr(below, name))
    assert above.over(above) == above == kind().over(above) == above.over(kind())
    assert above.over(below).over(lowest) == above.over(below.over(lowest))


def test_the_defaults_give_every_stage_a_deadline() -> None:
    for name in ("queue", "setup", "run", "score", "teardown", "call", "model_call", "turns"):
        assert getattr(DEFAULT_LIMITS, name) is not None


def test_temperature_zero_is_something_said() -> None:
    assert Sampling(temperature=0.0).over(Sampling(temperature=1.0)).temperature == 0.0


# ---- seeds


def test_derived_seeds_never_change() -> None:
    """Pinned: a checkpoint made by one release must draw the same in the next."""
    assert derive_seed(0) == 7210762507766007076
    assert derive_seed(0, "main", 0, 0) == 5780469847162204105
    assert derive_seed(7, "train", 12, 3) == 4440214001263900425
    assert derive_seed(-1, "ä") == 5370445201297947115


parts = st.lists(st.integers() | names | st.sampled_from(["", ";", "int:1:3;", "0;str:1:a", "\x1f"]), max_size=4)


@given(st.integers(), parts, st.integers(), parts)
def test_a_seed_depends_on_the_root_and_every_part(
    root: int, some: list[Any], other: int, more: list[Any]
) -> None:
    assert 0 <= derive_seed(root, *some) < 2**63
    assert derive_seed(root, *some) == derive_seed(root, *some)
    assert (derive_seed(root, *some) == derive_seed(other, *more)) == ((root, some) == (other, more))


def test_no_part_can_be_made_to_look_like_two() -> None:
    looks = ["a\x1fint:3", "a;int:1:3", "a", "3"]
    seeds = {derive_seed(0, *key) for key in [("a", 3), ("a", "3"), *((name,) for name in looks)]}
    assert len(seeds) == 6


# ---- records, tasks


@given(st.lists(made(Rollout), max_size=4))
def test_only_a_scored_rollout_that_ended_by_itself_or_its_budget_is_valid(rollouts: list[Rollout]) -> None:
    group = Group(index=0, task=Task(id="t"), rollouts=tuple(rollouts))
    assert group.rewards == [rollout.reward for rollout in rollouts]
    assert list(group.valid) == [rollout for rollout in rollouts if rollout.valid]
    for rollout in rollouts:
        if rollout.reward is None or isinstance(rollout.outcome, Failed | Cancelled):
            assert not rollout.valid


def test_a_taskset_is_an_ordered_sequence_that_keeps_its_name() -> None:
    tasks = [Task(id=str(n)) for n in range(5)]
    taskset = Taskset(tasks, name="five", source="here")
    assert list(taskset) == tasks
    assert (len(taskset), taskset[1], taskset[-1]) == (5, tasks[1], tasks[4])
    assert (list(taskset[1:3]), taskset[1:3].name) == (tasks[1:3], "five")


def test_the_text_of_a_message_leaves_out_what_is_no_text() -> None:
    parts = ({"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"})
    assert [Message("user", content).text for content in (None, "b", parts)] == ["", "b", "a"]
    task = Task(id="t", prompt=(Message("system", "no"), Message("user", "one"), Message("user", "two")))
    assert task.text == "one\ntwo"
