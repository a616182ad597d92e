"""An attempt's registration at the gateway: its budgets, its calls under way, and the models it may call."""

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
"""How turns are recorded: we render and sample token ids; the server renders and tells them; not by token."""

MODEL_CALL_SECONDS = 600.0
SUB_ROLE = "sub"
"""The role of sub-models that do not train."""


class ModelRole(msgspec.Struct, frozen=True, kw_only=True):
    """A model role: where it is served and how it samples. Only the policy's budgets are the rollout's."""

    name: str
    upstream: Upstream
    model: str
    sampling: Sampling = Sampling()
    record: RecordMode = "messages"
    rendering: "ThreadedRenderer | None" = None
    """The chat format, where `record` is tokens."""
    sub_call: bool = False
    """Calls beside the rollout's own conversation, as those of a sub-model: recorded, and trained where the role
    is the policy, but whoever makes them keeps their budget, and what ends one does not end the rollout."""


class WaitObserver(Protocol):
    """What an attempt wants to know about the waits inside it."""

    def hold(self) -> None:
        """The clock stops: somebody else's queue or pause."""
        ...

    def release(self) -> None: ...

    def credit(self, held: float) -> None:
        """A door of the attempt's saw so many seconds of such waits in all."""
        ...

    def waiting(self, on: str, step: int) -> None:
        """`step` is 1 when a wait on `on` begins, -1 when it ends."""
        ...


