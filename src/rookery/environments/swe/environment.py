"""The `swe` environment: the policy works in a sandbox and submits its files for grading by the task's tests.

Runs in a runner process. A task may have several steps, each with its own instruction and tests. Its reward is
that of the last step, or the mean over all steps, as the task says. A step that was not reached counts as the
lowest reward, so that giving up never pays.
"""

import math
import tomllib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from rookery.core import (
    Limits,
    Message,
    Rollout,
    SandboxSpec,
    Task,
    TaskError,
    ToolCall,
    ToolSchema,
    Truncated,
    Truncation,
    UsageError,
)
from rookery.environments.base import Score, reward_bounds
from rookery.environments.context import Context, run_with_deadline
from rookery.environments.swe.bash_tool import FOLDER, SHELL, SUBMITTED, bash_tool, submit_tool
from rookery.environments.swe.edit_tool import edit_tool
from rookery.environments.swe.grading_slots import GradingSlots, count_cores, get_run_name
from rookery.environments.swe.mcp_client import McpConnections, check_mcp_sdk
from rookery.environments.swe.mcp_servers import parse_servers, parse_task_servers
from rookery.environments.swe.stored_submissions import (
    find_submission_problem,
    restore_submissions,
    store_submissions,
)
from rookery.environments.swe.tool_config import BUILT_IN, ToolConfig, ToolSettings, parse_tool_config
from rookery.environments.text import clip
from rookery.environments.tool_environment import ANSWER, ToolEnvironment, ToolOutcome
from rookery.environments.tools import Tool, find_tool
from rookery.sandboxes.protocol import Sandbox, Shell
from rookery.scoring.swe import SweGrader, prepare, prepare_step
from rookery.tasks.swe import (
    SweStep,
    SweTask,
    get_swe_task,
    grading_budget,
    limits_with_test_timeout,
    with_test_timeout,
)

TaskNetwork: TypeAlias = Literal["task", "run"]
PROMPT = (
    "You work in a sandbox, on the files in {workdir}. Use the tools to look around, to change what must be "
    "changed and to try it. {submit}"
)
NUDGE = "You did not call a tool. {submit}"
UNWIND = 20.0
"""Seconds that a cancelled step gets to end. They are more than the 10 s of a cancelled tool."""


