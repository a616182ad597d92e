"""The `rlm` environment: a root model works on a long context in a REPL, and calls sub-models from code.

The context is the text, data or files that a task is about. It is placed in the sandbox, not in the prompt.

Runs in a runner process.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rookery.core import Limits, Message, Rollout, SandboxSpec, TaskError, ToolSchema, Truncation, UsageError
from rookery.environments.code_environment.limits import (
    PROGRAM_LIMITS,
    limits_for_task,
    normalize_limits,
    sandbox_for_task,
)
from rookery.environments.context import Context
from rookery.environments.rlm.bash_repl import BashRepl
from rookery.environments.rlm.budget import CallFailed
from rookery.environments.rlm.call_tree import CallTree, SubCall
from rookery.environments.rlm.contexts import PlacedContext, parse_source, place_context
from rookery.environments.rlm.conversation import REPL, Conversation
from rookery.environments.rlm.functions import ReplFunctions
from rookery.environments.rlm.options import MAX_CELL_MEMORY, MIN_CELL_MEMORY, RlmOptions, parse_options
from rookery.environments.rlm.prompts import system_prompt
from rookery.environments.rlm.python_repl import CellResult, PythonRepl, Repl, worker_limits
from rookery.environments.rlm.recipes import generate_tasks
from rookery.environments.tool_environment import ANSWER, ToolEnvironment, increment, store_answer
from rookery.environments.tools import Tool
from rookery.sandboxes.protocol import Sandbox
from rookery.workers import WorkerLimits

RESERVED_NAMES = frozenset({"llm", "llm_batch", "rlm", "answer", "budget", "context"})
NO_WORKER = WorkerLimits(memory=None, processes=0)
"""Worker limits with which `sandbox_for_task` leaves the memory and process limits of a sandbox unchanged."""
SANDBOX_OVERHEAD = 64 << 20
"""Bytes of memory that the sandbox of a bash REPL gets in addition to those of the model's scripts."""