class Session:
    """Budgets and recording of one attempt. Closed with it: what still calls afterwards is refused."""

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
        self.sub_call = 0
        """Turns of the policy that were made beside the conversation."""
        self.promptless = 0
        """Answers with ids whose prompt's ids the engine did not tell: without context they cannot train."""
        self.without_tokens = 0
        """Turns of the policy that were recorded without token IDs."""
        self.rerendered = 0
        """Turns whose prompt could not extend the one before."""
        self.argument_restorer = ArgumentRestorer()
        self.roles = roles
        self.recorder = recorder
        self.watch = watch
        self._calls: set[asyncio.Task[Any]] = set()
        self._policy_calls = 0
        """Calls of the policy under way: each will be a turn."""
        self._seed = seed
        self.avoid: tuple[str, ...] = ()
        """Replicas that an earlier attempt found hung."""
        self.evidence: list[UpstreamEvidence] = []
        """What was seen of model servers whose calls stayed silent."""
        self._closed = False
        self._models: dict[str, Model] = {}
        self._prompt_caches: dict[str, PromptCache] = {}

    def prompt_cache(self, role: str) -> PromptCache:
        """What a role's long prompts were, so that each is read and written once."""
        found = self._prompt_caches.get(role)
        if found is None:
            found = self._prompt_caches[role] = PromptCache()
        return found

    def model(self, role: str) -> "Model":
        """The handle for a role; a role nobody configured is an error in words."""
        found = self._models.get(role)
        if found is None:
            if role not in self.roles:
                known = ", ".join(sorted(self.roles)) or "none"
                raise UsageError(
                    f"no model serves the role {role!r} (configured: {known})", cause="bug.environment"
                )
            found = self._models[role] = Model(self, self.roles[role])
        return found

    def sub_model(self, *, trained: bool) -> "Model":
        """A model for calls beside the conversation: the policy itself, whose turns train, or else the role `sub`,
        which is served as the policy is where nobody configured it."""
        name = "policy/sub_call" if trained else SUB_ROLE
        found = self._models.get(name)
        if found is None:
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
            found = self._models[name] = Model(self, msgspec.structs.replace(role, sub_call=True))
        return found

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    def close(self) -> None:
        """Refuses further calls and cancels those under way."""
        self._closed = True
        self._models.clear()  # they know us: apart, both are freed at once
        current = asyncio.current_task()
        for task in self._calls:
            if task is not current:
                task.cancel()

    def truncate(self, reason: TruncatedReason, message: str) -> Truncation:
        """What ends the run stage, to be raised; the first reason stands."""
        self.truncated = self.truncated or reason
        return Truncation(reason, message)

    def apply_budgets(self, wanted: Sampling, prompt: int = 0) -> Sampling:
        """Budgets, before the call: a spent one truncates, a nearly spent one shortens the answer.

        `prompt` is how many tokens go in, where that is known already.
        """
        limits = self.limits
        left: int | None = None
        if limits.tokens is not None:
            left = limits.tokens - self.sampled_tokens
            if left <= 0:
                raise self.truncate("tokens", f"all {limits.tokens} tokens are sampled")
        if prompt and limits.context is not None:
            room = limits.context - prompt
            if room <= 0:
                raise self.truncate(
                    "context", f"a prompt of {prompt} tokens leaves no room within {limits.context}"
                )
            left = room if left is None else min(left, room)
        if left is None or (wanted.max_tokens is not None and wanted.max_tokens <= left):
            return wanted
        return msgspec.structs.replace(wanted, max_tokens=left)

    def next_seed(self) -> int:
        """What the next call draws from, at engines that can: a rollout that runs again draws the same."""
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
        if policy and limit is not None and self.turns - self.sub_call + self._policy_calls >= limit:
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
            if not policy:  # another role's limit is no budget of the rollout's
                raise UpstreamError(f"the {role.name}: {stop}", cause="upstream.rejected") from stop
            self.truncated = self.truncated or stop.reason
            raise
        finally:
            self._policy_calls -= policy
            self.watch.waiting("model", -1)
            if not nested:
                self._calls.discard(task)
        self.sub_call += role.sub_call and role.name == "policy"
        length, context = reply.prompt_tokens + reply.sampled_tokens, self.limits.context
        if policy and context is not None and length > context:
            raise self.truncate("context", f"the sequence is longer than {context} tokens")
        return reply

    def adopt(self, turns: Sequence[Turn]) -> None:
        """Turns that were recorded elsewhere, at the attempt's own door: they are this session's from now on."""
        for turn in self.recorder.adopt(turns):
            self.count(turn)

    def count(self, turn: Turn) -> None:
        """A turn that was recorded."""
        self.argument_restorer.add_turn(turn)
        if turn.role == "policy":
            self.turns += 1
            self.prompt_tokens += turn.prompt_tokens
            self.sampled_tokens += turn.sampled_tokens
            self.without_tokens += lacks_tokens(turn)
        else:
            self.others[turn.role] = self.others.get(turn.role, 0) + turn.sampled_tokens

    def on_wait(self, waits: bool) -> None:
        """A call begins to wait for a place or for the end of a pause, or goes on."""
        if waits:
            self.watch.hold()
        else:
            self.watch.release()

    async def examine(self) -> tuple[UpstreamEvidence, ...]:
        """Find out whether a server of a model call under way hangs; what was seen is added to `evidence`."""
        upstreams = {id(role.upstream): role.upstream for role in self.roles.values()}
        found = await asyncio.gather(
            *(one.examine(self.attempt) for one in upstreams.values() if isinstance(one, Examinable))
        )
        seen = tuple(chain.from_iterable(found))
        self.evidence += seen
        return seen


def lacks_tokens(turn: Turn) -> bool:
    """Whether something was sampled in a turn and its token IDs are not known."""
    return not turn.sampled and bool(turn.sampled_tokens or turn.response.content or turn.response.tool_calls)


class Model:
    """What an environment calls. Each call is one turn."""

    def __init__(self, session: Session, role: ModelRole) -> None:
        self._session = session
        self._role = role
        self.role = role.name
        self.name = role.model
        self.sampling = role.sampling
        """How it samples where a call does not say otherwise."""

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
        mixed. `on_delta` is called with each piece of the answer while it is sampled.

        Raises `ChatArgumentError` for a wrong argument, and `Truncation` when the rollout's budget is spent.
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
        """Continues a sequence of token ids (int32), for engines that take tokens in."""
        request = ModelRequest(
            tokens=tokens,
            sampling=self.sampling if sampling is None else read_sampling(sampling).over(self.sampling),
        )
        return await self._session.call(self._role, request, on_delta)
