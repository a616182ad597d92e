"""The `tools` environment: the policy calls typed Python functions until it gives its answer.

Runs in a runner process. Guarantees:

- Every tool call gets exactly one result message, in the order of the calls.
- An invalid call does not end the attempt; its result message says what is wrong with it.
- Every call has a deadline. Pauses of the run, and time in the queue of the inference engine, do not count.
- By default, an exception in a tool becomes the call's result message. `RookeryError`, `Truncation` (an exhausted
  budget) and cancellation are raised.
"""

import asyncio
import inspect
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from rookery.core import (
    Limits,
    Message,
    Rollout,
    RookeryError,
    Sampling,
    Task,
    TaskError,
    ToolCall,
    ToolSchema,
    Truncated,
    Truncation,
    UpstreamError,
    UsageError,
)
from rookery.core.errors import MAX_TRACEBACK, describe
from rookery.environments.base import Environment, Score, Ungraded, reward_bounds
from rookery.environments.context import Context, run_with_deadline
from rookery.environments.python_tool import python
from rookery.environments.text import clip, render
from rookery.environments.threads import run_in_thread
from rookery.environments.tools import InvalidArguments, Tool, find_tool
from rookery.scoring.answers import match_answer
from rookery.scoring.scorers import CommandCheck, ScorerInput, apply_scorer, make_scorer
from rookery.telemetry.operations import observe_tool_call
from rookery.upstreams.protocol import ModelReply

ToolErrors: TypeAlias = Literal["observe", "raise"]
ANSWER = "answer"
"""Key of the final answer in `ctx.state`."""
SUBMISSION = "submission"
"""Key in the `info` of a rollout of a program or file that is graded and that the messages do not contain."""
SANDBOX_GONE = "it is graded in the sandbox in which the policy worked, which is gone"
"""Reason why a stored rollout cannot be graded again."""
MAX_PARALLEL_CALLS = 16
"""Maximum number of tool calls of one turn that run at the same time if `parallel` is set."""
DEFAULT_CALL_SECONDS = 60.0
UNWIND = 5.0
"""Half of the seconds that a cancelled tool gets to end. A tool that exceeds them fails the rollout as a bug."""


class ToolOutcome(msgspec.Struct):
    """The end of a tool call: with a result, with an exception, or at its deadline."""

    text: str = ""
    """The result as text. If `timed_out`, the time limit in seconds."""
    error: BaseException | None = None
    timed_out: bool = False


