"""Drive a rollout from outside: a trainer sends tool calls, and gets observations and the reward.

The environment runs in an engine as usual. Its policy is an upstream that waits for the next call of the trainer.

Guarantees:
- After an infrastructure failure, a new attempt repeats the calls so far in a fresh sandbox.
- Time that the trainer takes to sample does not count against the limits of the rollout.
- Starting another rollout, or closing, cancels the current one.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from rookery.adapters.task_rows import find_task, get_tasks
from rookery.core import Message, Rollout, RookeryError, Task, ToolCall, ToolSchema, UsageError, label
from rookery.engine import Engine, EngineConfig
from rookery.environments import Environment
from rookery.upstreams.protocol import (
    ModelReply,
    ModelRequest,
    OnDelta,
    OnWait,
    Upstream,
    UpstreamConfig,
    UpstreamInfo,
)

KIND: Final = "steps"
ANSWER: Final = ToolSchema(
    "final_answer",
    "Give the final answer and end the task.",
    {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)
"""Tool that ends a rollout with a reply without tool calls. A trainer ends an episode at such a reply unscored."""


class EpisodeLostError(RookeryError):
    """The rollout ended without a reward, so there is no result for the trainer."""


class Observation(msgspec.Struct, frozen=True):
    """Result of a call for the trainer: text for the model, or the end with the reward."""

    text: str
    reward: float | None = None
    """Reward of the rollout; None while it runs."""
    tools: tuple[ToolSchema, ...] = ()
    messages: tuple[Message, ...] = ()
    """The new messages of the conversation, whose text is `text`."""


class _Episode:
    """The calls and the waiting model request of one rollout."""

    def __init__(self) -> None:
        self.replies: list[Message] = []
        self.requests: asyncio.Queue[ModelRequest] = asyncio.Queue()
        self.arrived = asyncio.Condition()
        self.turns: Counter[str] = Counter()
        """Number of model requests of each attempt."""


_episodes: dict[str, _Episode] = {}


class StepUpstream(Upstream):
    """Upstream whose replies are the calls of a trainer. It works only in the process of the trainer's adapter."""

    name = KIND
    accepts_tokens = False
    accepts_raw_json = False

    def __init__(self, config: UpstreamConfig, *, key: str | None = None) -> None:  # noqa: ARG002  (no key needed)
        self._address = config.urls[0] if config.urls else ""
        if self._address not in _episodes:
            raise UsageError(f"{self._address!r} is not an upstream of this process: use an engine with runners=0")
        self.version = 0

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:  # noqa: ARG002  (does not wait)
        return UpstreamInfo(url=self._address, models=(KIND,))

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,  # noqa: ARG002  (the trainer may take any time)
        on_delta: OnDelta | None = None,  # noqa: ARG002  (the gateway is not used)
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        episode = _episodes[self._address]
        turn = episode.turns[request.affinity]
        episode.turns[request.affinity] += 1
        if turn == len(episode.replies):
            episode.requests.put_nowait(request)
        if on_wait is not None:
            on_wait(True)
        try:
            async with episode.arrived:
                await episode.arrived.wait_for(lambda: turn < len(episode.replies))
        finally:
            if on_wait is not None:
                on_wait(False)
        message = episode.replies[turn]
        return ModelReply(message=message, finish="tool_calls" if message.tool_calls else "stop", replica=KIND)


class SteppedRollout:
    """Runs one rollout at a time, step by step. `options` are arguments of `Engine`.

    With `config`, the engine has this configuration, except for its policy and its runners.
    """

    def __init__(
        self,
        env: Environment | str,
        *,
        tasks: Iterable[Task | dict[str, Any] | str] | None = None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        self._address = f"{KIND}:{id(self)}"
        _episodes[self._address] = _Episode()
        policy = UpstreamConfig(kind=KIND, urls=(self._address,), model=KIND)
        if config is not None:
            upstreams = {**config.upstreams, "policy": policy}
            changed = msgspec.structs.replace(config, upstreams=upstreams, runners=0, record="plain")
            self.engine = Engine(env, config=changed, **options)
        else:
            self.engine = Engine(env, policy=policy, **{**options, "runners": 0, "record": "plain"})
        self.tasks = get_tasks(self.engine.environment, tasks)
        self._known = {task.id: task for task in self.tasks}
        self._running: asyncio.Task[Rollout] | None = None
        self._open = False
        self.missing: Counter[str] = Counter()
        """Number of rollouts without a reward, by cause."""

    async def reset(self, task: str) -> Observation:
        """Start a rollout of the task with this ID, and return the text of its prompt and its tools."""
        found = find_task(None, self._known, task)
        await self._cancel()
        if not self._open:
            await self.engine.__aenter__()
            self._open = True
        _episodes[self._address] = _Episode()
        self._running = asyncio.create_task(self._run(found))
        return await self._observe()

    async def step(self, name: str, arguments: Mapping[str, Any], call_id: str = "") -> Observation:
        """Execute a tool call of the model, and return what the model reads next, or the reward."""
        if name == ANSWER.name:
            return await self.reply(Message("assistant", str(arguments.get("text", ""))))
        count = len(_episodes[self._address].replies)
        call = ToolCall(call_id or f"call_{count}", name, json.dumps(dict(arguments)))
        return await self.reply(Message("assistant", None, (call,)))

    async def reply(self, reply: Message) -> Observation:
        """Give the model's reply to the environment, and return what the model reads next, or the reward."""
        if self._running is None or self._running.done():
            raise UsageError("no rollout is running: call reset first")
        episode = _episodes[self._address]
        async with episode.arrived:
            episode.replies.append(reply)
            episode.arrived.notify_all()
        return await self._observe()

    async def aclose(self) -> None:
        """Cancel the running rollout and close the engine."""
        await self._cancel()
        if self._open:
            self._open = False
            await self.engine.__aexit__(None, None, None)
        _episodes.pop(self._address, None)

    async def _run(self, task: Task) -> Rollout:
        stream = self.engine.groups(iter([task]), name=KIND, restart=True, buffer=1, load_tokens=False)
        async with stream:
            return (await anext(stream)).rollouts[0]

    async def _observe(self) -> Observation:
        """Wait for the next model request, or for the end of the rollout."""
        assert self._running is not None
        asking = asyncio.create_task(_episodes[self._address].requests.get())
        try:
            await asyncio.wait({asking, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return _make_observation(asking.result())
        finally:
            asking.cancel()
        rollout = self._running.result()
        if rollout.reward is None or not rollout.valid:
            self.missing[label(rollout.outcome)] += 1
            raise EpisodeLostError(
                f"the rollout of task {rollout.task} ended without a reward: {label(rollout.outcome)}"
            )
        return Observation("", rollout.reward)

    async def _cancel(self) -> None:
        running, self._running = self._running, None
        if running is not None and not running.done():
            running.cancel()
            await asyncio.wait({running})


def _make_observation(request: ModelRequest) -> Observation:
    """Return the messages after the last reply as text, and the tools of the request."""
    messages = [message for message in request.messages if isinstance(message, Message)]
    last = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=-1)
    new = tuple(messages[last + 1 :])
    text = "\n".join(message.text for message in new)
    return Observation(text, tools=(*request.tools.schemas, ANSWER), messages=new)
