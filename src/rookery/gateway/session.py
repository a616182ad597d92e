"""An attempt's registration at the gateway, and the models it may call."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rookery.core import (
    Finish,
    Limits,
    Message,
    RookeryError,
    Sampling,
    ToolCall,
    ToolSchema,
    TruncatedReason,
    Truncation,
    Turn,
    UpstreamError,
    UsageError,
)
from rookery.gateway.door import Credits, Door
from rookery.trajectories import Recorder
from rookery.upstreams.protocol import ModelRequest, Upstream


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """A model role: where it is served and how it samples. Only the policy's budgets are the rollout's."""

    name: str
    upstream: Upstream
    model: str
    sampling: Sampling = Sampling()
    credits: Credits
    want_tokens: bool = True


class Watch(Protocol):
    """What an attempt wants to know about the waits inside it."""

    def hold(self) -> None:
        """The clock stops: somebody else's queue or pause."""
        ...

    def release(self) -> None: ...

    def waiting(self, on: str, step: int) -> None:
        """`step` is 1 when a wait on `on` begins, -1 when it ends."""
        ...


class Reply(msgspec.Struct, frozen=True):
    """What a model answered, and the turn that recorded it."""

    message: Message
    finish: Finish
    turn: Turn

    @property
    def text(self) -> str:
        return self.message.text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.message.tool_calls


class Session:
    """Budgets and recording of one attempt. Closed with it: what still calls afterwards is refused."""

    def __init__(
        self,
        attempt: str,
        roles: Mapping[str, Role],
        limits: Limits,
        recorder: Recorder,
        door: Door,
        watch: Watch,
        seed: int = 0,
    ) -> None:
        self.attempt = attempt
        self.limits = limits
        self.truncated: TruncatedReason | None = None
        self.turns = 0
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.others: dict[str, int] = {}
        self._roles = roles
        self._recorder = recorder
        self._door = door
        self._watch = watch
        self._calls: set[asyncio.Task[Any]] = set()
        self._asking = 0
        """Calls of the policy under way: each will be a turn."""
        self._seed = seed
        self._closed = False
        self._models: dict[str, Model] = {}

    def model(self, role: str) -> "Model":
        """The handle for a role; a role nobody configured is an error in words."""
        found = self._models.get(role)
        if found is None:
            if role not in self._roles:
                known = ", ".join(sorted(self._roles)) or "none"
                raise UsageError(
                    f"no model serves the role {role!r} (configured: {known})", cause="bug.environment"
                )
            found = self._models[role] = Model(self, self._roles[role])
        return found

    def close(self) -> None:
        """Refuses further calls and cancels those under way."""
        self._closed = True
        self._models.clear()  # they know us: apart, both are freed at once
        current = asyncio.current_task()
        for task in self._calls:
            if task is not current:
                task.cancel()

    def _stop(self, reason: TruncatedReason, message: str) -> Truncation:
        self.truncated = self.truncated or reason
        return Truncation(reason, message)

    def _sampling(self, wanted: Sampling) -> Sampling:
        """Budgets, before the call: a spent one truncates, a nearly spent one shortens the answer."""
        limits = self.limits
        if limits.turns is not None and self.turns + self._asking >= limits.turns:
            raise self._stop("turns", f"all {limits.turns} turns are used")
        if limits.tokens is None:
            return wanted
        left = limits.tokens - self.sampled_tokens
        if left <= 0:
            raise self._stop("tokens", f"all {limits.tokens} tokens are sampled")
        if wanted.max_tokens is None or wanted.max_tokens > left:
            return msgspec.structs.replace(wanted, max_tokens=left)
        return wanted

    def draw_seed(self) -> int:
        """What the next call draws from, at engines that can: a rollout that runs again draws the same."""
        self._seed = (self._seed * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) & (2**63 - 1)
        return self._seed

    async def call(self, role: Role, request: ModelRequest) -> Reply:
        if self._closed:
            raise RookeryError(f"attempt {self.attempt} has ended; it can make no more model calls")
        policy = role.name == "policy"
        if policy:
            sampling = self._sampling(request.sampling)
            if sampling is not request.sampling:
                request = msgspec.structs.replace(request, sampling=sampling)
        task = asyncio.current_task()
        assert task is not None
        nested = task in self._calls
        self._calls.add(task)
        self._asking += policy
        self._watch.waiting("model", 1)
        try:
            queued = await self._enter(role)
            started = time.time()
            at = time.monotonic()
            try:
                reply = await role.upstream.complete(request, timeout=self.limits.model_call or 600.0)
            except Truncation as stop:
                if not policy:  # another role's limit is no budget of the rollout's
                    raise UpstreamError(f"the {role.name}: {stop}", cause="upstream.rejected") from stop
                self.truncated = self.truncated or stop.reason
                raise
            finally:
                self._door.leave()
                role.credits.give()
        finally:
            self._asking -= policy
            self._watch.waiting("model", -1)
            if not nested:
                self._calls.discard(task)
        if policy:
            self.turns += 1
            self.prompt_tokens += reply.prompt_tokens
            self.sampled_tokens += reply.sampled_tokens
        else:
            self.others[role.name] = self.others.get(role.name, 0) + reply.sampled_tokens
        turn = self._recorder.record(
            role=role.name,
            messages=request.messages,
            prompt=reply.prompt or request.tokens,
            response=reply.message,
            sampled=reply.sampled,
            logprobs=reply.logprobs,
            version=reply.version,
            finish=reply.finish,
            prompt_tokens=reply.prompt_tokens,
            sampled_tokens=reply.sampled_tokens,
            started=started,
            seconds=time.monotonic() - at,
            queued=queued + reply.queued,
            upstream=reply.replica,
            extras=reply.extras,
        )
        limit = self.limits.context
        if policy and limit is not None and reply.prompt_tokens + reply.sampled_tokens > limit:
            raise self._stop("context", f"the sequence is longer than {limit} tokens")
        return Reply(reply.message, reply.finish, turn)

    async def _enter(self, role: Role) -> float:
        """A credit and an open door, both; the waiting is not the attempt's time."""
        door = self._door
        if not door.paused and role.credits.take_now():
            door.enter()
            return 0.0
        began = time.monotonic()
        self._watch.hold()
        try:
            while True:
                await door.opened()
                await role.credits.take()
                if not door.paused:
                    break
                role.credits.give()  # paused while we stood in the queue
        finally:
            self._watch.release()
        door.enter()
        return time.monotonic() - began


