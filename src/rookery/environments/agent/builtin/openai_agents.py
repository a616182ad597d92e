# ruff: noqa: T201, S602  (runs in a box of its own; what it prints is its answer)
"""An agent with a shell and the task's MCP servers, written with openai-agents: it runs in the sandbox."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents.mcp import MCPServer, MCPServerStdio, MCPServerStreamableHttp
from openai import AsyncOpenAI

SECONDS = 300.0
"""For one answer of a server; without it, the package waits for five."""


@function_tool
def shell(command: str) -> str:
    """Runs a command and returns its exit code and what it printed.

    Args:
        command: A line for sh.
    """
    try:
        done = subprocess.run(command, shell=True, capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "killed after 120 seconds"
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    return f"exit code {done.returncode}\n{said[-16000:]}"


def server_of(name: str, entry: dict[str, Any]) -> MCPServer:
    """One of the task's servers, not yet connected."""
    about: Any = {key: value for key, value in entry.items() if key != "type"}
    kind = MCPServerStreamableHttp if entry["type"] == "http" else MCPServerStdio
    return kind(about, name=name, client_session_timeout_seconds=SECONDS, cache_tools_list=True)


def entries_of(listed: Path) -> dict[str, dict[str, Any]]:
    """The task's servers by name; there is no file where it has none."""
    found = json.loads(listed.read_text(encoding="utf-8")) if listed.exists() else {"mcpServers": {}}
    return dict(found["mcpServers"])


async def main(prompt: str, entries: dict[str, dict[str, Any]]) -> None:
    """One task, to its answer."""
    kind = OpenAIChatCompletionsModel if os.environ["AGENT_API"] == "chat" else OpenAIResponsesModel
    model = kind(model=os.environ["AGENT_MODEL"], openai_client=AsyncOpenAI(max_retries=5))
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for name, entry in entries.items():
            try:
                servers.append(await stack.enter_async_context(server_of(name, entry)))
            except Exception as error:  # noqa: BLE001  (whatever it is: one server less, as other agents do it)
                print(f"the MCP server {name} did not start: {error!r:.500}", file=sys.stderr)
        agent = Agent(
            name="agent",
            instructions="Use the shell and your other tools to do the task. Then answer.",
            tools=[shell],
            mcp_servers=servers,
            mcp_config={"include_server_in_tool_names": True},  # else one that is named as ours ends the agent
            model=model,
        )
        result = await Runner.run(agent, prompt, max_turns=1000)
    print(result.final_output)


asyncio.run(
    main(
        Path(os.environ["AGENT_PROMPT_FILE"]).read_text(encoding="utf-8"),
        entries_of(Path(os.environ["AGENT_MCP_FILE"])),
    )
)