class SweEnvironment(ToolEnvironment):
    """Environment for software engineering tasks: the policy works in a sandbox and is graded by the task's tests.

        SweEnvironment(tool_config={"preset": "bash-only"}, max_turns=50)

    By default the policy has the tools `bash`, `edit` and `submit`. The steps of a task run one after another in
    the same sandbox. Each is graded when the policy submits it.
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
        names, functions = _split_tools(tools)
        self.tool_config = parse_tool_config(names, _read_config(tool_config))
        self.mcp_servers = parse_servers(mcp)
        if self.mcp_servers:
            check_mcp_sdk()
        if nudges < 0:
            raise UsageError(f"nudges must be at least 0, not {nudges!r}")
        if network not in ("task", "run"):
            raise UsageError(
                f"network must be 'task' (as the task says) or 'run' (as the run says), not {network!r}"
            )
        self.nudges = nudges
        """Number of replies without a tool call in a step that are answered with a reminder. The next one
        submits."""
        self.grade_truncated = grade_truncated
        """True if a rollout that exhausted a budget is graded. If not, it gets the lowest reward."""
        self.network = network
        """`task`: the network of the sandbox is that of the task. `run`: it is that of the run's sandbox."""
        self.fresh_always = fresh_always
        """True if tests run in a new sandbox also if the task asks for the policy's. Tests that need services that
        the policy has started always run in the policy's sandbox."""
        if graded_at_once is not None and graded_at_once < 1:
            raise UsageError(f"graded_at_once must be at least 1, not {graded_at_once!r}")
        self.test_timeout = check_seconds("test_timeout", test_timeout)
        """Time limit in seconds for the tests of tasks that do not set one."""
        self._grading_slots = GradingSlots(graded_at_once or max(2, count_cores()), get_run_name())
        self._output_limits = _output_limits(self.tool_config)
        super().__init__(
            [*_make_tools(self.tool_config), *functions],
            system_prompt=PROMPT if system_prompt is None else system_prompt,
            max_turns=max_turns,
            max_result=max(self._output_limits.values()) + 4096,
        )

    @property
    def needs_sandbox(self) -> bool:
        return True

    def tasks(self) -> Iterable[Task | dict[str, Any] | str]:
        """Return the built-in taskset `repairs`: small programs with a bug each."""
        from rookery.environments.swe.repairs import repairs

        return repairs()

    def limits_for(self, task: Task, run: Limits) -> Limits:
        """Return the limits of a rollout, with stages that are long enough for the task's test timeout."""
        return limits_with_test_timeout(task, super().limits_for(task, run), run, self.test_timeout)

    def sandbox_for(self, task: Task, spec: SandboxSpec) -> SandboxSpec:
        """Return the specification of a task's sandbox: the run's `spec`, overridden by the task's settings."""
        return sandbox_for(get_swe_task(task), spec, network=self.network)

    # ---- an attempt

    async def setup(self, ctx: Context) -> None:
        """Prepare the sandbox as the task describes it, and start the MCP servers of the task and of the run."""
        task = with_test_timeout(get_swe_task(ctx.task), ctx.limits.test_timeout, self.test_timeout)
        if not task.steps:
            raise TaskError(f"task {ctx.task.id} has no steps")
        task_servers = parse_task_servers(task.id, task.mcp)
        if task_servers:
            check_mcp_sdk()
        sandbox = await _prepare_sandbox(ctx, task)
        if task_servers or self.mcp_servers:
            connections = ctx.state["mcp_connections"] = McpConnections()
            opening = connections.open(self.mcp_servers, task_servers, sandbox, self._tools, task.workdir)
            ctx.state["mcp_tools"] = await ctx.charge_policy("sandbox", opening)

    def tools_for(self, ctx: Context) -> dict[str, Tool]:
        return {**self._tools, **ctx.state.get("mcp_tools", {})}

    def messages(self, ctx: Context) -> list[Message]:
        task: SweTask = ctx.state["task"]
        if ctx.task.prompt:
            messages = super().messages(ctx)
        else:
            head = [Message("system", self.system_prompt)] if self.system_prompt else []
            messages = [*head, Message("user", task.steps[0].instruction)]
        if messages[0].role == "system" and self.system_prompt == PROMPT:
            text = PROMPT.format(workdir=task.workdir, submit=self._describe_submission())
            messages[0] = Message("system", text)
        return messages

    async def run(self, ctx: Context) -> None:
        task: SweTask = ctx.state["task"]
        messages = ctx.state["messages"] = self.messages(ctx)
        for number, step in enumerate(task.steps):
            if number:
                await self._begin_step(ctx, number, step, messages)
            await _run_with_time_limit(ctx, step.timeout, self._run_turns(ctx, messages))
            if number + 1 < len(task.steps):
                grade = await self._grade(ctx)
                if not may_continue(step, grade):
                    ctx.log.info(
                        "the remaining steps are skipped: the reward of this one is too low", step=step.name
                    )
                    return

    async def _begin_step(self, ctx: Context, number: int, step: SweStep, messages: list[Message]) -> None:
        """Begin a step after the first: prepare the sandbox, restart MCP servers, and append its instruction."""
        ctx.state["step"] = number
        ctx.state[SUBMITTED] = False
        await prepare_step(await ctx.sandbox(), ctx.state["task"], step, timeout=max(1.0, ctx.remaining))
        connections: McpConnections | None = ctx.state.get("mcp_connections")
        if connections is not None:
            for failure in await ctx.charge_policy("sandbox", connections.reopen()):
                ctx.log.warning("an MCP server could not be restarted for the next step", server=failure)
        messages.append(Message("user", step.instruction))

    async def _run_turns(self, ctx: Context, messages: list[Message]) -> None:
        """Run turns until the policy submits the current step, or replies without a tool call too often."""
        schemas: Sequence[ToolSchema] = tuple(tool.schema for tool in self.tools_for(ctx).values())
        nudges = self.nudges
        while True:
            reply = await self._sample_reply(ctx, messages, schemas)
            if reply.tool_calls:
                messages.extend(await self._run_calls(ctx, reply.tool_calls))
                if ctx.state.get(SUBMITTED):
                    return
                continue
            if reply.finish == "length":
                raise Truncation("tokens", "the reply was cut at its token limit")
            if not nudges:
                ctx.state[ANSWER] = reply.text
                return
            nudges -= 1
            messages.append(Message("user", NUDGE.format(submit=self._describe_submission())))

    async def _run_call(self, ctx: Context, call: ToolCall) -> ToolOutcome:
        if ctx.state.get(SUBMITTED):  # further calls in the turn that submitted
            return ToolOutcome("Nothing was done: the work is already submitted.")
        return await super()._run_call(ctx, call)

    def _observe(self, ctx: Context, call: ToolCall, outcome: ToolOutcome) -> str:
        limit = self._output_limits.get(call.name)
        if outcome.error is None and not outcome.timed_out and limit is not None:
            outcome = ToolOutcome(clip(outcome.text, limit + 2048))
        return super()._observe(ctx, call, outcome)

    def _describe_submission(self) -> str:
        if "submit" in self.tool_config.tools:
            return f"When you are done, call {self.tool_config.submit.name or 'submit'}."
        if self.tool_config.marker:
            name = self.tool_config.bash.name or "bash"
            return f"When you are done, run `echo {self.tool_config.marker}` with {name}."
        return "When you are done, say so without calling a tool."

    async def teardown(self, ctx: Context) -> None:
        connections: McpConnections | None = ctx.state.get("mcp_connections")
        if connections is not None:
            await connections.close()

    # ---- grading

    def find_restore_problem(self, task: Task, rollout: Rollout) -> str:  # noqa: ARG002
        if isinstance(rollout.outcome, Truncated) and not self.grade_truncated:
            return ""
        return find_submission_problem(rollout)

    async def restore(self, ctx: Context, rollout: Rollout, messages: Sequence[Message]) -> None:
        """Prepare a new sandbox, and install the stored submission in it."""
        task = with_test_timeout(get_swe_task(ctx.task), ctx.limits.test_timeout, self.test_timeout)
        ctx.state["messages"] = list(messages)
        ctx.state["task"], ctx.state["step"], ctx.state["grades"] = task, 0, []
        if isinstance(rollout.outcome, Truncated) and not self.grade_truncated:
            return
        await _prepare_sandbox(ctx, task)
        await restore_submissions(ctx, rollout, lambda: self._grade(ctx), may_continue)

    async def score(self, ctx: Context) -> Score:
        task: SweTask = ctx.state["task"]
        low, _ = reward_bounds(self)
        if ctx.truncated and not self.grade_truncated:
            return Score(low, metrics={"graded": 0.0})
        if len(ctx.state["grades"]) <= ctx.state["step"]:
            await self._grade(ctx)
        return combine_scores(task, ctx.state["grades"], low)

    async def _grade(self, ctx: Context) -> Score:
        """Grade the sandbox's current state as the result of the current step."""
        low, high = reward_bounds(self)
        task: SweTask = ctx.state["task"]
        number: int = ctx.state["step"]
        grader = SweGrader(
            ctx.sandbox,
            task,
            low=low,
            high=high,
            fresh_always=self.fresh_always,
            on_submission=store_submissions(ctx),
        )
        score = await grade_step(ctx, grader, number, self._grading_slots)
        if not task.steps[number].verifier.services:
            # Grading killed the processes in the sandbox; the next step gets a new shell.
            await self._close_shell(ctx)
        return score

    async def _close_shell(self, ctx: Context) -> None:
        shell: Shell | None = ctx.state.pop(SHELL, None)
        if shell is not None:
            await ctx.charge_policy("sandbox", shell.close())


