"""Whether tasks in a box are worth training on: the environment behind `rookery validate`.

Promises:
- a task is tried as an agent would: the same box, the same preparation, the same grading;
- each variant is a rollout of its own: the task's own solution, doing nothing, and every known cheat;
- nothing of it asks a model.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from rookery.core import Limits, Task
from rookery.environments.base import Score, reward_bounds
from rookery.environments.context import Context
from rookery.environments.swe.environment import SweEnvironment
from rookery.sandboxes import Command, Sandbox
from rookery.scoring.boxes import bounded_exec
from rookery.scoring.swe import SweGrader, prepare_step
from rookery.scoring.swe.cheats import BY_NAME, CHEATS
from rookery.scoring.swe.prepare import Clock
from rookery.scoring.swe.solving import solve
from rookery.tasks.swe import SweStep, SweTask, grading_budget, swe_task

VARIANT: Final = "variant"
"""In a task's data."""
SOLUTION: Final = "solution"
NOTHING: Final = "nothing"
FRESH: Final = "fresh"
"""The solution, of a task that asks to be graded in its own box, graded in a fresh one."""
CHEAT: Final = "cheat:"
ENVIRONMENT: Final = "rookery.environments.swe.validating:Validating"
MARK: Final = " / "
"""Between a task's id and a variant."""
_SHELL: Final = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'


class Validating(SweEnvironment):
    """A rollout does what its variant says, and is graded."""

    name = "validate"
    limits = Limits(setup=900.0, run=3600.0, score=3600.0)

    async def run(self, ctx: Context) -> None:
        task: SweTask = ctx.state["task"]
        box = await ctx.sandbox()
        for number, step in enumerate(task.steps):
            if number:
                ctx.state["step"] = number
                await prepare_step(box, task, step, timeout=max(1.0, ctx.remaining))
            await self._acted(ctx, box, task, step)
            if number + 1 < len(task.steps):
                await self._grade(ctx)

    async def _acted(self, ctx: Context, box: Sandbox, task: SweTask, step: SweStep) -> None:
        variant = str(ctx.task.data.get(VARIANT, NOTHING))
        seconds = min(ctx.remaining, step.timeout or ctx.remaining)
        if variant in (SOLUTION, FRESH):
            await solve(box, task, step, several=ctx.state["prepared"].several, clock=Clock(seconds))
        elif variant.startswith(CHEAT):
            script = BY_NAME[variant.removeprefix(CHEAT)].whole
            argv = ("sh", "-c", _SHELL, "sh", script)
            # What it says and how it ends is its own affair: what counts is the grade.
            await bounded_exec(box, Command(argv=argv, cwd=task.workdir, wall=min(seconds, 120.0)))

    async def _grade(self, ctx: Context) -> Score:
        low, high = reward_bounds(self)
        fresh = ctx.task.data.get(VARIANT) == FRESH
        grader = SweGrader(ctx.sandbox, ctx.state["task"], ctx.spec, low=low, high=high, fresh_always=fresh)
        # Through no gate: how many are tried at once is what the user says with -c.
        step: int = ctx.state["step"]
        seconds = grading_budget(ctx.state["task"].steps[step], ctx.remaining)
        grade = await grader.grade(await ctx.sandbox(), ctx.state["prepared"], step, timeout=seconds)
        ctx.state["grades"].append(grade.score)
        ctx.info.setdefault("grades", []).append(msgspec.to_builtins(grade))
        ctx.info["notes"] = list(ctx.state["prepared"].notes)
        return grade.score


def variants(tasks: Iterable[Task], *, cheats: bool = True) -> list[Task]:
    """One task for everything that is tried with each of them; those that are invalid come as they are."""
    made: list[Task] = []
    for task in tasks:
        if task.invalid:
            made.append(task)
            continue
        described = swe_task(task)
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


def parted(task_id: str) -> tuple[str, str]:
    """A task's own id, and the variant."""
    name, _, variant = task_id.rpartition(MARK)
    return (name, variant) if name else (task_id, "")


__all__: Sequence[str] = (
    "CHEAT",
    "ENVIRONMENT",
    "FRESH",
    "NOTHING",
    "SOLUTION",
    "Validating",
    "parted",
    "variants",
)
