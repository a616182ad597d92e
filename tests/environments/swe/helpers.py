"""Sandboxes, tasks and scripted models for the tests of the `swe` environment."""

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
async def open_local_sandbox(tmp_path: Path, **fields: Any) -> AsyncIterator[Sandbox]:
    provider = open_provider("local", ProviderHome(folder=tmp_path / "sandboxes", run="test"))
    try:
        yield await provider.create(SandboxSpec(provider="local", **fields), attempt="a1")
    finally:
        await provider.close()


def make_attempt(sandbox: Sandbox, folder: str = "/work", **options: Any) -> Attempt:
    """Return an attempt whose sandbox is this one."""

    async def get_sandbox(_: SandboxSpec) -> Sandbox:
        return sandbox

    attempt = Attempt(open_sandbox=get_sandbox, **options)
    attempt.ctx.state[FOLDER] = folder
    return attempt


def call(name: str, **arguments: Any) -> Answer:
    return Answer(None, calls=[(name, json.dumps(arguments))], finish="tool_calls")


def bash(command: str) -> Answer:
    return call("bash", command=command)


SUBMIT = call("submit")


def get_observations(request: Request) -> list[str]:
    """Return the results of the tool calls, as the policy read them."""
    return [message["content"] for message in request.body["messages"] if message["role"] == "tool"]


ModelFunction = Callable[[Request], Answer]


def scripted_model(*answers: Answer | str) -> ModelFunction:
    """Return a model that replies by the number of turns so far; the last answer repeats."""

    def reply(request: Request) -> Answer:
        turn = sum(message["role"] == "assistant" for message in request.body["messages"])
        answer = answers[min(turn, len(answers) - 1)]
        return Answer(answer) if isinstance(answer, str) else answer

    return reply


INSTRUCTION = "add.sh must print the sum of its two arguments."


def small_task(
    folder: Path,
    name: str = "sum",
    *,
    files: dict[str, str] | None = None,
    test: str = 'out=$(bash add.sh 2 3) && [ "$out" = 5 ]\n',
    setup: str = "",
    instruction: str = INSTRUCTION,
    mode: Any = "fresh",
    steps: tuple[tuple[str, str], ...] = (),
    **fields: Any,
) -> Task:
    """Write a small task and return it. `steps` are the instructions and tests of further steps."""
    top = folder / name
    seeds = top / "seeds"
    seeds.mkdir(parents=True)
    for path, text in (files or {"add.sh": "echo $(($1 - $2))\n"}).items():
        (seeds / path).parent.mkdir(parents=True, exist_ok=True)
        (seeds / path).write_text(text)
    task_steps = []
    for number, (text, script) in enumerate(((instruction, test), *steps)):
        tests = top / f"tests{number}"
        tests.mkdir()
        (tests / "test.sh").write_text(f"cd /workspace || exit 1\n{script}")
        setup_path = ""
        if setup and not number:
            (top / "setup.sh").write_text(setup)
            setup_path = str(top / "setup.sh")
        task_steps.append(
            SweStep(
                name=f"s{number}",
                instruction=text,
                setup=setup_path,
                tests=(FileMapping(source=str(tests), target="/tests"),),
                verifier=Verifier(mode=mode, timeout=60.0),
                **(fields.pop("step", {}) if not number else {}),
            )
        )
    task = SweTask(
        id=name,
        format="rows",
        folder=str(top),
        steps=tuple(task_steps),
        files=(FileMapping(source=str(seeds), target="/workspace"),),
        **fields,
    )
    return make_task(task, (Message("user", instruction),))
