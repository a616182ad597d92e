"""Rollouts of environments and unmodified agents with a real model, served by a real vLLM.

The recorded tokens are checked against vLLM's log and against vLLM's own scoring.
"""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from rookery import Engine
from rookery.core import Completed, Failed, Limits, Rollout, Sampling, Truncated
from rookery.environments import ToolEnvironment, tool
from rookery.environments.agent import AgentEnvironment
from rookery.gateway.config import GatewayConfig
from rookery.gateway.shards import Gateway
from tests.cli.sandbox_kit import local_sandboxes
from tests.engine.conftest import QUICK
from tests.engines.conftest import RunningEngine, start_vllm
from tests.engines.helpers import RENDERING, check_tokens, read_ints, vllm_config, wait_until
from tests.environments.agent.helpers import agents_directory, get_agents_dir, require_agent, write_program

__all__ = ["local_sandboxes"]
pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("local_sandboxes")]

TOOL_CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9], "b": [0-9]\}\}\n</tool_call>'
"""A regular expression that vLLM enforces: the small model would rarely call a tool by itself."""
CHAT = """
import os, sys
from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
for question in ("go on", "and?"):
    reply = client.chat.completions.create(model=os.environ["MODEL"], messages=messages, max_tokens=16)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    messages.append({"role": "user", "content": question})
print(reply.choices[0].message.content)
"""


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def build_engine(vllm: RunningEngine, env: Any, out: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "runners": 0,
        "retry": QUICK,
        "record": "tokens",
        "rendering": RENDERING,
        "concurrency": 4,
        "sampling": Sampling(max_tokens=24, temperature=1.0),
        "sandbox": "local",
    }
    settings |= options
    if settings["record"] == "messages":
        del settings["rendering"]
    return Engine(env, policy=vllm_config(vllm), out=out / "runs", **settings)


async def run_one(vllm: RunningEngine, env: Any, out: Path, row: dict[str, Any], **options: Any) -> Rollout:
    """Run one rollout and check its tokens."""
    earlier = set(vllm.logged_requests())
    async with build_engine(vllm, env, out, **options) as engine:
        (group,) = [group async for group in engine.groups([row])]
    (rollout,) = group.rollouts
    assert not isinstance(rollout.outcome, Failed), rollout.outcome
    constrained = "sampling" in options and "structured_outputs" in options["sampling"].extra
    await check_tokens(vllm, rollout, earlier, constrained=constrained)
    return rollout


async def test_tool_calls_are_parsed_by_vllm_and_recorded_exactly(vllm: RunningEngine, tmp_path: Path) -> None:
    """In `messages` mode vLLM renders the prompts and its own parser finds the tool calls."""
    sampling = Sampling(max_tokens=64, temperature=1.0, extra={"structured_outputs": {"regex": TOOL_CALL}})
    env = ToolEnvironment([add], max_turns=3)
    row = {"prompt": "What is 2 + 3?", "answer": "5"}
    rollout = await run_one(vllm, env, tmp_path, row, record="messages", sampling=sampling)
    assert rollout.outcome == Truncated("turns")
    assert rollout.usage.turns == 3
    assert rollout.usage.tool_calls == 3


async def test_python_tool_runs_what_the_model_calls(vllm: RunningEngine, tmp_path: Path) -> None:
    call = r'<tool_call>\n\{"name": "python", "arguments": \{"code": "print\([0-9] \* [0-9]\)"\}\}\n</tool_call>'
    sampling = Sampling(max_tokens=64, temperature=1.0, extra={"structured_outputs": {"regex": call}})
    env, row = ToolEnvironment(max_turns=2), {"prompt": "2 * 3?", "answer": "6"}
    rollout = await run_one(vllm, env, tmp_path, row, record="messages", sampling=sampling)
    assert (rollout.usage.turns, rollout.usage.tool_calls) == (2, 2)


async def test_program_with_the_openai_package(vllm: RunningEngine, tmp_path: Path) -> None:
    require_agent("openai-sdk")
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment("openai-sdk", script=write_program(tmp_path, CHAT, prefix=""))
        rollout = await run_one(vllm, env, tmp_path, {"prompt": "6 * 7?", "answer": 42})
    assert rollout.outcome == Completed()
    (segment,) = rollout.segments  # the second prompt continues the sampled tokens of the first turn
    assert segment.turns == (0, 1)


async def test_mini_swe_agent(vllm: RunningEngine, tmp_path: Path) -> None:
    require_agent("mini-swe-agent")
    tests = "def check(candidate):\n    assert candidate(4) == 8\n"
    row = {"prompt": "Write `double(x)`.", "tests": tests, "entry_point": "double"}
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment("mini-swe-agent")
        rollout = await run_one(vllm, env, tmp_path, row, limits=Limits(turns=3))
    assert 1 <= rollout.usage.turns <= 3


async def test_gateway_serves_several_choices_of_one_request(vllm: RunningEngine) -> None:
    config = GatewayConfig(upstreams={"policy": vllm_config(vllm)}, record="tokens", rendering=RENDERING)
    async with Gateway(config) as gateway:
        session = await gateway.register({"id": "choices"})
        async with openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["secret"]) as client:
            reply = await client.chat.completions.create(
                model="smollm2", messages=[{"role": "user", "content": "Say a word."}], n=3, max_tokens=8
            )
        record = await gateway.trajectory("choices")
    assert len(reply.choices) == 3
    texts = {choice.message.content for choice in reply.choices}
    assert {turn["response"]["content"] for turn in record["turns"]} == texts
    assert len(record["segments"]) == 3


async def test_killed_engine_costs_attempts_and_no_rollout(
    vllm: RunningEngine, engines: dict[str, RunningEngine], tmp_path: Path
) -> None:
    """vLLM is killed under load and started again. While it loads, the run waits for it."""
    rows = [{"prompt": f"Count to {n}.", "answer": "x"} for n in range(4)]
    options = {"wait_for_upstream": 600.0, "concurrency": 8, "runners": 2}
    events: list[str] = []
    engine = build_engine(vllm, ToolEnvironment([add]), tmp_path, **options)
    engine.on_event = lambda kind, payload: events.append(kind)
    async with engine:

        async def consume() -> list[Rollout]:
            return [one async for group in engine.groups(rows, k=4) for one in group.rollouts]

        running = asyncio.create_task(consume())
        await wait_until(lambda: vllm.metric("vllm:num_requests_running") >= 4)
        vllm.kill()
        server = engines["vllm"] = start_vllm(vllm.log, int(vllm.url.rpartition(":")[2]))
        async with asyncio.timeout(900):
            rollouts = await running
    assert sorted(rollout.id for rollout in rollouts) == sorted({rollout.id for rollout in rollouts})
    assert len(rollouts) == 16
    assert all(rollout.valid and rollout.segments for rollout in rollouts)
    assert any(len(rollout.attempts) > 1 for rollout in rollouts)
    assert "upstream.waiting" in events
    logged = server.logged_requests().values()
    prompts = [request.prompt for request in logged]
    for rollout in rollouts:
        assert any(read_ints(rollout.segments[0].tokens)[: len(prompt)] == prompt for prompt in prompts)
