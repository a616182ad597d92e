"""Run single rollouts on request, for servers that speak the protocol of another trainer.

Guarantees:
- A request gets the final record of its rollout with the turns, or an exception.
- A rollout without usable log probabilities raises `BatchError`, because a trainer would train on it unnoticed.
- A cancelled request cancels its rollout, and no other.
- There is one engine for each policy (URLs and model name) that requests name, and at most `max_engines`: for a
  new policy, the engine that was idle for the longest time is closed.
- An API key is sent only to the policy of the configuration, never to one that a request names.
- Sampling parameters that a request does not name are those of the configuration, or else the defaults of trainers
  (temperature 1, all tokens). They are sent explicitly, so that defaults of a model or server do not replace them.
- Requests with other sampling parameters than those before are reported in the log, once for each change.
- If the trainer's tokenizer or context length is given, a rollout that does not fit raises `UsageError`. So does a
  longer context length in the limits of the configuration.
- An engine that stopped itself, for example because too many attempts failed, is closed. The next request opens a
  new one, which checks the policy again.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol, Self

import msgspec

from rookery.adapters.compatibility import RolloutChecks, TokenDecoder, TrainerSettings
from rookery.adapters.group_requests import GroupRequests
from rookery.core import Message, Rollout, RookeryError, Sampling, Segment, Task, Turn, UsageError
from rookery.engine import Engine, EngineConfig, Stopped
from rookery.environments import Environment, load_environment
from rookery.journal import TokenReader, load_turns
from rookery.training import BatchConfig
from rookery.training.rollout_checks import check_rollouts
from rookery.trajectories.segments import trim_partial_turns

_RULES: Final = BatchConfig(extras=())
_TRAINER_DEFAULTS: Final = TrainerSettings().settle_sampling(None)
_MAX_REPORTED: Final = 16
"""Maximum number of different sampling parameters that are reported."""

log = logging.getLogger("rookery.adapters")


class QueueFullError(RookeryError):
    """Too many requests are running or waiting."""


class TurnTokens(msgspec.Struct, frozen=True):
    """A turn that trains in a segment: `prompt` tokens after the turn before it, then `sampled` tokens."""

    turn: Turn
    start: int
    """Position of the first sampled token in the segment."""
    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]


class FinishedRollout(msgspec.Struct, frozen=True):
    """The record of a rollout with its segments, and its turns by index."""

    rollout: Rollout
    turns: dict[int, Turn]
    run: str
    """Directory of the run whose journal has the rollout."""

    def split_segment(self, segment: Segment) -> list[TurnTokens]:
        """Split a segment into its trained turns. Joined in order, their tokens are the segment's."""
        tokens = memoryview(segment.tokens).cast("i").tolist()
        logprobs: list[float] = memoryview(segment.logprobs).cast("f").tolist()  # type: ignore[assignment]
        found: list[TurnTokens] = []
        at = 0
        for index in segment.turns:
            turn = self.turns[index]
            start = segment.mask.index(1, at)
            end = start + len(turn.sampled) // 4
            found.append(TurnTokens(turn, start, tokens[at:start], tokens[start:end], logprobs[start:end]))
            at = end
        return found

    def get_new_messages(self, turn: Turn, previous: Turn | None) -> list[Message]:
        """Return the messages of the turn's prompt that follow the reply of `previous`, or all if that is None."""
        path = [turn]
        while (parent := path[-1].parent) in self.turns and (previous is None or parent != previous.index):
            path.append(self.turns[parent])
        if previous is not None and path[-1].parent is None:
            return list(turn.messages)  # it continues the tokens of `previous`, but was not recorded as its child
        path.reverse()
        return [
            *path[0].messages,
            *(message for before, one in pairwise(path) for message in (before.response, *one.messages)),
        ]


class RolloutServer(Protocol):
    """A server for one trainer's protocol: the plug-ins of the entry-point group `rookery.servers`."""

    name: str
    scheme: str
    default_port: int

    async def serve(
        self, service: "RolloutService", host: str, port: int, ready: Callable[[str], None], stop: asyncio.Event
    ) -> None:
        """Serve until `stop` is set. `ready` is called with the server's URL when it accepts connections."""
        ...

    def write_package(self, tasks: "list[Task]", folder: Path, name: str, url: str) -> list[Path]:
        """Write what the trainer needs on its side (tasks, configuration) into `folder`; return the files."""
        ...


class _OpenEngine:
    """An open engine, and what is needed to read the turns of its rollouts."""

    def __init__(self, engine: Engine, checks: RolloutChecks) -> None:
        assert engine.folder is not None
        self.engine = engine
        self.checks = checks
        self.folder = engine.folder
        self.requests = GroupRequests("requests")
        self.reader = TokenReader(engine.folder / "tokens")
        self.reading = asyncio.Lock()
        self.running = 0
        self.used = 0

    async def run(self, task: Task) -> FinishedRollout:
        self.running += 1
        try:
            group = await self.requests.run(self.engine, task, 1)
            (rollout,) = check_rollouts([group], _RULES)
            await asyncio.to_thread(self.checks.check_groups, [group], self.folder)
            turns: list[Turn] = []
            if rollout.segments:
                turns = await asyncio.shield(asyncio.ensure_future(self._load_turns(rollout)))
            by_index = {one.index: one for one in trim_partial_turns(turns)}
            return FinishedRollout(rollout, by_index, str(self.folder))
        finally:
            self.running -= 1

    async def _load_turns(self, rollout: Rollout) -> list[Turn]:
        """Load the turns in a thread. A caller that is cancelled must shield this, so that the lock stays held."""
        async with self.reading:  # a reader is not thread-safe
            return await asyncio.to_thread(load_turns, rollout, self.reader)

    async def close(self) -> None:
        try:
            await self.engine.__aexit__(None, None, None)
        finally:
            async with self.reading:
                self.reader.close()


