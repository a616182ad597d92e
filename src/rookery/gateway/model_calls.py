"""A client's model call, from its request to the last byte of its answer.

Promises:
- bytes reach the client as they arrive; the turn is recorded before the events that say it is complete;
- a request that its client marks as a retry gets the recorded answer again, and waits for a call that
  is still under way; an equal request without the mark is a new turn;
- a spent budget ends the call with an error in the client's own shape, and the session is truncated from then on;
- a client that closes the connection ends its call, up to the engine; what a stream had sampled until then counts
  against the budgets, as a partial turn.
"""

import asyncio
import re
import time
from collections.abc import Iterable
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
from rookery.gateway.http import EVENT_STREAM, Disconnect, Request, ResponseWriter
from rookery.gateway.media import check_media
from rookery.gateway.metrics import Metrics
from rookery.gateway.pipeline import count_prompt_tokens
from rookery.gateway.registry import Registry
from rookery.gateway.session import ModelRole, Session
from rookery.gateway.session_entry import SessionEntry, make_turn_key, reply_id_in_key
from rookery.gateway.tools import ToolsError
from rookery.trajectories import HistoryMatch, MessageError
from rookery.upstreams.format import delta_from_reply
from rookery.upstreams.hang_detector import UpstreamEvidence
from rookery.upstreams.protocol import DecodeTokens, Delta, ModelReply, OnDelta

RETRY_SECONDS: Final = 600.0
"""How long a retry waits for the call that it repeats."""
_PROBLEMS: Final[dict[str, ErrorKind]] = {
    "upstream.rejected": "bad_request",
    "upstream.unreachable": "unavailable",
    "upstream.overloaded": "unavailable",
    "upstream.paused": "unavailable",
    "upstream.timeout": "timeout",
    "upstream.hung": "timeout",
}
_EXPECTED: Final = (BaseExceptionGroup, RookeryError, Truncation, MessageError, ToolsError)
_encode = msgspec.msgpack.Encoder().encode


class SessionGoneError(RookeryError):
    """The session is past."""


