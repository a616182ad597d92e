"""The `code` environment: a policy that writes Python which remembers, and is graded by what it hands in."""

import asyncio
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from rookery.core import (
    Limits,
    Message,
    Sampling,
    SandboxSpec,
    Task,
    TaskError,
    ToolSchema,
    Truncation,
    UpstreamError,
    UsageError,
)
from rookery.environments.base import Score, reward_bounds
from rookery.environments.code import tags
from rookery.environments.code.limits import OWN, defaults, is_unlimited, normalized, of_task, sandbox_of
from rookery.environments.context import Context
from rookery.environments.schemas import CallLimit, tool
from rookery.environments.tools import ANSWER, ToolEnvironment
from rookery.sandboxes import is_isolated
from rookery.scoring.code_tasks import CodeTask, code_task
from rookery.scoring.grading import Forms, GradeFunction, Grader
from rookery.scoring.programs import ProgramLimits
from rookery.workers import Cell, Worker, WorkerLimits

Style: TypeAlias = Literal["tags", "tool"]
GRADE_SHARE = 0.9
"""The part of the stage's time that grading may use."""
AT_ONCE = 4
"""Sandboxes in which one rollout is graded at a time."""
UNBOUNDED = 3600.0
"""Seconds of grading, where the stage has no end."""
TAGS = (
    "You can run Python. Write a cell between <code> and </code>; you then get what it printed, and the value of "
    "its last expression, between <result> and </result>. Variables, functions and imports stay from cell to "
    "cell. When you are done, answer without <code>; put a program that you hand in into a ``` block there."
)
TOOL = (
    "You can run Python with the tool `python`: it returns what the cell printed, and the value of its last "
    "expression. Variables, functions and imports stay from cell to cell. When you are done, answer; put a "
    "program that you hand in into a ``` block there."
)


