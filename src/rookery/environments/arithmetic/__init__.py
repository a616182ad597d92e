"""The `arithmetic` environment: expressions and word problems of five levels, solved with the `python` tool.

The ID of a task contains its split, seed, level and number, and always identifies the same problem. The levels
alternate, so that the first n tasks are balanced over the levels for any n. The reward is 1 if the last number in
the final answer is right, otherwise 0.
"""

from collections.abc import Sequence
from typing import Any, Final

from rookery.core import Limits, Message, Task, UsageError
from rookery.environments.arithmetic.problems import LEVELS, SPLITS, Problem, generate_problems
from rookery.environments.base import Score
from rookery.environments.context import Context
from rookery.environments.tool_environment import ToolEnvironment

__all__ = ["LEVELS", "SPLITS", "Arithmetic", "Problem", "generate_problems", "make_task"]

MAX_SIZE: Final = 100_000
"""Maximum number of tasks of one instance."""


class Arithmetic(ToolEnvironment):
    """Environment with generated arithmetic problems of five levels, solved with the `python` tool.

        Arithmetic(split="held-out", size=100, levels=[1, 2])

    `size` is the number of tasks. The splits `train` and `held-out` have no problem in common, whatever the seeds.
    `held_out_levels` are the levels of the tasks on which a trainer evaluates the policy, by default `levels`.
    """

    name = "arithmetic"
    system_prompt = "Use python. End with the number."
    limits = Limits(turns=6, tokens=600, call=10.0)
    max_result = 500

    def __init__(
        self,
        split: str = "train",
        size: int = 1_000,
        seed: int = 0,
        levels: int | Sequence[int] = LEVELS,
        held_out_levels: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        chosen_split = str(split).replace("_", "-")
        if chosen_split not in SPLITS:
            raise UsageError(f"split must be {' or '.join(SPLITS)}, not {split!r:.100}")
        if not _is_int(size) or not 1 <= size <= MAX_SIZE:
            raise UsageError(f"size must be an integer from 1 to {MAX_SIZE:,}, not {size!r:.100}")
        if not _is_int(seed):
            raise UsageError(f"seed must be an integer, not {seed!r:.100}")
        self.split = chosen_split
        self.size = size
        self.seed = seed
        self.levels = _check_levels("levels", levels)
        self.held_out_levels = (
            self.levels if held_out_levels is None else _check_levels("held_out_levels", held_out_levels)
        )

    def tasks(self) -> list[Task]:
        streams = [generate_problems(self.split, self.seed, level) for level in self.levels]
        count = len(streams)
        return [
            make_task(next(streams[index % count]), self.split, self.seed, index // count)
            for index in range(self.size)
        ]

    def held_out_tasks(self, count: int) -> list[Task] | None:
        if self.split == "held-out":
            return None
        return type(self)(split="held-out", size=count, seed=self.seed, levels=self.held_out_levels).tasks()

    async def score(self, ctx: Context) -> Score | float:
        reward = await super().score(ctx)
        assert isinstance(reward, float)
        level = ctx.task.data.get("level")
        metrics = {"used_python": float(ctx.tool_calls > 0)}
        if isinstance(level, int):  # tasks from users may not have a level
            metrics["level"] = float(level)
        return Score(reward, metrics=metrics)


def make_task(problem: Problem, split: str, seed: int, number: int) -> Task:
    """Make a task from a problem. `number` is the problem's index within its level; it becomes part of the ID."""
    return Task(
        id=f"{split}-{seed}-l{problem.level}-{number:05}",
        prompt=(Message("user", problem.prompt),),
        data={"answer": problem.answer, "level": problem.level, "kind": problem.kind},
    )


def _check_levels(name: str, value: Any) -> tuple[int, ...]:
    """Return levels as a tuple. Raise `UsageError` if they are not distinct levels."""
    levels = (value,) if _is_int(value) else value
    if (
        not isinstance(levels, list | tuple)
        or not levels
        or any(not _is_int(level) or level not in LEVELS for level in levels)
        or len(set(levels)) < len(levels)
    ):
        raise UsageError(f"{name} must be distinct integers from 1 to 5, such as [1,2], not {value!r:.100}")
    return tuple(levels)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