class RolloutService:
    """Runs one rollout per request in engines with the configuration `config`.

    The policy is that of `config` or, if it has none, the one that a request names. `queue` is the maximum number
    of unfinished requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        out: str | Path = "runs",
        queue: int = 4096,
        max_engines: int = 4,
        tokenizer: TokenDecoder | None = None,
        context: int | None = None,
        on_engine: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        """Create a service without open engines. `on_engine` is called with each engine that is opened.

        `tokenizer` is the trainer's, and `context` the length of the longest sequence that it takes.
        """
        settings = TrainerSettings(context=context)
        self.config = msgspec.structs.replace(config, limits=settings.settle_limits(config.limits))
        self._checks = RolloutChecks("the trainer", settings, tokenizer)
        self._on_engine = on_engine
        self.environment: Environment = load_environment(config.environment, **config.arguments)
        self.out = out
        self.queue = queue
        self._max_engines = max_engines
        self._engines: dict[bytes, asyncio.Task[_OpenEngine]] = {}
        self._clock = 0
        self._reported: set[tuple[object, ...]] = set()
        self.unfinished = 0
        """Number of requests that are running or waiting."""

    @property
    def has_policy(self) -> bool:
        """True if the configuration names the policy, so that requests need not."""
        return bool(self.config.upstreams["policy"].urls)

    async def __aenter__(self) -> Self:
        if self.has_policy:
            await self._get_engine("", "")  # reports a wrong policy before the server accepts requests
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as stack:  # closes all engines, also if one of them raises
            for key in list(self._engines):
                stack.push_async_callback(self._close_engine, key)

    async def run(
        self, task: Task, *, policy: str = "", model: str = "", sampling: Sampling | None = None
    ) -> FinishedRollout:
        """Run one rollout of `task` and return it. A failed rollout is returned, not raised.

        `policy` and `model` are used if the configuration does not name them.
        """
        if self.unfinished >= self.queue:
            raise QueueFullError(f"{self.unfinished} requests are running or waiting: try again later")
        task = msgspec.structs.replace(task, sampling=self._settle_sampling(sampling or Sampling()))
        self.unfinished += 1
        try:
            key, open_engine = await self._get_engine(policy, model)
            try:
                return await open_engine.run(task)
            except Stopped:
                await self._close_engine(key)
                raise
        finally:
            self.unfinished -= 1

    def _settle_sampling(self, wanted: Sampling) -> Sampling:
        """Return explicit sampling parameters for a request, and report those that differ from earlier ones."""
        configured = self.config.upstreams["policy"].sampling.over(self.config.sampling)
        sampling = wanted.over(configured).over(_TRAINER_DEFAULTS)
        if len(self._reported) < _MAX_REPORTED:
            key = sampling.temperature, sampling.top_p, sampling.top_k
            if key not in self._reported:
                level = logging.WARNING if self._reported else logging.INFO
                log.log(level, "the trainer requests rollouts with temperature %g, top-p %g and top-k %d", *key)
                self._reported.add(key)
        return sampling

    async def _get_engine(self, policy: str, model: str) -> tuple[bytes, _OpenEngine]:
        upstream = self.config.upstreams["policy"]
        if not upstream.urls:
            if not policy:
                raise UsageError("the request names no policy, and the server was started without --policy")
            upstream = msgspec.structs.replace(upstream, urls=(policy,), key_env="")
        upstream = msgspec.structs.replace(upstream, model=upstream.model or model)
        key = msgspec.msgpack.encode(upstream)
        while True:
            if key not in self._engines:
                await self._make_room()
            opening = self._engines.get(key)  # another request may have opened it meanwhile
            if opening is None:
                config = msgspec.structs.replace(
                    self.config, upstreams={**self.config.upstreams, "policy": upstream}
                )
                opening = self._engines[key] = asyncio.create_task(self._open_engine(config))
            try:
                opened = await asyncio.shield(opening)
            except BaseException:
                if opening.done() and self._engines.get(key) is opening:
                    del self._engines[key]
                raise
            if self._engines.get(key) is opening:
                break
        self._clock += 1
        opened.used = self._clock
        return key, opened

    async def _open_engine(self, config: EngineConfig) -> _OpenEngine:
        engine = Engine(config.environment, config=config, out=self.out)
        await engine.__aenter__()
        self._on_engine(engine)
        return _OpenEngine(engine, self._checks)

    async def _make_room(self) -> None:
        """Close the engine that was idle for longest if there are too many."""
        if len(self._engines) < self._max_engines:
            return
        idle = {
            key: task.result().used
            for key, task in self._engines.items()
            if task.done() and not task.cancelled() and task.exception() is None and not task.result().running
        }
        if not idle:
            raise QueueFullError(
                f"{len(self._engines)} policies are in use, which is the maximum: use fewer policies at once"
            )
        await self._close_engine(min(idle, key=idle.__getitem__))

    async def _close_engine(self, key: bytes) -> None:
        opening = self._engines.pop(key, None)
        if opening is not None:
            try:
                opened = await opening
            except RookeryError:
                return  # it did not open, which its request was told
            await asyncio.shield(asyncio.ensure_future(opened.close()))
