"""Handle model calls over HTTP, from the request to the last byte of the response. Runs in gateway shards.

Guarantees:
- the parts (deltas) of a streamed reply are sent to the client as they arrive; the turn is recorded before the
  last events of the stream are sent;
- a request that its client marks as a retry gets the recorded reply, and first waits for the original call if that
  is in flight; an equal request without the mark is a new turn;
- if a budget is exhausted, the client gets an error in the format of its API, and the session is truncated;
- if a client disconnects, its call is cancelled, also at the inference engine. The tokens that a stream had
  sampled until then are recorded as a partial turn and count against the budgets.
"""

import asyncio
import re
import time
from collections.abc import Iterable
from contextlib import nullcontext
from hashlib import blake2b
from typing import Any, Final

import msgspec

from rookery.core import Message, RookeryError, Sampling, Truncation, Turn, UpstreamError
from rookery.core.errors import unwrap_group
from rookery.gateway.chat_renderers.protocol import RenderError
from rookery.gateway.dialects.protocol import (
    BadRequestError,
    ClientRequest,
    Dialect,
    ErrorKind,
    ReplyStream,
    StatefulDialect,
    TokenCountDialect,
)
from rookery.gateway.http_messages import EVENT_STREAM, Disconnect, Request, ResponseWriter
from rookery.gateway.media import check_media
from rookery.gateway.metrics import ShardMetrics
from rookery.gateway.pipeline import count_prompt_tokens
from rookery.gateway.registry import SessionRegistry
from rookery.gateway.session import ModelRole, Session
from rookery.gateway.session_entry import SessionEntry, make_turn_key, reply_id_in_key
from rookery.gateway.tools import ToolsError
from rookery.telemetry import tracing
from rookery.telemetry.logs import current_attempt
from rookery.trajectories import HistoryMatch, MessageError
from rookery.upstreams.format import delta_from_reply
from rookery.upstreams.hang_detector import UpstreamEvidence
from rookery.upstreams.protocol import DecodeTokens, Delta, ModelReply, OnDelta

RETRY_SECONDS: Final = 600.0
"""Maximum time for which a retry waits for the original call to end."""
_ERROR_KINDS: Final[dict[str, ErrorKind]] = {
    "upstream.rejected": "bad_request",
    "upstream.unreachable": "unavailable",
    "upstream.overloaded": "unavailable",
    "upstream.paused": "unavailable",
    "upstream.timeout": "timeout",
    "upstream.hung": "timeout",
}
_EXPECTED: Final = (BaseExceptionGroup, RookeryError, Truncation, MessageError, ToolsError)
_NO_DEADLINE: Final = nullcontext()
_encode = msgspec.msgpack.Encoder().encode


class SessionGoneError(RookeryError):
    """The session was cancelled or deleted, so it accepts no more model calls."""


