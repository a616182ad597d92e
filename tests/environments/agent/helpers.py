"""Run agents in real sandboxes, against a scripted inference engine or the stand-in for vLLM."""

import asyncio
import functools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rookery import Context, Engine
from rookery.core import Group, Rollout, RookeryError, Sampling, label
from rookery.environments.agent import AgentEnvironment, find_launcher
from rookery.environments.agent.installation import get_agents_dir, host_python, install_agent
from rookery.gateway.gateway_session import GatewaySession
from rookery.sandboxes.protocol import Command, Sandbox
from rookery.upstreams import UpstreamConfig
from tests.engine.conftest import QUICK
from tests.engine_standins import StandinServer
from tests.environments.helpers import unwrap_sandbox
from tests.servers import Answer, ModelServer, Request
from tests.waiting import wait_until

CALL_MODEL = """
import json, os, sys, time, urllib.error, urllib.request

SECONDS = 60

def ask(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)["choices"][0]["message"]

messages = [{"role": "user", "content": sys.argv[1]}]
"""


def write_program(directory: Path, text: str, name: str = "agent.py", prefix: str = CALL_MODEL) -> Path:
    path = directory / name
    path.write_text(prefix + text, encoding="utf-8")
    return path


def standin_engine(server: StandinServer, env: AgentEnvironment, out: Path, **options: Any) -> Engine:
    """Return an engine that records tokens. The stand-in's replies come from random weights."""
    settings: dict[str, Any] = {
        "runners": 0,
        "retry": QUICK,
        "record": "tokens",
        "rendering": {"name": "embedded"},
        "concurrency": 6,
        "sandbox": "local",
        "sampling": Sampling(max_tokens=12, extra={"ignore_eos": True}),
    }
    policy = UpstreamConfig(kind="vllm", urls=(server.root,))
    return Engine(env, policy=policy, out=out / "runs", **{**settings, **options})


async def run_rollouts(engine: Engine, rows: list[Any], k: int = 1) -> list[Rollout]:
    groups: list[Group] = [group async for group in engine.groups(rows, k=k)]
    return [rollout for group in groups for rollout in group.rollouts]


@contextmanager
def agents_directory(directory: Path) -> Iterator[None]:
    """Install agents in `directory` inside the block."""
    prefix = os.environ.get("ROOKERY_AGENTS")
    os.environ["ROOKERY_AGENTS"] = str(directory)
    try:
        yield
    finally:
        if prefix is None:
            del os.environ["ROOKERY_AGENTS"]
        else:
            os.environ["ROOKERY_AGENTS"] = prefix


Step = str | tuple[str, dict[str, Any]]
"""A text, or the name and arguments of a tool call."""


def scripted_model(*steps: Step) -> Callable[[Request], Answer]:
    """Return a model that plays one step per turn; the last step repeats."""

    def reply(request: Request) -> Answer:
        turn = sum(message["role"] == "assistant" for message in request.body["messages"])
        step = steps[min(turn, len(steps) - 1)]
        if isinstance(step, str):
            return Answer(step, **_token_fields(turn))
        name, arguments = step
        calls = ((name, json.dumps(arguments)),)
        return Answer(None, calls=calls, finish="tool_calls", **_token_fields(turn))

    return reply


def _token_fields(turn: int) -> dict[str, Any]:
    """Return token IDs that continue those of the previous turn, three of them sampled."""
    ids = list(range(10 * turn + 10))
    return {"prompt_ids": ids[:-3], "ids": ids[-3:], "logprobs": [-1.0] * 3}


def make_turn(turn: int, text: str, calls: tuple[tuple[str, str], ...] = ()) -> Answer:
    """Return a reply, or tool calls whose IDs differ from those of other turns."""
    if not calls:
        return Answer(text, **_token_fields(turn))
    body = Answer(None, calls=calls, finish="tool_calls", **_token_fields(turn)).completion(chat=True)
    for number, call in enumerate(body["choices"][0]["message"]["tool_calls"]):
        call["id"] = f"call_{turn}_{number}"
    return Answer(body=body)


def scripted_engine(server: ModelServer, env: AgentEnvironment, out: Path, **options: Any) -> Engine:
    """Return an engine that records the token IDs that the server returns."""
    settings: dict[str, Any] = {
        "runners": 0,
        "retry": QUICK,
        "record": "messages",
        "concurrency": 6,
        "sandbox": "local",
    }
    policy = UpstreamConfig(urls=(f"{server.url}/v1",))
    return Engine(env, policy=policy, out=out / "runs", **{**settings, **options})


def assert_trainable(rollout: Rollout, turns: int) -> None:
    """Assert that a rollout completed and that every sampled token is trained once."""
    assert label(rollout.outcome) == "completed", (rollout.outcome, rollout.info)
    assert rollout.usage.turns == turns, rollout.info
    assert sum(segment.trained for segment in rollout.segments) == rollout.usage.sampled_tokens == 3 * turns


@functools.cache
def find_installation_problem(name: str) -> str:
    """Install an agent for all tests of this machine. Return why that failed, or an empty string."""
    try:
        asyncio.run(install_agent(find_launcher(name), host_python(), home=get_agents_dir()))
    except RookeryError as error:
        return str(error)
    return ""


def require_agent(name: str) -> None:
    """Skip the test unless the agent can be installed."""
    with ThreadPoolExecutor(1) as threads:  # the test runs in an event loop already
        if problem := threads.submit(find_installation_problem, name).result():
            pytest.skip(f"[probed] {problem}")


def make_leftover_program(seconds: float) -> str:
    """Return a program whose fork outlives it and keeps calling the model, writing each HTTP status to a file."""
    return f"""
ask(messages)
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    SECONDS = {seconds}
    while True:
        try:
            ask(messages)
            code = 200
        except urllib.error.HTTPError as error:
            code = error.code
        except OSError:
            code = 0
        with open("/work/statuses", "a") as file:
            print(code, file=file)
        time.sleep(0.01)
print(42)
"""


SANDBOX_PIDS: list[int] = []
"""PID of process 1 of each sandbox in which an agent was started."""


class RecordsSandboxPids(AgentEnvironment):
    """Appends the PID whose death ends the sandbox to `SANDBOX_PIDS` before each agent starts."""

    async def _make_command(self, ctx: Context, sandbox: Sandbox, session: GatewaySession) -> Command:
        SANDBOX_PIDS.append(unwrap_sandbox(sandbox).handle.pid)
        return await super()._make_command(ctx, sandbox, session)


class WaitsForRefusal(AgentEnvironment):
    """Scores only after the model calls of a program that outlived its agent are refused."""

    async def score(self, ctx: Context) -> float:
        sandbox = await ctx.sandbox()

        async def refused() -> list[str] | None:
            statuses = (await sandbox.exec(Command(argv=("cat", "/work/statuses")))).stdout.decode().split()
            return statuses if statuses and statuses[-1] != "200" else None

        ctx.info["statuses"] = await wait_until(refused)
        return 1.0
