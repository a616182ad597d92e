"""Boxes, tasks and scripted agents for the tests of tasks in a box."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rookery.core import Message, SandboxSpec, Task
from rookery.environments.swe.bash_tool import FOLDER
from rookery.sandboxes import ProviderHome, open_provider
from rookery.sandboxes.protocol import Sandbox
from rookery.tasks.swe import FileMapping, SweStep, SweTask, Verifier, make_task
from tests.environments.helpers import Attempt
from tests.servers import Answer, Request


@asynccontextmanager
async def box(tmp_path: Path, **fields: Any) -> AsyncIterator[Sandbox]:
    provider = open_provider("local", ProviderHome(folder=tmp_path / "boxes", run="test"))
    try:
        yield await provider.create(SandboxSpec(provider="local", **fields), attempt="a1")
    finally:
        await provider.close()


def attempt_in(made: Sandbox, folder: str = "/work", **options: Any) -> Attempt:
    """A context whose sandbox is this one."""

    async def opened(_: SandboxSpec) -> Sandbox:
        return made

    attempt = Attempt(open_sandbox=opened, **options)
    attempt.ctx.state[FOLDER] = folder
    return attempt


def call(name: str, **arguments: Any) -> Answer:
    return Answer(None, calls=[(name, json.dumps(arguments))], finish="tool_calls")


def bash(command: str) -> Answer:
    return call("bash", command=command)


SUBMIT = call("submit")


def told(request: Request) -> list[str]:
    """What the tools answered, as the policy read it."""
    return [message["content"] for message in request.body["messages"] if message["role"] == "tool"]


Script = Callable[[Request], Answer]


def scripted(*answers: Answer | str) -> Script:
    """Plays by the number of turns so far, so that many rollouts share one server; the last answer repeats."""

    def play(request: Request) -> Answer:
        turn = sum(message["role"] == "assistant" for message in request.body["messages"])
        answer = answers[min(turn, len(answers) - 1)]
        return Answer(answer) if isinstance(answer, str) else answer

    return play


def small_task(
    folder: Path,
    name: str = "sum",
    *,
    files: dict[str, str] | None = None,
    test: str = 'out=$(bash add.sh 2 3) && [ "$out" = 5 ]\n',
    setup: str = "",
    instruction: str = "add.sh must print the sum of its two arguments.",
    mode: Any = "fresh",
    steps: tuple[tuple[str, str], ...] = (),
    **fields: Any,
) -> Task:
    """A task on disk; `steps`: (instruction, test) of more steps."""
    top = folder / name
    seeds = top / "seeds"
    seeds.mkdir(parents=True)
    for path, text in (files or {"add.sh": "echo $(($1 - $2))\n"}).items():
        (seeds / path).parent.mkdir(parents=True, exist_ok=True)
        (seeds / path).write_text(text)
    made = []
    for number, (said, script) in enumerate(((instruction, test), *steps)):
        tests = top / f"tests{number}"
        tests.mkdir()
        (tests / "test.sh").write_text(f"cd /workspace || exit 1\n{script}")
        begin = ""
        if setup and not number:
            (top / "setup.sh").write_text(setup)
            begin = str(top / "setup.sh")
        made.append(
            SweStep(
                name=f"s{number}",
                instruction=said,
                setup=begin,
                tests=(FileMapping(source=str(tests), target="/tests"),),
                verifier=Verifier(mode=mode, timeout=60.0),
                **(fields.pop("step", {}) if not number else {}),
            )
        )
    task = SweTask(
        id=name,
        format="rows",
        folder=str(top),
        steps=tuple(made),
        files=(FileMapping(source=str(seeds), target="/workspace"),),
        **fields,
    )
    return make_task(task, (Message("user", instruction),))
