"""Contexts with a real session whose model is an upstream that replies from a script."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from rookery.core import Limits, Message, SandboxSpec, StageClock, Task, ToolCall, Turn
from rookery.environments import Context, Log, Tool, ToolEnvironment
from rookery.environments.sandbox_proxy import SandboxProxy
from rookery.gateway import ModelRole, Session
from rookery.sandboxes.protocol import Sandbox
from rookery.trajectories import Recorder
from rookery.upstreams.protocol import ModelReply, ModelRequest, OnDelta, OnWait, Upstream, UpstreamInfo

Reply = str | ModelReply | list[ToolCall]


def calls(*pairs: tuple[str, str]) -> list[ToolCall]:
    return [ToolCall(f"call_{index}", name, arguments) for index, (name, arguments) in enumerate(pairs)]


def unwrap_sandbox(sandbox: Sandbox) -> Any:
    """Return the sandbox to which the sandbox of a context forwards."""
    return sandbox._inner if isinstance(sandbox, SandboxProxy) else sandbox


class ScriptedUpstream(Upstream):
    """Upstream that replies with the next entry of its script and records the requests."""

    name = "scripted"
    accepts_tokens = True
    accepts_raw_json = True
    version = 0

    def __init__(self, script: Iterable[Reply]) -> None:
        self.script = list(script)
        self.requests: list[ModelRequest] = []

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        return UpstreamInfo(url="scripted:")

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        reply = self.script[len(self.requests)]
        self.requests.append(request)
        if isinstance(reply, ModelReply):
            return reply
        if isinstance(reply, str):
            return ModelReply(message=Message("assistant", reply), finish="stop")
        return ModelReply(message=Message("assistant", None, tuple(reply)), finish="tool_calls")

    async def close(self) -> None:
        pass


class CountingWatch:
    """Records what the attempt waited for."""

    def __init__(self, clock: StageClock) -> None:
        self.clock = clock
        self.waits_started: list[str] = []
        self.waits: dict[str, int] = {}

    def stop_clock(self) -> None:
        self.clock.stop(asyncio.get_running_loop().time())

    def restart_clock(self) -> None:
        self.clock.restart(asyncio.get_running_loop().time())

    def count_wait(self, resource: str, change: int) -> None:
        self.waits[resource] = self.waits.get(resource, 0) + change
        if change > 0:
            self.waits_started.append(resource)

    def on_calls_ended(self) -> None: ...


class Attempt:
    """A context and everything around it, for one test."""

    def __init__(
        self,
        script: Iterable[Reply] = (),
        *,
        task: Task | None = None,
        limits: Limits | None = None,
        run: float = 60.0,
        elapsed: Callable[[], float] | None = None,
        open_sandbox: Callable[[SandboxSpec], Awaitable[Sandbox]] | None = None,
    ) -> None:
        limits = limits or Limits()
        self.upstream = ScriptedUpstream(script)
        self.turns: list[Turn] = []
        self.opened: list[Sandbox] = []
        self.logged: list[tuple[str, dict[str, Any]]] = []
        loop = asyncio.get_running_loop()
        self.clock = StageClock(loop.time(), run)
        self.watch = CountingWatch(self.clock)
        role = ModelRole(name="policy", upstream=self.upstream, model="m")
        self.session = Session("a1", {"policy": role}, limits, Recorder("a1", self.turns.append), self.watch)
        self.ctx = Context(
            attempt="a1",
            task=task or Task(id="t1", prompt=(Message("user", "What is 6 times 7?"),), data={"answer": 42}),
            seed=7,
            limits=limits,
            spec=SandboxSpec(),
            session=self.session,
            wait_observer=self.watch,
            remaining=lambda: self.clock.remaining(loop.time()),
            elapsed=elapsed or (lambda: self.clock.used(loop.time())),
            log=Log(lambda level, fields: self.logged.append((level, fields))),
            open_sandbox=open_sandbox or refuse_sandbox,
        )

    @property
    def observations(self) -> list[str]:
        return [message.text for message in self.ctx.state["messages"] if message.role == "tool"]


async def refuse_sandbox(spec: SandboxSpec) -> Sandbox:
    raise AssertionError("the environment opened a sandbox")


async def observe_call(function: Any, arguments: str = "{}", **options: Any) -> tuple[str, Attempt]:
    """Run one call of a tool and return the text that the policy reads, and the attempt."""
    tool = function if isinstance(function, Tool) else Tool(function)
    limits = options.pop("limits", None)
    env = ToolEnvironment([tool], **options)
    attempt = Attempt([calls((tool.name, arguments)), "42"], limits=limits)
    await env.run(attempt.ctx)
    (text,) = attempt.observations
    assert not any(attempt.watch.waits.values())
    return text, attempt