class ModelCallHandler:
    """Answers the model calls of one shard's sessions."""

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        self._registry = registry
        self._metrics = metrics

    async def answer(self, entry: SessionEntry, dialect: Dialect, request: Request, out: ResponseWriter) -> None:
        """Answers, whatever happens; only the end of the client itself is passed on."""
        began = time.perf_counter()
        call: _ModelCall | None = None
        try:
            client_request = dialect.parse_request(request.body)
            call = _ModelCall(self, entry, dialect, client_request, out, began)
            await call.run(*_read_retry_headers(request))
            self._metrics.call_seconds.add(time.perf_counter() - began)
        except asyncio.CancelledError:
            if entry.ended is None or out.gone:
                self._metrics.count("disconnects")
                if entry.session is not None:
                    self._count_changes(entry, entry.session)
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()  # it was the session that ended, not the client
            self._fail(dialect, out, call, "gone", f"rollout {entry.id} was {entry.ended}")
        except _EXPECTED as raised:
            problem, message, where = self._classify(entry, unwrap_group(raised))
            self._fail(dialect, out, call, problem, message, where)

    async def count_tokens(
        self, entry: SessionEntry, dialect: Dialect, request: Request, out: ResponseWriter
    ) -> None:
        """How many tokens a request would begin with; nothing is sampled."""
        assert isinstance(dialect, TokenCountDialect)
        try:
            client_request = dialect.parse_request(request.body)
            session = self._registry.load_session(entry)
            role = _find_role(session, client_request.model)
            client_request = self._complete_request(entry, session, dialect, client_request)
            new = session.recorder.match_history(
                role.name, client_request.messages, client_request.tools.scope
            ).new_messages
            _check_recordable(new)
            check_media(new, entry.registration.network, entry.registration.allow)
            out.send(200, dialect.format_token_count(await count_prompt_tokens(session, role, client_request)))
            self._metrics.count("requests", label="status", value="200")
        except _EXPECTED as raised:
            self._fail(dialect, out, None, *self._classify(entry, unwrap_group(raised)))

    async def handle_stored(
        self, entry: SessionEntry, dialect: Dialect, name: str, request: Request, out: ResponseWriter
    ) -> None:
        """An answer that was given before, or its end."""
        assert isinstance(dialect, StatefulDialect)
        session = self._registry.load_session(entry)
        key = name.partition("_")[2]
        known = entry.stored_replies.get(key)
        if known is None:
            self._fail(dialect, out, None, "not_found", f"there is no answer {name[:200]!r} in this rollout")
            return
        if request.method == "DELETE":
            del entry.stored_replies[key]
            out.send(200, dialect.format_deleted(name))
        else:
            turn = self._registry.read_turn(entry, known[0])
            reply = _reply_from_turn(turn)
            out.send(200, dialect.format_stored(name, reply, session.roles[turn.role].model))
        self._metrics.count("requests", label="status", value="200")

    def _complete_request(
        self, entry: SessionEntry, session: Session, dialect: Dialect, client_request: ClientRequest
    ) -> ClientRequest:
        """Return the request with tool calls as they were sampled and with the history that it continues by ID."""
        if client_request.object_arguments:
            argument_restorer = session.argument_restorer
            messages = tuple(
                [
                    argument_restorer.restore(one) if isinstance(one, Message) else one
                    for one in client_request.messages
                ]
            )
            return msgspec.structs.replace(client_request, messages=messages)
        if client_request.references:
            client_request = self._resolve_references(entry, dialect, client_request)
        if not client_request.previous_id:
            return client_request
        known = entry.stored_replies.get(client_request.previous_id)
        if known is None or not isinstance(dialect, StatefulDialect):
            raise BadRequestError(
                f"this session has no response {client_request.previous_id[:200]!r}: send the whole history",
                "previous_response_id",
            )
        index, head = known
        return dialect.prepend_history(client_request, self._registry.read_history(entry, index), head)

    def _resolve_references(
        self, entry: SessionEntry, dialect: Dialect, client_request: ClientRequest
    ) -> ClientRequest:
        """The client_request with parts of earlier answers in the place of the references to them."""
        assert isinstance(dialect, StatefulDialect)
        answers: dict[str, Message] = {}
        for reference in client_request.references:
            answer = dialect.find_referenced_response(reference)
            known = entry.stored_replies.get(answer)
            if known is None:
                said = f"there is no item {reference[:200]!r} in this rollout: send the item itself"
                raise BadRequestError(said, "input")
            if answer not in answers:
                answers[answer] = self._registry.read_turn(entry, known[0]).response
        return dialect.resolve_references(client_request, answers)

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
        self._metrics.count("requests", label="status", value=str(status))

    def _count_changes(self, entry: SessionEntry, session: Session) -> None:
        for name, by in entry.take_new_counts(session).items():
            self._metrics.count(name, by)

    def _classify(self, entry: SessionEntry, error: BaseException) -> tuple[ErrorKind, str, str | None]:
        """What to tell the client; what it is not about is raised on."""
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
                self._metrics.count("truncated", label="reason", value=error.reason)
                said = f"rollout {entry.id} is truncated ({error.reason}): {without_addresses(str(error))}"
                return ("context" if error.reason == "context" else "truncated"), said, None
            case SessionGoneError():
                return "gone", str(error), None
            case RookeryError() if entry.ended is not None:  # it ended while this was on its way
                return "gone", f"rollout {entry.id} was {entry.ended}", None
            case UpstreamError():
                entry.failure = error.code
                self._metrics.count("upstream_errors", label="cause", value=error.code)
                if isinstance(error.evidence, UpstreamEvidence) and error.evidence not in entry.evidence:
                    entry.evidence.append(error.evidence)
                return _PROBLEMS.get(error.code, "upstream"), without_addresses(str(error)), None
        raise error


