"""A session: the budgets, recorder and models of one attempt.

Runs in runners for calls made in Python, and in gateway shards for HTTP calls.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec

from rookery.core import (
    Limits,
    RookeryError,
    Sampling,
    TruncatedReason,
    Truncation,
    Turn,
    UpstreamError,
    UsageError,
)
from rookery.gateway.chat_arguments import (
    MessagesInput,
    SamplingInput,
    ToolsInput,
    read_messages,
    read_sampling,
    read_tool_choice,
    read_tools,
)
from rookery.gateway.tools import ArgumentRestorer
from rookery.trajectories import HistoryMatch, Recorder
from rookery.upstreams.hang_detector import Examinable, UpstreamEvidence
from rookery.upstreams.protocol import NO_TOOLS, ModelReply, ModelRequest, OnDelta, Upstream
from rookery.upstreams.token_ids import PromptCache

if TYPE_CHECKING:
    from rookery.gateway.chat_renderers.threaded import ThreadedRenderer
    from rookery.gateway.http import Disconnect

RecordMode: TypeAlias = Literal["tokens", "messages", "plain"]
"""How turns are recorded.

- `tokens`: the gateway renders prompts and exchanges token IDs with the inference engine.
- `messages`: the engine renders prompts and returns token IDs.
- `plain`: without token IDs.
"""

MODEL_CALL_SECONDS = 600.0
SUB_ROLE = "sub"
"""The role of sub-models whose turns do not train."""


class ModelRole(msgspec.Struct, frozen=True, kw_only=True):
    """A model role: its upstream, model name and sampling parameters. Budgets apply only to the policy."""

    name: str
    upstream: Upstream
    model: str
    sampling: Sampling = Sampling()
    record: RecordMode = "messages"
    rendering: "ThreadedRenderer | None" = None
    """The chat format, if `record` is `tokens`."""
    sub_call: bool = False
    """Whether calls are sub-calls, outside the rollout's conversation. They are recorded, and train if the role is
    the policy, but the rollout's budgets do not apply to them and their truncation does not end the rollout."""


class WaitObserver(Protocol):
    """Notified when an attempt waits for something that does not count as its own time."""

    def hold(self) -> None:
        """Stop the attempt's clock, during a pause or in a queue."""
        ...

    def release(self) -> None:
        """Undo one `hold`."""
        ...

    def credit(self, held: float) -> None:
        """Set the total of waiting seconds to at least `held`, as measured by the gateway."""
        ...

    def waiting(self, on: str, step: int) -> None:
        """Called with `step` 1 when a wait for `on` begins, and with -1 when it ends."""
        ...


