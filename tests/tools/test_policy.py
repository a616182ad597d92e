"""Tests of the bundled policy: its weights match their record, and it solves about half of the tasks."""

import asyncio
import hashlib
import json
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from rookery.core import Message, Sampling, Task, Truncation
from rookery.environments.arithmetic import Arithmetic
from rookery.scoring.answers import match_answer
from rookery.upstreams import ModelRequest, Upstream, UpstreamConfig, open_upstream
from rookery.upstreams.protocol import ToolSet

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from embedded.programs import run_tool_call

pytestmark = pytest.mark.long

PLACE = files("rookery.upstreams.embedded")
TASKS = 600


def test_weights_match_their_training_record() -> None:
    record = json.loads((PLACE / "policy.json").read_text())
    weights = (PLACE / "policy.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == record["sha256"]
    assert len(weights) <= 2_000_000
    assert 0.40 <= record["held_out"]["rate"] <= 0.55
    assert record["losses"][-1][1] == record["loss"] or record["loss"] < 0.2


async def rollout(upstream: Upstream, env: Arithmetic, task: Task, seed: int) -> bool:
    """Run a rollout as the environment would, with an evaluator of small arithmetic instead of a sandbox."""
    messages = [Message("system", str(env.system_prompt)), *task.prompt]
    for turn in range(env.limits.turns or 6):
        sampling = Sampling(temperature=1.0, seed=1000 * seed + turn, max_tokens=300)
        tools = ToolSet(tuple(env.tools()))
        request = ModelRequest(model="", messages=tuple(messages), tools=tools, sampling=sampling)
        try:
            reply = await upstream.complete(request, timeout=600)
        except Truncation:
            return False
        messages.append(reply.message)
        if not reply.message.tool_calls:
            return match_answer(reply.message.text, task.data["answer"])
        messages += [
            Message("tool", run_tool_call(call.name, call.arguments, env.max_result), tool_call_id=call.id)
            for call in reply.message.tool_calls
        ]
    return False


async def test_policy_solves_about_half_of_the_tasks() -> None:
    """Uses tasks that no setting was tuned on. The margin is twice the standard error at either end."""
    env = Arithmetic(split="held-out", size=TASKS, seed=7)
    upstream = open_upstream(UpstreamConfig(urls=("embedded",)))
    try:
        async with asyncio.TaskGroup() as group:
            results = [
                (task, group.create_task(rollout(upstream, env, task, seed)))
                for seed, task in enumerate(env.tasks())
            ]
    finally:
        await upstream.close()
    by_level = {level: [] for level in env.levels}  # type: dict[int, list[bool]]
    for task, passed in results:
        by_level[task.data["level"]].append(passed.result())
    rates = [sum(passed) / len(passed) for passed in by_level.values()]
    assert 0.40 <= sum(rates) / len(rates) <= 0.55, rates
    assert rates[0] >= 0.85, rates
    assert rates[-1] <= 0.20, rates
    assert rates == sorted(rates, reverse=True), rates
