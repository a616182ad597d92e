"""Run a task's reference solution in a sandbox, to validate the task or to find out whether it is at fault.

Guarantees:
- The solution runs as the agent's user in the working directory, and is removed from the sandbox afterwards.
- If the solution fails or cannot be run, the task is at fault, and the error contains the output. A solution that
  is too slow raises `SolutionTimeout`, which blames nobody.
"""

from typing import Final

from rookery.core import TaskError
from rookery.sandboxes import Command, Sandbox
from rookery.scoring.fresh_sandboxes import exec_with_deadline
from rookery.scoring.swe import test_script
from rookery.scoring.swe.preparation import ROOT, Deadline, describe_result, run_script
from rookery.scoring.swe.submission_transfer import UngradableSubmission
from rookery.tasks.swe import SOLUTION, SweStep, SweTask

_PLACE_SCRIPT: Final = f"umask 022; rm -rf {SOLUTION}; mkdir -m 755 {SOLUTION}"


class SolutionTimeout(TaskError):  # noqa: N818  (not evidence against the task)
    """The reference solution was still running at the deadline."""


async def run_solution(
    sandbox: Sandbox, task: SweTask, step: SweStep, *, multi_user: bool, deadline: Deadline
) -> None:
    """Run the reference solution of a step in a sandbox.

    Raise `TaskError` if the step has no solution or if the solution fails, and `SolutionTimeout` if it does not
    end before the deadline. `multi_user` says whether commands in the sandbox can run as root.
    """
    if not step.solution:
        raise TaskError(f"task {task.id} has no reference solution")
    owner = ROOT if multi_user else None
    made = await run_script(sandbox, _PLACE_SCRIPT, user=owner, deadline=deadline)
    if not made.ok:
        raise TaskError(
            (f"task {task.id}: cannot create the directory for its reference solution: {describe_result(made)}"),
            cause="task.setup",
        )
    try:
        await test_script.unpack_files(sandbox, task, step.solution, user=owner, deadline=deadline)
    except (test_script.TestsCannotStart, UngradableSubmission) as error:
        raise TaskError(
            f"task {task.id}: cannot copy its reference solution: {error}", cause="task.image"
        ) from error
    await run_script(sandbox, f"chmod -R a+rX {SOLUTION}", user=owner, deadline=deadline)
    command = Command(
        argv=test_script.get_solution_command(task, step),
        cwd=task.workdir,
        env={**task.env, **step.solve_env},
        wall=deadline.remaining(),
    )
    result = await exec_with_deadline(sandbox, command)
    await run_script(sandbox, f"rm -rf {SOLUTION}", user=owner, deadline=deadline)
    if not result.ok:
        if result.status == "time_limit":
            raise SolutionTimeout(f"task {task.id}: its reference solution did not end in time")
        raise TaskError(
            f"task {task.id}: its reference solution failed: {describe_result(result)}", cause="task.setup"
        )
