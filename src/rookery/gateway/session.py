"""A session: enforces the budgets of one attempt, gives access to its models and records their replies.

Runs in runners for calls made in Python, and in gateway shards for HTTP calls.
"""

import asyncio
import time
from collections import defaultdict
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
from rookery.gateway.pipeline import run_turn
from rookery.gateway.tools import ArgumentRestorer
from rookery.telemetry import tracing
from rookery.telemetry.operations import end_model_call, fail_model_call, start_model_call
from rookery.trajectories import HistoryMatch, Recorder
from rookery.upstreams.hang_detector import Examinable, UpstreamEvidence
from rookery.upstreams.protocol import NO_TOOLS, ModelReply, ModelRequest, OnDelta, Upstream
from rookery.upstreams.token_ids import PromptCache

if TYPE_CHECKING:
    from rookery.gateway.chat_renderers.threaded import ThreadedRenderer
    from rookery.gateway.http_messages import Disconnect

RecordMode: TypeAlias = Literal["tokens", "messages", "plain"]
"""The mode in which turns are recorded.

- `tokens`: Rookery renders messages to prompt token IDs itself, and exchanges token IDs with the inference engine.
- `messages`: the inference engine gets messages, renders the prompt and returns token IDs with its reply.
- `plain`: the inference engine gets messages, and no token IDs are recorded.
"""

SUB_ROLE = "sub"
"""Name of the model role for sub-calls (calls outside the rollout's conversation) that do not train."""


class ModelRole(msgspec.Struct, frozen=True, kw_only=True):
    """A model role (`policy`, `judge`, …): its upstream, model name and default sampling parameters.

    The budgets of a session apply only to the role `policy`.
    """

    name: str
    upstream: Upstream
    model: str
    sampling: Sampling = Sampling()
    record: RecordMode = "messages"
    rendering: "ThreadedRenderer | None" = None
    """Converts between messages and token IDs (tokenizer and chat template). Required if `record` is `tokens`."""
    top_logprobs: int = 0
    """Number of most likely tokens to record for each sampled token. They are not shown to clients."""
    sub_call: bool = False
    """True if calls are sub-calls, which are outside the rollout's conversation. They are recorded, and train if
    the role is the policy. The rollout's budgets do not limit sub-calls, but sampled tokens of policy
    sub-calls count towards its token budget. A truncated sub-call does not end the rollout."""


class WaitObserver(Protocol):
    """Is notified when model calls of an attempt wait, so that the wait does not count against the time budget."""

    def stop_clock(self) -> None:
        """Stop the attempt's clock.

        Called when a call waits for the end of a pause or in the inference engine's queue.
        """
        ...

    def restart_clock(self) -> None:
        """Undo one `stop_clock`. The clock continues when every `stop_clock` was undone."""
        ...

    def exclude_at_least(self, total_seconds: float) -> None:
        """Make the waiting time that does not count against the attempt's deadline at least `total_seconds`.

        `total_seconds` is a total that the gateway measured: how long calls of the attempt's programs have waited
        for the end of a pause or in the inference engine's queue. A smaller total than before changes nothing.
        """
        ...

    def count_wait(self, resource: str, change: int) -> None:
        """Called when the attempt begins (`change` 1) or ends (`change` -1) to wait for a tool or a sandbox.

        `resource` is `tool` or `sandbox`.
        """
        ...

    def on_calls_ended(self) -> None:
        """Called when a model call has ended and no other one is in flight."""
        ...


