"""The `swe` environment: an agent in a box of its own that repairs something and hands it in."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from rookery.core import (
    Limits,
    Message,
    RookeryError,
    SandboxSpec,
    Task,
    TaskError,
    ToolCall,
    ToolSchema,
    Truncation,
    UpstreamError,
    UsageError,
)
from rookery.environments.base import Score, reward_bounds
from rookery.environments.context import Context
from rookery.environments.results import clip
from rookery.environments.schemas import Tool
from rookery.environments.swe.bash import FOLDER, SHELL, SUBMITTED
from rookery.environments.swe.config import Tooling, tooling_of
from rookery.environments.swe.gate import Gate, cores, name_of_run
from rookery.environments.swe.mcp import Servers, check_sdk
from rookery.environments.swe.mcp_config import servers_of, servers_of_task
from rookery.environments.swe.rewards import enough, total
from rookery.environments.swe.toolbox import toolbox
from rookery.environments.tools import ANSWER, ToolEnvironment, _Ended
from rookery.sandboxes.protocol import Shell
from rookery.scoring.swe import Prepared, SweGrader, prepare, prepare_step
from rookery.tasks.swe import (
    SweStep,
    SweTask,
    grading_budget,
    limits_with_test_timeout,
    swe_task,
    with_test_timeout,
)

TaskNetwork: TypeAlias = Literal["task", "run"]
PROMPT = (
    "You work in a sandbox, on the files in {workdir}. Use the tools to look around, to change what must be "
    "changed and to try it. {submit}"
)
NUDGE = "You did not call a tool. {submit}"
UNWIND = 20.0
"""Seconds a step gets to end at its limit: longer than the tools in it do."""


class SweEnvironment(ToolEnvironment):
    """A task in a box: its image, its files, a shell, an editor, `submit`, and grading by the task's tests.

    Steps of a task follow one another in the same box; each is graded when the policy hands it in.
    """

    name = "swe"
    limits = Limits(turns=100, setup=900.0, run=3600.0, score=1800.0, call=180.0)

    def __init__(
        self,
        tools: Sequence[str | Tool | Callable[..., Any]] | str | None = None,
        *,
        tool_config: dict[str, Any] | str | None = None,
        mcp: Sequence[Any] | None = None,
        system_prompt: str | None = None,
        max_turns: int | None = None,
        nudges: int = 0,
        grade_truncated: bool = True,
        network: TaskNetwork = "task",
        fresh_always: bool = False,
        graded_at_once: int | None = None,
        test_timeout: float | None = None,
    ) -> None:
        names, own = _parted(tools)
        self.tooling = tooling_of(names, _config(tool_config))
        self.servers = servers_of(mcp)
        if self.servers:
            check_sdk()
        if nudges < 0:
            raise UsageError(f"nudges must be at least 0, not {nudges!r}")
        if network not in ("task", "run"):
            raise UsageError(
                f"network must be 'task' (as the task says) or 'run' (as the run says), not {network!r}"
            )
        self.nudges = nudges
        """How often an answer without a tool call is sent back before it counts as handing in."""
        self.grade_truncated = grade_truncated
        """Whether what is there is graded when turns, tokens or time ran out; else that is the lowest reward."""
        self.network = network
        self.fresh_always = fresh_always
        if graded_at_once is not None and graded_at_once < 1:
            raise UsageError(f"graded_at_once must be at least 1, not {graded_at_once!r}")
        self.test_timeout = seconds_of("test_timeout", test_timeout)
        """Seconds for one run of the tests of tasks that do not say it themselves."""
        self._gate = Gate(graded_at_once or max(2, cores()), name_of_run())
        self._outputs = _outputs(self.tooling)
        super().__init__(
            [*toolbox(self.tooling), *own],
            system_prompt=PROMPT if system_prompt is None else system_prompt,
            max_turns=max_turns,
            max_result=max(self._outputs.values()) + 4096,
        )

    @property
    def needs_sandbox(self) -> bool:
        return True

    def tasks(self) -> Iterable[Task | dict[str, Any] | str]:
        """The built-in taskset `repairs`."""
        from rookery.environments.swe.repairs import repairs

        return repairs()

    def limits_for(self, task: Task, run: Limits) -> Limits:
        """Return the limits of a rollout, with stages that are long enough for its tests."""
        return limits_with_test_timeout(task, super().limits_for(task, run), run, self.test_timeout)

    def sandbox_for(self, task: Task, spec: SandboxSpec) -> SandboxSpec:
        """The box that a task asks for, over what the run says; pure."""
        return sandbox_for(swe_task(task), spec, network=self.network)

    # ---- an attempt

    async def setup(self, ctx: Context) -> None:
        """The box as the task describes it, and its MCP servers. What fails here is never the policy's."""
        task = with_test_timeout(swe_task(ctx.task), ctx.limits.test_timeout, self.test_timeout)
        if not task.steps:
            raise TaskError(f"task {ctx.task.id} has no steps")
        own = servers_of_task(task.id, task.mcp)
        if own:
            check_sdk()
        ctx.state["task"], ctx.state["step"], ctx.state["grades"] = task, 0, []
        ctx.state[FOLDER] = task.workdir
        box = await ctx.sandbox()
        ctx.state["prepared"] = await prepare(box, task, timeout=ctx.remaining)
        if own or self.servers:
            servers = ctx.state["servers"] = Servers()
            opening = servers.open(self.servers, own, box, self._tools, task.workdir)
            ctx.state["mcp"] = await ctx.working("sandbox", opening)

    def offered(self, ctx: Context) -> dict[str, Tool]:
        return {**self._tools, **ctx.state.get("mcp", {})}

    def messages(self, ctx: Context) -> list[Message]:
        task: SweTask = ctx.state["task"]
        if ctx.task.prompt:
            messages = super().messages(ctx)
        else:
            head = [Message("system", self.system_prompt)] if self.system_prompt else []
            messages = [*head, Message("user", task.steps[0].instruction)]
        if messages[0].role == "system" and self.system_prompt == PROMPT:
            said = PROMPT.format(workdir=task.workdir, submit=self._how_to_submit())
            messages[0] = Message("system", said)
        return messages

    async def run(self, ctx: Context) -> None:
        task: SweTask = ctx.state["task"]
        messages = ctx.state["messages"] = self.messages(ctx)
        for number, step in enumerate(task.steps):
            if number:
                await self._begin(ctx, number, step, messages)
            await _within(step.timeout, self._play(ctx, messages), ctx)
            if number + 1 < len(task.steps):
                grade = await self._grade(ctx)
                if not enough(step, grade):
                    ctx.log.info("the next steps are not begun: the reward of this one is too low", step=step.name)
                    return

    async def _begin(self, ctx: Context, number: int, step: SweStep, messages: list[Message]) -> None:
        """A later step: its files and setup, its instruction."""
        ctx.state["step"] = number
        ctx.state[SUBMITTED] = False
        await prepare_step(await ctx.sandbox(), ctx.state["task"], step, timeout=max(1.0, ctx.remaining))
        servers: Servers | None = ctx.state.get("servers")
        if servers is not None:
            for gone in await ctx.working("sandbox", servers.reopen()):
                ctx.log.warning("an MCP server did not come back for the next step", server=gone)
        messages.append(Message("user", step.instruction))

    async def _play(self, ctx: Context, messages: list[Message]) -> None:
        """Turns until the policy hands the step in."""
        schemas: Sequence[ToolSchema] = tuple(found.schema for found in self.offered(ctx).values())
        nudges = self.nudges
        while True:
            reply = await ctx.policy.chat(messages, tools=schemas)
            if reply.finish == "abort":
                raise UpstreamError("the model server aborted an answer before its end")
            messages.append(reply.message)
            if reply.tool_calls:
                messages.extend(await self._replies(ctx, reply.tool_calls))
                if ctx.state.get(SUBMITTED):
                    return
                continue
            if reply.finish == "length":
                raise Truncation("tokens", "the answer was cut at its token limit")
            if not nudges:
                ctx.state[ANSWER] = reply.text
                return
            nudges -= 1
            messages.append(Message("user", NUDGE.format(submit=self._how_to_submit())))

    async def _call(self, ctx: Context, call: ToolCall) -> _Ended:
        if ctx.state.get(SUBMITTED):  # calls of the same turn, after the one that handed in
            return _Ended("Nothing was done: the work is already submitted.")
        return await super()._call(ctx, call)

    def _observation(self, ctx: Context, call: ToolCall, ended: _Ended) -> str:
        limit = self._outputs.get(call.name)
        if ended.error is None and not ended.late and limit is not None:
            ended = _Ended(clip(ended.text, limit + 2048))
        return super()._observation(ctx, call, ended)

    def _how_to_submit(self) -> str:
        if "submit" in self.tooling.tools:
            return f"When you are done, call {self.tooling.submit.name or 'submit'}."
        if self.tooling.marker:
            name = self.tooling.bash.name or "bash"
            return f"When you are done, run `echo {self.tooling.marker}` with {name}."
        return "When you are done, say so without calling a tool."

    async def teardown(self, ctx: Context) -> None:
        servers: Servers | None = ctx.state.get("servers")
        if servers is not None:
            await servers.close()

    # ---- grading

    async def score(self, ctx: Context) -> Score:
        task: SweTask = ctx.state["task"]
        low, _ = reward_bounds(self)
        if ctx.truncated and not self.grade_truncated:
            return Score(low, metrics={"graded": 0.0})
        if len(ctx.state["grades"]) <= ctx.state["step"]:
            await self._grade(ctx)
        return total(task, ctx.state["grades"], low)

    async def _grade(self, ctx: Context) -> Score:
        """Grades the step that is under way, over the box as it is now."""
        low, high = reward_bounds(self)
        prepared: Prepared = ctx.state["prepared"]
        task: SweTask = ctx.state["task"]
        number: int = ctx.state["step"]
        grader = SweGrader(ctx.sandbox, task, ctx.spec, low=low, high=high, fresh_always=self.fresh_always)
        box = await ctx.sandbox()
        async with AsyncExitStack() as stack:
            with ctx.held():
                await ctx.working("sandbox", stack.enter_async_context(self._gate.passed()))
            seconds = grading_budget(task.steps[number], ctx.remaining)
            grade = await grader.grade(box, prepared, number, timeout=seconds)
        if not task.steps[number].verifier.services:
            # Grading ended what ran in the box; the next step is not to find the shell half dead.
            await self._close_shell(ctx)
        ctx.state["grades"].append(grade.score)
        ctx.info.setdefault("grades", []).append(msgspec.to_builtins(grade))
        return grade.score

    async def _close_shell(self, ctx: Context) -> None:
        shell: Shell | None = ctx.state.pop(SHELL, None)
        if shell is not None:
            await ctx.working("sandbox", shell.close())


