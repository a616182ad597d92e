"""Write task directories in Harbor's format, with an MCP server that uses the real SDK."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rookery.core import Task
from rookery.tasks import load_tasks
from tests.environments.agent.helpers import make_turn
from tests.servers import Answer, Request

SERVER = '''
"""A server of the task. Nothing else in the sandbox contains the result of its tool."""
import hashlib, os, sys
from mcp.server import MCPServer

server = MCPServer("vault")

@server.tool()
def unlock(number: int) -> str:
    """Opens the drawer of this number."""
    return f"{number}-{os.environ['WORD']}-" + hashlib.sha256(b"%d" % number).hexdigest()[:8] + f" {os.getcwd()}"

if sys.argv[1] == "stdio":
    server.run("stdio")
else:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
'''
UNLOCKED = "6-of the task-e7f6c011"
"""Result of `unlock(6)`, followed by the working directory."""
START = "/opt/rookery/agent/start.py"
"""Starts a program with the agent's packages; those of openai-agents include the MCP SDK."""
TEST = """cd /workspace
mkdir -p /logs/verifier
if {check}; then echo '{reward}'; else echo '{{"reward": 0}}'; fi > /logs/verifier/reward.json
"""


@dataclass
class StepDirectory:
    """One step of a task. `check` is a shell command that runs in the working directory."""

    instruction: str
    check: str = "true"
    reward: str = '{"reward": 1}'
    files: dict[str, str] = field(default_factory=dict)
    """Files of the step. `setup.sh` runs when the step begins."""
    settings: str = ""
    """Further lines of the step's TOML table."""


def harbor_task(
    directory: Path, *steps: StepDirectory, name: str = "task", head: str = "", settings: str = ""
) -> Task:
    """Write a task with these steps and load it. `head` contains TOML lines before the first table."""
    top = directory / name
    lines = ['schema_version = "1.4"', head, "[environment]", 'network_mode = "no-network"', settings]
    for number, step in enumerate(steps, 1):
        step_directory = top / "steps" / f"s{number}"
        for path, text in {
            "instruction.md": step.instruction,
            "tests/test.sh": TEST.format(check=step.check, reward=step.reward),
            **{f"workdir/{name}": text for name, text in step.files.items()},
        }.items():
            (step_directory / path).parent.mkdir(parents=True, exist_ok=True)
            (step_directory / path).write_text(text)
        lines += ["[[steps]]", f'name = "s{number}"', step.settings]
    (top / "task.toml").write_text("\n".join(lines) + "\n")
    (task,) = load_tasks(top)
    return task


def stdio_server(*command: str, name: str = "vault", extra: str = "") -> str:
    """Return the TOML lines that configure a stdio MCP server."""
    return (
        f"env = {{ WORD = 'of the task' }}\n[[environment.mcp_servers]]\nname = {json.dumps(name)}\n"
        f'transport = "stdio"\ncommand = {json.dumps(command[0])}\nargs = {json.dumps(command[1:])}\n{extra}'
    )


def get_text(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of parts."""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content or ())


def model_that_calls(tool: str, shell: tuple[str, str]) -> Callable[[Request], Answer]:
    """Return a model that calls the server's tool, writes the result to a file with `shell`, and answers.

    `shell` is the name of a tool that runs commands, and the name of its parameter.
    """

    def reply(request: Request) -> Answer:
        messages = request.body["messages"]
        turn_number = sum(message["role"] == "assistant" for message in messages)
        calls: tuple[tuple[str, str], ...] = ()
        if turn_number == 0:
            calls = ((tool, json.dumps({"number": 6})),)
        elif turn_number == 1:
            response = [get_text(message["content"]) for message in messages if message["role"] == "tool"][-1]
            command = f"cat > heard.txt <<'END'\n{response}\nEND"
            calls = ((shell[0], json.dumps({shell[1]: command, "description": "Write a file"})),)
        return make_turn(turn_number, "it is done", calls)

    return reply
