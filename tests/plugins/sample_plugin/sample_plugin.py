"""One plug-in of every kind, as an outside package would write it."""

from pathlib import Path
from typing import Any

import msgspec

from rookery import Context, Environment, Message, ModelReply, ModelRequest, UpstreamConfig
from rookery.gateway.dialects import Operation
from rookery.gateway.dialects.chat import ChatDialect
from rookery.sandboxes import Command
from rookery.sandboxes.protocol import MachineCheck
from rookery.sandboxes.subprocess_provider import SubprocessProvider
from rookery.tasks.swe import SweStep, SweTask, Verifier
from rookery.upstreams import Upstream, UpstreamInfo

LAUNCHER = {"command": ["echo", "{prompt}"], "dialect": "sample-dialect", "about": "Prints its prompt."}
PROMPT_FILE = "sample-prompt.txt"


class SampleEnvironment(Environment):
    """Environment that sends the prompt to the model and repeats the reply in a sandbox."""

    async def run(self, ctx: Context) -> None:
        reply = await ctx.policy.chat(ctx.task.prompt)
        sandbox = await ctx.sandbox()
        result = await sandbox.exec(Command(argv=("echo", reply.text)))
        ctx.state["output"] = result.stdout.decode()

    async def score(self, ctx: Context) -> float:
        return float(ctx.state["output"] == "sample reply\n")


class SampleUpstream(Upstream):
    """Upstream that gives the same reply to every call."""

    name = "sample-upstream"
    path_prefixes = ("sample-file",)
    accepts_tokens = False
    accepts_raw_json = False
    version = 0

    def __init__(self, config: UpstreamConfig, key: str | None = None) -> None:
        self.config = config

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        return UpstreamInfo(url="sample:", models=("sample-model",))

    async def complete(self, request: ModelRequest, *, timeout: float, **callbacks: Any) -> ModelReply:
        return ModelReply(message=Message("assistant", "sample reply"), finish="stop", sampled_tokens=2)


class SampleProvider(SubprocessProvider):
    """Provider that runs programs as subprocesses and has one check for `rookery doctor`."""

    name = "sample-sandbox"

    def diagnose(self) -> list[MachineCheck]:
        return [MachineCheck("sample-check", "ok", "the sample provider always works")]


class SampleDialect(ChatDialect):
    """Chat completions under another path."""

    name = "sample-dialect"
    paths = ("/sample/completions",)

    def describe_operations(self) -> dict[str, Operation]:
        schema = {"title": "SampleRequest", "type": "object", "required": ["messages"]}
        return {
            path: msgspec.structs.replace(operation, summary="Create a sample.", request=schema)
            for path, operation in super().describe_operations().items()
        }


class SampleFormat:
    """Task directories with a prompt in `sample-prompt.txt`."""

    name = "sample-format"
    priority = 99

    def matches(self, folder: Path) -> bool:
        return (folder / PROMPT_FILE).is_file()

    def read(self, folder: Path, id: str, problems: Any, options: Any) -> SweTask:  # noqa: A002
        step = SweStep(instruction=(folder / PROMPT_FILE).read_text(), verifier=Verifier())
        return SweTask(id=id, folder=str(folder), format=self.name, steps=(step,))

    def write(self, task: SweTask, folder: Path) -> list[str]:
        (folder / PROMPT_FILE).write_text(task.steps[0].instruction)
        return []
