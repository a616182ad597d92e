"""The order of tasks: samplers skip tasks for a while, environments take turns, and a restored order continues."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Group, Task, UsageError
from rookery.tasks import DifficultySampler, SkipSettledSampler
from rookery.tasks.samplers import SAMPLERS
from rookery.tasks.task_order import TaskOrder, TaskOrderState
from tests.training.kit import group_of_rewards

TASKS = [Task(id=f"t{at}") for at in range(4)]
MIXED = [Task(id=f"{name}/{at}", environment=name) for name in "abc" for at in range(5)]


def finish(order: TaskOrder, task: Task, *rewards: float | None) -> None:
    group: Group = msgspec.structs.replace(group_of_rewards(0, *rewards), task=task)
    order.record(group)


def draw(tasks: Iterator[Task], count: int) -> list[str]:
    return [task.id for task in islice(tasks, count)]


def store(order: TaskOrder) -> TaskOrderState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(order.get_state()), type=TaskOrderState)


def test_settled_tasks_rest_for_some_epochs() -> None:
    order = TaskOrder(TASKS, sampler="skip-settled")
    tasks = iter(order)
    assert draw(tasks, 4) == ["t0", "t1", "t2", "t3"]
    finish(order, TASKS[0], 1.0, 1.0)
    finish(order, TASKS[1], 0.0, 0.0)
    finish(order, TASKS[2], 1.0, 0.0)
    finish(order, TASKS[3], None, None)
    rests = (3, 1, 0, 0)
    epochs = [[f"t{at}" for at, rest in enumerate(rests) if epoch >= rest] for epoch in range(max(rests) + 1)]
    assert [draw(tasks, len(epoch)) for epoch in epochs] == epochs


def test_tasks_outside_of_the_difficulty_window_are_checked_again() -> None:
    order = TaskOrder(
        TASKS, sampler=lambda count: DifficultySampler(count, low=0.2, high=0.8, recheck=2, memory=0.5)
    )
    tasks = iter(order)
    draw(tasks, 4)
    finish(order, TASKS[0], 1.0, 1.0)  # too easy
    finish(order, TASKS[1], 0.0, 0.0)  # too hard
    finish(order, TASKS[2], 1.0, 0.0)
    assert draw(tasks, 4) == ["t2", "t3", "t2", "t3"]
    assert draw(tasks, 2) == ["t0", "t1"], "checked again"
    finish(order, TASKS[0], 0.0, 0.0)  # the moving average is 0.5
    finish(order, TASKS[1], 0.0, 1.0)  # 0.25
    assert draw(tasks, 6) == ["t2", "t3", "t0", "t1", "t2", "t3"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_all_tasks_may_be_settled(sampler: str) -> None:
    order = TaskOrder(TASKS, sampler=sampler)
    tasks = iter(order)
    for _ in range(20):
        finish(order, next(tasks), 1.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([*SAMPLERS, {"a": "difficulty", "c": "skip-settled"}]),
    st.integers(0, 2**32),
    st.integers(0, 40),
    st.tuples(*[st.floats(0.2, 5.0)] * 3),
)
def test_a_restored_order_draws_the_same_tasks_and_continues_in_the_same_way(
    sampler: Any, seed: int, before: int, weights: tuple[float, float, float]
) -> None:
    options: dict[str, Any] = {
        "sampler": sampler,
        "seed": seed,
        "weights": dict(zip("abc", weights, strict=True)),
    }
    rng = random.Random(seed)
    order = TaskOrder(MIXED, **options)
    tasks = iter(order)
    drawn = []
    for task in islice(tasks, before):
        drawn.append(task.id)
        finish(order, task, float(rng.random() < 0.5), float(rng.random() < 0.5))
    restored = TaskOrder(MIXED, **options, state=store(order))
    again = iter(restored)
    assert draw(again, before) == drawn
    for _ in range(30):
        task = next(tasks)
        assert next(again) is task
        drawn.append(task.id)
        rewards = float(rng.random() < 0.5), float(rng.random() < 0.5)
        finish(order, task, *rewards)
        finish(restored, task, *rewards)
    assert restored.get_state() == order.get_state()
    seen = Counter(one[0] for one in drawn)
    for name, weight in options["weights"].items():
        assert abs(seen[name] - len(drawn) * weight / sum(weights)) < 3, "samplers do not change the shares"


def test_wrong_samplers_and_states_are_refused() -> None:
    for sampler in ("settled", "no.such.module:Sampler", lambda count: DifficultySampler(count, low=1, high=0)):
        with pytest.raises(UsageError):
            TaskOrder(TASKS, sampler=sampler)
    state = TaskOrder(TASKS, sampler=SkipSettledSampler).get_state()
    with pytest.raises(UsageError):
        TaskOrder(TASKS[:3], state=state)
    with pytest.raises(UsageError):
        TaskOrder(TASKS, sampler="difficulty", state=state)
