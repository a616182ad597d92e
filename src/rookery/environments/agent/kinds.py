"""What an agent is asked for and graded by: three kinds of task, told apart by their data.

Promises:
- a task that cannot be scored is the task's fault, before anything is started for it;
- no more boxes of a run are graded at once on a machine than it has cores for, whatever the number of rollouts;
- each kind is graded as its own environment grades it: answers are matched, programs run in fresh sandboxes, boxes
  are graded by the task's tests where no agent was.
"""

import asyncio
import functools
from contextlib import AsyncExitStack
from typing import Any, Final, Literal, TypeAlias

import msgspec

from rookery.core import TaskError
from rookery.environments.base import Score
from rookery.environments.code.limits import normalized
from rookery.environments.context import Context
from rookery.environments.results import match_answer
from rookery.sandboxes import is_isolated
from rookery.scoring.code_tasks import CodeTask, code_task
from rookery.scoring.grading import Forms, Grader
from rookery.tasks.swe import GRADE_SHARE, KEY, SweStep, SweTask, grading_budget, swe_task

Kind: TypeAlias = Literal["plain", "code", "swe"]
AT_ONCE: Final = 4
"""Sandboxes in which one submission is graded at a time."""
ANSWER_FILE: Final = "answer.txt"
SUBMISSION: Final = "solution.py"
MAX_ANSWER: Final = 1 << 20


def kind_of(ctx: Context) -> Kind:
    """`TaskError` where a task says nothing that it could be scored by."""
    data = ctx.task.data
    if data.get(KEY) is not None:
        task = swe_task(ctx.task)
        if not task.steps:
            raise TaskError(f"task {ctx.task.id} has no steps")
        return "swe"
    if data.get("tests") is not None or data.get("cases") is not None:
        graded(ctx)
        return "code"
    expected(ctx)
    return "plain"


def graded(ctx: Context) -> CodeTask:
    data, _ = normalized(ctx.task.data)
    return code_task({**data, "id": ctx.task.id, "prompt": ctx.task.text})


def expected(ctx: Context) -> str | float:
    answer = ctx.task.data.get("answer")
    if isinstance(answer, str | int | float) and not isinstance(answer, bool) and answer != "":
        return answer
    raise TaskError(
        f"task {ctx.task.id} cannot be scored: its data has no swe, tests or cases, and data.answer must be a "
        f"text or a number, {'it is missing' if answer is None else f'not {answer!r:.100}'}"
    )


def file_of(ctx: Context, kind: Kind) -> str:
    """Where the agent leaves what is scored; empty where that is the whole box."""
    if kind == "swe":
        return ""
    name = ctx.task.data.get("submission", SUBMISSION if kind == "code" else ANSWER_FILE)
    if not isinstance(name, str) or not name or "\0" in name or ".." in name.split("/"):
        raise TaskError(f"task {ctx.task.id}: submission must be a path in the box, not {name!r:.100}")
    return name


def asked(ctx: Context, kind: Kind, workdir: str, *, told: bool) -> str:
    """The prompt as the agent gets it. `told`: with where to leave what is scored."""
    parts = [message.text for message in ctx.task.prompt if message.role in ("system", "developer", "user")]
    text = "\n\n".join(part for part in parts if part)
    if kind == "swe" and not text:
        text = swe_task(ctx.task).steps[0].instruction
    if not text:
        raise TaskError(f"task {ctx.task.id} has no prompt")
    if any("\ud800" <= one <= "\udfff" for one in text):
        raise TaskError(f"task {ctx.task.id}: its prompt has half of a character, which cannot be written down")
    if not told or kind == "swe":
        return text
    path = file_of(ctx, kind)
    path = path if path.startswith("/") else f"{workdir.rstrip('/')}/{path}"
    what = "the program" if kind == "code" else "the final answer, and nothing else,"
    return f"{text}\n\nWhen you are done, {what} must stand in the file {path}."


# ---- plain


def answered(ctx: Context, low: float, high: float) -> Score:
    """By the answer's file, or else by what the agent printed: all of it, or its last line."""
    written: str | None = ctx.state.get("submission")
    printed: str = ctx.state.get("printed", "")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    given = [written] if written is not None else [printed, *lines[-1:]]
    right = any(match_answer(text, expected(ctx)) for text in given)
    return Score(high if right else low, metrics={"answer_file": float(written is not None)})


# ---- code


async def programmed(ctx: Context, low: float, high: float, *, partial: bool, forms: Forms) -> Score:
    spec = msgspec.structs.replace(ctx.spec, network="none", mounts=())
    grader = Grader(
        spec,
        ctx.sandbox,
        asyncio.Semaphore(AT_ONCE),
        isolated=is_isolated(spec.provider),
        partial=partial,
        low=low,
        high=high,
        forms=forms,
        seconds=GRADE_SHARE * ctx.remaining,
    )
    grade = await grader.grade(graded(ctx), ctx.state.get("submission") or "")
    ctx.info["grade"] = msgspec.to_builtins(grade)
    return grade.score


# ---- swe


async def prepared(ctx: Context, box: Any, task: SweTask) -> Any:
    from rookery.scoring.swe import prepare

    return await prepare(box, task, timeout=ctx.remaining)


@functools.cache
def _gate() -> Any:
    """The places of a machine where submissions of a run are graded: those of the environment `swe`."""
    from rookery.environments.swe.gate import Gate, cores, name_of_run

    return Gate(max(2, cores()), name_of_run())


def enough(step: SweStep, score: Score) -> bool:
    """Whether the next step begins."""
    from rookery.environments.swe.rewards import enough as well

    return bool(well(step, score))


async def box_graded(ctx: Context, step: int, low: float, high: float) -> Score:
    """One step, over the box as it is now. Waiting for a place is off the clock."""
    from rookery.scoring.swe import SweGrader

    spec = msgspec.structs.replace(ctx.spec, network="none", mounts=())
    grader = SweGrader(ctx.sandbox, ctx.state["task"], spec, low=low, high=high)
    box = await ctx.sandbox()
    async with AsyncExitStack() as stack:
        with ctx.held():
            await ctx.working("sandbox", stack.enter_async_context(_gate().passed()))
        seconds = grading_budget(ctx.state["task"].steps[step], ctx.remaining)
        grade = await grader.grade(box, ctx.state["prepared"], step, timeout=seconds)
    ctx.state["grades"].append(grade.score)
    ctx.info.setdefault("grades", []).append(msgspec.to_builtins(grade))
    score: Score = grade.score
    return score
