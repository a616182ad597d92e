"""Environments for engine tests: one misbehaves in every possible way, as its task requests."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from typing import Any

from rookery import Context, Environment, Limits, Score
from rookery.core import Message, SandboxError, TaskError, Truncation
from rookery.sandboxes.protocol import Command
from rookery.upstreams.protocol import Delta

FOREVER = 3600.0


class CustomError(Exception):
    """An exception that only this environment raises."""


class Misbehaving(Environment):
    """Performs the action that `task.data` names for a stage. By default calls the policy once and scores 1."""

    name = "misbehaving"
    limits = Limits(setup=20.0, run=20.0, score=20.0, teardown=5.0)

    def tasks(self) -> list[dict[str, Any]]:
        return [{"prompt": f"question {n}"} for n in range(4)]

    async def setup(self, ctx: Context) -> None:
        await action(ctx, "setup")

    async def run(self, ctx: Context) -> None:
        await action(ctx, "run")
        ctx.state["reply"] = await ctx.policy.chat(ctx.task.prompt)
        await action(ctx, "after")

    async def score(self, ctx: Context) -> Score | float:
        value = await action(ctx, "score")
        return 1.0 if value is None else value

    async def teardown(self, ctx: Context) -> None:
        await action(ctx, "teardown")


async def action(ctx: Context, stage: str) -> Any:
    kind = ctx.task.data.get(stage)
    if kind is None:
        return None
    if isinstance(kind, dict):  # by member or by attempt: {"0": action} or {"attempt 1": action}
        _, member, number = ctx.attempt.split(".")
        kind = kind.get(member, kind.get(f"attempt {number}"))
    match kind:
        case None:
            return None
        case "raise":
            raise CustomError(f"raised in {stage} of {ctx.attempt}")
        case "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(_raises())
        case "recursion":
            return await action(ctx, stage)
        case "cancelled":
            raise asyncio.CancelledError
        case "cancel-self":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        case "exit":
            sys.exit(7)
        case "exit-in-task":
            await asyncio.create_task(_exits())
        case "interrupt":
            raise KeyboardInterrupt
        case "hang":
            await asyncio.sleep(FOREVER)
        case "hang-in-policy":
            await ctx.policy.chat("hang")
        case "hang-in-sandbox":
            sandbox = await ctx.sandbox()
            await sandbox.exec(Command(argv=("sleep", "3600"), wall=FOREVER))
        case "swallow":
            while True:
                try:
                    await asyncio.sleep(FOREVER)
                except asyncio.CancelledError:
                    if ctx.state.setdefault("swallowed", 0) > 100:
                        raise
                    ctx.state["swallowed"] += 1
        case "block":
            time.sleep(FOREVER)
        case "spin":
            while True:
                pass
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "_exit":
            os._exit(0)
        case "sandbox-lost":
            raise SandboxError("the sandbox is gone")
        case "task-broken":
            raise TaskError("this task's file is broken", cause="task.setup")
        case "truncate":
            raise Truncation("context")
        case "nan":
            return float("nan")
        case "nothing":
            return "not a number"
        case "too-much":
            return 2.0
        case "half":
            return 0.5
        case "spend-turns":
            while True:
                await ctx.policy.chat(ctx.task.prompt)
        case "odd-data":
            import numpy as np

            ctx.info = {
                "array": np.ones(2),
                3: {("a", 1): object()},
                "set": {1},
                "path": __import__("pathlib").Path("x"),
            }
            ctx.metrics = {"float32": np.float32(0.5), "int": np.int64(3), "plain": True}  # type: ignore[dict-item]
            ctx.log.info("odd", thing=object(), nested={(1, 2): {3}})
        case "bad-metrics":
            ctx.metrics = {"words": "many"}  # type: ignore[dict-item]
        case "bad-info":
            loop: list[Any] = []
            loop.append(loop)
            ctx.info = {"loop": loop}
        case "tell-truncated":
            ctx.info["truncated"] = ctx.truncated
            return 0.5
        case "say":
            ctx.log.info("said", stage=stage)
        case "background-sleep":
            ctx.state["sleeper"] = asyncio.create_task(asyncio.sleep(FOREVER), name="sleeper")
            await asyncio.sleep(0)
        case "count-sleepers":
            ctx.metrics["sleepers"] = sum(task.get_name() == "sleeper" for task in asyncio.all_tasks())
        case "background-call":
            ctx.state["background"] = asyncio.create_task(ctx.policy.chat("hang"))
            await asyncio.sleep(0)
        case _:
            raise AssertionError(f"unknown action {kind!r}")
    return None


async def _raises() -> None:
    raise CustomError("raised in a child task")


async def _exits() -> None:
    sys.exit(3)


class Blocking(Environment):
    """Defines stages as plain functions, which run in threads."""

    def run(self, ctx: Context) -> None:  # type: ignore[override]
        time.sleep(FOREVER if ctx.task.id == "stuck" else 0)
        ctx.info["thread"] = __import__("threading").current_thread().name

    def score(self, ctx: Context) -> float:  # type: ignore[override]
        return 1.0


class WithSandbox(Environment):
    """Writes and reads a file in its sandbox, and starts a child process that would outlive the command."""

    name = "with-sandbox"

    async def run(self, ctx: Context) -> None:
        sandbox = await ctx.sandbox()
        write = Command(argv=("sh", "-c", "setsid sleep 3600 >/dev/null 2>&1 & echo $$ > mine"))
        while not (await sandbox.exec(write)).ok:  # a test killed the program, not the sandbox
            pass
        ctx.state["data"] = await sandbox.read("mine")
        for path, text in ctx.task.files.items():
            assert (await sandbox.read(path)).decode() == text
        await ctx.policy.chat(ctx.task.prompt)

    async def score(self, ctx: Context) -> float:
        return 1.0 if ctx.state["data"].strip().isdigit() else 0.0


class Judged(Environment):
    """Calls models of other roles than the policy."""

    roles = ("judge", "user")

    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat(ctx.task.prompt)
        await ctx.model("user").chat("anything else?")

    async def score(self, ctx: Context) -> float:
        return float((await ctx.model("judge").chat("right?")).text == "yes")


class Talking(Environment):
    """Has a conversation of several turns, streamed if the task requests it."""

    name = "talking"
    limits = Limits(run=60.0)

    async def run(self, ctx: Context) -> None:
        messages = list(ctx.task.prompt)
        for _ in range(int(ctx.task.data.get("turns", 3))):
            reply = await ctx.policy.chat(
                messages, on_delta=_ignore_delta if ctx.task.data.get("streams") else None
            )
            messages += [reply.message, Message("user", "more")]

    async def score(self, ctx: Context) -> float:
        return 1.0


async def _ignore_delta(_: Delta) -> None:
    """Ignore the delta; passing a callback makes the call stream."""