async def grade_step(ctx: Context, grader: SweGrader, number: int, slots: GradingSlots | None) -> Score:
    """Grade the sandbox's current state as the result of step `number` and store the grade.

    The stage's clock is paused while this waits for one of the `slots`, which limit how many submissions are
    graded at once.
    """
    sandbox = await ctx.sandbox()
    async with AsyncExitStack() as stack:
        if slots is not None:
            with ctx.pause_clock():
                await ctx.charge_policy("sandbox", stack.enter_async_context(slots.acquire()))
        seconds = grading_budget(ctx.state["task"].steps[number], ctx.remaining)
        grade = await grader.grade(sandbox, ctx.state["prepared"], number, timeout=seconds)
    ctx.state["grades"].append(grade.score)
    ctx.info.setdefault("grades", []).append(msgspec.to_builtins(grade))
    return grade.score


async def _prepare_sandbox(ctx: Context, task: SweTask) -> Sandbox:
    """Open the attempt's sandbox, prepare it as the task describes, and store what grading needs in the state."""
    ctx.state["task"], ctx.state["step"], ctx.state["grades"] = task, 0, []
    ctx.state[FOLDER] = task.workdir
    sandbox = await ctx.sandbox()
    ctx.state["prepared"] = await prepare(sandbox, task, timeout=ctx.remaining)
    return sandbox