class Model:
    """What an environment calls. Each call is one turn."""

    def __init__(self, session: Session, role: Role) -> None:
        self._session = session
        self._role = role
        self.role = role.name
        self.name = role.model

    async def chat(
        self,
        messages: Sequence[Message] | str,
        *,
        tools: Sequence[ToolSchema] = (),
        tool_choice: str | None = None,
        sampling: Sampling | None = None,
    ) -> Reply:
        """Asks for the next message. Raises `Truncation` when the rollout's budget is spent."""
        history = (Message("user", messages),) if isinstance(messages, str) else tuple(messages)
        return await self._session.call(
            self._role,
            ModelRequest(
                model=self._role.model,
                messages=history,
                tools=tuple(tools),
                tool_choice=tool_choice,
                sampling=self._role.sampling if sampling is None else sampling.over(self._role.sampling),
                want_tokens=self._role.want_tokens,
                seed=self._session.draw_seed(),
                affinity=self._session.attempt,
            ),
        )

    async def complete(self, tokens: bytes, *, sampling: Sampling | None = None) -> Reply:
        """Continues a sequence of token ids (int32), for engines that take tokens in."""
        return await self._session.call(
            self._role,
            ModelRequest(
                model=self._role.model,
                tokens=tokens,
                sampling=self._role.sampling if sampling is None else sampling.over(self._role.sampling),
                want_tokens=self._role.want_tokens,
                seed=self._session.draw_seed(),
                affinity=self._session.attempt,
            ),
        )