class _ModelCall:
    """One call and its answer."""

    def __init__(
        self,
        handler: ModelCallHandler,
        entry: SessionEntry,
        dialect: Dialect,
        client_request: ClientRequest,
        out: ResponseWriter,
        began: float,
    ) -> None:
        self._handler = handler
        self._registry = handler._registry
        self._metrics = handler._metrics
        self._find_entry = entry
        self._dialect = dialect
        self._request = client_request
        self._out = out
        self._began = began
        self.stream: ReplyStream | None = None
        """Where the answer is streamed, and from when it is known who answers."""

    async def run(self, is_retry: bool, named: str) -> None:
        entry, client_request = self._find_entry, self._request
        if entry.ended is not None:
            raise SessionGoneError(f"rollout {entry.id} was {entry.ended}")
        session = self._registry.load_session(entry)
        role = _find_role(session, client_request.model)
        client_request = self._request = self._handler._complete_request(
            entry, session, self._dialect, client_request
        )
        if client_request.prompts:
            client_request = self._request = await _tokenise(client_request, role)
        self._open_stream(client_request, role)
        own = entry.sampling(role.name)
        sampling = own.over(client_request.sampling.over(role.sampling))
        if client_request.sampling.extra and (
            own.extra or role.sampling.extra
        ):  # one option replaces itself, not the others
            extra = {**role.sampling.extra, **client_request.sampling.extra, **own.extra}
            sampling = msgspec.structs.replace(sampling, extra=extra)
        place = session.recorder.match_history(role.name, client_request.messages, client_request.tools.scope)
        _check_recordable(place.new_messages)
        check_media(place.new_messages, entry.registration.network, entry.registration.allow)
        before = entry.turn_key(place.turn.index) if place.turn is not None else ""
        key = _make_key(
            named, before, client_request, len(place.new_messages), client_request.tools.scope, role.name, sampling
        )
        if is_retry and (turns := await self._find_recorded(key)):
            self._metrics.count("replays")
            if client_request.reply_id:  # the name that its client may have seen
                self._request = msgspec.structs.replace(client_request, reply_id=reply_id_in_key(turns[0].key))
                self._open_stream(self._request, role)
            await self._replay([self._load_reply(turn, role) for turn in turns])
            return
        if entry.ended is not None:  # while the retry waited
            raise SessionGoneError(f"rollout {entry.id} was {entry.ended}")
        if entry.truncated is not None and role.name == "policy":
            raise Truncation(entry.truncated, "its budget was spent before")
        call = msgspec.structs.replace(client_request, sampling=sampling)
        with entry.track_request(key):
            async with entry.deadline():
                entry.calls += 1
                try:
                    replies = await self._call_model(session, role, call, key, place)
                except RenderError:
                    entry.calls -= 1  # refused here, before a model was asked
                    raise
        entry.failure = ""
        for reply in replies:
            self._count_turn(session, reply.turn)
        self._complete(replies)

    def _get_disconnect(self) -> Disconnect | None:
        return self._out.disconnect

    def _open_stream(self, client_request: ClientRequest, role: ModelRole) -> None:
        if client_request.stream:
            spell = role.rendering.renderer.token_bytes if role.rendering is not None else None
            self.stream = self._dialect.open_stream(client_request, spell)

    async def _call_model(
        self, session: Session, role: ModelRole, request: ClientRequest, key: str, match: HistoryMatch
    ) -> list[ModelReply]:
        """Make one model call for each choice that the client wants."""
        disconnect = self._get_disconnect if request.stream else None
        calls = [
            session.call(role, one, self._delta_writer(choice), key=turn_key, match=match, disconnect=disconnect)
            for choice in range(request.choices)
            for one, turn_key in [self._make_choice(request, key, choice)]
        ]
        if len(calls) == 1:
            return [await calls[0]]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
        return [task.result() for task in tasks]

    def _make_choice(self, request: ClientRequest, key: str, choice: int) -> tuple[ClientRequest, str]:
        """Return the request for one of several choices, and the key of its turn."""
        if not choice and not request.reply_id and not request.prompts:
            return request, key
        changes: dict[str, Any] = {}
        if request.sampling.seed is not None and (number := choice % request.n):
            # As vLLM numbers the choices of one prompt. With the same seed all of them would be equal.
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
                self._metrics.first_piece_seconds.add(time.perf_counter() - self._began)
                out.begin(200, EVENT_STREAM, ((b"cache-control", b"no-cache"),))
            await out.write(data)

        return on_delta

    def _complete(self, replies: list[ModelReply]) -> None:
        out, stream = self._out, self.stream
        self._metrics.count("requests", label="status", value="200")
        if stream is None:
            out.send(200, self._dialect.format_response(self._request, replies))
            return
        if not out.begun:
            out.begin(200, EVENT_STREAM, ((b"cache-control", b"no-cache"),))
        ends = b"".join(stream.format_choice_end(choice, reply) for choice, reply in enumerate(replies))
        out.end(ends + stream.format_end(replies))

    # ---- the same again

    async def _find_recorded(self, key: str) -> list[Turn]:
        """What was recorded for this request, choice by choice; waits where it is still under way."""
        entry = self._find_entry
        if (asking := entry.pending.get(key)) is not None:
            try:
                async with asyncio.timeout(RETRY_SECONDS):
                    await asyncio.shield(asking)
            except TimeoutError:
                said = f"the call that this one repeats did not end within {RETRY_SECONDS:g} seconds"
                raise UpstreamError(said, cause="upstream.timeout") from None
        turns = entry.replayable.get(key, {})
        count = self._request.choices
        return [turns[choice] for choice in range(count)] if len(turns) == count else []

    def _load_reply(self, turn: Turn, role: ModelRole) -> ModelReply:
        return _reply_from_turn(
            turn,
            prompt=self._registry.read_prompt(self._find_entry, turn) if self._request.return_token_ids else b"",
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
        self._handler._count_changes(self._find_entry, session)
        count("turns")
        count("prompt_tokens", turn.prompt_tokens)
        count("sampled_tokens", turn.sampled_tokens)


def _reply_from_turn(turn: Turn, prompt: bytes = b"", decode_tokens: DecodeTokens | None = None) -> ModelReply:
    """Return the reply that a recorded turn stands for."""
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
    """An error of the engine as its clients may see it: without the addresses of machines."""
    return _ADDRESS.sub("the model server", text)


_ADDRESS: Final = re.compile(
    r"""\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'"<>,;)\]]*[^\s'"<>,;:.)\]]  # a URL, without the punctuation after it
    |(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\w)  # an IPv4 address, with a port or without
    |\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\](?::\d+)?  # an IPv6 address
    |(?<![\w.-])(?:localhost|[\w-]+(?:\.[\w-]+)*):\d{2,5}(?!\w)  # a host and its port
    """,
    re.VERBOSE,
)


async def _tokenise(client_request: ClientRequest, role: ModelRole) -> ClientRequest:
    """The client_request with ids in the place of texts."""
    if not role.upstream.accepts_tokens:
        raise BadRequestError("the model server does not accept token IDs: request a chat completion", "prompt")
    found: list[bytes | str] = []
    for prompt in client_request.prompts:
        if isinstance(prompt, str):
            if role.rendering is None:
                raise BadRequestError(
                    "the gateway has no tokenizer for text: send token IDs, or start it with --record tokens",
                    "prompt",
                )
            prompt = await role.rendering.encode(prompt)  # noqa: PLW2901  (the same, as engines read it)
        if not prompt:
            raise BadRequestError("the prompt must have at least one token", "prompt")
        found.append(prompt)
    return msgspec.structs.replace(client_request, prompts=tuple(found))


def _check_recordable(messages: Iterable[Message]) -> None:
    """What cannot be recorded is not sampled from: a part of a message may hold a number without end."""
    try:
        for message in messages:
            if isinstance(message.content, tuple):
                _encode(message)
    except OverflowError:
        raise MessageError("a number in the content of a message does not fit into 64 bits") from None


def _find_role(session: Session, model: str) -> ModelRole:
    """The role that a client means by a model's name: a role's own name, its model's, or else the policy."""
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
    named: str, before: str, client_request: ClientRequest, new: int, scope: bytes, role: str, sampling: Sampling
) -> str:
    """What tells a request from others: its name, what it adds to the turn that it continues, and how it samples.

    A name alone would not do: a client that gave it to two requests would get the answer to the other one.

    The whole body would do, but a conversation's hundredth request would cost a hundred times its second.
    """
    digest = blake2b(before.encode(), digest_size=16)
    for message in client_request.messages[len(client_request.messages) - new :]:
        digest.update(bytes(message) if isinstance(message, msgspec.Raw) else _encode(message))
    digest.update(
        _encode(
            (
                named,
                role,
                client_request.n,
                scope,
                client_request.tool_choice,
                client_request.top_logprobs,
                sampling,
            )
        )
    )
    for prompt in client_request.prompts:
        digest.update(_encode(prompt))
    return digest.hexdigest()


def _read_retry_headers(request: Request) -> tuple[bool, str]:
    """Whether the client says that it sends this again, and the name that it gave the request, if any."""
    name = request.headers.get("idempotency-key", "")
    count = request.headers.get("x-stainless-retry-count", "")
    return bool(name) or (count.isdecimal() and bool(count.strip("0"))), name