class Session:
    """Enforces the budgets of one attempt, makes its model calls and records them as turns.

    `attempt` is the attempt's ID, and `wait_observer` is notified of waiting times. Calls after `close` are
    rejected.
    """

    def __init__(
        self,
        attempt: str,
        roles: Mapping[str, ModelRole],
        limits: Limits,
        recorder: Recorder,
        wait_observer: WaitObserver,
        seed: int = 0,
    ) -> None:
        self.attempt = attempt
        self.limits = limits
        self.truncated: TruncatedReason | None = None
        self.turns = 0
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.sampled_tokens_by_role: dict[str, int] = {}
        """Number of sampled tokens of each role other than the policy."""
        self.prompt_tokens_by_role: dict[str, int] = {}
        """Number of prompt tokens of each role other than the policy."""
        self.sub_call_turns = 0
        """Number of policy turns that were sub-calls."""
        self.promptless = 0
        """Number of replies whose token IDs were dropped because the inference engine did not return prompt token
        IDs."""
        self.without_tokens = 0
        """Number of policy turns that were recorded without token IDs."""
        self.rerendered = 0
        """Number of turns, in `tokens` mode, whose prompt was rendered anew because it could not extend the
        earlier turn."""
        self.argument_restorer = ArgumentRestorer()
        self.roles = roles
        self.recorder = recorder
        self.wait_observer = wait_observer
        self._calls: set[asyncio.Task[Any]] = set()
        """The tasks whose model calls are in flight."""
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._policy_calls = 0
        """Number of policy calls in flight, without sub-calls. They count against the budget of turns."""
        self._seed = seed
        self.avoid: tuple[str, ...] = ()
        """Names of replicas that hung in an earlier attempt, to be avoided."""
        self.evidence: list[UpstreamEvidence] = []
        """Observations of replicas that did not answer calls of this attempt."""
        self._closed = False
        self._models: dict[str, Model] = {}
        self.prompt_caches: defaultdict[str, PromptCache] = defaultdict(PromptCache)
        """The cache of encoded prompts of each model role, so that a growing history is encoded only once."""

    def model(self, role: str) -> "Model":
        """Return the model of a role, such as `policy`. Raises `UsageError` if the role is not configured."""
        model = self._models.get(role)
        if model is None:
            if role not in self.roles:
                known = ", ".join(sorted(self.roles)) or "none"
                raise UsageError(
                    f"no model serves the role {role!r} (configured: {known}): pass --role {role}=URL",
                    cause="bug.environment",
                )
            model = self._models[role] = Model(self, self.roles[role])
        return model

    def sub_model(self, *, trained: bool) -> "Model":
        """Return a model for sub-calls, which are outside the rollout's conversation.

        The rollout's budgets do not limit sub-calls. If `trained`, this is the policy, and the sub-calls train.
        Otherwise it is the role `sub`, or, if that role is not configured, the policy's upstream without training.
        Raises `UsageError` if `trained` and the role `sub` is configured.
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

    def untrained_policy(self, name: str) -> "Model":
        """Return a model that the policy's upstream answers, and that is recorded under `name` and does not train.

        The rollout's budgets do not limit its calls. Raises `UsageError` if `name` is a configured role.
        """
        key = f"policy/{name}"
        model = self._models.get(key)
        if model is None:
            if name in self.roles:
                raise UsageError(
                    f"{name!r} is a role with its own upstream: call `ctx.model({name!r})`",
                    cause="bug.environment",
                )
            role = msgspec.structs.replace(self.roles["policy"], name=name, sub_call=True)
            model = self._models[key] = Model(self, role)
        return model

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_flight(self) -> int:
        """Number of tasks with model calls in flight."""
        return len(self._calls)

    @property
    def busy_seconds(self) -> float:
        """Seconds so far in which at least one model call was in flight."""
        return self._busy_seconds + (time.monotonic() - self._busy_since if self._calls else 0.0)

    def close(self) -> None:
        """Reject further model calls, and cancel those in flight except one made by the current task."""
        self._closed = True
        self._models.clear()  # break the reference cycle, so that both are freed at once
        current = asyncio.current_task()
        for task in self._calls:
            if task is not current:
                task.cancel()

    def truncate(self, reason: TruncatedReason, message: str) -> Truncation:
        """Mark the session as truncated, and return the exception for the caller to raise.

        If the session is already truncated, its first reason is kept.
        """
        self.truncated = self.truncated or reason
        return Truncation(reason, message)

    def apply_budgets(self, wanted: Sampling, prompt: int = 0) -> Sampling:
        """Return sampling parameters whose `max_tokens` does not exceed what the token and context budgets leave.

        `prompt` is the number of prompt tokens; 0 if it is not known, so that the context budget cannot be
        applied. Raises `Truncation` if a budget is exhausted.
        """
        limits = self.limits
        left: int | None = None
        if limits.tokens is not None:
            left = limits.tokens - self.sampled_tokens
            if left <= 0:
                raise self.truncate("tokens", f"all {limits.tokens} tokens of the rollout's budget are used")
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
        """Return the sampling seed of the next call. Sessions with the same initial seed get the same sequence."""
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

        `on_delta` is called with each part of the reply while it is sampled. The keyword arguments are for HTTP
        calls. `key` is recorded with the turn, so that a retry of the request finds it. `match` is the position of
        the request in the session's conversations, if already known. `disconnect` returns how the client has ended
        a streamed call, or None; if it has, the tokens sampled until then are recorded as a partial turn.

        Raises `Truncation` if a budget of the attempt is exhausted, `UpstreamError` if the inference engine fails,
        and `RookeryError` if the session is closed.
        """
        if self._closed:
            raise RookeryError(f"attempt {self.attempt} has ended; it can make no more model calls")
        policy = role.name == "policy" and not role.sub_call
        limit = self.limits.turns
        if policy and limit is not None and self.turns - self.sub_call_turns + self._policy_calls >= limit:
            raise self.truncate("turns", f"all {limit} turns of the rollout's budget are used")
        task = asyncio.current_task()
        assert task is not None
        if not self._calls:
            self._busy_since = time.monotonic()
        nested = task in self._calls
        self._calls.add(task)
        self._policy_calls += policy
        try:
            span = None
            if tracing.active is not None:
                span = start_model_call(role.name, role.model, role.upstream.name, self.attempt, request.sampling)
            try:
                reply = await run_turn(self, role, request, on_delta, key, match, disconnect)
            except BaseException as error:
                fail_model_call(role.name, error, span)
                raise
            end_model_call(role.name, reply.recorded_turn, span)
        except Truncation as stop:
            if role.sub_call:
                raise
            if not policy:  # a limit of another role is not a budget of the rollout
                raise UpstreamError(
                    f"a limit of the model role {role.name!r} is reached: {stop}", cause="upstream.rejected"
                ) from stop
            self.truncated = self.truncated or stop.reason
            raise
        finally:
            self._policy_calls -= policy
            if not nested:
                self._calls.discard(task)
                if not self._calls:
                    self._busy_seconds += time.monotonic() - self._busy_since
                    self.wait_observer.on_calls_ended()
        self.sub_call_turns += role.sub_call and role.name == "policy"
        length, context = reply.prompt_tokens + reply.sampled_tokens, self.limits.context
        if policy and context is not None and length > context:
            raise self.truncate("context", f"the sequence exceeds the context limit of {context} tokens")
        return reply

    def adopt(self, turns: Sequence[Turn]) -> None:
        """Add turns that the HTTP gateway has recorded for this attempt to its record, and count them."""
        for turn in self.recorder.adopt(turns):
            self.count(turn)

    def count(self, turn: Turn) -> None:
        """Add a recorded turn to the counters of turns and tokens, which the budgets use."""
        self.argument_restorer.add_turn(turn)
        if turn.role == "policy":
            self.turns += 1
            self.prompt_tokens += turn.prompt_tokens
            self.sampled_tokens += turn.sampled_tokens
            self.without_tokens += lacks_tokens(turn)
        else:
            sampled, prompts = self.sampled_tokens_by_role, self.prompt_tokens_by_role
            sampled[turn.role] = sampled.get(turn.role, 0) + turn.sampled_tokens
            prompts[turn.role] = prompts.get(turn.role, 0) + turn.prompt_tokens

    def on_wait(self, waits: bool) -> None:
        """Stop the attempt's clock if `waits`, else restart it.

        Called when a call begins and ends to wait in a queue or for the end of a pause.
        """
        if waits:
            self.wait_observer.stop_clock()
        else:
            self.wait_observer.restart_clock()

    async def examine(self) -> tuple[UpstreamEvidence, ...]:
        """Check whether the replicas of calls in flight hang.

        Returns the observations, and adds them to `evidence`.
        """
        upstreams = {id(role.upstream): role.upstream for role in self.roles.values()}
        results = await asyncio.gather(
            *(one.examine(self.attempt) for one in upstreams.values() if isinstance(one, Examinable))
        )
        seen = tuple(chain.from_iterable(results))
        self.evidence += seen
        return seen


def lacks_tokens(turn: Turn) -> bool:
    """Return whether a turn has a non-empty response that was recorded without token IDs."""
    return not turn.sampled and bool(turn.sampled_tokens or turn.response.content or turn.response.tool_calls)


class Model:
    """A model that an environment can call with `chat` or `complete`. Each call is recorded as a turn."""

    def __init__(self, session: Session, role: ModelRole) -> None:
        self._session = session
        self._role = role
        self.role = role.name
        self.name = role.model
        self.sampling = role.sampling
        """Default sampling parameters; those of a call override them."""

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

        Messages, tools, the tool choice and sampling are Rookery's types or plain dictionaries in OpenAI's format,
        also mixed. `on_delta` is called with each part of the reply while it is sampled.

        Raises `ChatArgumentError` for a wrong argument, `Truncation` when a budget is exhausted, and
        `UpstreamError` if the inference engine fails.
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
        """Sample a continuation of a prompt that is given as token IDs (int32 bytes).

        Works only with inference engines that accept token IDs. `on_delta` is called with each part of the reply.
        """
        request = ModelRequest(
            tokens=tokens,
            sampling=self.sampling if sampling is None else read_sampling(sampling).over(self.sampling),
        )
        return await self._session.call(self._role, request, on_delta)
