"""Functions and CPU time between `chat()` in an environment and the first write to the socket.

One engine without runner processes (`runners=0`) calls an HTTP inference engine. The call that is traced is not
the first one: connections, caches and the conversation exist already. `sys.setprofile` sees every Python function
that is entered. The trace uses asyncio's own event loop, because uvloop writes to the socket outside of Python.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import uvloop

import rookery
from benchmarks import Progress, Result
from benchmarks.instant_model import instant_model
from rookery import Context, Engine, Environment

NAME = "model-call"
PACKAGE = str(Path(rookery.__file__).parent)
WARM_UP_CALLS = 3


class CallPath(msgspec.Struct, frozen=True):
    """The functions of Rookery that one model call enters before the first byte is written to the socket."""

    stack: tuple[str, ...]
    """The call stack at the first write, outermost function first."""
    functions: tuple[str, ...]
    """All functions entered, each once, in order."""


class _Tracer:
    """Profile function for `sys.setprofile`. It removes itself at the first write to a socket."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.functions: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            if frame.f_code.co_filename.startswith(PACKAGE):
                self.functions[_describe(frame.f_code)] = None
        elif event == "c_call" and called.__name__ in ("send", "sendmsg"):
            sys.setprofile(None)
            caller: FrameType | None = frame
            while caller is not None:
                if caller.f_code.co_filename.startswith(PACKAGE):
                    self.stack.insert(0, _describe(caller.f_code))
                if caller.f_code.co_qualname == "Model.chat":
                    break
                caller = caller.f_back


def _describe(code: CodeType) -> str:
    return f"{code.co_filename[len(PACKAGE) + 1 :]} {code.co_qualname}"


class _TracedEnvironment(Environment):
    """Make a few calls, then trace one."""

    path: CallPath

    async def run(self, ctx: Context) -> None:
        policy = ctx.policy
        for _ in range(WARM_UP_CALLS):
            await policy.chat(ctx.task.prompt)
        tracer = _Tracer()
        sys.setprofile(tracer)
        try:
            await policy.chat(ctx.task.prompt)
        finally:
            sys.setprofile(None)
        self.path = CallPath(tuple(tracer.stack), tuple(tracer.functions))

    async def score(self, ctx: Context) -> float:  # noqa: ARG002
        return 1.0


class _TimedEnvironment(Environment):
    """Measure the CPU time of this process per call, one call at a time."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.micros = 0.0

    async def run(self, ctx: Context) -> None:
        for _ in range(WARM_UP_CALLS):
            await ctx.policy.chat(ctx.task.prompt)
        begun = time.process_time()
        for n in range(self.calls):
            await ctx.policy.chat(f"What is {n} times 7?")
        self.micros = (time.process_time() - begun) / self.calls * 1e6

    async def score(self, ctx: Context) -> float:  # noqa: ARG002
        return 1.0


async def _run_once(environment: Environment, url: str) -> None:
    with tempfile.TemporaryDirectory() as out:
        async with Engine(environment, policy=url, runners=0, limits={"turns": 100_000}, out=Path(out)) as engine:
            async for group in engine.groups([{"prompt": "What is 6 times 7?"}], k=1):
                if group.rollouts[0].reward is None:
                    raise RuntimeError(f"the measured rollout failed: {group.rollouts[0].outcome}")


def trace_call() -> CallPath:
    """Run one rollout against a server that answers at once, and return the path of one of its model calls."""

    async def main() -> CallPath:
        async with instant_model() as model:
            environment = _TracedEnvironment()
            await _run_once(environment, model.tokens_url)
            return environment.path

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(main())


async def _measure_calls(calls: int) -> float:
    async with instant_model() as model:
        environment = _TimedEnvironment(calls)
        await _run_once(environment, model.tokens_url)
        return environment.micros


def run(quick: bool, progress: Progress) -> list[Result]:
    path = trace_call()
    for name in path.functions:
        progress(f"{'*' if name in path.stack else ' '} {name}")
    rounds = 3 if quick else 10
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        micros = [runner.run(_measure_calls(500 if quick else 2000)) for _ in range(rounds)]
    return [
        Result(name="call stack", unit="functions", ours=float(len(path.stack)), target="<= 10"),
        Result(name="entered before the write", unit="functions", ours=float(len(path.functions))),
        Result(name="CPU per call", unit="us", ours=min(micros), note=f"256 tokens; best of {rounds} rounds"),
    ]