class Session:
    """Enforces the budgets of one attempt and records its model calls. Calls after `close` are rejected."""

    def __init__(
        self,
        attempt: str,
        roles: Mapping[str, ModelRole],
        limits: Limits,
        recorder: Recorder,
        watch: WaitObserver,
        seed: int = 0,
    ) -> None:
        self.attempt = attempt
        self.limits = limits
        self.truncated: TruncatedReason | None = None
        self.turns = 0
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.others: dict[str, int] = {}
        """Sampled tokens of the other roles."""
        self.sub_call_turns = 0
        """Number of policy turns that were sub-calls."""
        self.promptless = 0
        """Replies whose token IDs are dropped because the inference engine did not return those of the prompt."""
        self.without_tokens = 0
        """Turns of the policy that were recorded without token IDs."""
        self.rerendered = 0
        """Turns whose prompt could not extend the previous turn."""
        self.argument_restorer = ArgumentRestorer()
        self.roles = roles
        self.recorder = recorder
        self.watch = watch
        self._calls: set[asyncio.Task[Any]] = set()
        self._policy_calls = 0
        """Number of policy calls in flight, each of which becomes a turn."""
        self._seed = seed
        self.avoid: tuple[str, ...] = ()
        """Replicas that hung in an earlier attempt."""
        self.evidence: list[UpstreamEvidence] = []
        """Observations of model servers that did not answer."""
        self._closed = False
        self._models: dict[str, Model] = {}
        self._prompt_caches: dict[str, PromptCache] = {}

    def prompt_cache(self, role: str) -> PromptCache:
        """Return the cache of a role's encoded prompts, so that a history is encoded once."""
        cache = self._prompt_caches.get(role)
        if cache is None:
            cache = self._prompt_caches[role] = PromptCache()
        return cache

    def model(self, role: str) -> "Model":
        """Return the model of a role. Raises `UsageError` if the role is not configured."""
        model = self._models.get(role)
        if model is None:
            if role not in self.roles:
                known = ", ".join(sorted(self.roles)) or "none"
                raise UsageError(
                    f"no model serves the role {role!r} (configured: {known})", cause="bug.environment"
                )
            model = self._models[role] = Model(self, self.roles[role])
        return model

    def sub_model(self, *, trained: bool) -> "Model":
        """Return a model for sub-calls: the policy if `trained`, else the role `sub`.

        If the role `sub` is not configured, it uses the policy's upstream.
        """
        name = "policy/sub_call" if trained else SUB_ROLE
        model = self._models.get(name)
        if model is None:
            policy = self.roles["policy"]
            if trained and SUB_ROLE in self.roles:
                raise UsageError(
                    f"the role {SUB_ROLE!r} has its own upstream, whose tokens cannot train the policy; "
                    "remove that role or do not train sub-calls",
                    cause="bug.environment",
                )
            role = (
                policy if trained else self.roles.get(SUB_ROLE) or msgspec.structs.replace(policy, name=SUB_ROLE)
            )
            model = self._models[name] = Model(self, msgspec.structs.replace(role, sub_call=True))
        return model

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_flight(self) -> int:
        """Number of model calls in flight."""
        return len(self._calls)

    def close(self) -> None:
        """Reject further calls and cancel those in flight."""
        self._closed = True
        self._models.clear()  # break the reference cycle, so that both are freed at once
        current = asyncio.current_task()
        for task in self._calls:
            if task is not current:
                task.cancel()

    def truncate(self, reason: TruncatedReason, message: str) -> Truncation:
        """Mark the session as truncated and return the exception to raise. The first reason is kept."""
        self.truncated = self.truncated or reason
        return Truncation(reason, message)

    def apply_budgets(self, wanted: Sampling, prompt: int = 0) -> Sampling:
        """Limit the tokens of a reply to what the budgets leave. Raises `Truncation` if one is exhausted.

        `prompt` is the number of prompt tokens, if already known.
        """
        limits = self.limits
        left: int | None = None
        if limits.tokens is not None:
            left = limits.tokens - self.sampled_tokens
            if left <= 0:
                raise self.truncate("tokens", f"all {limits.tokens} tokens are used")
        if prompt and limits.context is not None:
            available = limits.context - prompt
            if available <= 0:
                raise self.truncate(
                    "context", f"the prompt has {prompt} tokens, and the context limit is {limits.context}"
                )
            left = available if left is None else min(left, available)
        if left is None or (wanted.max_tokens is not None and wanted.max_tokens <= left):
            return wanted
        return msgspec.structs.replace(wanted, max_tokens=left)

    def next_seed(self) -> int:
        """Return the seed of the next call. A rollout that runs again gets the same seeds."""
        self._seed = (self._seed * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) & (2**63 - 1)
        return self._seed

    async def call(
        self,
        role: ModelRole,
        request: ModelRequest,
        on_delta: OnDelta | None = None,
        *,
        key: str = "",
        match: HistoryMatch | None = None,
        disconnect: "Callable[[], Disconnect | None] | None" = None,
    ) -> ModelReply:
        """Make one model call and record it as a turn.

        The keyword arguments are for HTTP calls: `key` identifies the request, so that a client can repeat it;
        `match` is its position in the session's histories, if already known; `cut` returns how the client ended a
        streamed call, if it did, so that what was sampled until then is recorded as a partial turn.
        """
        from rookery.gateway.pipeline import run_turn  # it imports this module

        if self._closed:
            raise RookeryError(f"attempt {self.attempt} has ended; it can make no more model calls")
        policy = role.name == "policy" and not role.sub_call
        limit = self.limits.turns
        if policy and limit is not None and self.turns - self.sub_call_turns + self._policy_calls >= limit:
            raise self.truncate("turns", f"all {limit} turns are used")
        task = asyncio.current_task()
        assert task is not None
        nested = task in self._calls
        self._calls.add(task)
        self._policy_calls += policy
        self.watch.waiting("model", 1)
        try:
            reply = await run_turn(self, role, request, on_delta, key, match, disconnect)
        except Truncation as stop:
            if role.sub_call:
                raise
            if not policy:  # a limit of another role is not a budget of the rollout
                raise UpstreamError(f"the {role.name}: {stop}", cause="upstream.rejected") from stop
            self.truncated = self.truncated or stop.reason
            raise
        finally:
            self._policy_calls -= policy
            self.watch.waiting("model", -1)
            if not nested:
                self._calls.discard(task)
        self.sub_call_turns += role.sub_call and role.name == "policy"
        length, context = reply.prompt_tokens + reply.sampled_tokens, self.limits.context
        if policy and context is not None and length > context:
            raise self.truncate("context", f"the sequence exceeds the context limit of {context} tokens")
        return reply

    def adopt(self, turns: Sequence[Turn]) -> None:
        """Add turns that the attempt's gateway session has recorded."""
        for turn in self.recorder.adopt(turns):
            self.count(turn)

    def count(self, turn: Turn) -> None:
        """Count a recorded turn."""
        self.argument_restorer.add_turn(turn)
        if turn.role == "policy":
            self.turns += 1
            self.prompt_tokens += turn.prompt_tokens
            self.sampled_tokens += turn.sampled_tokens
            self.without_tokens += lacks_tokens(turn)
        else:
            self.others[turn.role] = self.others.get(turn.role, 0) + turn.sampled_tokens

    def on_wait(self, waits: bool) -> None:
        """Stop the clock while a call waits in a queue or for the end of a pause."""
        if waits:
            self.watch.hold()
        else:
            self.watch.release()

    async def examine(self) -> tuple[UpstreamEvidence, ...]:
        """Check whether a server of a call in flight hangs, and add the observations to `evidence`."""
        upstreams = {id(role.upstream): role.upstream for role in self.roles.values()}
        results = await asyncio.gather(
            *(one.examine(self.attempt) for one in upstreams.values() if isinstance(one, Examinable))
        )
        seen = tuple(chain.from_iterable(results))
        self.evidence += seen
        return seen


