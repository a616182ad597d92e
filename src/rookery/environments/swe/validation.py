"""Check whether SWE tasks are fit for training: the environment behind the command `rookery validate`.

A task is run like a rollout, with the same sandbox, preparation and grading, but a script acts instead of a model.
Each variant is one rollout: the reference solution, doing nothing, and every known way to cheat.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from rookery.core import Limits, Task
from rookery.environments.base import Score, reward_bounds
from rookery.environments.context import Context
from rookery.environments.swe.environment import SweEnvironment, grade_step
from rookery.sandboxes import Command, Sandbox
from rookery.scoring.fresh_sandboxes import exec_with_deadline
from rookery.scoring.swe import SweGrader, prepare_step
from rookery.scoring.swe.cheats import BY_NAME, CHEATS
from rookery.scoring.swe.preparation import Deadline
from rookery.scoring.swe.reference_solution import run_solution
from rookery.tasks.swe import SweStep, SweTask, get_swe_task

VARIANT: Final = "variant"
"""Key in a task's data of the variant that its rollout executes."""
SOLUTION: Final = "solution"
NOTHING: Final = "nothing"
FRESH: Final = "fresh"
"""Variant that grades the reference solution in a new sandbox, for tasks usually graded in the agent's sandbox."""
CHEAT: Final = "cheat:"
ENVIRONMENT: Final = "rookery.environments.swe.validation:ValidationEnvironment"
MARK: Final = " / "
"""Separator between the task's ID and the variant in the ID of a variant's task."""
_SHELL: Final = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'


class ValidationEnvironment(SweEnvironment):
    """Environment whose rollouts execute a variant of a task, such as its reference solution, without a policy."""

    name = "validate"
    limits = Limits(setup=900.0, run=3600.0, score=3600.0)

    async def run(self, ctx: Context) -> None:
        task: SweTask = ctx.state["task"]
        sandbox = await ctx.sandbox()
        for number, step in enumerate(task.steps):
            if number:
                ctx.state["step"] = number
                await prepare_step(sandbox, task, step, timeout=max(1.0, ctx.remaining))
            await self._execute_variant(ctx, sandbox, task, step)
            if number + 1 < len(task.steps):
                await self._grade(ctx)

    async def _execute_variant(self, ctx: Context, sandbox: Sandbox, task: SweTask, step: SweStep) -> None:
        variant = str(ctx.task.data.get(VARIANT, NOTHING))
        seconds = min(ctx.remaining, step.timeout or ctx.remaining)
        if variant in (SOLUTION, FRESH):
            await run_solution(
                sandbox, task, step, multi_user=ctx.state["prepared"].multi_user, deadline=Deadline(seconds)
            )
        elif variant.startswith(CHEAT):
            script = BY_NAME[variant.removeprefix(CHEAT)].full_script
            argv = ("sh", "-c", _SHELL, "sh", script)
            # Its output and exit code do not matter, only the grade.
            await exec_with_deadline(sandbox, Command(argv=argv, cwd=task.workdir, wall=min(seconds, 120.0)))

    async def _grade(self, ctx: Context) -> Score:
        low, high = reward_bounds(self)
        fresh = ctx.task.data.get(VARIANT) == FRESH
        grader = SweGrader(ctx.sandbox, ctx.state["task"], low=low, high=high, fresh_always=fresh)
        # No grading slots here: the user limits the concurrency with -c.
        score = await grade_step(ctx, grader, ctx.state["step"], None)
        ctx.info["notes"] = list(ctx.state["prepared"].warnings)
        return score


def expand_variants(tasks: Iterable[Task], *, cheats: bool = True) -> list[Task]:
    """Return one task for each variant of each task. Invalid tasks are returned unchanged.

    The variants are the reference solution if the task has one, doing nothing and, if `cheats`, every known cheat.
    """
    made: list[Task] = []
    for task in tasks:
        if task.invalid:
            made.append(task)
            continue
        described = get_swe_task(task)
        tried = [NOTHING]
        if all(step.solution for step in described.steps):
            tried.insert(0, SOLUTION)
            if _may_be_fresh(described):
                tried.append(FRESH)
        if cheats:
            tried += [f"{CHEAT}{cheat.name}" for cheat in CHEATS]
        for variant in tried:
            data = {**task.data, VARIANT: variant}
            made.append(msgspec.structs.replace(task, id=f"{task.id}{MARK}{variant}", data=data))
    return made


def _may_be_fresh(task: SweTask) -> bool:
    verifiers = [step.verifier for step in task.steps]
    return any(one.mode == "shared" for one in verifiers) and not any(one.services for one in verifiers)


def split_variant(task_id: str) -> tuple[str, str]:
    """Split the ID of a variant's task into the original task's ID and the variant; empty if there is none."""
    name, _, variant = task_id.rpartition(MARK)
    return (name, variant) if name else (task_id, "")


__all__: Sequence[str] = (
    "CHEAT",
    "ENVIRONMENT",
    "FRESH",
    "NOTHING",
    "SOLUTION",
    "ValidationEnvironment",
    "expand_variants",
    "split_variant",
)