class ToolEnvironment(Environment):
    """Environment in which the policy calls tools, turn by turn, until it replies without a tool call.

        class Capitals(ToolEnvironment):
            system_prompt = "Answer with one word."

            @tool
            async def look_up(self, country: str) -> str:
                \"\"\"Return an article about a country.\"\"\"
                return ARTICLES[country]

    Tools are passed to the constructor, listed in the class attribute `toolset`, or defined as methods with
    `@tool`. If there are none, the policy gets the tool `python`, which runs a program in the sandbox. The text of
    the reply without a tool call is the answer, unless a tool has set `ctx.state["answer"]` before. `answer(ctx)`
    returns it, and the default `score` compares it with `task.data["answer"]`.
    """

    toolset: ClassVar[Sequence[Tool | Callable[..., Any] | str] | None] = None
    """Tools to use if none are passed to the constructor, as objects or by name (`"bash"`). Tools defined as
    methods are always added."""
    scorer: ScorerInput | None = None
    """Scorer that grades the answer: an object, a name, or a table with a name and arguments. None compares the
    answer with `task.data["answer"]`."""
    system_prompt: str | None = None
    """System message, used unless the task's prompt starts with its own."""
    parallel: bool = False
    """True if the tool calls of one turn run concurrently. By default they run one after another, in order."""
    tool_errors: ToolErrors = "observe"
    """`observe`: an exception of a tool becomes its result message. `raise`: it fails the rollout as a bug."""
    max_result: int = 16_384
    """Maximum size in bytes of a tool result that the policy sees. Longer results are cut in the middle."""

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any] | str] | None = None,
        *,
        system_prompt: str | None = None,
        max_turns: int | None = None,
        parallel: bool | None = None,
        tool_errors: ToolErrors | None = None,
        max_result: int | None = None,
        scorer: ScorerInput | None = None,
    ) -> None:
        if type(self) is ToolEnvironment and not self.name:
            self.name = "tools"
        self._tools_argument = tools
        if system_prompt is not None:
            self.system_prompt = system_prompt
        if parallel is not None:
            self.parallel = parallel
        if tool_errors is not None:
            self.tool_errors = tool_errors
        if max_result is not None:
            self.max_result = max_result
        if self.tool_errors not in ("observe", "raise"):
            raise UsageError(f"tool_errors must be 'observe' or 'raise', not {self.tool_errors!r}")
        if self.max_result < 1:
            raise UsageError(f"max_result must be at least 1 byte, not {self.max_result!r}")
        if scorer is not None:
            self.scorer = scorer
        # A function on the class would become a method.
        chosen = vars(self).get("scorer", inspect.getattr_static(type(self), "scorer"))
        self._scorer = None if chosen is None else make_scorer(chosen)
        if self._scorer is not None:
            self.roles = tuple(dict.fromkeys((*self.roles, *self._scorer.roles)))
        if max_turns is not None:
            if max_turns < 1:
                raise UsageError(f"max_turns must be at least 1, not {max_turns!r}")
            self.limits = Limits(turns=max_turns).over(self.limits)
        self._tools  # noqa: B018  (report invalid tools now)

    @property
    def needs_sandbox(self) -> bool:
        return super().needs_sandbox or any(tool.sandbox for tool in self._tools.values())

    def tools(self) -> Sequence[ToolSchema]:
        return tuple(tool.schema for tool in self._tools.values())

    def messages(self, ctx: Context) -> list[Message]:
        """Return the messages that start the conversation."""
        prompt = ctx.task.prompt
        if not prompt:
            raise TaskError(f"task {ctx.task.id} has no prompt")
        if self.system_prompt is None or prompt[0].role in ("system", "developer"):
            return list(prompt)
        return [Message("system", self.system_prompt), *prompt]

    def done(self, ctx: Context) -> bool:  # noqa: ARG002  (for subclasses)
        """Return whether the attempt ends after the tool calls of the current turn. For subclasses to override."""
        return False

    def tools_for(self, ctx: Context) -> dict[str, Tool]:  # noqa: ARG002  (for subclasses)
        """Return the tools that the policy may call in an attempt, by name. Subclasses may override this."""
        return self._tools

    def answer(self, ctx: Context) -> str:
        """Return the policy's final answer, or an empty string if there is none."""
        return str(ctx.state.get(ANSWER, ""))

    async def run(self, ctx: Context) -> None:
        if self._scorer is None and type(self).score is ToolEnvironment.score:
            _get_expected_answer(ctx)  # fail before the attempt if the task cannot be scored
        messages = ctx.state["messages"] = self.messages(ctx)
        offered = self.tools_for(ctx)
        schemas = self.tools() if offered is self._tools else tuple(tool.schema for tool in offered.values())
        while True:
            reply = await self._sample_reply(ctx, messages, schemas)
            if not reply.tool_calls:
                if reply.finish == "length":
                    raise Truncation("tokens", "the reply was cut at its token limit")
                if ctx.state.setdefault(ANSWER, reply.text) != reply.text:
                    store_answer(ctx)
                return
            messages.extend(await self._run_calls(ctx, reply.tool_calls))
            if self.done(ctx):
                store_answer(ctx)
                return

    async def restore(self, ctx: Context, rollout: Rollout, messages: Sequence[Message]) -> None:
        ctx.state["messages"] = list(messages)
        ctx.state[ANSWER] = find_stored_answer(rollout, messages)

    def find_restore_problem(self, task: Task, rollout: Rollout) -> str:
        kind = type(self)
        if kind.restore is ToolEnvironment.restore and kind.run is not ToolEnvironment.run:
            return "the environment defines its own `run`, but not `restore`"
        if isinstance(self._scorer, CommandCheck):
            return SANDBOX_GONE
        return super().find_restore_problem(task, rollout)

    async def score(self, ctx: Context) -> Score | Ungraded | float:
        """Return the reward that the scorer gives.

        Without a scorer, it is the highest reward if the answer matches `task.data["answer"]`, else the lowest.
        """
        if self._scorer is not None:
            return await apply_scorer(self._scorer, ctx.submission(self.answer(ctx)), *reward_bounds(self))
        return self.reward_range[match_answer(self.answer(ctx), _get_expected_answer(ctx))]

    @cached_property
    def _tools(self) -> dict[str, Tool]:
        argument = getattr(self, "_tools_argument", None)
        chosen = type(self).toolset if argument is None else argument
        methods = _find_tool_methods(self)
        if chosen is None:
            chosen = () if methods else (python,)
        tools: dict[str, Tool] = {}
        for entry in (*chosen, *methods):
            if isinstance(entry, str):
                entry = find_tool(entry)  # noqa: PLW2901
            tool = entry if isinstance(entry, Tool) else Tool(entry)
            if tool.method:
                raise UsageError(
                    f"the tool {tool.name} is a method: define it on the environment's class and do not list it"
                )
            if tool.name in tools:
                raise UsageError(f"{self.title} has two tools named {tool.name!r}: rename one with @tool(name=…)")
            tools[tool.name] = tool
        return tools

    async def _sample_reply(
        self,
        ctx: Context,
        messages: list[Message],
        schemas: Sequence[ToolSchema] = (),
        sampling: Sampling | None = None,
    ) -> ModelReply:
        """Sample the next reply of the policy, and append its message to `messages`."""
        reply = await ctx.policy.chat(messages, tools=schemas, sampling=sampling)
        if reply.finish == "abort":
            raise UpstreamError(
                "the inference engine aborted the generation (finish reason 'abort'); read the server's log"
            )
        messages.append(reply.message)
        return reply

    async def _run_calls(self, ctx: Context, calls: Sequence[ToolCall]) -> list[Message]:
        """Run the tool calls of one turn and return their result messages in order."""
        if self.parallel and len(calls) > 1:
            slots = asyncio.Semaphore(MAX_PARALLEL_CALLS)

            async def run_call(call: ToolCall) -> ToolOutcome:
                async with slots:
                    return await self._run_call(ctx, call)

            try:
                async with asyncio.TaskGroup() as group:
                    running = [group.create_task(run_call(call)) for call in calls]
            except BaseExceptionGroup as errors:
                if (fault := _find_fault(errors)) is not None:
                    raise fault from errors
                raise
            outcomes = [task.result() for task in running]
            texts = [self._observe(ctx, call, outcome) for call, outcome in zip(calls, outcomes, strict=True)]
        else:
            texts = [self._observe(ctx, call, await self._run_call(ctx, call)) for call in calls]
        # Call IDs are repeated as sampled, even empty or duplicate ones: the order identifies the call.
        pairs = zip(calls, texts, strict=True)
        return [Message("tool", text, tool_call_id=call.id) for call, text in pairs]

    async def _run_call(self, ctx: Context, call: ToolCall) -> ToolOutcome:
        """Run one tool call and return how it ended. Raise only exceptions that end the attempt."""
        ctx.tool_calls += 1
        tools = self.tools_for(ctx)
        tool = tools.get(call.name)
        if tool is None:
            increment(ctx, "bad_tool_calls")
            known = ", ".join(tools) or "none"
            return ToolOutcome(f"There is no tool named {clip(call.name, 100)!r}. The tools are: {known}.")
        try:
            arguments = tool.parse(call.arguments)
        except InvalidArguments as problem:
            increment(ctx, "bad_tool_calls")
            return ToolOutcome(str(problem))
        with observe_tool_call(tool.name, call.id, call.arguments) as operation:
            outcome = await ctx.charge_policy("tool", _run_tool(tool, arguments, ctx))
            operation.result = "time" if outcome.timed_out else "ok" if outcome.error is None else "error"
            operation.output = outcome.text
        return outcome

    def _observe(self, ctx: Context, call: ToolCall, outcome: ToolOutcome) -> str:
        """Return the text that the policy reads about a finished call."""
        if outcome.timed_out:
            increment(ctx, "tool_timeouts")
            return f"{call.name} was stopped: it did not end within its {outcome.text} s."
        error = outcome.error
        if error is None:
            return clip(outcome.text, self.max_result)
        increment(ctx, "tool_errors")
        trace = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
        ctx.log.warning(
            "a tool raised an exception", tool=call.name, error=clip(describe(error), 500), traceback=trace
        )
        if self.tool_errors == "raise":
            raise error
        return clip(f"{call.name} failed: {describe(error)}", self.max_result)


