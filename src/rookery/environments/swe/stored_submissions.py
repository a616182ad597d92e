"""Submissions of SWE tasks in the records of their rollouts: store them, and grade them again in new sandboxes.

Used by the environments `swe` and `agent` in runner processes.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from rookery.core import Failed, Rollout, TaskError
from rookery.core.records import SUBMISSIONS
from rookery.environments.context import Context
from rookery.scoring.rewards import Score
from rookery.scoring.swe import prepare_step
from rookery.scoring.swe.preparation import Deadline
from rookery.scoring.swe.stored_submission import unpack_submission
from rookery.scoring.swe.submission_transfer import install, staging_directory
from rookery.tasks.swe import SweStep, SweTask

NOT_STORED: Final = (
    "its submission is not stored, because it is too large, the tests ran in the policy's sandbox, or the rollout "
    "failed before"
)
"""Reason why a stored rollout cannot be graded again."""


def store_submissions(ctx: Context) -> Callable[[int, str], None]:
    """Return a function that stores the submission of a step in the record of the attempt's rollout."""

    def store(step: int, text: str) -> None:
        ctx.info.setdefault(SUBMISSIONS, {})[str(step)] = text

    return store


def get_submissions(rollout: Rollout) -> list[str]:
    """Return the stored submissions of the steps in order, up to the first that is missing."""
    stored: Any = rollout.info.get(SUBMISSIONS)
    found: list[str] = []
    while isinstance(stored, dict) and isinstance(text := stored.get(str(len(found))), str):
        found.append(text)
    return found


def find_submission_problem(rollout: Rollout) -> str:
    """Return why the submissions of a stored rollout cannot be graded again; empty if they can."""
    graded = len(rollout.info.get("grades") or ())
    # The step that failed has no grade. If a later grading failed, the record still has those of the first one.
    ungraded = isinstance(rollout.outcome, Failed) and "rescored" not in rollout.info
    return "" if len(get_submissions(rollout)) >= max(1, graded + ungraded) else NOT_STORED


async def restore_submissions(
    ctx: Context,
    rollout: Rollout,
    grade: Callable[[], Awaitable[Score]],
    may_continue: Callable[[SweStep, Score], bool],
) -> None:
    """Install the stored submission of each step in the prepared sandbox, and grade all steps but the last.

    `score` grades the last one. `grade` grades the current step. `may_continue` says whether the score of a step
    is enough for the next one.
    """
    task: SweTask = ctx.state["task"]
    submissions = get_submissions(rollout)
    if not submissions:
        raise TaskError(f"rollout {rollout.id} cannot be graded again: {NOT_STORED}")
    sandbox = await ctx.sandbox()
    for number, text in enumerate(submissions):
        ctx.state["step"] = number
        if number:
            await prepare_step(sandbox, task, task.steps[number], timeout=max(1.0, ctx.remaining))
        with staging_directory() as staging:
            tops, files = unpack_submission(text, staging)
            await install(sandbox, files, tops, Deadline(max(1.0, ctx.remaining)))
        if number + 1 < len(submissions) and not may_continue(task.steps[number], await grade()):
            return
