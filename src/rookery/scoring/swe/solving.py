"""The task's own solution in a box, for validation and for telling whose fault a failed grading is.

Promises:
- the solution runs as the agent's user, in the working folder, and is gone from the box afterwards;
- a solution that cannot be run is the task's fault, with its output.
"""

from typing import Final

from rookery.core import TaskError
from rookery.sandboxes import Command, Sandbox
from rookery.scoring.boxes import bounded_exec
from rookery.scoring.swe import scripts
from rookery.scoring.swe.changes import TooMuch
from rookery.scoring.swe.prepare import ROOT, Clock, run, told
from rookery.tasks.swe import SOLUTION, SweStep, SweTask

_PLACE: Final = f"umask 022; rm -rf {SOLUTION}; mkdir -m 755 {SOLUTION}"


class OutOfTime(TaskError):  # noqa: N818  (says nothing against the task)
    """A solution that was still running when its time was over."""


async def solve(box: Sandbox, task: SweTask, step: SweStep, *, several: bool, clock: Clock) -> None:
    """`TaskError` where the task has no solution, or one that fails."""
    if not step.solution:
        raise TaskError(f"task {task.id}: it has no solution")
    owner = ROOT if several else None
    made = await run(box, _PLACE, user=owner, clock=clock)
    if not made.ok:
        raise TaskError(f"task {task.id}: there is no place for its solution: {told(made)}", cause="task.setup")
    try:
        await scripts.unpacked(box, task, step.solution, user=owner, clock=clock)
    except (scripts.CannotStart, TooMuch) as error:
        raise TaskError(
            f"task {task.id}: its solution cannot be brought in: {error}", cause="task.image"
        ) from error
    await run(box, f"chmod -R a+rX {SOLUTION}", user=owner, clock=clock)
    command = Command(
        argv=scripts.solving(task, step), cwd=task.workdir, env={**task.env, **step.solve_env}, wall=clock.left()
    )
    result = await bounded_exec(box, command)
    await run(box, f"rm -rf {SOLUTION}", user=owner, clock=clock)
    if not result.ok:
        if result.status == "time_limit":
            raise OutOfTime(f"task {task.id}: its solution did not end in time")
        raise TaskError(f"task {task.id}: its solution failed: {told(result)}", cause="task.setup")
