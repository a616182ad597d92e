"""The `sandbox` environment: the policy works in a sandbox with `bash`, `edit` and MCP tools, on any task.

Runs in a runner process. It is for everything that is not a SWE task: its tasks are ordinary rows with a prompt
and, if needed, files. Any scorer can grade them, or none.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rookery.core import Limits, Rollout, Task
from rookery.environments.base import Score, Ungraded
from rookery.environments.context import Context
from rookery.environments.swe.mcp_client import McpConnections, check_mcp_sdk
from rookery.environments.swe.mcp_servers import parse_servers, parse_task_servers
from rookery.environments.tool_environment import SANDBOX_GONE, ToolEnvironment
from rookery.environments.tools import Tool
from rookery.scoring.scorers import AnswerMatch, CommandCheck, NoScorer, Scorer, ScorerInput, apply_scorer

PROMPT = (
    "You work in a sandbox. Use the tools to look around, to change what must be changed and to try it. When you "
    "are done, answer without calling a tool."
)
_MCP = "sandbox.mcp"
_MCP_TOOLS = "sandbox.mcp_tools"


class SandboxEnvironment(ToolEnvironment):
    """Environment in which the policy works in a sandbox, with `bash`, `edit` and the tools of MCP servers.

        SandboxEnvironment(["bash", "python"], scorer="numeric", max_turns=30)

    The reply without a tool call is the answer. `scorer` grades it. Without a scorer, a task is graded by its
    `check`, a shell command that runs in the sandbox, or by its `answer`. A rollout of a task that has
    neither is ungraded: it has no reward and does not train.
    """

    name = "sandbox"
    toolset: ClassVar[Sequence[Tool | Callable[..., Any] | str] | None] = ("bash", "edit")
    limits = Limits(turns=50, run=1800.0, call=120.0)
    max_result = 20_480

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any] | str] | None = None,
        *,
        mcp: Sequence[Any] | None = None,
        system_prompt: str | None = None,
        max_turns: int | None = None,
        parallel: bool | None = None,
        max_result: int | None = None,
        scorer: ScorerInput | None = None,
    ) -> None:
        self.mcp_servers = parse_servers(mcp)
        if self.mcp_servers:
            check_mcp_sdk()
        super().__init__(
            tools,
            system_prompt=PROMPT if system_prompt is None else system_prompt,
            max_turns=max_turns,
            parallel=parallel,
            max_result=max_result,
            scorer=scorer,
        )

    @property
    def needs_sandbox(self) -> bool:
        return True

    async def setup(self, ctx: Context) -> None:
        """Create the sandbox with the task's files, and start the MCP servers of the run and of the task."""
        task_servers = parse_task_servers(ctx.task.id, ctx.task.data.get("mcp") or ())
        sandbox = await ctx.sandbox()
        if task_servers or self.mcp_servers:
            check_mcp_sdk()
            connections = ctx.state[_MCP] = McpConnections()
            opening = connections.open(self.mcp_servers, task_servers, sandbox, self._tools)
            ctx.state[_MCP_TOOLS] = await ctx.charge_policy("sandbox", opening)

    def tools_for(self, ctx: Context) -> dict[str, Tool]:
        return {**self._tools, **ctx.state[_MCP_TOOLS]} if _MCP_TOOLS in ctx.state else self._tools

    async def score(self, ctx: Context) -> Score | Ungraded:
        scorer = self._scorer or choose_scorer(ctx.task)
        return await apply_scorer(scorer, ctx.submission(self.answer(ctx)), *self.reward_range)

    def find_restore_problem(self, task: Task, rollout: Rollout) -> str:
        if isinstance(self._scorer or choose_scorer(task), CommandCheck):
            return SANDBOX_GONE
        return super().find_restore_problem(task, rollout)

    async def teardown(self, ctx: Context) -> None:
        connections: McpConnections | None = ctx.state.get(_MCP)
        if connections is not None:
            await connections.close()


def choose_scorer(task: Task) -> Scorer:
    """Return the scorer for a task of a run without one: by its `check`, else by its `answer`, else none."""
    if task.data.get("check") not in (None, ""):
        return CommandCheck()
    return AnswerMatch() if task.data.get("answer") not in (None, "") else NoScorer()
