# ruff: noqa: T201, S602  (runs in a box of its own; what it prints is its answer)
"""An agent with a shell, written with openai-agents: it runs in the sandbox."""

import asyncio
import os
import subprocess
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI


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


async def main(prompt: str) -> None:
    """One task, to its answer."""
    kind = OpenAIChatCompletionsModel if os.environ["AGENT_API"] == "chat" else OpenAIResponsesModel
    model = kind(model=os.environ["AGENT_MODEL"], openai_client=AsyncOpenAI(max_retries=5))
    agent = Agent(
        name="agent", instructions="Use the shell to do the task. Then answer.", tools=[shell], model=model
    )
    result = await Runner.run(agent, prompt, max_turns=1000)
    print(result.final_output)


asyncio.run(main(Path(os.environ["AGENT_PROMPT_FILE"]).read_text(encoding="utf-8")))
