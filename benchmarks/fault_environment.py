"""The environment of the fault campaign. Its tasks say which fault a rollout causes. Runs in runner processes.

A rollout makes two model calls and a tool call in a sandbox, and is graded in a fresh sandbox. One in four
rollouts makes its second call over HTTP, through the gateway. The reward depends on the seed of the rollout alone,
so that all runs with the same seed have the same rewards.
"""

import asyncio
import os
import sys
import time

import aiohttp

from rookery import Context, Environment, Limits
from rookery.core import SandboxError, SandboxSpec, UpstreamError
from rookery.sandboxes.protocol import Command, Sandbox

MB = 1 << 20
HANG_SECONDS = 3600.0
MAX_CALLS = 10
PROGRAMS = {
    "sandbox memory": ("python3", "-c", "x = b'x' * (1 << 30)"),
    "sandbox spin": ("sh", "-c", "while :; do :; done"),
    "sandbox fork bomb": ("sh", "-c", "f() { f | f & }; f; sleep 5"),
    "sandbox output": ("sh", "-c", "head -c 30000000 /dev/zero"),
}
"""Programs that exceed a limit of their sandbox. What the policy's programs do is a result, not a failure."""
ENDLESS = frozenset({"sandbox spin", "sandbox fork bomb"})
WALL_SECONDS = 60.0
"""The time limit of other programs, which only a broken sandbox reaches, also on a busy machine."""
ENDLESS_SECONDS = 0.5
"""The time limit of programs that would use a core for ever."""


class CampaignError(Exception):
    """The exception that the environment raises on purpose."""


def expected_answer(seed: int) -> int:
    return 3 * (seed % 100_000) + 1


def expected_reward(seed: int) -> float:
    return expected_answer(seed) % 5 / 4


def uses_gateway(number: int) -> bool:
    return number % 4 == 3


async def call_gateway(ctx: Context, prompt: str) -> None:
    """Make a model call through the gateway. Like an API client, repeat it after retryable errors."""
    async with ctx.gateway_session() as session, aiohttp.ClientSession() as http:
        body = {"messages": [{"role": "user", "content": prompt}]}
        headers = {"Authorization": f"Bearer {session.key}"}
        for number in range(MAX_CALLS):
            try:
                async with http.post(f"{session.url}/chat/completions", json=body, headers=headers) as reply:
                    if reply.status < 500 and reply.status != 429:
                        reply.raise_for_status()
                        await reply.read()
                        break
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError):
                pass  # its shard was killed
            await asyncio.sleep(0.1 * (number + 1))
        else:
            raise UpstreamError(f"the gateway did not answer {MAX_CALLS} times")
        await session.end()


async def execute(sandbox: Sandbox, *argv: str) -> str:
    """Execute a command that cannot fail, and return its output. Raise `SandboxError` if it was killed."""
    result = await sandbox.exec(Command(argv=argv))
    if not result.ok:
        raise SandboxError(f"a command was killed: {result.status}, {result.stderr[-200:]!r}")
    return result.stdout.decode().strip()


class FaultCampaign(Environment):
    """Solves its task, or causes the fault that the task names."""

    name = "fault-campaign"
    sandbox = SandboxSpec(memory=96 * MB, pids=64, wall=WALL_SECONDS)
    limits = Limits(run=2 * WALL_SECONDS, score=2 * WALL_SECONDS, model_call=6.0)
    needs_gateway = "the second model call of some rollouts"

    async def run(self, ctx: Context) -> None:
        number, fault = int(ctx.task.data["n"]), str(ctx.task.data["fault"])
        first = ctx.attempt.endswith(".1")
        await ctx.policy.chat(f"{number} 0 {fault}")
        match fault:
            case "environment raises":
                raise CampaignError("on purpose")
            case "environment exits":
                sys.exit(7)
            case "environment hangs":
                await asyncio.sleep(HANG_SECONDS)
            case "environment blocks":
                time.sleep(HANG_SECONDS)  # noqa: ASYNC251  (on purpose)
            case "runner crashes":
                os.abort()
            case "sandbox lost" if first:
                raise SandboxError("lost on purpose")
        sandbox = await ctx.sandbox()
        if fault in PROGRAMS:
            wall = ENDLESS_SECONDS if fault in ENDLESS else None
            status = (await sandbox.exec(Command(argv=PROGRAMS[fault], wall=wall))).status
            # Only a program that runs out of memory ends by a signal, unless the campaign has killed it.
            if status == "lost" or (status == "signaled" and fault != "sandbox memory"):
                raise SandboxError(f"the sandbox or its program was killed: {status}")
            ctx.info["status"] = status
            ctx.state["answer"] = str(expected_answer(ctx.seed))
            return
        operand = ctx.seed % 100_000
        ctx.state["answer"] = await execute(sandbox, "sh", "-c", f"echo $((3 * {operand} + 1))")
        prompt = f"{number} 1 none"
        await (call_gateway(ctx, prompt) if uses_gateway(number) else ctx.policy.chat(prompt))

    async def score(self, ctx: Context) -> float:
        fault = str(ctx.task.data["fault"])
        if fault == "reward not a number":
            return float("nan")
        if fault == "reward out of range":
            return 2.0
        grader = await ctx.sandbox(SandboxSpec(memory=64 * MB, pids=32, wall=WALL_SECONDS))
        if fault == "grader crashes":
            raise CampaignError("the grader crashes on purpose")
        test = f'test "$1" -eq {expected_answer(ctx.seed)} && echo $(($1 % 5))'
        return int(await execute(grader, "sh", "-c", test, "grader", ctx.state["answer"])) / 4
