"""The `code` environment: the policy runs Python cells with persistent state and submits a program.

Runs in a runner process. A cell is a piece of Python source. Cells run in the attempt's sandbox, and the submitted
program is graded in new sandboxes.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from rookery.core import (
    Limits,
    Message,
    Rollout,
    Sampling,
    SandboxSpec,
    Task,
    TaskError,
    ToolSchema,
    Truncation,
    UsageError,
)
from rookery.environments.base import Score, Ungraded, reward_bounds
from rookery.environments.code_environment import tags
from rookery.environments.code_environment.limits import (
    PROGRAM_LIMITS,
    default_limits,
    is_unlimited,
    limits_for_task,
    normalize_limits,
    sandbox_for_task,
)
from rookery.environments.context import Context
from rookery.environments.tool_environment import ANSWER, SUBMISSION, ToolEnvironment, increment
from rookery.environments.tools import CallLimit, tool
from rookery.sandboxes import is_isolated
from rookery.scoring.code_tasks import CodeTask, parse_code_task
from rookery.scoring.grading import GradeFunction, Grader, IsolationCache
from rookery.scoring.programs import ProgramLimits
from rookery.tasks.swe import GRADING_TIME_SHARE
from rookery.telemetry.operations import observe_tool_call
from rookery.workers import Cell, Worker, WorkerLimits

Style: TypeAlias = Literal["tags", "tool"]
PARALLEL_SANDBOXES = 4
"""Maximum number of sandboxes that are used at the same time to grade one rollout."""
DEFAULT_GRADING_SECONDS = 3600.0
"""Upper bound, in seconds, of the grading time from which the time limit of an unlimited program is derived."""
TAGS_PROMPT = (
    "You can run Python. Write a cell between <code> and </code>; you then get its output and the value of its "
    "last expression between <result> and </result>. Variables, functions and imports persist between cells. "
    "When you are done, answer without <code>; put a program that you submit into a ``` block there."
)
TOOL_PROMPT = (
    "You can run Python with the tool `python`: it returns the cell's output and the value of its last "
    "expression. Variables, functions and imports persist between cells. When you are done, answer; put a "
    "program that you submit into a ``` block there."
)


class CodeEnvironment(ToolEnvironment):
    """Environment for multi-turn Python with persistent state, in `<code>` tags or as a tool call.

        CodeEnvironment(style="tool", default_timeout_seconds=5)

    The policy runs cells of Python in `<code>` tags (`style="tags"`) or with a tool call (`style="tool"`). A task
    is graded by the function `grade` if that is given, else by its `tests` or `cases`, else by comparing the
    policy's answer with the task's `answer`. If `partial`, passing some of the tests earns a part of the reward.
    If `terminate_on_evaluation`, the attempt ends after the first cell.
    """

    name = "code"
    limits = Limits(turns=16)
    own_limits = PROGRAM_LIMITS

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
        default_prompt = TAGS_PROMPT if style == "tags" else TOOL_PROMPT
        super().__init__(
            system_prompt=default_prompt if system_prompt is None else system_prompt,
            max_turns=max_turns,
            max_result=max_result,
        )
        self.cell_limits = default_limits(default_timeout_seconds, default_memory_limit_bytes)
        self.terminate_on_evaluation = terminate_on_evaluation
        self.partial = partial
        self.grade = grade
        self._isolation_cache = IsolationCache()

    @property
    def needs_sandbox(self) -> bool:
        return True

    def tools(self) -> Sequence[ToolSchema]:
        return super().tools() if self.style == "tool" else ()

    # ---- an attempt

    def sandbox_for(self, task: Task, spec: SandboxSpec) -> SandboxSpec:
        data, _ = normalize_limits(task.data)
        return sandbox_for_task(task.id, limits_for_task(task.id, data, self.cell_limits), data, spec)

    async def setup(self, ctx: Context) -> None:
        """Check the task's limits and scoring data, without creating a sandbox."""
        data, raised = normalize_limits(ctx.task.data)
        for note in raised:
            ctx.log.warning(note, task=ctx.task.id)
        limits = limits_for_task(ctx.task.id, data, self.cell_limits)
        task = _parse_task(ctx)
        if task is None and self.grade is None and data.get("answer") is None:
            raise TaskError(
                f"task {ctx.task.id} cannot be scored: it has no tests, cases or answer, "
                "and the environment has no grade function"
            )
        ctx.state["cell_limits"] = limits
        ctx.state["cells"] = []

    async def run(self, ctx: Context) -> None:
        if self.style == "tool":
            await super().run(ctx)
            return
        messages = ctx.state["messages"] = self.messages(ctx)
        while True:
            reply = await self._sample_reply(ctx, messages, sampling=Sampling(stop=(tags.END,)))
            code = tags.extract_code(reply.text)
            if reply.finish == "length" and (code is None or not tags.is_closed(reply.text)):
                raise Truncation("tokens", "the reply was cut at its token limit")
            if code is None:
                ctx.state.setdefault(ANSWER, reply.text)
                return
            ctx.tool_calls += 1
            with observe_tool_call("python", arguments=code):
                cell = await ctx.charge_policy("tool", self.cell(ctx, code))
            messages.append(Message("user", tags.render_observation(cell, self.max_result)))
            if self.terminate_on_evaluation:
                return

    @tool
    async def python(self, code: str, ctx: Context, limit: CallLimit) -> str:  # noqa: ARG002  (cells have their own limit)
        """Runs a cell of Python and returns what it printed and the value of its last expression.

        Args:
            code: The cell. Variables, functions and imports of earlier cells are there.
        """
        return tags.render_cell(await self.cell(ctx, code), self.max_result)

    def done(self, ctx: Context) -> bool:
        return self.terminate_on_evaluation and bool(ctx.state["cells"])

    async def cell(self, ctx: Context, code: str) -> Cell:
        """Run one cell in the attempt's persistent Python interpreter, which the first call starts."""
        worker: Worker | None = ctx.state.get("worker")
        if worker is None:
            worker = ctx.state["worker"] = await Worker.open(await ctx.sandbox(), limits=ctx.state["cell_limits"])
        cell = await worker.run(code)
        ctx.state["cells"].append(code)
        increment(ctx, "cells")
        increment(ctx, f"cells/{cell.status}")
        if cell.recovered != "none":
            increment(ctx, f"recovered/{cell.recovered}")
        return cell

    async def teardown(self, ctx: Context) -> None:
        worker: Worker | None = ctx.state.get("worker")
        if worker is not None:
            await worker.close()

    # ---- grading

    def submission(self, ctx: Context) -> str:
        """Return the submitted program: by default the last fenced block of the final answer.

        Without such a block it is the content of its `<answer>` tag, or the last cell that ran. Subclasses may
        override this.
        """
        return tags.extract_submission(self.answer(ctx), ctx.state["cells"])

    async def restore(self, ctx: Context, rollout: Rollout, messages: Sequence[Message]) -> None:
        await self.setup(ctx)
        await super().restore(ctx, rollout, messages)
        if isinstance(cell := rollout.info.get(SUBMISSION), str):
            ctx.state["cells"] = [cell]

    async def score(self, ctx: Context) -> Score | Ungraded | float:
        task = _parse_task(ctx)
        if task is None and self.grade is None:
            return await super().score(ctx)
        low, high = reward_bounds(self)
        grader = Grader(
            ctx.spec,
            ctx.sandbox,
            asyncio.Semaphore(PARALLEL_SANDBOXES),
            isolated=is_isolated(ctx.spec.provider),
            limits=_program_limits(ctx),
            partial=self.partial,
            low=low,
            high=high,
            isolation_cache=self._isolation_cache,
            seconds=GRADING_TIME_SHARE * ctx.remaining,
        )
        submission = self.submission(ctx)
        if submission != tags.extract_submission(self.answer(ctx), []):
            ctx.info[SUBMISSION] = submission  # it is a cell, which the stored answer does not contain
        if self.grade is not None:
            task = task or CodeTask(id=ctx.task.id, prompt=ctx.task.text)
            return await grader.grade_by(self.grade, task, submission, wall=ctx.remaining / 2)
        assert task is not None
        grade = await grader.grade(task, submission)
        ctx.info["grade"] = msgspec.to_builtins(grade)
        return grade.score


def _parse_task(ctx: Context) -> CodeTask | None:
    """Return the task's tests or cases, or None if it has neither."""
    data, _ = normalize_limits(ctx.task.data)
    if data.get("tests") is None and data.get("cases") is None:
        return None
    return parse_code_task({**data, "id": ctx.task.id, "prompt": ctx.task.text})


def _program_limits(ctx: Context) -> ProgramLimits:
    limits: WorkerLimits = ctx.state["cell_limits"]
    # Without a time limit, two runs of the submission and one of the solution must still fit into the stage.
    wall = max(1.0, min(ctx.remaining, DEFAULT_GRADING_SECONDS) / 4) if is_unlimited(limits) else limits.wall
    return ProgramLimits(wall=wall, cpu=limits.cpu_seconds, memory=limits.memory or ctx.spec.memory)
