"""What is asked of an agent's box."""

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


class Answering:
    """A box of some image: its Python says which one it is."""

    id = "box"
    spec = SandboxSpec()

    async def exec(self, command: Command, *, on_output: Any = None) -> Any:
        assert command.argv[0] == "python3"
        return ExecResult(status="exited", exit_code=0, stdout=b"3.11 x86_64 glibc-2.36\n")

    async def close(self) -> None:
        pass


async def test_an_image_that_takes_long_keeps_no_other_waiting_and_is_asked_once() -> None:
    slow = asyncio.Event()
    opened: list[str | None] = []

    async def open_box(spec: SandboxSpec) -> Any:
        opened.append(spec.image)
        if spec.image == "slow":
            await slow.wait()
        return Answering()

    ctx = Attempt(open_sandbox=open_box).ctx
    boxes = SandboxProbe(find_launcher("openai-sdk"))
    waiting = [asyncio.create_task(boxes.find_python(ctx, SandboxSpec(image="slow"))) for _ in range(3)]
    while not opened:
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        assert (await boxes.find_python(ctx, SandboxSpec(image="other"))).version == "3.11"
    slow.set()
    assert {(await one).libc for one in waiting} == {"glibc-2.36"}
    assert opened == ["slow", "other"]


async def test_a_prompt_that_cannot_be_written_down_is_the_tasks_fault() -> None:
    ctx = Attempt(task=Task(id="half", prompt=(Message("user", "a\ud800b"),))).ctx
    with pytest.raises(TaskError, match="surrogate"):
        build_prompt(ctx, "plain", "/work", instruct=False)


async def test_what_a_row_says_goes_before_the_instruction_of_its_tasks_first_step() -> None:
    box = SweTask(id="t", format="rows", folder="/none", steps=(SweStep(instruction="repair it"),))
    said = (Message("system", "be brief"), Message("user", "repair it, please"))
    for prompt, wanted in ((said, "be brief\n\nrepair it, please"), ((), "repair it")):
        assert build_prompt(Attempt(task=make_task(box, prompt)).ctx, "swe", "/work", instruct=True) == wanted
