"""Scripted agents for the built-in tasks, each with its expected outcome and reward."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from rookery.core import Completed, Message, Outcome, Task, Truncated
from rookery.environments.swe.repairs import write
from rookery.tasks import load_tasks
from tests.environments.swe.helpers import SUBMIT, bash, call
from tests.servers import Answer, Request

TURNS = 14
DISK = 48 << 20
"""Disk limit of an agent's sandbox, in bytes."""
_AGENT = re.compile(r"\(You are the agent ([a-z-]+), at ([a-z-]+)\.\)")

Fix = tuple[Answer, ...]


class Agent(NamedTuple):
    """An agent: a function from the turns that fix the task to all its turns, and the expected result."""

    turns: Callable[[Fix], tuple[Answer, ...]]
    rewarded: bool
    outcome: Outcome = Completed()


def _bash_turns(*lines: str) -> tuple[Answer, ...]:
    return tuple(bash(line) for line in lines)


FILL = "cat /dev/zero > /workspace/.fill; cat /dev/zero > /tmp/fill; ls -l /workspace/.fill"
AGENTS: dict[str, Agent] = {
    "submits": Agent(lambda fix: (*fix, SUBMIT), True),
    "does-nothing": Agent(lambda _: (SUBMIT,), False),
    "gives-up": Agent(lambda _: (*_bash_turns("ls"), Answer("I cannot find it.")), False),
    "loops": Agent(lambda _: _bash_turns("ls >/dev/null; true"), False, Truncated("turns")),
    "loops-after": Agent(lambda fix: (*fix, bash("true")), True, Truncated("turns")),
    "crashes-shell": Agent(lambda fix: (*_bash_turns("kill -9 $$", "exit 3", "exec true"), *fix, SUBMIT), True),
    "kills-all": Agent(
        lambda fix: (
            *_bash_turns("sleep 1000 & sleep 1000 &", "kill -9 -1", "kill -9 -1; kill -9 $PPID"),
            *fix,
            SUBMIT,
        ),
        True,
    ),
    "fills-disk": Agent(lambda fix: (*_bash_turns(FILL, "rm -f /workspace/.fill /tmp/fill"), *fix, SUBMIT), True),
    "stays-full": Agent(lambda _: (*_bash_turns(FILL), SUBMIT), False),
    "hangs": Agent(lambda fix: (call("bash", command="sleep 1000", timeout=0.5), *fix, SUBMIT), True),
    "daemons": Agent(
        lambda fix: (
            *_bash_turns("(setsid nohup bash -c 'trap \"\" TERM; while :; do sleep 0.1; done' >/dev/null 2>&1 &)"),
            *fix,
            SUBMIT,
        ),
        True,
    ),
    "babbles": Agent(
        lambda fix: (
            Answer(None, calls=[("bash", "{"), ("nothing", "{}")], finish="tool_calls"),
            *_bash_turns("head -c 3000000 /dev/zero | tr '\\0' x"),
            *fix,
            SUBMIT,
        ),
        True,
    ),
}


def make_fix(folder: Path) -> Fix:
    """Return a turn that writes the files of the task's solution with the editor."""
    top = folder / "solution" / "files"
    pairs = [
        (
            "edit",
            json.dumps({"command": "create", "path": str(path.relative_to(top)), "file_text": path.read_text()}),
        )
        for path in sorted(top.rglob("*"))
        if path.is_file()
    ]
    return (Answer(None, calls=pairs, finish="tool_calls"),)


class AgentTasks:
    """Tasks for all agents, and the model that plays the agents."""

    def __init__(self, folder: Path, count: int) -> None:
        write("open-instruct", folder)
        tasks = list(load_tasks(str(folder)))
        assert not any(task.invalid for task in tasks), [task.invalid for task in tasks]
        self._fixes = {task.id: make_fix(folder / task.id) for task in tasks}
        self._turns: dict[tuple[str, str], tuple[Answer, ...]] = {}
        names = list(AGENTS)
        self.tasks: list[Task] = []
        self.expected: dict[str, Agent] = {}
        for number in range(count):
            # Shifted by one in each round, so that every agent gets every task if the count is large enough.
            task = tasks[number % len(tasks)]
            agent = names[(number + number // len(tasks)) % len(names)]
            prompt_text = f"{task.text}\n\n(You are the agent {agent}, at {task.id}.)"
            identity = f"{task.id}-{agent}-{number}"
            self.tasks.append(msgspec.structs.replace(task, id=identity, prompt=(Message("user", prompt_text),)))
            self.expected[identity] = AGENTS[agent]
            self._turns[task.id, agent] = AGENTS[agent].turns(self._fixes[task.id])

    def reply(self, request: Request) -> Answer:
        messages = request.body["messages"]
        prompt = next(message["content"] for message in messages if message["role"] == "user")
        match = _AGENT.search(prompt)
        assert match is not None
        turns = self._turns[match[2], match[1]]
        turn = sum(message["role"] == "assistant" for message in messages)
        return turns[min(turn, len(turns) - 1)]
