"""The order of tasks in a training run: settled tasks rest, and a resumed run draws the same tasks."""

from collections.abc import Iterator
from itertools import islice

import msgspec

from rookery.core import Group, Task
from rookery.trainer.task_order import SOLVED_REST, UNSOLVED_REST, TaskOrder, TaskOrderState
from tests.training.kit import group_of_rewards

TASKS = [Task(id=f"t{at}") for at in range(4)]


def finish(order: TaskOrder, task: Task, *rewards: float | None) -> None:
    group: Group = msgspec.structs.replace(group_of_rewards(0, *rewards), task=task)
    order.record(group)


def draw(tasks: Iterator[Task], count: int) -> list[str]:
    return [task.id for task in islice(tasks, count)]


def test_settled_tasks_rest_for_some_epochs() -> None:
    order = TaskOrder(TASKS)
    tasks = iter(order)
    assert draw(tasks, 4) == ["t0", "t1", "t2", "t3"]
    finish(order, TASKS[0], 1.0, 1.0)
    finish(order, TASKS[1], 0.0, 0.0)
    finish(order, TASKS[2], 1.0, 0.0)
    finish(order, TASKS[3], None, None)
    epochs = [
        [f"t{at}" for at, rest in enumerate((SOLVED_REST, UNSOLVED_REST, 0, 0)) if epoch >= rest]
        for epoch in range(SOLVED_REST + 1)
    ]
    assert [draw(tasks, len(epoch)) for epoch in epochs] == epochs


def test_all_tasks_may_be_settled() -> None:
    order = TaskOrder(TASKS)
    tasks = iter(order)
    for _ in range(20):
        finish(order, next(tasks), 1.0, 1.0)


def test_a_resumed_order_draws_the_same_tasks() -> None:
    order = TaskOrder(TASKS)
    tasks = iter(order)
    before = draw(tasks, 3)
    finish(order, TASKS[0], 1.0, 1.0)
    finish(order, TASKS[1], 0.0, 0.0)
    before += draw(tasks, 2)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(order.get_state()), type=TaskOrderState)
    resumed = TaskOrder(TASKS, state)
    again = iter(resumed)
    assert draw(again, 5) == before
    for one in (order, resumed):
        finish(one, TASKS[2], 1.0, 1.0)
    assert draw(again, 12) == draw(tasks, 12)
    assert resumed.get_state() == order.get_state()
