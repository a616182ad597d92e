"""Scripted agents over the built-in tasks: what each does, and what must come of it."""

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
"""Bytes of an agent's box."""
_AGENT = re.compile(r"\(You are the agent ([a-z-]+), at ([a-z-]+)\.\)")

Fix = tuple[Answer, ...]
QUICK = ("backup-rotation", "cache-expiry", "last-line", "missing-group")
"""Tasks whose tests take the least."""


class Agent(NamedTuple):
    """What an agent does, given the turns that repair the task; and how it must end."""

    turns: Callable[[Fix], tuple[Answer, ...]]
    paid: bool
    outcome: Outcome = Completed()


def _shell(*lines: str) -> tuple[Answer, ...]:
    return tuple(bash(line) for line in lines)


FILL = "cat /dev/zero > /workspace/.fill; cat /dev/zero > /tmp/fill; ls -l /workspace/.fill"
AGENTS: dict[str, Agent] = {
    "submits": Agent(lambda fix: (*fix, SUBMIT), True),
    "does-nothing": Agent(lambda _: (SUBMIT,), False),
    "gives-up": Agent(lambda _: (*_shell("ls"), Answer("I cannot find it.")), False),
    "loops": Agent(lambda _: _shell("ls >/dev/null; true"), False, Truncated("turns")),
    "loops-after": Agent(lambda fix: (*fix, bash("true")), True, Truncated("turns")),
    "crashes-shell": Agent(lambda fix: (*_shell("kill -9 $$", "exit 3", "exec true"), *fix, SUBMIT), True),
    "kills-all": Agent(
        lambda fix: (
            *_shell("sleep 1000 & sleep 1000 &", "kill -9 -1", "kill -9 -1; kill -9 $PPID"),
            *fix,
            SUBMIT,
        ),
        True,
    ),
    "fills-disk": Agent(lambda fix: (*_shell(FILL, "rm -f /workspace/.fill /tmp/fill"), *fix, SUBMIT), True),
    "stays-full": Agent(lambda _: (*_shell(FILL), SUBMIT), False),
    "hangs": Agent(lambda fix: (call("bash", command="sleep 1000", timeout=0.5), *fix, SUBMIT), True),
    "daemons": Agent(
        lambda fix: (
            *_shell("(setsid nohup bash -c 'trap \"\" TERM; while :; do sleep 0.1; done' >/dev/null 2>&1 &)"),
            *fix,
            SUBMIT,
        ),
        True,
    ),
    "babbles": Agent(
        lambda fix: (
            Answer(None, calls=[("bash", "{"), ("nothing", "{}")], finish="tool_calls"),
            *_shell("head -c 3000000 /dev/zero | tr '\\0' x"),
            *fix,
            SUBMIT,
        ),
        True,
    ),
}


def fixes(folder: Path) -> Fix:
    """The turns that repair a task: its solution, file by file, with the editor."""
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


class Cast:
    """The tasks, each for every agent, and the model that plays them."""

    def __init__(self, folder: Path, count: int, only: tuple[str, ...] = ()) -> None:
        write("open-instruct", folder)
        found = [task for task in load_tasks(str(folder)) if not only or task.id in only]
        assert not any(task.invalid for task in found), [task.invalid for task in found]
        self._fixes = {task.id: fixes(folder / task.id) for task in found}
        self._plays: dict[tuple[str, str], tuple[Answer, ...]] = {}
        names = list(AGENTS)
        self.tasks: list[Task] = []
        self.expected: dict[str, Agent] = {}
        for number in range(count):
            # Each agent meets each task once the count is large enough: the rows shift by one.
            task = found[number % len(found)]
            agent = names[(number + number // len(found)) % len(names)]
            told = f"{task.text}\n\n(You are the agent {agent}, at {task.id}.)"
            identity = f"{task.id}-{agent}-{number}"
            self.tasks.append(msgspec.structs.replace(task, id=identity, prompt=(Message("user", told),)))
            self.expected[identity] = AGENTS[agent]
            self._plays[task.id, agent] = AGENTS[agent].turns(self._fixes[task.id])

    def play(self, request: Request) -> Answer:
        messages = request.body["messages"]
        prompt = next(message["content"] for message in messages if message["role"] == "user")
        named = _AGENT.search(prompt)
        assert named is not None
        turns = self._plays[named[2], named[1]]
        at = sum(message["role"] == "assistant" for message in messages)
        return turns[min(at, len(turns) - 1)]
