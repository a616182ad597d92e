"""Claude Code and Codex with a task's MCP server, live: `make test-agents`. Not a part of `make test`."""

import json
from pathlib import Path

import pytest

from rookery.environments.agent import AgentEnvironment
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent.folders import StepFolder, asks_a_server, harbor_task, stdio
from tests.environments.agent.kit import agents_at, all_of, get_agents_dir, real_agent, scripted_engine, trainable
from tests.servers import ModelServer

__all__ = ["local_sandboxes"]
pytestmark = [pytest.mark.usefixtures("local_sandboxes"), pytest.mark.timeout(600)]
SERVER = (Path(__file__).parents[1] / "swe" / "mcp_server.py").read_text(encoding="utf-8")
"""Of the standard library alone: a box of these agents has no packages. The SDK's own client is tried on it in
`tests/environments/swe/test_mcp.py`."""
TOOLS = {
    "claude-code": ("mcp__my_vault__whoami", ("Bash", "command")),
    "codex": ("mcp__my_vault__whoami", ("exec_command", "cmd")),
}


@pytest.mark.parametrize("name", sorted(TOOLS))
async def test_it_calls_a_tool_of_the_tasks_server(name: str, tmp_path: Path) -> None:
    real_agent(name)
    step = StepFolder(
        "Ask the vault who it is.",
        check="grep -q '/workspace of the task' heard.txt",
        files={"server.py": SERVER},
    )
    task = harbor_task(tmp_path, step, settings=stdio("python3", "/workspace/server.py", name="my vault"))
    with agents_at(get_agents_dir()):
        env = AgentEnvironment(name)
        async with (
            ModelServer(asks_a_server(*TOOLS[name])) as server,
            scripted_engine(server, env, tmp_path) as made,
        ):
            (found,) = await all_of(made, [task])
    offered = [json.dumps(request.body.get("tools"))[:20_000] for request in list(server.requests)[:1]]
    assert found.reward == 1.0, (json.dumps(found.info, indent=1), offered)
    trainable(found, 3)
