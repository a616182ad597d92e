"""Our side of the benchmark `swe`: a trivial task, a scripted model and an engine in this process."""

import asyncio
import json
import subprocess
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, Self

from aiohttp import web

from benchmarks import Result
from rookery.core import Completed, SandboxSpec
from rookery.engine import Engine
from rookery.environments.swe import SweEnvironment
from rookery.sandboxes import ProviderHome, open_provider
from rookery.scoring.swe import prepare
from rookery.tasks.swe import FileMapping, SweStep, SweTask, Verifier, make_task

BASH = 10
EDITS = 2
FILES = 500
COMMANDS = (
    "pwd",
    "ls",
    "cat add.sh",
    "x=41; export x",
    "bash add.sh 2 3; true",
    "echo $((x + 1))",
    "grep -n echo add.sh",
    "bash add.sh 2 3",
    "wc -l add.sh",
    "cd /workspace && ls -l",
)
EDIT_CALLS = (
    {"command": "replace", "path": "add.sh", "old_str": "-", "new_str": "+"},
    {"command": "insert", "path": "add.sh", "insert_line": 0, "new_str": "# Adds."},
)
SEED = "echo $(($1 - $2))\n"
TEST = 'cd /workspace && [ "$(bash add.sh 2 3)" = 5 ]\n'


def tool_calls() -> list[tuple[str, dict[str, Any]]]:
    """Return the tool calls of the model, turn by turn, with the edits between the commands."""
    sequence: list[tuple[str, dict[str, Any]]] = [("bash", {"command": line}) for line in COMMANDS]
    sequence.insert(5, ("edit", EDIT_CALLS[0]))
    sequence.insert(9, ("edit", EDIT_CALLS[1]))
    return [*sequence, ("submit", {})]


def write_task(folder: Path) -> SweTask:
    """Write the task to disk and return it."""
    top = folder / "task"
    for name, path, text in (("seeds", "add.sh", SEED), ("tests", "test.sh", TEST)):
        (top / name).mkdir(parents=True, exist_ok=True)
        (top / name / path).write_text(text)
    step = SweStep(
        instruction="add.sh must print the sum of its two arguments.",
        tests=(FileMapping(source=str(top / "tests"), target="/tests"),),
        verifier=Verifier(timeout=60.0),
    )
    files = (FileMapping(source=str(top / "seeds"), target="/workspace"),)
    return SweTask(id="trivial", format="rows", folder=str(top), steps=(step,), files=files)


def commands_ms(folder: Path, repeats: int) -> float:
    """Measure milliseconds of the commands and the test alone, in one bash."""
    path = folder / "plain"
    path.mkdir(exist_ok=True)
    (path / "add.sh").write_text(SEED.replace("-", "+"))
    lines = [line.replace("/workspace", str(path)) for line in (*COMMANDS, TEST)]
    script = "\n".join(["cd " + str(path), *lines])
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run(["bash", "-c", script], check=True, stdout=subprocess.DEVNULL)
        times.append(1e3 * (time.perf_counter() - began))
    empty = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run(["bash", "-c", ":"], check=True)
        empty.append(1e3 * (time.perf_counter() - began))
    return max(0.0, median(times) - median(empty))


class Rollouts:
    """An engine and its inference engine; `one` runs a rollout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._task = make_task(write_task(folder))
        self._stack = AsyncExitStack()
        self._engine: Engine | None = None
        self._model = 0.0
        self._bodies = [
            json.dumps(_completion(name, arguments, turn)).encode()
            for turn, (name, arguments) in enumerate(tool_calls())
        ]

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            engine = Engine(
                SweEnvironment(), policy=url, out=self._folder / "runs", runners=0, sandbox="local", record="plain"
            )
            self._engine = await self._stack.enter_async_context(engine)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def one(self) -> tuple[float, float]:
        """Run a rollout and return its wall time and the model's share in milliseconds."""
        assert self._engine is not None
        self._model = 0.0
        began = time.perf_counter()
        rollouts = [group.rollouts[0] async for group in self._engine.groups([self._task], restart=True)]
        wall = 1e3 * (time.perf_counter() - began)
        (rollout,) = rollouts
        if rollout.outcome != Completed() or rollout.reward != 1.0:
            raise RuntimeError(f"a rollout ended as {rollout.outcome!r} with reward {rollout.reward}")
        return wall, 1e3 * self._model

    async def _complete(self, request: web.Request) -> web.Response:
        began = time.perf_counter()
        request_body = json.loads(await request.read())
        turn = sum(message["role"] == "assistant" for message in request_body["messages"])
        answer = web.Response(body=self._bodies[turn], content_type="application/json")
        self._model += time.perf_counter() - began
        return answer

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "script", "object": "model"}]})


def _completion(name: str, arguments: dict[str, Any], turn: int) -> dict[str, Any]:
    call = {
        "id": f"c{turn}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "script",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
    }


def _files(source: Path) -> list[Path]:
    return [path for path in source.rglob("*") if path.is_file()]


class _TransferCounter:
    """Wraps a sandbox and counts the calls that transfer files into it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.transfers = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("upload", "write"):
            self.transfers += 1
        return getattr(self._inner, name)


async def upload_rows(folder: Path, times: int) -> list[Result]:
    """Measure how `prepare` uploads 500 files of a task, beside one write per file."""
    source = folder / "many"
    for number in range(FILES):
        path = source / f"d{number % 20}" / f"f{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {number}\n" * 20)
    task = write_task(folder)
    mapping = (FileMapping(source=str(source), target="/workspace"),)
    many = SweTask(id="many", format="rows", folder=str(folder), steps=task.steps, files=mapping)
    provider = open_provider("local", ProviderHome(folder=folder / "sandboxes", run="bench"))
    uploads: list[float] = []
    writes: list[float] = []
    transfers = 0
    try:
        for _ in range(times):
            sandbox = await provider.create(SandboxSpec(provider="local"), attempt="bench")
            counted: Any = _TransferCounter(sandbox)
            await prepare(counted, many, timeout=60.0)
            transfers = max(transfers, counted.transfers)
            began = time.perf_counter()
            await sandbox.upload(source, "/work/many")
            uploads.append(1e3 * (time.perf_counter() - began))
            began = time.perf_counter()
            for path in await asyncio.to_thread(_files, source):
                await sandbox.write(f"/work/one/{path.relative_to(source)}", path.read_bytes())
            writes.append(1e3 * (time.perf_counter() - began))
            await sandbox.close()
    finally:
        await provider.close()
    return [
        Result(
            name="upload_500",
            unit="transfers",
            ours=float(transfers),
            target="<= 1",
            note=f"calls that transfer the {FILES} files of a task into its sandbox",
        ),
        Result(
            name="upload_500_ms", unit="ms", ours=median(uploads), peer="a write for each", theirs=median(writes)
        ),
    ]
