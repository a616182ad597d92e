"""Execute the Python examples of the documentation as they are printed.

Every block runs in an empty directory. `http://localhost:8000` is replaced by the embedded policy, and names that
an example assumes (`tasks`, `train`, `sandbox`, …) are defined here. `EXECUTED_ELSEWHERE` names the test of each
block that this module does not execute.
"""

import ast
import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine, SandboxSpec, SyncEngine, make_batch
from rookery.sandboxes import Command, ProviderHome, open_provider
from tests.cli.helpers import SECONDS, start_command
from tests.docs.test_docs import PAGES, ROOT, blocks

EXECUTED_ELSEWHERE = {
    ("docs/guides/agents.md", 0): "tests/environments/agent/test_real_agents.py",  # needs an installed agent
    (
        "docs/guides/cluster.md",
        0,
    ): "tests/cluster/test_ray.py",  # needs a cluster and a server
    ("docs/guides/environments.md", 2): "tests/engine/test_run_gateway.py",  # needs a run with a gateway
    ("docs/guides/remote-sandboxes.md", 0): "tests/sandboxes/remote/test_conformance.py",
    ("docs/guides/sandboxes.md", 2): "tests/sandboxes/test_conformance.py",  # a template for a reader's provider
    ("docs/trainers/trl.md", 0): "tests/adapters/test_trl.py",
    ("docs/trainers/trl.md", 1): "tests/adapters/test_trl_worker.py",  # TRL's trainer itself needs a GPU
    ("docs/tutorials/agent.md", 0): "tests/environments/agent/test_real_agents.py",  # needs an installed agent
    ("docs/tutorials/train-the-embedded-policy.md", 0): "tests/training/test_docs.py",
}
"""Examples that other tests execute, by page and index of the block."""
EXAMPLES = {
    f"{page.relative_to(ROOT)}:{index}": block
    for page in PAGES
    for index, block in enumerate(blocks(page, "python"))
    if (str(page.relative_to(ROOT)), index) not in EXECUTED_ELSEWHERE
}
ENVIRONMENT = """
from rookery import Context, environment

@environment(tasks=[{"prompt": "What is 3 + 4?", "answer": "7"}] * 20)
async def sums(ctx: Context) -> float:
    reply = await ctx.policy.chat(ctx.task.prompt)
    return float(len(reply.text) % 2)
"""


LOCAL_SERVER = "http://127.0.0.1:8000/v1"


@asynccontextmanager
async def serve_embedded(folder: Path) -> AsyncIterator[str]:
    """Run `rookery serve-embedded` and yield its base URL."""
    async with start_command("serve-embedded", "--port", "0", cwd=folder) as process:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), SECONDS)).decode()
        yield line.rpartition(" at ")[2].strip()


class TrainedEnough(Exception):
    """Ends an example that would train forever."""


class Reader:
    """Defines what a reader of the examples already has: tasks, a trainer, an open engine, a sandbox."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trained = 0

    def train(self, batch: object) -> None:
        assert batch is not None
        self.trained += 1
        if self.trained == 2:
            raise TrainedEnough

    async def names(self, source: str, stack: AsyncExitStack) -> dict[str, Any]:
        names: dict[str, Any] = {
            "__name__": "example",
            "add_sample": lambda *columns: None,
            "log_metrics": lambda metrics: None,
            "asyncio": asyncio,
            "Command": Command,
            "Engine": Engine,
            "checkpoint": {},
            "make_batch": make_batch,
            "push_weights": lambda: None,
            "steps": 2,
            "tasks": [{"prompt": "What is 3 + 4?", "answer": "7"}] * 4,
            "train": self.train,
        }
        if "engine." in source and " as engine" not in source:
            kind = Engine if "async " in source or "await " in source else SyncEngine
            engine = kind("sums.py", policy="embedded", runners=0, out=self.folder / "runs")
            if isinstance(engine, SyncEngine):
                names["engine"] = stack.enter_context(engine)
            else:
                names["engine"] = await stack.enter_async_context(engine)
        if "make_batch(groups" in source or "make_rows(groups" in source or "runs/latest" in source:
            async with Engine("sums.py", policy="embedded", runners=0, out=self.folder / "runs") as finished:
                names["groups"] = [group async for group in finished.groups(k=2, want=2)]
        if "Engine.connect" in source:
            await stack.enter_async_context(
                Engine("sums.py", policy="embedded", runners=0, out=self.folder / "runs")
            )
        if "sandbox." in source or "ctx.sandbox" in source:
            provider = open_provider("local", ProviderHome(folder=self.folder / "sandboxes", run="example"))
            stack.push_async_callback(provider.close)
            network = "model" if "listener()" in source else "none"
            sandbox = await provider.create(spec := SandboxSpec(provider="local", network=network), attempt="1")
            await sandbox.write("agent.py", b"")
            names |= {"sandbox": sandbox, "spec": spec, "on_client": lambda reader, writer: writer.close()}
            names["ctx"] = type("Ctx", (), {"sandbox": staticmethod(lambda: asyncio.sleep(0, sandbox))})
        if "from_model(model" in source:
            from rookery.upstreams.embedded import load_builtin_weights

            names["model"] = load_builtin_weights().to_model()
        if "task-data" in source:
            task = self.folder / "task-data" / "one"
            (task / "tests").mkdir(parents=True)
            (task / "instruction.md").write_text("Do it.\n")
            (task / "tests" / "test.sh").write_text("exit 0\n")
        return names


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
async def test_example_runs_as_printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(ENVIRONMENT)
    source = EXAMPLES[name].replace('"http://localhost:8000/v1"', '"embedded"').replace("runners=8", "runners=1")
    source = source.replace('model="Qwen/Qwen3-8B"', 'model="embedded"')
    reader = Reader(tmp_path)
    async with AsyncExitStack() as stack:
        if LOCAL_SERVER in source:
            source = source.replace(LOCAL_SERVER, await stack.enter_async_context(serve_embedded(tmp_path)))
        names = await reader.names(source, stack)
        code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        try:
            if code.co_flags & inspect.CO_COROUTINE:
                await eval(code, names)
            else:
                await asyncio.to_thread(exec, code, names)
        except TrainedEnough:
            assert reader.trained == 2


def test_examples_executed_elsewhere_exist() -> None:
    for (page, index), test in EXECUTED_ELSEWHERE.items():
        assert index < len(blocks(ROOT / page, "python")), page
        assert (ROOT / test).is_file(), test