async def _run_tool(tool: Tool, arguments: dict[str, Any], ctx: Context) -> ToolOutcome:
    """Run a tool's function until it ends or its deadline passes. Raise errors that end the attempt."""
    limit = min(tool.timeout or ctx.limits.call or DEFAULT_CALL_SECONDS, ctx.remaining)
    # A tool that enforces its limit itself is only bounded by the stage.
    seconds = ctx.remaining if tool.enforces_limit else limit
    work = _call_function(tool, arguments, ctx, limit)
    # Longer than the stage waits for this coroutine after a cancellation: a tool that keeps running must not look
    # finished.
    task, timed_out = await run_with_deadline(ctx, seconds, work, f"the tool {tool.name}", unwind=2 * UNWIND)
    if not task.cancelled():
        outcome = _raise_fault(task.result())  # it may have failed for another reason while it was cancelled
        if not timed_out:
            return outcome
    elif tool.blocking:
        increment(ctx, "stuck_threads")
        ctx.log.warning("a blocking tool still runs in its thread after its time limit", tool=tool.name)
    return ToolOutcome(f"{seconds:.3g}", timed_out=True)


def _raise_fault(outcome: ToolOutcome) -> ToolOutcome:
    """Raise the outcome's exception if the policy is not responsible for it; otherwise return the outcome."""
    if outcome.error is not None and (fault := _find_fault(outcome.error)) is not None:
        raise fault
    return outcome