class RlmEnvironment(ToolEnvironment):
    """Environment in which a model works in a REPL on text, data or files (the context) too long for a prompt.

        RlmEnvironment(repl="python", max_depth=2, max_calls=100)

    The keyword arguments are those of `RlmOptions`. `tools` can be called as functions in the REPL; `sub_tools`
    can be called by sub-models that have no REPL. The task's data contains the context as `context` (text or
    JSON), `context_file`, `context_folder` or `recipe`, and the expected `answer`. The task's `timeout_seconds`,
    `memory_limit_bytes` and `limits` override the options `cell_seconds` and `cell_memory`.
    """

    name = "rlm"
    own_limits = PROGRAM_LIMITS

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        *,
        sub_tools: Sequence[Tool | Callable[..., Any]] = (),
        system_prompt: str | None = None,
        **options: Any,
    ) -> None:
        self.options = parse_options(options)
        super().__init__(tools, system_prompt=system_prompt, max_result=self.options.max_output)
        self.limits = Limits(turns=self.options.max_turns, run=self.options.max_seconds)
        self._sub_tools = {
            tool.name: tool for tool in (tool if isinstance(tool, Tool) else Tool(tool) for tool in sub_tools)
        }
        for name in self._tools:
            if name in RESERVED_NAMES or name.startswith("_"):
                raise UsageError(f"a tool of rlm cannot be named {name!r}: the REPL already defines that name")
            if self.options.repl == "python" and not name.isidentifier():
                raise UsageError(f"the tool {name!r} cannot be called from Python: rename it with @tool(name=…)")
        if self.options.repl == "bash":
            self.sandbox = SandboxSpec(network="model")

    @property
    def needs_sandbox(self) -> bool:
        return True

    def tools(self) -> Sequence[ToolSchema]:
        return (REPL,) if self.options.style == "tool" else ()

    def tasks(self) -> Sequence[Any]:
        options = self.options
        return generate_tasks(options.kinds, options.megabytes, options.size, options.seed)

    # ---- an attempt

    async def setup(self, ctx: Context) -> None:
        """Transfer the task's context (text, data or files) into the sandbox and start the REPL."""
        answer = ctx.task.data.get("answer")
        if type(self).score is RlmEnvironment.score and not isinstance(answer, str | int | float):
            raise TaskError(f"task {ctx.task.id} cannot be scored: data.answer must be a string or a number")
        source = parse_source(ctx.task.id, ctx.task.data)
        options = ctx.state["options"] = self._options_for(ctx)
        ctx.spec = self._sandbox_for(ctx, options)
        sandbox = await ctx.sandbox()
        placed = await place_context(sandbox, source, preview=self.options.preview)
        tree = ctx.state["tree"] = CallTree(ctx, self.options, self._sub_tools, self._run_child)
        functions = ReplFunctions(tree, 0, self._tools, sandbox)
        ctx.state["placed"] = placed
        ctx.state["repl"] = await self._open_repl(ctx, sandbox, functions, placed)

    def _options_for(self, ctx: Context) -> RlmOptions:
        """Return the options of an attempt: the environment's, with the task's limits for cells."""
        data, raised = normalize_limits(ctx.task.data, MIN_CELL_MEMORY)
        for note in raised:
            ctx.log.warning(note, task=ctx.task.id)
        limits = limits_for_task(ctx.task.id, data, worker_limits(self.options))
        if (limits.memory or 0) > MAX_CELL_MEMORY:
            raise TaskError(
                f"task {ctx.task.id}: the memory limit of {limits.memory} bytes is too large; the maximum is "
                f"{MAX_CELL_MEMORY}"
            )
        ctx.state["worker_limits"] = limits
        return msgspec.structs.replace(self.options, cell_seconds=limits.wall, cell_memory=limits.memory)

    def _sandbox_for(self, ctx: Context, options: RlmOptions) -> SandboxSpec:
        """Return the specification of a REPL's sandbox. It has no network except the channel to this process."""
        limits: WorkerLimits = ctx.state["worker_limits"]
        data, _ = normalize_limits(ctx.task.data, MIN_CELL_MEMORY)
        if options.repl == "python":
            spec = sandbox_for_task(ctx.task.id, limits, data, ctx.spec)
            return msgspec.structs.replace(spec, network="none", allow=())
        spec = sandbox_for_task(ctx.task.id, NO_WORKER, data, ctx.spec)
        task_limits = data.get("limits") or {}
        memory = options.cell_memory + SANDBOX_OVERHEAD
        if task_limits.get("memory") is None and data.get("memory_limit_bytes") is None:
            memory = max(ctx.spec.memory or 0, memory)
        return msgspec.structs.replace(
            spec,
            memory=memory,
            pids=limits.processes if task_limits.get("pids") is not None else spec.pids,
            cpu_seconds=limits.cpu_seconds or spec.cpu_seconds,
            output=limits.output if task_limits.get("output") is not None else spec.output,
            network="model",
            allow=(),
        )

    async def _open_repl(
        self, ctx: Context, sandbox: Sandbox, functions: ReplFunctions, placed: PlacedContext
    ) -> Repl:
        options: RlmOptions = ctx.state["options"]
        if options.repl == "python":
            return await PythonRepl.open(sandbox, functions, placed, options, ctx.state["worker_limits"])
        return await BashRepl.open(sandbox, functions, placed, options)

    def messages(self, ctx: Context) -> list[Message]:
        if not ctx.task.prompt:
            raise TaskError(f"task {ctx.task.id} has no prompt")
        return self._first_messages(ctx.task.prompt, ctx.state["placed"], 0)

    def _first_messages(self, prompt: Sequence[Message], placed: PlacedContext, depth: int) -> list[Message]:
        """Return the first messages of a conversation: a system message that describes the REPL, and the prompt.

        If the prompt starts with a system message, its text is appended to that description.
        """
        text = self.system_prompt
        if text is None:
            text = system_prompt(self.options, self._tools, placed, depth)
        if prompt[0].role not in ("system", "developer"):
            return [Message("system", text), *prompt]
        return [Message("system", f"{text}\n\n{prompt[0].text}"), *prompt[1:]]

    async def run(self, ctx: Context) -> None:
        tree: CallTree = ctx.state["tree"]
        tree.begin()
        repl: Repl = ctx.state["repl"]
        messages = ctx.state["messages"] = self.messages(ctx)
        conversation = Conversation(
            tree.root_chat,
            repl,
            self.options,
            messages,
            get_budget=lambda: tree.left(0),
            make_cut_error=lambda: Truncation("tokens", "the reply was cut at its token limit"),
            on_cell=lambda result: self.on_cell(ctx, result, root=True),
            charge=lambda work: ctx.charge_policy("tool", work),
            context_tokens=self.options.context_tokens or ctx.limits.context,
        )
        try:
            ctx.state[ANSWER] = await conversation.run()
        finally:
            if repl.functions.answered:  # it counts, whatever ended the rollout afterwards
                ctx.state[ANSWER] = repl.functions.value
            store_answer(ctx)
            await tree.close()
            budget = tree.budget
            ctx.metrics.update(
                sub_calls=float(budget.calls),
                tree_tokens=float(budget.tokens),
                depth=float(budget.deepest),
                compactions=float(conversation.compactions),
            )

    async def restore(self, ctx: Context, rollout: Rollout, messages: Sequence[Message]) -> None:
        await super().restore(ctx, rollout, messages)  # `run` stores the answer of the REPL in the record

    def on_cell(self, ctx: Context, result: CellResult, *, root: bool) -> None:
        if root:
            ctx.tool_calls += 1
        names = ["cells" if root else "sub_cells", f"cells/{result.status}"]
        names += [f"recovered/{result.recovered}"] if result.recovered != "none" else []
        for name in names:
            increment(ctx, name)
        if result.timed_out and self.options.end_on_timeout:
            if root:
                raise Truncation("time", "a cell exceeded its time limit")
            raise CallFailed("a cell of the sub-model exceeded its time limit")

    async def _run_child(self, tree: CallTree, request: SubCall) -> str:
        """Run a sub-model that has its own REPL, in a new sandbox, and return its answer."""
        ctx = tree.ctx
        sandbox = await ctx.sandbox(ctx.spec)
        repl: Repl | None = None
        try:
            placed = await place_context(sandbox, request.context, preview=self.options.preview)
            functions = ReplFunctions(tree, request.depth, self._tools, sandbox)
            repl = await self._open_repl(ctx, sandbox, functions, placed)
            turns = 0

            async def chat(messages: Sequence[Message], **options: Any) -> Any:
                nonlocal turns
                turns += 1
                if turns > self.options.sub_turns:
                    raise CallFailed(f"the sub-model did not answer within its {self.options.sub_turns} turns")
                return await tree.chat(messages, request.depth, **options)

            conversation = Conversation(
                chat,
                repl,
                self.options,
                self._first_messages([Message("user", request.prompt)], placed, request.depth),
                get_budget=lambda: tree.left(request.depth),
                make_cut_error=lambda: CallFailed("the sub-model's reply was cut at its token limit"),
                on_cell=lambda result: self.on_cell(ctx, result, root=False),
                charge=lambda work: ctx.charge_policy("tool", work),
                context_tokens=self.options.context_tokens or ctx.limits.context,
            )
            return await conversation.run()
        finally:
            try:
                if repl is not None:
                    await repl.close()
            finally:
                await sandbox.close()

    async def teardown(self, ctx: Context) -> None:
        repl: Repl | None = ctx.state.get("repl")
        if repl is not None:
            await repl.close()
