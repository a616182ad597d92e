"""The `rlm` environment: a root model, its REPL over a long context, and the sub-models it calls from code."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rookery.core import Limits, Message, SandboxSpec, TaskError, ToolSchema, Truncation, UsageError
from rookery.environments.base import Score
from rookery.environments.code.limits import OWN, normalized, of_task, sandbox_of
from rookery.environments.context import Context
from rookery.environments.rlm.bash import BashRepl
from rookery.environments.rlm.budgets import CallFailed
from rookery.environments.rlm.contexts import Placed, put, source_of
from rookery.environments.rlm.conversation import REPL, Conversation
from rookery.environments.rlm.options import LEAST_CELL_MEMORY, MOST_CELL_MEMORY, Options, options_of
from rookery.environments.rlm.prompts import system_prompt
from rookery.environments.rlm.recipes import tasks_of
from rookery.environments.rlm.repl import Observed, PythonRepl, Repl, worker_limits
from rookery.environments.rlm.tree import Asked, Tree
from rookery.environments.rlm.verbs import Verbs
from rookery.environments.schemas import Tool
from rookery.environments.tools import ANSWER, ToolEnvironment
from rookery.sandboxes.protocol import Sandbox
from rookery.workers import WorkerLimits

TAKEN = frozenset({"llm", "llm_batch", "rlm", "answer", "budget", "context"})
NO_WORKER = WorkerLimits(memory=None, processes=0)
"""Limits that ask nothing of a sandbox."""
ROOM = 64 << 20
"""Of a bash sandbox's memory, for what is not the scripts' own."""


class RlmEnvironment(ToolEnvironment):
    """A model that works in a REPL over a context that no prompt could hold. Arguments: see `Options`.

    `tools` are functions in the REPL; `sub_tools` are what sub-models may call. A task's context is its row's
    `context` (text or JSON), `context_file` or `context_folder`; its `answer` is what the answer is compared with.
    Its `timeout_seconds`, `memory_limit_bytes` and `limits` go over `cell_seconds` and `cell_memory`.
    """

    name = "rlm"
    own_limits = OWN

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        *,
        sub_tools: Sequence[Tool | Callable[..., Any]] = (),
        system_prompt: str | None = None,
        **options: Any,
    ) -> None:
        self.options = options_of(options)
        super().__init__(tools, system_prompt=system_prompt, max_result=self.options.max_output)
        self.limits = Limits(turns=self.options.max_turns, run=self.options.max_seconds)
        self._sub = {
            tool.name: tool for tool in (one if isinstance(one, Tool) else Tool(one) for one in sub_tools)
        }
        for name in self._tools:
            if name in TAKEN or name.startswith("_"):
                raise UsageError(f"a tool of rlm cannot be named {name!r}: the REPL has that name already")
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
        return tasks_of(options.kinds, options.megabytes, options.size, options.seed)

    # ---- an attempt

    async def setup(self, ctx: Context) -> None:
        """The context lies in the sandbox, and the REPL runs, before the policy acts."""
        answer = ctx.task.data.get("answer")
        if type(self).score is RlmEnvironment.score and not isinstance(answer, str | int | float):
            raise TaskError(f"task {ctx.task.id} cannot be scored: data.answer must be a text or a number")
        source = source_of(ctx.task.id, ctx.task.data)
        options = ctx.state["options"] = self._options_of(ctx)
        ctx.spec = self._spec(ctx, options)
        sandbox = await ctx.sandbox()
        placed = await put(sandbox, source, preview=self.options.preview)
        tree = ctx.state["tree"] = Tree(ctx, self.options, self._sub, self._child)
        verbs = Verbs(tree, 0, self._tools)
        ctx.state["placed"] = placed
        ctx.state["repl"] = await self._opened(ctx, sandbox, verbs, placed)

    def _options_of(self, ctx: Context) -> Options:
        """Return the options of an attempt: its row's limits of a cell go over the environment's."""
        data, raised = normalized(ctx.task.data, LEAST_CELL_MEMORY)
        for note in raised:
            ctx.log.warning(note, task=ctx.task.id)
        allowed = of_task(ctx.task.id, data, worker_limits(self.options))
        if (allowed.memory or 0) > MOST_CELL_MEMORY:
            raise TaskError(f"task {ctx.task.id}: a cell cannot have {allowed.memory} bytes of memory")
        ctx.state["worker_limits"] = allowed
        return msgspec.structs.replace(self.options, cell_seconds=allowed.wall, cell_memory=allowed.memory)

    def _spec(self, ctx: Context, options: Options) -> SandboxSpec:
        """Return the sandbox of a REPL. It has no network but the one channel."""
        allowed: WorkerLimits = ctx.state["worker_limits"]
        data, _ = normalized(ctx.task.data, LEAST_CELL_MEMORY)
        if options.repl == "python":
            made = sandbox_of(ctx.task.id, allowed, data, ctx.spec)
            return msgspec.structs.replace(made, network="none", allow=())
        made = sandbox_of(ctx.task.id, NO_WORKER, data, ctx.spec)
        said = data.get("limits") or {}
        memory = options.cell_memory + ROOM
        if said.get("memory") is None and data.get("memory_limit_bytes") is None:
            memory = max(ctx.spec.memory or 0, memory)
        return msgspec.structs.replace(
            made,
            memory=memory,
            pids=allowed.processes if said.get("pids") is not None else made.pids,
            cpu_seconds=allowed.cpu_seconds or made.cpu_seconds,
            output=allowed.output if said.get("output") is not None else made.output,
            network="model",
            allow=(),
        )

    async def _opened(self, ctx: Context, sandbox: Sandbox, verbs: Verbs, placed: Placed) -> Repl:
        options: Options = ctx.state["options"]
        if options.repl == "python":
            return await PythonRepl.open(sandbox, verbs, placed, options, ctx.state["worker_limits"])
        return await BashRepl.open(sandbox, verbs, placed, options)

    def messages(self, ctx: Context) -> list[Message]:
        if not ctx.task.prompt:
            raise TaskError(f"task {ctx.task.id} has no prompt")
        return self._begun(ctx.task.prompt, ctx.state["placed"], 0)

    def _begun(self, prompt: Sequence[Message], placed: Placed, depth: int) -> list[Message]:
        """What the model is told of its REPL, then what the task says: one system message, then the others."""
        told = self.system_prompt
        if told is None:
            told = system_prompt(self.options, self._tools, placed, depth)
        if prompt[0].role not in ("system", "developer"):
            return [Message("system", told), *prompt]
        return [Message("system", f"{told}\n\n{prompt[0].text}"), *prompt[1:]]

    async def run(self, ctx: Context) -> None:
        tree: Tree = ctx.state["tree"]
        tree.begin()
        repl: Repl = ctx.state["repl"]
        messages = ctx.state["messages"] = self.messages(ctx)
        talk = Conversation(
            tree.root_chat,
            repl,
            self.options,
            messages,
            left=lambda: tree.left(0),
            cut=lambda: Truncation("tokens", "the answer was cut at its token limit"),
            on_cell=lambda observed: self._cell(ctx, observed, root=True),
            working=lambda work: ctx.working("tool", work),
            context=self.options.context_tokens or ctx.limits.context,
        )
        try:
            ctx.state[ANSWER] = await talk.play()
        finally:
            if repl.verbs.answered:  # it stands, whatever ended the rollout after it
                ctx.state[ANSWER] = repl.verbs.value
            await tree.close()
            ledger = tree.ledger
            ctx.metrics.update(
                sub_calls=float(ledger.calls),
                tree_tokens=float(ledger.tokens),
                depth=float(ledger.deepest),
                compactions=float(talk.compactions),
            )

    def _cell(self, ctx: Context, observed: Observed, *, root: bool) -> None:
        if root:
            ctx.tool_calls += 1
        names = ["cells" if root else "sub_cells", f"cells/{observed.status}"]
        names += [f"recovered/{observed.recovered}"] if observed.recovered != "none" else []
        for name in names:
            ctx.metrics[name] = ctx.metrics.get(name, 0.0) + 1
        if observed.late and self.options.end_on_timeout:
            if root:
                raise Truncation("time", "a cell ran out of its time")
            raise CallFailed("a cell of the sub-model ran out of its time")

    async def _child(self, tree: Tree, asked: Asked) -> str:
        """A sub-model with a REPL of its own, in a sandbox of its own."""
        ctx = tree.ctx
        sandbox = await ctx.sandbox(ctx.spec)
        repl: Repl | None = None
        try:
            placed = await put(sandbox, asked.context, preview=self.options.preview)
            verbs = Verbs(tree, asked.depth, self._tools)
            repl = await self._opened(ctx, sandbox, verbs, placed)
            turns = 0

            async def speak(messages: Sequence[Message], **more: Any) -> Any:
                nonlocal turns
                turns += 1
                if turns > self.options.sub_turns:
                    raise CallFailed(f"the sub-model did not answer within its {self.options.sub_turns} turns")
                return await tree.chat(messages, asked.depth, **more)

            talk = Conversation(
                speak,
                repl,
                self.options,
                self._begun([Message("user", asked.prompt)], placed, asked.depth),
                left=lambda: tree.left(asked.depth),
                cut=lambda: CallFailed("the sub-model's answer was cut at its token limit"),
                on_cell=lambda observed: self._cell(ctx, observed, root=False),
                working=lambda work: ctx.working("tool", work),
                context=self.options.context_tokens or ctx.limits.context,
            )
            return await talk.play()
        finally:
            try:
                if repl is not None:
                    await repl.close()
            finally:
                await sandbox.close()

    async def score(self, ctx: Context) -> Score | float:
        return await super().score(ctx)

    async def teardown(self, ctx: Context) -> None:
        repl: Repl | None = ctx.state.get("repl")
        if repl is not None:
            await repl.close()