async def _call_function(tool: Tool, arguments: dict[str, Any], ctx: Context, limit: float) -> ToolOutcome:
    """Call the tool's function and return any exception as a value, unless this task itself is cancelled."""
    # A SystemExit that leaves a task stops the event loop, so everything must be caught here.
    error: BaseException | None = None
    value: Any = None
    try:
        if tool.blocking:
            value, error = await run_in_thread(tool.name, lambda: tool.invoke(arguments, ctx, limit))
        else:
            value = tool.invoke(arguments, ctx, limit)
        if inspect.isawaitable(value):
            value = await value
        if error is None:
            return ToolOutcome(render(value))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except asyncio.CancelledError as cancelled:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        error = cancelled
    except BaseException as raised:  # noqa: BLE001  (becomes an observation; see `_observe`)
        error = raised
    return ToolOutcome(error=error)


def _find_fault(error: BaseException) -> BaseException | None:
    """Return the `RookeryError` or `Truncation` that `error` is or, if it is a group, contains; otherwise None.

    Such an error ends the attempt. Other exceptions of a tool are shown to the policy.
    """
    if isinstance(error, RookeryError | Truncation):
        return error
    if isinstance(error, BaseExceptionGroup):
        for leaf in error.exceptions:
            if (fault := _find_fault(leaf)) is not None:
                return fault
    return None


def _get_expected_answer(ctx: Context) -> str | float:
    answer = ctx.task.data.get("answer")
    if isinstance(answer, str | int | float) and answer != "":
        return answer
    problem = "is missing" if answer is None else f"is {answer!r:.100}"
    raise TaskError(
        f"task {ctx.task.id} cannot be scored: data.answer must be a text or a number, but it {problem}"
    )


def _find_tool_methods(env: ToolEnvironment) -> list[Tool]:
    """Return the tools defined on the environment's class, bound to `env`, in the order of definition."""
    names: dict[str, None] = {}
    for cls in reversed(type(env).__mro__):
        names.update(dict.fromkeys(vars(cls)))
    attributes = ((name, inspect.getattr_static(type(env), name)) for name in names)
    return [
        getattr(env, name) for name, value in attributes if isinstance(getattr(value, "__func__", value), Tool)
    ]


def store_answer(ctx: Context) -> None:
    """Store an answer that is not the policy's last message in the record, so that it can be graded again."""
    if ANSWER in ctx.state:
        ctx.info.setdefault(ANSWER, str(ctx.state[ANSWER]))


def find_stored_answer(rollout: Rollout, messages: Sequence[Message]) -> str:
    """Return the final answer of a stored rollout, or an empty string if it has none.

    It is `info["answer"]` if the environment stored one there, else the last message of the policy, unless that
    calls a tool or was truncated.
    """
    stored = rollout.info.get(ANSWER)
    if isinstance(stored, str):
        return stored
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.tool_calls or isinstance(rollout.outcome, Truncated):
        return ""
    return last.text


def increment(ctx: Context, metric: str) -> None:
    """Add 1 to a metric of the attempt."""
    ctx.metrics[metric] = ctx.metrics.get(metric, 0.0) + 1