def check_seconds(name: str, value: Any) -> float | None:
    """Return `value` as a float, or None for None; raise `UsageError` unless it is a finite number above 0.

    `name` is the name of the option in the error message.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{name} must be a finite number of seconds above 0, not {value!r:.80}")
    return float(value)


def sandbox_for(task: SweTask, spec: SandboxSpec, *, network: TaskNetwork = "task") -> SandboxSpec:
    """Return the specification of a task's sandbox: the run's `spec`, overridden by the task's settings.

    These are its image, resources, user and environment variables and, if `network` is `task`, its network.
    """
    settings: dict[str, Any] = {
        name: value
        for name in ("image", "memory", "cpus", "disk", "user", "gpus")
        if (value := getattr(task, name, None)) is not None
    }
    if task.env:
        settings["env"] = {**spec.env, **task.env}
    if network == "task":
        settings["network"], settings["allow"] = task.network, task.allow
    return msgspec.structs.replace(spec, **settings)


def may_continue(step: SweStep, score: Score) -> bool:
    """Return whether the score of a step reaches the minimum that the task requires before the next step."""
    if step.min_reward is not None and score.reward < step.min_reward:
        return False
    return all(name in score.parts and score.parts[name] >= least for name, least in step.min_reward_parts.items())


def combine_scores(task: SweTask, scores: list[Score], low: float) -> Score:
    """Return the score of a rollout from the scores of its graded steps, in order.

    Steps that were not graded count with `low`, the lowest reward.
    """
    if len(task.steps) == 1:
        return scores[0]
    parts: dict[str, float] = {}
    rewards: list[float] = []
    for number, step in enumerate(task.steps):
        name = step.name or f"step-{number + 1}"
        score = scores[number] if number < len(scores) else Score(low)
        rewards.append(score.reward)
        parts[name] = score.reward
        parts.update({f"{name}/{part}": value for part, value in score.parts.items()})
    reward = rewards[-1] if task.rewards == "final" else sum(rewards) / len(rewards)
    return Score(reward, parts, {"steps_graded": float(len(scores))})


async def _run_with_time_limit(ctx: Context, seconds: float | None, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`; raise `Truncation` if it takes longer than `seconds` of the stage's clock."""
    if seconds is None or seconds >= ctx.remaining:
        await work
        return
    task, timed_out = await run_with_deadline(ctx, seconds, work, "the step", unwind=UNWIND)
    if not (timed_out and task.cancelled()):
        task.result()
    if timed_out:
        raise Truncation("time", f"the step exceeded its limit of {seconds:g} seconds")


def _make_tools(config: ToolConfig) -> list[Tool]:
    """Return the tools that `config` names, in order; raise `UsageError` for an unknown name."""
    makers = {"bash": bash_tool, "edit": edit_tool, "submit": submit_tool}
    return [
        makers[name](config)
        if name in makers
        else _with_settings(find_tool(name, BUILT_IN), config.others.get(name))
        for name in config.tools
    ]


def _with_settings(tool: Tool, settings: ToolSettings | None) -> Tool:
    if settings is None:
        return tool
    return Tool(
        tool.function,
        name=settings.name or tool.name,
        description=settings.description or tool.description,
        timeout=settings.timeout or tool.timeout,
        sandbox=tool.sandbox,
    )


def _split_tools(tools: Any) -> tuple[Any, list[Tool | Callable[..., Any]]]:
    """Split the constructor argument `tools` into names (None if there are none to override) and functions."""
    if tools is None or isinstance(tools, str):
        return tools, []
    functions = [tool for tool in tools if not isinstance(tool, str)]
    names = [tool for tool in tools if isinstance(tool, str)]
    return (names or None) if functions else names, functions


def _read_config(config: Any) -> Any:
    """Return the tool configuration, reading it from a TOML file if it is a path."""
    if not isinstance(config, str):
        return config
    try:
        return tomllib.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the tool configuration {config!r:.200} cannot be read: {error}") from None


def _output_limits(config: ToolConfig) -> dict[str, int]:
    """Return the maximum bytes of each tool's output, by the name under which the policy calls the tool."""
    limits = {getattr(config, name).name or name: getattr(config, name).output for name in BUILT_IN}
    for name, settings in config.others.items():
        limits[settings.name or name.rpartition(":")[2]] = settings.output
    return limits
