"""Probes of sandboxes for agents, and the prompts of agents."""

import asyncio
from typing import Any

import pytest

from rookery.core import ExecResult, Message, SandboxSpec, Task, TaskError
from rookery.environments.agent import find_launcher
from rookery.environments.agent.sandbox_probe import SandboxProbe
from rookery.environments.agent.task_kinds import build_prompt
from rookery.sandboxes.protocol import Command
from rookery.tasks.swe import SweStep, SweTask, make_task
from tests.environments.helpers import Attempt


class FakeSandbox:
    """A sandbox whose Python reports its platform."""

    id = "sandbox"
    spec = SandboxSpec()

    async def exec(self, command: Command, *, on_output: Any = None) -> Any:
        assert command.argv[0] == "python3"
        return ExecResult(status="exited", exit_code=0, stdout=b"3.11 x86_64 glibc-2.36\n")

    async def close(self) -> None:
        pass


async def test_each_image_is_probed_once_without_blocking_others() -> None:
    release = asyncio.Event()
    opened: list[str | None] = []

    async def create(spec: SandboxSpec) -> Any:
        opened.append(spec.image)
        if spec.image == "slow":
            await release.wait()
        return FakeSandbox()

    ctx = Attempt(open_sandbox=create).ctx
    probe = SandboxProbe(find_launcher("openai-sdk"))
    waiting = [asyncio.create_task(probe.find_python(ctx, SandboxSpec(image="slow"))) for _ in range(3)]
    while not opened:
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert (await probe.find_python(ctx, SandboxSpec(image="other"))).version == "3.11"
    release.set()
    assert {(await one).libc for one in waiting} == {"glibc-2.36"}
    assert opened == ["slow", "other"]


async def test_prompt_with_a_lone_surrogate_is_the_tasks_fault() -> None:
    ctx = Attempt(task=Task(id="half", prompt=(Message("user", "a\ud800b"),))).ctx
    with pytest.raises(TaskError, match="half"):
        build_prompt(ctx, "plain", "/work", instruct=False)


async def test_prompt_of_the_row_replaces_the_instruction_of_the_first_step() -> None:
    task = SweTask(id="t", format="rows", folder="/none", steps=(SweStep(instruction="repair it"),))
    messages = (Message("system", "be brief"), Message("user", "repair it, please"))
    for prompt, expected in ((messages, "be brief\n\nrepair it, please"), ((), "repair it")):
        assert build_prompt(Attempt(task=make_task(task, prompt)).ctx, "swe", "/work", instruct=True) == expected