class ModelCallHandler:
    """Handles HTTP requests that call models, for all sessions of a shard."""

    def __init__(self, registry: SessionRegistry, metrics: ShardMetrics) -> None:
        self._registry = registry
        self._metrics = metrics

    async def handle_call(
        self, entry: SessionEntry, dialect: Dialect, http_request: Request, out: ResponseWriter
    ) -> None:
        """Make a model call and send the response, or an error response in the format of the client's API.

        Raises `CancelledError` if the client disconnects. An unexpected exception, which is a bug, is raised
        again.
        """
        current_attempt.set(entry.id)  # for logs
        if tracing.active is None:
            await self._handle_call(entry, dialect, http_request, out)
            return
        header = http_request.headers.get("traceparent", "")
        with tracing.parent_context(tracing.choose_parent(entry.registration.traceparent, header)):
            await self._handle_call(entry, dialect, http_request, out)

    async def _handle_call(
        self, entry: SessionEntry, dialect: Dialect, http_request: Request, out: ResponseWriter
    ) -> None:
        began = time.perf_counter()
        call: _ModelCall | None = None
        try:
            request = dialect.parse_request(http_request.body)
            call = _ModelCall(self, entry, dialect, request, out, began)
            await call.run(*_read_retry_headers(http_request))
            self._metrics.observe_call(time.perf_counter() - began)
        except asyncio.CancelledError:
            if entry.ended is None or out.gone:
                self._metrics.count("disconnects")
                if entry.session is not None:
                    self._count_changes(entry, entry.session)
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()  # the session was ended, but the client is still connected
            self._fail(dialect, out, call, "gone", f"rollout {entry.id} was {entry.ended}")
        except _EXPECTED as raised:
            problem, message, where = self._classify(entry, unwrap_group(raised))
            self._fail(dialect, out, call, problem, message, where)

    async def count_tokens(
        self, entry: SessionEntry, dialect: Dialect, http_request: Request, out: ResponseWriter
    ) -> None:
        """Send the number of prompt tokens of a request as the response, without calling the model.

        The number is an estimate unless the gateway itself renders prompts.
        """
        assert isinstance(dialect, TokenCountDialect)
        try:
            request = dialect.parse_request(http_request.body)
            session = self._registry.load_session(entry)
            role = _find_role(session, request.model)
            request = self._complete_request(entry, session, dialect, request)
            new = session.recorder.match_history(role.name, request.messages, request.tools.scope).new_messages
            _check_recordable(new)
            check_media(new, entry.registration.network, entry.registration.allow)
            out.send(200, dialect.format_token_count(await count_prompt_tokens(session, role, request)))
            self._metrics.count_response(200)
        except _EXPECTED as raised:
            self._fail(dialect, out, None, *self._classify(entry, unwrap_group(raised)))

    async def handle_stored(
        self, entry: SessionEntry, dialect: Dialect, name: str, http_request: Request, out: ResponseWriter
    ) -> None:
        """Send or delete an earlier reply of the session, whose ID is `name`.

        This is for APIs in which clients can refer to earlier replies by ID.
        """
        assert isinstance(dialect, StatefulDialect)
        session = self._registry.load_session(entry)
        key = name.partition("_")[2]
        known = entry.stored_replies.get(key)
        if known is None:
            self._fail(dialect, out, None, "not_found", f"this rollout has no reply with the ID {name[:200]!r}")
            return
        if http_request.method == "DELETE":
            del entry.stored_replies[key]
            out.send(200, dialect.format_deleted(name))
        else:
            turn = self._registry.read_turn(entry, known[0])
            reply = _reply_from_turn(turn)
            out.send(200, dialect.format_stored(name, reply, session.roles[turn.role].model))
        self._metrics.count_response(200)

    def _complete_request(
        self, entry: SessionEntry, session: Session, dialect: Dialect, request: ClientRequest
    ) -> ClientRequest:
        """Return the request with its complete history.

        Tool call arguments that the client has parsed and written again are replaced by their sampled text. Items
        and earlier responses that the request refers to by ID are filled in from the session's recorded turns.
        """
        if request.object_arguments:
            restore = session.argument_restorer.restore
            messages = tuple([restore(one) if isinstance(one, Message) else one for one in request.messages])
            return msgspec.structs.replace(request, messages=messages)
        if request.references:
            request = self._resolve_references(entry, dialect, request)
        if not request.previous_id:
            return request
        known = entry.stored_replies.get(request.previous_id)
        if known is None or not isinstance(dialect, StatefulDialect):
            raise BadRequestError(
                f"this session has no response with the ID {request.previous_id[:200]!r}: send the whole history",
                "previous_response_id",
            )
        index, head = known
        return dialect.prepend_history(request, self._registry.read_history(entry, index), head)

    def _resolve_references(self, entry: SessionEntry, dialect: Dialect, request: ClientRequest) -> ClientRequest:
        """Return the request with each item that it refers to by ID replaced by that item of an earlier reply."""
        assert isinstance(dialect, StatefulDialect)
        replies: dict[str, Message] = {}
        for reference in request.references:
            reply_id = dialect.find_referenced_response(reference)
            known = entry.stored_replies.get(reply_id)
            if known is None:
                raise BadRequestError(
                    f"this rollout has no item with the ID {reference[:200]!r}; send the item itself", "input"
                )
            if reply_id not in replies:
                replies[reply_id] = self._registry.read_turn(entry, known[0]).response
        return dialect.resolve_references(request, replies)

    def _fail(
        self,
        dialect: Dialect,
        out: ResponseWriter,
        call: "_ModelCall | None",
        problem: ErrorKind,
        message: str,
        where: str | None = None,
    ) -> None:
        if out.begun:
            assert call is not None
            assert call.stream is not None
            out.end(call.stream.format_failure(problem, message))
            status = 200
        else:
            status, body = dialect.format_error(problem, message, where)
            out.send(status, body)
        self._metrics.count_response(status)

    def _count_changes(self, entry: SessionEntry, session: Session) -> None:
        for name, by in entry.take_new_counts(session).items():
            self._metrics.count(name, by)

    def _classify(self, entry: SessionEntry, error: BaseException) -> tuple[ErrorKind, str, str | None]:
        """Return the kind, the message and the request field (or None) of an error for the client.

        Also marks the session as truncated if a budget is exhausted. Raises an unexpected error again.
        """
        match error:
            case BadRequestError():
                return error.problem, str(error), error.where
            case MessageError():
                return "bad_request", str(error), "messages"
            case ToolsError():
                return "bad_request", str(error), "tools"
            case RenderError():
                return "bad_request", str(error), "messages"
            case Truncation():
                self._registry.mark_truncated(entry, error.reason)
                self._metrics.count_truncated(error.reason)
                message = f"rollout {entry.id} is truncated ({error.reason}): {without_addresses(str(error))}"
                return ("context" if error.reason == "context" else "truncated"), message, None
            case SessionGoneError():
                return "gone", str(error), None
            case RookeryError() if entry.ended is not None:  # it ended during the call
                return "gone", f"rollout {entry.id} was {entry.ended}", None
            case UpstreamError():
                entry.failure = error.code
                self._metrics.count_upstream_error(error.code)
                if isinstance(error.evidence, UpstreamEvidence) and error.evidence not in entry.evidence:
                    entry.evidence.append(error.evidence)
                return _ERROR_KINDS.get(error.code, "upstream"), without_addresses(str(error)), None
        raise error


