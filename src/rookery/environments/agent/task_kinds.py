"""The three kinds of task that an agent can work on: prompts, submissions and grading.

Runs in a runner process. A `plain` task has an expected answer. A `code` task has tests or test cases for a
program and is graded as in the `code` environment. A `swe` task has tests that examine the files in the sandbox
and is graded as in the `swe` environment; the number of `swe` submissions that a machine grades at the same time
is limited. A task that cannot be scored is rejected before a sandbox or agent is started.
"""

import asyncio
import functools
from typing import Final, Literal, TypeAlias

import msgspec

from rookery.core import TaskError
from rookery.environments.base import Score
from rookery.environments.code_environment.environment import PARALLEL_SANDBOXES
from rookery.environments.code_environment.limits import normalize_limits
from rookery.environments.context import Context
from rookery.environments.swe.environment import grade_step
from rookery.environments.swe.grading_slots import GradingSlots, count_cores, get_run_name
from rookery.environments.swe.stored_submissions import store_submissions
from rookery.environments.tool_environment import ANSWER, SUBMISSION
from rookery.sandboxes import is_isolated
from rookery.scoring.answers import match_answer
from rookery.scoring.code_tasks import CodeTask, parse_code_task
from rookery.scoring.grading import Grader, IsolationCache
from rookery.scoring.swe import SweGrader
from rookery.tasks.swe import DATA_KEY, GRADING_TIME_SHARE, get_swe_task

Kind: TypeAlias = Literal["plain", "code", "swe"]
ANSWER_FILE: Final = "answer.txt"
PROGRAM_FILE: Final = "solution.py"
MAX_ANSWER: Final = 1 << 20
MAX_STORED: Final = 256 << 10
"""Maximum number of characters of a submitted file that is stored in the record of the rollout."""


def get_task_kind(ctx: Context) -> Kind:
    """Return the kind of the attempt's task; raise `TaskError` if the task cannot be scored."""
    data = ctx.task.data
    if data.get(DATA_KEY) is not None:
        task = get_swe_task(ctx.task)
        if not task.steps:
            raise TaskError(f"task {ctx.task.id} has no steps")
        return "swe"
    if data.get("tests") is not None or data.get("cases") is not None:
        get_code_task(ctx)
        return "code"
    get_expected_answer(ctx)
    return "plain"


def get_code_task(ctx: Context) -> CodeTask:
    """Return the tests or cases of a `code` task; raise `TaskError` if they are invalid."""
    data, _ = normalize_limits(ctx.task.data)
    return parse_code_task({**data, "id": ctx.task.id, "prompt": ctx.task.text})


def get_expected_answer(ctx: Context) -> str | float:
    """Return the expected answer of a `plain` task; raise `TaskError` if it has none."""
    answer = ctx.task.data.get("answer")
    if isinstance(answer, str | int | float) and not isinstance(answer, bool) and answer != "":
        return answer
    raise TaskError(
        f"task {ctx.task.id} cannot be scored: its data has none of the keys swe, tests and cases, and its "
        f"data.answer is {'missing' if answer is None else f'{answer!r:.100}'}: set data.answer to a text or a "
        "number"
    )


def get_submission_path(ctx: Context, kind: Kind) -> str:
    """Return the path of the file to be scored.

    Return an empty string for a `swe` task, for which the whole sandbox is scored.
    """
    if kind == "swe":
        return ""
    name = ctx.task.data.get("submission", PROGRAM_FILE if kind == "code" else ANSWER_FILE)
    if not isinstance(name, str) or not name or "\0" in name or ".." in name.split("/"):
        raise TaskError(f"task {ctx.task.id}: submission must be a path in the sandbox, not {name!r:.100}")
    return name


def build_prompt(ctx: Context, kind: Kind, workdir: str, *, instruct: bool) -> str:
    """Return the agent's prompt: the texts of the task's messages.

    If `instruct`, add an instruction that names the file to be scored; a `swe` task has no such file.
    """
    parts = [message.text for message in ctx.task.prompt if message.role in ("system", "developer", "user")]
    text = "\n\n".join(part for part in parts if part)
    if kind == "swe" and not text:
        text = get_swe_task(ctx.task).steps[0].instruction
    if not text:
        raise TaskError(f"task {ctx.task.id} has no prompt")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise TaskError(f"task {ctx.task.id}: its prompt contains a lone surrogate, which cannot be encoded")
    if not instruct or kind == "swe":
        return text
    path = get_submission_path(ctx, kind)
    path = path if path.startswith("/") else f"{workdir.rstrip('/')}/{path}"
    what = "the program" if kind == "code" else "the final answer, and nothing else,"
    return f"{text}\n\nWhen you are done, {what} must be in the file {path}."


# ---- plain


def score_answer(ctx: Context, low: float, high: float) -> Score:
    """Score the agent's answer to a `plain` task: its answer file, or its stdout if it did not write that file.

    Stdout is correct if all of it or its last line matches the expected answer. `low` and `high` are the rewards
    of a wrong and a correct answer.
    """
    written: str | None = ctx.state.get(SUBMISSION)
    printed: str = ctx.state.get("printed", "")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    ctx.info[ANSWER] = written if written is not None else lines[-1] if lines else ""
    candidates = [written] if written is not None else [printed, *lines[-1:]]
    correct = any(match_answer(text, get_expected_answer(ctx)) for text in candidates)
    return Score(high if correct else low, metrics={"answer_file": float(written is not None)})


# ---- code


async def grade_program(
    ctx: Context, low: float, high: float, *, partial: bool, isolation_cache: IsolationCache
) -> Score:
    """Grade the submitted program of a `code` task in new sandboxes without network.

    `low` and `high` are the lowest and highest reward. If `partial`, passing some of the tests earns a part of it.
    """
    spec = msgspec.structs.replace(ctx.spec, network="none", mounts=())
    grader = Grader(
        spec,
        ctx.sandbox,
        asyncio.Semaphore(PARALLEL_SANDBOXES),
        isolated=is_isolated(spec.provider),
        partial=partial,
        low=low,
        high=high,
        isolation_cache=isolation_cache,
        seconds=GRADING_TIME_SHARE * ctx.remaining,
    )
    grade = await grader.grade(get_code_task(ctx), ctx.state.get(SUBMISSION) or "")
    ctx.info["grade"] = msgspec.to_builtins(grade)
    return grade.score


# ---- swe


@functools.cache
def get_grading_slots() -> GradingSlots:
    """Return the semaphore that limits how many `swe` submissions of this run are graded at once on this machine.

    It is shared by all processes of the run, and with the `swe` environment.
    """
    return GradingSlots(max(2, count_cores()), get_run_name())


async def grade_current_step(ctx: Context, low: float, high: float) -> Score:
    """Grade the current state of the sandbox as the result of the current step."""
    grader = SweGrader(ctx.sandbox, ctx.state["task"], low=low, high=high, on_submission=store_submissions(ctx))
    return await grade_step(ctx, grader, ctx.state["step"], get_grading_slots())
