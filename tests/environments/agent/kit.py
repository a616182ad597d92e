"""Runs with agents in real boxes, against a scripted model server or the stand-in for vLLM."""

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

from rookery import Engine
from rookery.core import Group, Rollout, RookeryError, Sampling, label
from rookery.environments.agent import AgentEnvironment, find_launcher
from rookery.environments.agent.installation import get_agents_dir, host_python, install_agent
from rookery.upstreams import UpstreamConfig
from tests.engine.conftest import QUICK
from tests.engine_standins import StandinServer
from tests.servers import Answer, ModelServer, Request

PLAIN = """
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


def program(folder: Path, text: str, name: str = "agent.py", before: str = PLAIN) -> Path:
    path = folder / name
    path.write_text(before + text, encoding="utf-8")
    return path


def standin_engine(server: StandinServer, env: AgentEnvironment, out: Path, **options: Any) -> Engine:
    """Records by tokens; answers are of random weights."""
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


async def all_of(made: Engine, rows: list[Any], k: int = 1) -> list[Rollout]:
    groups: list[Group] = [group async for group in made.groups(rows, k=k)]
    return [rollout for group in groups for rollout in group.rollouts]


@contextmanager
def agents_at(folder: Path) -> Iterator[None]:
    """Installs go there."""
    before = os.environ.get("ROOKERY_AGENTS")
    os.environ["ROOKERY_AGENTS"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["ROOKERY_AGENTS"]
        else:
            os.environ["ROOKERY_AGENTS"] = before


Step = str | tuple[str, dict[str, Any]]
"""A text, or a call of a tool: its name and arguments."""


def scripted(*steps: Step) -> Callable[[Request], Answer]:
    """Plays the steps, told apart by how many answers a conversation holds; tokens go on from turn to turn."""

    def play(request: Request) -> Answer:
        at = sum(message["role"] == "assistant" for message in request.body["messages"])
        step = steps[min(at, len(steps) - 1)]
        text, calls = (step, ()) if isinstance(step, str) else (None, ((step[0], json.dumps(step[1])),))
        tokens = list(range(10 * at + 10))
        return Answer(
            text,
            calls=calls,
            prompt_ids=tokens[:-3],
            ids=tokens[-3:],
            logprobs=[-1.0] * 3,
            finish="tool_calls" if calls else "stop",
        )

    return play


def scripted_engine(server: ModelServer, env: AgentEnvironment, out: Path, **options: Any) -> Engine:
    """Records what the server tells of tokens."""
    settings: dict[str, Any] = {
        "runners": 0,
        "retry": QUICK,
        "record": "messages",
        "concurrency": 6,
        "sandbox": "local",
    }
    policy = UpstreamConfig(urls=(f"{server.url}/v1",))
    return Engine(env, policy=policy, out=out / "runs", **{**settings, **options})


def trainable(rollout: Rollout, turns: int) -> None:
    """Completed, with every token that was sampled in it trained once."""
    assert label(rollout.outcome) == "completed", (rollout.outcome, rollout.info)
    assert rollout.usage.turns == turns, rollout.info
    assert sum(segment.trained for segment in rollout.segments) == rollout.usage.sampled_tokens == 3 * turns


@functools.cache
def agent_there(name: str) -> str:
    """Why a real agent cannot be had here, or nothing; installed once, for all who run these tests."""
    try:
        asyncio.run(install_agent(find_launcher(name), host_python(), home=get_agents_dir()))
    except RookeryError as error:
        return str(error)
    return ""


def real_agent(name: str) -> None:
    """Skips where it cannot be had."""
    with ThreadPoolExecutor(1) as threads:  # the test has a loop of its own
        if why := threads.submit(agent_there, name).result():
            pytest.skip(f"[probed] {why}")


def left_behind(seconds: float) -> str:
    """A program whose fork outlives it and calls on, `seconds` for an answer; each status goes into a file."""
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
        with open("/work/answers", "a") as file:
            print(code, file=file)
        time.sleep(0.01)
print(42)
"""
