"""Task folders of Harbor's format for agents, and an MCP server of the real SDK that lies in them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rookery.core import Task
from rookery.tasks import load_tasks
from tests.servers import Answer, Request

SERVER = '''
"""A server of the task's own. What its tool says stands nowhere else in the box."""
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
SAID = "6-of the task-e7f6c011"
"""What it says to 6, before its folder."""
START = "/opt/rookery/agent/start.py"
"""Starts a program with the agent's own packages; the SDK is one of them for openai-agents."""
TEST = """cd /workspace
mkdir -p /logs/verifier
if {check}; then echo '{reward}'; else echo '{{"reward": 0}}'; fi > /logs/verifier/reward.json
"""


@dataclass
class StepFolder:
    """One step: `check` is a line of shell in the working folder."""

    instruction: str
    check: str = "true"
    reward: str = '{"reward": 1}'
    files: dict[str, str] = field(default_factory=dict)
    """`setup.sh` is run when the step begins."""
    settings: str = ""
    """More lines of its table."""


def harbor_task(folder: Path, *steps: StepFolder, name: str = "task", head: str = "", settings: str = "") -> Task:
    """The task of a folder with these steps, as it is read from the disk. `head`: lines before the tables."""
    top = folder / name
    lines = ['schema_version = "1.4"', head, "[environment]", 'network_mode = "no-network"', settings]
    for number, step in enumerate(steps, 1):
        below = top / "steps" / f"s{number}"
        for path, text in {
            "instruction.md": step.instruction,
            "tests/test.sh": TEST.format(check=step.check, reward=step.reward),
            **{f"workdir/{name}": text for name, text in step.files.items()},
        }.items():
            (below / path).parent.mkdir(parents=True, exist_ok=True)
            (below / path).write_text(text)
        lines += ["[[steps]]", f'name = "s{number}"', step.settings]
    (top / "task.toml").write_text("\n".join(lines) + "\n")
    (task,) = load_tasks(top)
    return task


def stdio(*command: str, name: str = "vault", more: str = "") -> str:
    """A server of the task's, as its folder says it."""
    return (
        f"env = {{ WORD = 'of the task' }}\n[[environment.mcp_servers]]\nname = {json.dumps(name)}\n"
        f'transport = "stdio"\ncommand = {json.dumps(command[0])}\nargs = {json.dumps(command[1:])}\n{more}'
    )


def texts_of(content: Any) -> str:
    """What a message says, in whatever form."""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content or ())


def asks_a_server(tool: str, shell: tuple[str, str]) -> Callable[[Request], Answer]:
    """A policy that asks the server, writes down what it heard, and says that it is done. `shell`: a tool that
    runs commands, and its argument's name."""

    def play(request: Request) -> Answer:
        messages = request.body["messages"]
        at = sum(message["role"] == "assistant" for message in messages)
        calls: tuple[tuple[str, str], ...] = ()
        if at == 0:
            calls = ((tool, json.dumps({"number": 6})),)
        elif at == 1:
            heard = [texts_of(one["content"]) for one in messages if one["role"] == "tool"][-1]
            command = f"cat > heard.txt <<'END'\n{heard}\nEND"
            calls = ((shell[0], json.dumps({shell[1]: command, "description": "Writes it down"})),)
        return turn(at, "it is done", calls)

    return play


def turn(at: int, text: str, calls: tuple[tuple[str, str], ...] = ()) -> Answer:
    """An answer whose tokens go on from the turn before; its calls have names that no other turn's have."""
    tokens = list(range(10 * at + 10))
    said: dict[str, Any] = {"prompt_ids": tokens[:-3], "ids": tokens[-3:], "logprobs": [-1.0] * 3}
    if not calls:
        return Answer(text, **said)
    body = Answer(None, calls=calls, finish="tool_calls", **said).completion(chat=True)
    for number, call in enumerate(body["choices"][0]["message"]["tool_calls"]):
        call["id"] = f"call_{at}_{number}"
    return Answer(body=body)
