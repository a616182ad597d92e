"""Measures the CPU time of one rollout in verifiers 0.4, driven in-process, which is its cheapest mode.

The benchmark `engine` runs it in the peer's own environment (`make peers`) against our instant model. The harness
runs in the framework's process; the harnesses that verifiers ships start a program for every rollout and cost
hundreds of times more. User and system time of this process and its children count, after a warm-up; the inference
engine is another process and does not count. A failed rollout fails the measurement.

The last line of the output is one JSON object: {"peer", "case", "runs": [{"n", "cpu_ms", "wall_s"}]}.
This file is also the plug-in that verifiers loads by name for its taskset and its harness.
"""

import argparse
import asyncio
import importlib.metadata
import json
import logging
import resource
import time

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

PLUGIN = "verifiers_overhead"
WARM_UP = 256  # the first hundreds of rollouts cost a fifth more
TURNS = {"single": 1, "tool3": 3}
ECHO = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "Echo the text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}

__all__ = ["BenchTaskset", "InProcessHarness"]


class BenchTask(vf.Task[vf.TaskData]):
    """A question with a known answer."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float("42" in trace.last_reply)


class BenchConfig(vf.TasksetConfig):
    """Configuration of the taskset: the number of questions."""

    n: int = 1


class BenchTaskset(vf.Taskset[BenchTask, BenchConfig]):
    """A taskset that repeats one question with different numbers."""

    def load(self) -> list[BenchTask]:
        return [
            BenchTask(vf.TaskData(idx=i, prompt=f"Question {i}: what is six times seven?"), self.config.task)
            for i in range(self.config.n)
        ]


class InProcessConfig(HarnessConfig):
    """Configuration of the harness: whether the model gets a tool."""

    tools: bool = False


class InProcessHarness(Harness[InProcessConfig]):
    """Runs the agent loop in the framework's process; model calls still go through its interception server."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    client: aiohttp.ClientSession | None = None

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # noqa: ARG002
        if InProcessHarness.client is None:
            # Not httpx: the client in the loop should cost the peer as little as possible.
            InProcessHarness.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        while True:
            body = {"model": ctx.model, "messages": messages}
            if self.config.tools:
                body["tools"] = [ECHO]
            url = f"{endpoint}/chat/completions"
            async with InProcessHarness.client.post(url, json=body, headers=headers) as reply:
                reply.raise_for_status()
                message = (await reply.json())["choices"][0]["message"]
            messages.append({key: value for key, value in message.items() if value is not None})
            if not message.get("tool_calls"):
                return ProgramResult(0, "", "")
            for call in message["tool_calls"]:
                text = json.loads(call["function"]["arguments"])["text"]
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def cpu_s() -> float:
    """Return user and system seconds of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def measure(case: str, url: str, n: int, repeat: int, concurrency: int) -> list[dict[str, float]]:
    """Run `n` rollouts `repeat` times in a warmed-up environment and return the CPU time of each run."""
    harness = {"id": PLUGIN, "tools": case == "tool3"}
    agent = {"harness": harness, "runtime": {"type": "subprocess"}}
    taskset = {"id": PLUGIN, "n": WARM_UP + n * repeat}
    env = load_environment(resolve_env_config({"taskset": taskset, "agent": agent}))
    ctx = ModelContext(model="instant", client=EvalClientConfig(base_url=url, api_key_var="BENCH_KEY"))
    tasks, semaphore = list(env.taskset), asyncio.Semaphore(concurrency)

    async def rollouts(some: list) -> None:
        episodes = await asyncio.gather(*(env.run_slot(env.slots(task)[0], ctx, semaphore) for task in some))
        for episode in episodes:
            if not episode.ok or episode.traces[0].num_turns != TURNS[case]:
                raise SystemExit(f"a rollout failed: {episode.errors or episode.traces[0].errors}")

    runs = []
    async with env.serving():
        await rollouts(tasks[:WARM_UP])
        for start in range(WARM_UP, WARM_UP + n * repeat, n):
            cpu, wall = cpu_s(), time.perf_counter()
            await rollouts(tasks[start : start + n])
            cpu, wall = cpu_s() - cpu, time.perf_counter() - wall
            runs.append({"n": n, "cpu_ms": 1e3 * cpu / n, "wall_s": wall})
        client = __import__(PLUGIN).InProcessHarness.client  # the plug-in's copy of this module, not __main__
        if client is not None:
            await client.close()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one rollout of verifiers 0.4.")
    parser.add_argument("--case", choices=sorted(TURNS), default="single")
    parser.add_argument("--url", required=True, help="base URL of the model, with /v1")
    parser.add_argument("--n", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=64)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    runs = asyncio.run(measure(args.case, args.url, args.n, args.repeat, args.concurrency))
    peer = f"verifiers {importlib.metadata.version('verifiers')}"
    print(json.dumps({"peer": peer, "case": args.case, "runs": runs}))


if __name__ == "__main__":
    main()
