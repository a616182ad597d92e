# ruff: noqa: T201, S602  (runs in the sandbox; its output is its answer)
"""An agent with a shell and the task's MCP servers, written with openai-agents. Runs in the sandbox."""

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

RESPONSE_SECONDS = 300.0
"""Time limit in seconds for one response of an MCP server. The default of openai-agents is 5 seconds."""


@function_tool
def shell(command: str) -> str:
    """Run a command and return its exit code and output.

    Args:
        command: A command line for sh.
    """
    try:
        result = subprocess.run(command, shell=True, capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "killed after 120 seconds"
    output = (result.stdout + result.stderr).decode("utf-8", "replace")
    return f"exit code {result.returncode}\n{output[-16000:]}"


def make_server(name: str, entry: dict[str, Any]) -> MCPServer:
    """Return one of the task's MCP servers, not yet connected. `entry` is its configuration."""
    parameters: Any = {key: value for key, value in entry.items() if key != "type"}
    kind = MCPServerStreamableHttp if entry["type"] == "http" else MCPServerStdio
    return kind(parameters, name=name, client_session_timeout_seconds=RESPONSE_SECONDS, cache_tools_list=True)


def read_servers(config: Path) -> dict[str, dict[str, Any]]:
    """Return the configurations of the task's MCP servers by name. If there are none, `config` does not exist."""
    if not config.exists():
        return {}
    return dict(json.loads(config.read_text(encoding="utf-8"))["mcpServers"])


async def main(prompt: str, entries: dict[str, dict[str, Any]]) -> None:
    """Run the agent on one task and print its answer."""
    kind = OpenAIChatCompletionsModel if os.environ["AGENT_API"] == "chat" else OpenAIResponsesModel
    model = kind(model=os.environ["AGENT_MODEL"], openai_client=AsyncOpenAI(max_retries=5))
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for name, entry in entries.items():
            try:
                servers.append(await stack.enter_async_context(make_server(name, entry)))
            except Exception as error:  # noqa: BLE001  (start without this server, as other agents do)
                print(f"the MCP server {name} did not start: {error!r:.500}", file=sys.stderr)
        agent = Agent(
            name="agent",
            instructions="Use the shell and your other tools to do the task. Then answer.",
            tools=[shell],
            mcp_servers=servers,
            mcp_config={"include_server_in_tool_names": True},  # avoids clashes with `shell`
            model=model,
        )
        result = await Runner.run(agent, prompt, max_turns=1000)
    print(result.final_output)


asyncio.run(
    main(
        Path(os.environ["AGENT_PROMPT_FILE"]).read_text(encoding="utf-8"),
        read_servers(Path(os.environ["AGENT_MCP_FILE"])),
    )
)
