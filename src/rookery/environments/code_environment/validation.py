"""Check whether code tasks are fit for training: the environment behind `rookery validate` for tests and cases.

A task is graded like a submission of a rollout, but nothing is sampled. Each variant is one rollout: the reference
solution, an empty program, and programs that try to pass without solving the task.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from rookery.core import Limits, Task, UsageError
from rookery.environments.base import Score, Ungraded
from rookery.environments.code_environment.environment import CodeEnvironment
from rookery.environments.context import Context
from rookery.environments.swe.validation import CHEAT, MARK, NOTHING, SOLUTION, VARIANT

ENVIRONMENT: Final = "rookery.environments.code_environment.validation:CodeValidationEnvironment"
EXIT: Final = f"{CHEAT}exit"
STUB: Final = f"{CHEAT}stub"
PROGRAMS: Final = {
    NOTHING: "",
    EXIT: "import os\nos._exit(0)\n",
    STUB: "def {entry_point}(*args, **kwargs):\n    return None\n",
}
"""The submissions of variants. A task whose tests check nothing is passed by a function that returns nothing."""


class CodeValidationEnvironment(CodeEnvironment):
    """Environment whose rollouts submit a variant of a code task, such as its solution, without a policy."""

    name = "validate"
    limits = Limits(score=3600.0)

    async def run(self, ctx: Context) -> None:
        """Do nothing: `submission` needs no policy."""

    def submission(self, ctx: Context) -> str:
        data = ctx.task.data
        if data[VARIANT] == SOLUTION:
            return str(data["solution"])
        return PROGRAMS[data[VARIANT]].replace("{entry_point}", str(data.get("entry_point")))

    async def score(self, ctx: Context) -> Score | Ungraded | float:
        score = await super().score(ctx)
        ctx.info["grades"] = [ctx.info["grade"]]
        return score


def expand_code_variants(tasks: Iterable[Task], *, cheats: bool = True) -> list[Task]:
    """Return one task for each variant of each code task. Invalid tasks are returned unchanged.

    Raise `UsageError` if a task has neither tests nor cases.
    """
    made: list[Task] = []
    for task in tasks:
        if task.invalid:
            made.append(task)
            continue
        if not task.data.get("tests") and not task.data.get("cases"):
            raise UsageError(
                f"task {task.id} has no files, tests or cases: `rookery validate` checks SWE tasks and code tasks"
            )
        tried = [SOLUTION] if task.data.get("solution") else []
        tried.append(NOTHING)
        if cheats:
            tried += [EXIT, STUB] if task.data.get("entry_point") else [EXIT]
        made += [
            msgspec.structs.replace(task, id=f"{task.id}{MARK}{variant}", data={**task.data, VARIANT: variant})
            for variant in tried
        ]
    return made