class CodeEnvironment(ToolEnvironment):
    """Multi-turn Python with state, in `<code>` tags or as a tool call.

    A task is graded by its `tests`, its `cases`, a function of yours (`grade`), or by its `answer`.
    """

    name = "code"
    limits = Limits(turns=16)
    own_limits = OWN

    def __init__(
        self,
        *,
        style: Style = "tags",
        default_timeout_seconds: float | None = 10.0,
        default_memory_limit_bytes: float | None = 512 << 20,
        system_prompt: str | None = None,
        max_turns: int | None = None,
        max_result: int = 8192,
        terminate_on_evaluation: bool = False,
        partial: bool = False,
        grade: GradeFunction | None = None,
    ) -> None:
        if style not in ("tags", "tool"):
            raise UsageError(f"style must be 'tags' or 'tool', not {style!r:.80}")
        self.style: Style = style
        default = TAGS if style == "tags" else TOOL
        super().__init__(
            system_prompt=default if system_prompt is None else system_prompt,
            max_turns=max_turns,
            max_result=max_result,
        )
        self.cell_limits = defaults(default_timeout_seconds, default_memory_limit_bytes)
        self.terminate_on_evaluation = terminate_on_evaluation
        self.partial = partial
        self.grade = grade
        self._forms = Forms()

    @property
    def needs_sandbox(self) -> bool:
        return True

    def tools(self) -> Sequence[ToolSchema]:
        return super().tools() if self.style == "tool" else ()

    # ---- an attempt

    def sandbox_for(self, task: Task, spec: SandboxSpec) -> SandboxSpec:
        data, _ = normalized(task.data)
        return sandbox_of(task.id, of_task(task.id, data, self.cell_limits), data, spec)

    async def setup(self, ctx: Context) -> None:
        """Checks the task; starts nothing."""
        data, raised = normalized(ctx.task.data)
        for note in raised:
            ctx.log.warning(note, task=ctx.task.id)
        allowed = of_task(ctx.task.id, data, self.cell_limits)
        task = _graded(ctx)
        if task is None and self.grade is None and data.get("answer") is None:
            raise TaskError(
                f"task {ctx.task.id} cannot be scored: it has no tests, no cases and no answer, "
                "and the environment no grade function"
            )
        ctx.state["cell_limits"] = allowed
        ctx.state["cells"] = []

    async def run(self, ctx: Context) -> None:
        if self.style == "tool":
            await super().run(ctx)
            return
        messages = ctx.state["messages"] = self.messages(ctx)
        while True:
            reply = await ctx.policy.chat(messages, sampling=Sampling(stop=(tags.END,)))
            if reply.finish == "abort":
                raise UpstreamError("the model server aborted an answer before its end")
            messages.append(reply.message)
            code = tags.code_of(reply.text)
            if reply.finish == "length" and (code is None or not tags.closed(reply.text)):
                raise Truncation("tokens", "the answer was cut at its token limit")
            if code is None:
                ctx.state.setdefault(ANSWER, reply.text)
                return
            ctx.tool_calls += 1
            cell = await ctx.working("tool", self.cell(ctx, code))
            messages.append(Message("user", tags.observation(cell, self.max_result)))
            if self.terminate_on_evaluation:
                return

    @tool
    async def python(self, code: str, ctx: Context, limit: CallLimit) -> str:  # noqa: ARG002  (cells keep their own)
        """Runs a cell of Python and returns what it printed and the value of its last expression.

        Args:
            code: The cell. Variables, functions and imports of earlier cells are there.
        """
        return tags.described(await self.cell(ctx, code), self.max_result)

    def done(self, ctx: Context) -> bool:
        return self.terminate_on_evaluation and bool(ctx.state["cells"])

    async def cell(self, ctx: Context, code: str) -> Cell:
        """Runs one cell in the attempt's worker, which the first one opens."""
        worker: Worker | None = ctx.state.get("worker")
        if worker is None:
            worker = ctx.state["worker"] = await Worker.open(await ctx.sandbox(), limits=ctx.state["cell_limits"])
        cell = await worker.run(code)
        ctx.state["cells"].append(code)
        for name in (
            "cells",
            f"cells/{cell.status}",
            *([f"recovered/{cell.recovered}"] if cell.recovered != "none" else ()),
        ):
            ctx.metrics[name] = ctx.metrics.get(name, 0.0) + 1
        return cell

    async def teardown(self, ctx: Context) -> None:
        worker: Worker | None = ctx.state.get("worker")
        if worker is not None:
            await worker.close()

    # ---- grading

    def submission(self, ctx: Context) -> str:
        """What is handed in: override it for another convention."""
        return tags.submission_of(self.answer(ctx), ctx.state["cells"])

    async def score(self, ctx: Context) -> Score | float:
        task = _graded(ctx)
        if task is None and self.grade is None:
            return await super().score(ctx)
        low, high = reward_bounds(self)
        grader = Grader(
            ctx.spec,
            ctx.sandbox,
            asyncio.Semaphore(AT_ONCE),
            isolated=is_isolated(ctx.spec.provider),
            limits=_program_limits(ctx),
            partial=self.partial,
            low=low,
            high=high,
            forms=self._forms,
            seconds=GRADE_SHARE * ctx.remaining,
        )
        submission = self.submission(ctx)
        if self.grade is not None:
            task = task or CodeTask(id=ctx.task.id, prompt=ctx.task.text)
            return await grader.grade_by(self.grade, task, submission, wall=ctx.remaining / 2)
        assert task is not None
        grade = await grader.grade(task, submission)
        ctx.info["grade"] = msgspec.to_builtins(grade)
        return grade.score


def _graded(ctx: Context) -> CodeTask | None:
    """What the submission is graded by, where the task says so."""
    data, _ = normalized(ctx.task.data)
    if data.get("tests") is None and data.get("cases") is None:
        return None
    return code_task({**data, "id": ctx.task.id, "prompt": ctx.task.text})


def _program_limits(ctx: Context) -> ProgramLimits:
    allowed: WorkerLimits = ctx.state["cell_limits"]
    # Without a limit, two runs of the submission and one of the solution must still fit into the stage.
    wall = max(1.0, min(ctx.remaining, UNBOUNDED) / 4) if is_unlimited(allowed) else allowed.wall
    return ProgramLimits(wall=wall, cpu=allowed.cpu_seconds, memory=allowed.memory or ctx.spec.memory)