def seconds_of(name: str, value: Any) -> float | None:
    """Return a number of seconds that an environment was given; `UsageError` unless it is finite and above 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{name} must be a finite number of seconds above 0, not {value!r:.80}")
    return float(value)


def sandbox_for(task: SweTask, spec: SandboxSpec, *, network: TaskNetwork = "task") -> SandboxSpec:
    """A task's box, over what a run says: image, memory, cores, disk, network, user and variables."""
    said: dict[str, Any] = {
        name: value
        for name in ("image", "memory", "cpus", "disk", "user", "gpus")
        if (value := getattr(task, name, None)) is not None
    }
    if task.env:
        said["env"] = {**spec.env, **task.env}
    if network == "task":
        said["network"], said["allow"] = task.network, task.allow
    return msgspec.structs.replace(spec, **said)


async def _within(seconds: float | None, work: Coroutine[Any, Any, None], ctx: Context) -> None:
    """Awaits for at most so many seconds of the stage's clock, which stands still in pauses."""
    if seconds is None or seconds >= ctx.remaining:
        await work
        return
    began = ctx.remaining
    loop = asyncio.get_running_loop()
    at = loop.time()
    task = asyncio.create_task(work, name="step")
    try:
        while True:
            used = began - ctx.remaining if math.isfinite(began) else loop.time() - at
            if used >= seconds:
                break
            done, _ = await asyncio.wait({task}, timeout=max(seconds - used, 0.01))
            if done:
                task.result()
                return
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=UNWIND)
    if not task.done():
        raise RookeryError(
            f"a step went on after it was cancelled at its limit of {seconds:g} s", cause="bug.uncancellable"
        )
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
    raise Truncation("time", f"the step's {seconds:g} seconds are over")


def _parted(tools: Any) -> tuple[Any, list[Tool | Callable[..., Any]]]:
    """Names, and functions that were given as they are."""
    if tools is None or isinstance(tools, str):
        return tools, []
    own = [tool for tool in tools if not isinstance(tool, str)]
    names = [tool for tool in tools if isinstance(tool, str)]
    return (names or None) if own else names, own


def _config(given: Any) -> Any:
    """A table, or the path of a TOML file that holds one."""
    if not isinstance(given, str):
        return given
    import tomllib

    try:
        return tomllib.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the tool configuration {given!r:.200} cannot be read: {error}") from None


def _outputs(tooling: Tooling) -> dict[str, int]:
    """Bytes of an answer, by the name that the policy calls."""
    found = {
        getattr(tooling, name).name or name: getattr(tooling, name).output for name in ("bash", "edit", "submit")
    }
    for name, settings in tooling.others.items():
        found[settings.name or name.rpartition(":")[2]] = settings.output
    return found