class _ModelCall:
    """One HTTP request for a model call, and its response. With several choices it makes several model calls."""

    def __init__(
        self,
        handler: ModelCallHandler,
        entry: SessionEntry,
        dialect: Dialect,
        request: ClientRequest,
        out: ResponseWriter,
        began: float,
    ) -> None:
        self._handler = handler
        self._registry = handler._registry
        self._metrics = handler._metrics
        self._entry = entry
        self._dialect = dialect
        self._request = request
        self._out = out
        self._began = began
        self.stream: ReplyStream | None = None
        """Formats the events of the response if the client requested a stream; otherwise None."""

    async def run(self, is_retry: bool, idempotency_key: str) -> None:
        """Answer the request: a retry with the recorded reply if there is one, any other with a new model call."""
        entry, request = self._entry, self._request
        if entry.ended is not None:
            raise SessionGoneError(f"rollout {entry.id} was {entry.ended}")
        session = self._registry.load_session(entry)
        role = _find_role(session, request.model)
        request = self._request = self._handler._complete_request(entry, session, self._dialect, request)
        if request.prompts:
            request = self._request = await _tokenise(request, role)
        self._open_stream(request, role)
        own = entry.sampling(role.name)
        sampling = own.over(request.sampling.over(role.sampling))
        if request.sampling.extra and (own.extra or role.sampling.extra):  # merge them key by key
            extra = {**role.sampling.extra, **request.sampling.extra, **own.extra}
            sampling = msgspec.structs.replace(sampling, extra=extra)
        match = session.recorder.match_history(role.name, request.messages, request.tools.scope)
        _check_recordable(match.new_messages)
        check_media(match.new_messages, entry.registration.network, entry.registration.allow)
        before = entry.turn_key(match.turn.index) if match.turn is not None else ""
        key = _make_key(
            idempotency_key, before, request, len(match.new_messages), request.tools.scope, role.name, sampling
        )
        if is_retry and (turns := await self._find_recorded(key)):
            self._metrics.count("replays")
            if request.reply_id:  # the client may have seen the ID of the first reply
                self._request = msgspec.structs.replace(request, reply_id=reply_id_in_key(turns[0].key))
                self._open_stream(self._request, role)
            await self._replay([self._load_reply(turn, role) for turn in turns])
            return
        if entry.ended is not None:  # while the retry waited
            raise SessionGoneError(f"rollout {entry.id} was {entry.ended}")
        if entry.truncated is not None and role.name == "policy":
            raise Truncation(entry.truncated, "an earlier call has exhausted its budget")
        call = msgspec.structs.replace(request, sampling=sampling)
        over = entry.begin_request(key)
        try:
            async with entry.deadline() if entry.has_deadline else _NO_DEADLINE:
                entry.calls += 1
                try:
                    replies = await self._call_model(session, role, call, key, match)
                except RenderError:
                    entry.calls -= 1  # rejected before the upstream was called
                    raise
        finally:
            entry.end_request(key, over)
        entry.failure = ""
        for reply in replies:
            self._count_turn(session, reply.turn)
        self._complete(replies)

    def _get_disconnect(self) -> Disconnect | None:
        return self._out.disconnect

    def _open_stream(self, request: ClientRequest, role: ModelRole) -> None:
        if request.stream:
            decode_tokens = role.rendering.renderer.token_bytes if role.rendering is not None else None
            self.stream = self._dialect.open_stream(request, decode_tokens)

    async def _call_model(
        self, session: Session, role: ModelRole, request: ClientRequest, key: str, match: HistoryMatch
    ) -> list[ModelReply]:
        """Make one model call for each choice (alternative reply) that the client requests, concurrently."""
        disconnect = self._get_disconnect if request.stream else None
        calls = []
        for choice in range(request.choices):
            one, turn_key = self._make_choice(request, key, choice)
            write = self._delta_writer(choice)
            calls.append(session.call(role, one, write, key=turn_key, match=match, disconnect=disconnect))
        if len(calls) == 1:
            return [await calls[0]]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
        return [task.result() for task in tasks]

    def _make_choice(self, request: ClientRequest, key: str, choice: int) -> tuple[ClientRequest, str]:
        """Return the request for one choice (alternative reply), and the key under which its turn is recorded."""
        if not choice and not request.reply_id and not request.prompts:
            return request, key
        changes: dict[str, Any] = {}
        if request.sampling.seed is not None and (number := choice % request.n):
            # As in vLLM: with the same seed, all choices would be equal.
            seed = (request.sampling.seed + number + 2**63) % 2**64 - 2**63
            changes["sampling"] = msgspec.structs.replace(request.sampling, seed=seed)
        if request.prompts:
            changes["tokens"] = request.prompts[choice // request.n]
        key = make_turn_key(key, choice, request.reply_id, request.instruction_length)
        return (msgspec.structs.replace(request, **changes) if changes else request), key

    def _delta_writer(self, choice: int) -> OnDelta | None:
        stream, out = self.stream, self._out
        if stream is None:
            return None

        async def on_delta(delta: Delta) -> None:
            data = stream.format_delta(choice, delta)
            if not data:
                return
            if not out.begun:
                self._metrics.observe_first_piece(time.perf_counter() - self._began)
                out.begin(200, EVENT_STREAM, ((b"cache-control", b"no-cache"),))
            await out.write(data)

        return on_delta

    def _complete(self, replies: list[ModelReply]) -> None:
        out, stream = self._out, self.stream
        self._metrics.count_response(200)
        if stream is None:
            out.send(200, self._dialect.format_response(self._request, replies))
            return
        if not out.begun:
            out.begin(200, EVENT_STREAM, ((b"cache-control", b"no-cache"),))
        ends = b"".join(stream.format_choice_end(choice, reply) for choice, reply in enumerate(replies))
        out.end(ends + stream.format_end(replies))

    # ---- retries

    async def _find_recorded(self, key: str) -> list[Turn]:
        """Return the recorded turns of the request with this key, one per choice.

        The list is empty if the turns of some choices are not recorded. If that request is in progress, wait until
        it ends.
        """
        entry = self._entry
        if (asking := entry.pending.get(key)) is not None:
            try:
                async with asyncio.timeout(RETRY_SECONDS):
                    await asyncio.shield(asking)
            except TimeoutError:
                message = f"the original call of this retry did not end within {RETRY_SECONDS:g} seconds"
                raise UpstreamError(message, cause="upstream.timeout") from None
        turns = entry.replayable.get(key, {})
        count = self._request.choices
        return [turns[choice] for choice in range(count)] if len(turns) == count else []

    def _load_reply(self, turn: Turn, role: ModelRole) -> ModelReply:
        return _reply_from_turn(
            turn,
            prompt=self._registry.read_prompt(self._entry, turn) if self._request.return_token_ids else b"",
            decode_tokens=role.rendering.renderer.token_bytes if role.rendering is not None else None,
        )

    async def _replay(self, replies: list[ModelReply]) -> None:
        if self.stream is not None:
            for choice, reply in enumerate(replies):
                on_delta = self._delta_writer(choice)
                assert on_delta is not None
                await on_delta(delta_from_reply(reply))
        self._complete(replies)

    def _count_turn(self, session: Session, turn: Turn) -> None:
        count = self._metrics.count
        self._handler._count_changes(self._entry, session)
        count("turns")
        count("prompt_tokens", turn.prompt_tokens)
        count("sampled_tokens", turn.sampled_tokens)


def _reply_from_turn(turn: Turn, prompt: bytes = b"", decode_tokens: DecodeTokens | None = None) -> ModelReply:
    """Convert a recorded turn to the reply that it was recorded from. `prompt` are all prompt token IDs."""
    return ModelReply(
        message=turn.response,
        finish=turn.finish,
        prompt=prompt,
        sampled=turn.sampled,
        logprobs=turn.logprobs,
        prompt_tokens=turn.prompt_tokens,
        sampled_tokens=turn.sampled_tokens,
        recorded_turn=turn,
        decode_tokens=decode_tokens,
    )


def without_addresses(text: str) -> str:
    """Replace URLs, IP addresses and hosts with ports in an error message by the words `the inference engine`."""
    return _ADDRESS.sub("the inference engine", text)


_ADDRESS: Final = re.compile(
    r"""\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'"<>,;)\]]*[^\s'"<>,;:.)\]]  # a URL, without the punctuation after it
    |(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\w)  # an IPv4 address, with a port or without
    |\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\](?::\d+)?  # an IPv6 address
    |(?<![\w.-])(?:localhost|[\w-]+(?:\.[\w-]+)*):\d{2,5}(?!\w)  # a host and its port
    """,
    re.VERBOSE,
)


async def _tokenise(request: ClientRequest, role: ModelRole) -> ClientRequest:
    """Return the request with its text prompts converted to token IDs.

    Raises `BadRequestError` if the upstream does not accept token IDs, if there is no tokenizer, or if a prompt is
    empty.
    """
    if not role.upstream.accepts_tokens:
        raise BadRequestError(
            "the inference engine does not accept token IDs: request a chat completion", "prompt"
        )
    prompts: list[bytes | str] = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            if role.rendering is None:
                raise BadRequestError(
                    "the gateway has no tokenizer for texts: send token IDs, or start it with --record tokens",
                    "prompt",
                )
            prompt = await role.rendering.encode(prompt)  # noqa: PLW2901
        if not prompt:
            raise BadRequestError("the prompt must have at least one token", "prompt")
        prompts.append(prompt)
    return msgspec.structs.replace(request, prompts=tuple(prompts))


def _check_recordable(messages: Iterable[Message]) -> None:
    """Raise `MessageError` if a message cannot be encoded for the record, before a reply to it is sampled."""
    try:
        for message in messages:
            if isinstance(message.content, tuple):
                _encode(message)
    except OverflowError:
        raise MessageError("an integer in the content of a message does not fit into 64 bits") from None


def _find_role(session: Session, model: str) -> ModelRole:
    """Return the model role for the model name of a request.

    This is the role whose name equals `model`, else the role whose model has that name, else the policy.
    """
    roles = session.roles
    if model in roles:
        return roles[model]
    policy = roles["policy"]
    if model and model != policy.model:
        for role in roles.values():
            if role.model == model:
                return role
    return policy


def _make_key(
    idempotency_key: str,
    before: str,
    request: ClientRequest,
    new: int,
    scope: bytes,
    role: str,
    sampling: Sampling,
) -> str:
    """Return a key that identifies a request, so that a retry can be recognised.

    It is a hash of the idempotency key, the new messages (the last `new` ones), the model role, tools and
    sampling.

    The idempotency key alone is not enough, because a client may use it for two different requests. Earlier
    messages are represented by `before`, the key of the turn that the request continues: hashing the whole body
    would make the cost of a request grow with the conversation.
    """
    digest = blake2b(before.encode(), digest_size=16)
    for message in request.messages[len(request.messages) - new :]:
        digest.update(bytes(message) if isinstance(message, msgspec.Raw) else _encode(message))
    digest.update(
        _encode(
            (
                idempotency_key,
                role,
                request.n,
                scope,
                request.tool_choice,
                request.top_logprobs,
                sampling,
            )
        )
    )
    for prompt in request.prompts:
        digest.update(_encode(prompt))
    return digest.hexdigest()


def _read_retry_headers(request: Request) -> tuple[bool, str]:
    """Return whether the request may be a retry, and its idempotency key (or an empty string).

    A request may be a retry if it has an idempotency key, or a retry count above 0 as sent by OpenAI's and
    Anthropic's client libraries.
    """
    name = request.headers.get("idempotency-key", "")
    count = request.headers.get("x-stainless-retry-count", "")
    return bool(name) or (count.isdecimal() and bool(count.strip("0"))), name