def lacks_tokens(turn: Turn) -> bool:
    """Return whether a turn has a response without token IDs."""
    return not turn.sampled and bool(turn.sampled_tokens or turn.response.content or turn.response.tool_calls)


class Model:
    """A model that an environment can call. Each call is recorded as a turn."""

    def __init__(self, session: Session, role: ModelRole) -> None:
        self._session = session
        self._role = role
        self.role = role.name
        self.name = role.model
        self.sampling = role.sampling
        """Default sampling parameters."""

    async def chat(
        self,
        messages: MessagesInput,
        *,
        tools: ToolsInput = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        sampling: SamplingInput | None = None,
        on_delta: OnDelta | None = None,
    ) -> ModelReply:
        """Ask for the next message of a conversation.

        Messages, tools, the tool choice and sampling are our types or plain dictionaries in OpenAI's format, also
        mixed. `on_delta` is called with each part of the reply while it is sampled.

        Raises `ChatArgumentError` for a wrong argument, and `Truncation` when a budget is exhausted.
        """
        history = read_messages(messages)
        offered = read_tools(tools) if tools else NO_TOOLS
        request = ModelRequest(
            messages=history,
            tools=offered,
            tool_choice=None if tool_choice is None else read_tool_choice(tool_choice, offered),
            sampling=self.sampling if sampling is None else read_sampling(sampling).over(self.sampling),
        )
        return await self._session.call(self._role, request, on_delta)

    async def complete(
        self, tokens: bytes, *, sampling: SamplingInput | None = None, on_delta: OnDelta | None = None
    ) -> ModelReply:
        """Continue a sequence of token IDs (int32), with inference engines that accept token prompts."""
        request = ModelRequest(
            tokens=tokens,
            sampling=self.sampling if sampling is None else read_sampling(sampling).over(self.sampling),
        )
        return await self._session.call(self._role, request, on_delta)
