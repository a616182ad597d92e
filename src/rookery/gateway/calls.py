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
from rookery.gateway.http import EVENTS, Answer, Cut, Request
from rookery.gateway.media import check_media
from rookery.gateway.metrics import Metrics
from rookery.gateway.pipeline import count_prompt_tokens
from rookery.gateway.registry import Registry
from rookery.gateway.seat import Seat, choice_key, name_in
from rookery.gateway.session import Role, Session
from rookery.gateway.tools import ToolsError
from rookery.trajectories import HistoryMatch, MessageError
from rookery.upstreams.hang_detector import UpstreamEvidence
from rookery.upstreams.http_upstream import delta_from_reply
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


class GoneError(RookeryError):
    """The session is past."""


class Calls:
    """Answers the model calls of one shard's sessions."""

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        self._registry = registry
        self._metrics = metrics

    async def answer(self, seat: Seat, dialect: Dialect, request: Request, out: Answer) -> None:
        """Answers, whatever happens; only the end of the client itself is passed on."""
        began = time.perf_counter()
        telling: _Telling | None = None
        try:
            ask = dialect.parse_request(request.body)
            telling = _Telling(self, seat, dialect, ask, out, began)
            await telling.play(*_mark(request))
            self._metrics.call_seconds.add(time.perf_counter() - began)
        except asyncio.CancelledError:
            if seat.ended is None or out.gone:
                self._metrics.count("disconnects")
                if seat.session is not None:
                    self._count_news(seat, seat.session)
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()  # it was the session that ended, not the client
            self._fail(dialect, out, telling, "gone", f"rollout {seat.id} was {seat.ended}")
        except _EXPECTED as raised:
            problem, message, where = self._problem(seat, unwrap_group(raised))
            self._fail(dialect, out, telling, problem, message, where)

    async def count(self, seat: Seat, dialect: Dialect, request: Request, out: Answer) -> None:
        """How many tokens a request would begin with; nothing is sampled."""
        assert isinstance(dialect, TokenCountDialect)
        try:
            ask = dialect.parse_request(request.body)
            session = self._registry.session(seat)
            role = _role(session, ask.model)
            ask = self._whole(seat, session, dialect, ask)
            new = session.recorder.match_history(role.name, ask.messages, ask.tools.scope).new_messages
            _recordable(new)
            check_media(new, seat.registration.network, seat.registration.allow)
            out.send(200, dialect.format_token_count(await count_prompt_tokens(session, role, ask)))
            self._metrics.count("requests", label="status", value="200")
        except _EXPECTED as raised:
            self._fail(dialect, out, None, *self._problem(seat, unwrap_group(raised)))

    async def recall(self, seat: Seat, dialect: Dialect, name: str, request: Request, out: Answer) -> None:
        """An answer that was given before, or its end."""
        assert isinstance(dialect, StatefulDialect)
        session = self._registry.session(seat)
        key = name.partition("_")[2]
        known = seat.named.get(key)
        if known is None:
            self._fail(dialect, out, None, "not_found", f"there is no answer {name[:200]!r} in this rollout")
            return
        if request.method == "DELETE":
            del seat.named[key]
            out.send(200, dialect.format_deleted(name))
        else:
            turn = self._registry.turn(seat, known[0])
            reply = _reply_from_turn(turn)
            out.send(200, dialect.format_stored(name, reply, session.roles[turn.role].model))
        self._metrics.count("requests", label="status", value="200")

    def _whole(self, seat: Seat, session: Session, dialect: Dialect, ask: ClientRequest) -> ClientRequest:
        """An ask with calls as they were sampled, and with all before it, where it goes on from an answer."""
        if ask.object_arguments:
            respelled = session.respelled
            messages = tuple(
                [respelled.restored(one) if isinstance(one, Message) else one for one in ask.messages]
            )
            return msgspec.structs.replace(ask, messages=messages)
        if ask.references:
            ask = self._resolved(seat, dialect, ask)
        if not ask.previous_id:
            return ask
        known = seat.named.get(ask.previous_id)
        if known is None or not isinstance(dialect, StatefulDialect):
            raise BadRequestError(
                f"there is no answer {ask.previous_id[:200]!r} to go on from: send the whole history",
                "previous_response_id",
            )
        index, head = known
        return dialect.prepend_history(ask, self._registry.history(seat, index), head)

    def _resolved(self, seat: Seat, dialect: Dialect, ask: ClientRequest) -> ClientRequest:
        """The ask with parts of earlier answers in the place of the references to them."""
        assert isinstance(dialect, StatefulDialect)
        answers: dict[str, Message] = {}
        for reference in ask.references:
            answer = dialect.find_referenced_response(reference)
            known = seat.named.get(answer)
            if known is None:
                said = f"there is no item {reference[:200]!r} in this rollout: send the item itself"
                raise BadRequestError(said, "input")
            if answer not in answers:
                answers[answer] = self._registry.turn(seat, known[0]).response
        return dialect.resolve_references(ask, answers)

    def _fail(
        self,
        dialect: Dialect,
        out: Answer,
        telling: "_Telling | None",
        problem: ErrorKind,
        message: str,
        where: str | None = None,
    ) -> None:
        if out.begun:
            assert telling is not None
            assert telling.answering is not None
            out.end(telling.answering.format_failure(problem, message))
            status = 200
        else:
            status, body = dialect.format_error(problem, message, where)
            out.send(status, body)
        self._metrics.count("requests", label="status", value=str(status))

    def _count_news(self, seat: Seat, session: Session) -> None:
        for name, by in seat.news_of(session).items():
            self._metrics.count(name, by)

    def _problem(self, seat: Seat, error: BaseException) -> tuple[ErrorKind, str, str | None]:
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
                self._registry.stopped(seat, error.reason)
                self._metrics.count("truncated", label="reason", value=error.reason)
                said = f"rollout {seat.id} is truncated ({error.reason}): {without_addresses(str(error))}"
                return ("context" if error.reason == "context" else "truncated"), said, None
            case GoneError():
                return "gone", str(error), None
            case RookeryError() if seat.ended is not None:  # it ended while this was on its way
                return "gone", f"rollout {seat.id} was {seat.ended}", None
            case UpstreamError():
                seat.failure = error.code
                self._metrics.count("upstream_errors", label="cause", value=error.code)
                if isinstance(error.evidence, UpstreamEvidence) and error.evidence not in seat.evidence:
                    seat.evidence.append(error.evidence)
                return _PROBLEMS.get(error.code, "upstream"), without_addresses(str(error)), None
        raise error


class _Telling:
    """One call and its answer."""

    def __init__(
        self, calls: Calls, seat: Seat, dialect: Dialect, ask: ClientRequest, out: Answer, began: float
    ) -> None:
        self._calls = calls
        self._registry = calls._registry
        self._metrics = calls._metrics
        self._seat = seat
        self._dialect = dialect
        self._ask = ask
        self._out = out
        self._began = began
        self.answering: ReplyStream | None = None
        """Where the answer is streamed, and from when it is known who answers."""

    async def play(self, marked: bool, named: str) -> None:
        seat, ask = self._seat, self._ask
        if seat.ended is not None:
            raise GoneError(f"rollout {seat.id} was {seat.ended}")
        session = self._registry.session(seat)
        role = _role(session, ask.model)
        ask = self._ask = self._calls._whole(seat, session, self._dialect, ask)
        if ask.prompts:
            ask = self._ask = await _tokenised(ask, role)
        self._answers(ask, role)
        own = seat.sampling(role.name)
        sampling = own.over(ask.sampling.over(role.sampling))
        if ask.sampling.extra and (own.extra or role.sampling.extra):  # one option replaces itself, not the others
            extra = {**role.sampling.extra, **ask.sampling.extra, **own.extra}
            sampling = msgspec.structs.replace(sampling, extra=extra)
        place = session.recorder.match_history(role.name, ask.messages, ask.tools.scope)
        _recordable(place.new_messages)
        check_media(place.new_messages, seat.registration.network, seat.registration.allow)
        before = seat.key_of(place.turn.index) if place.turn is not None else ""
        key = _key(named, before, ask, len(place.new_messages), ask.tools.scope, role.name, sampling)
        if marked and (turns := await self._again(key)):
            self._metrics.count("replays")
            if ask.reply_id:  # the name that its client may have seen
                self._ask = msgspec.structs.replace(ask, reply_id=name_in(turns[0].key))
                self._answers(self._ask, role)
            await self._replay([self._recorded(turn, role) for turn in turns])
            return
        if seat.ended is not None:  # while the retry waited
            raise GoneError(f"rollout {seat.id} was {seat.ended}")
        if seat.truncated is not None and role.name == "policy":
            raise Truncation(seat.truncated, "its budget was spent before")
        call = msgspec.structs.replace(ask, sampling=sampling)
        with seat.asks(key):
            async with seat.within():
                seat.calls += 1
                try:
                    replies = await self._call_model(session, role, call, key, place)
                except RenderError:
                    seat.calls -= 1  # refused here, before a model was asked
                    raise
        seat.failure = ""
        for reply in replies:
            self._counted(session, reply.turn)
        self._complete(replies)

    def _cut(self) -> Cut | None:
        return self._out.cut

    def _answers(self, ask: ClientRequest, role: Role) -> None:
        if ask.stream:
            spell = role.rendering.renderer.token_bytes if role.rendering is not None else None
            self.answering = self._dialect.open_stream(ask, spell)

    async def _call_model(
        self, session: Session, role: Role, request: ClientRequest, key: str, match: HistoryMatch
    ) -> list[ModelReply]:
        """Make one model call for each choice that the client wants."""
        cut = self._cut if request.stream else None
        calls = [
            session.call(role, one, self._delta_writer(choice), key=turn_key, match=match, cut=cut)
            for choice in range(request.choices)
            for one, turn_key in [self._choice(request, key, choice)]
        ]
        if len(calls) == 1:
            return [await calls[0]]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
        return [task.result() for task in tasks]

    def _choice(self, request: ClientRequest, key: str, choice: int) -> tuple[ClientRequest, str]:
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
        key = choice_key(key, choice, request.reply_id, request.instruction_length)
        return (msgspec.structs.replace(request, **changes) if changes else request), key

    def _delta_writer(self, choice: int) -> OnDelta | None:
        answering, out = self.answering, self._out
        if answering is None:
            return None

        async def on_delta(delta: Delta) -> None:
            data = answering.format_delta(choice, delta)
            if not data:
                return
            if not out.begun:
                self._metrics.first_piece_seconds.add(time.perf_counter() - self._began)
                out.begin(200, EVENTS, ((b"cache-control", b"no-cache"),))
            await out.write(data)

        return on_delta

    def _complete(self, replies: list[ModelReply]) -> None:
        out, answering = self._out, self.answering
        self._metrics.count("requests", label="status", value="200")
        if answering is None:
            out.send(200, self._dialect.format_response(self._ask, replies))
            return
        if not out.begun:
            out.begin(200, EVENTS, ((b"cache-control", b"no-cache"),))
        ends = b"".join(answering.format_choice_end(choice, reply) for choice, reply in enumerate(replies))
        out.end(ends + answering.format_end(replies))

    # ---- the same again

    async def _again(self, key: str) -> list[Turn]:
        """What was recorded for this request, choice by choice; waits where it is still under way."""
        seat = self._seat
        if (asking := seat.asking.get(key)) is not None:
            try:
                async with asyncio.timeout(RETRY_SECONDS):
                    await asyncio.shield(asking)
            except TimeoutError:
                said = f"the call that this one repeats did not end within {RETRY_SECONDS:g} seconds"
                raise UpstreamError(said, cause="upstream.timeout") from None
        turns = seat.keys.get(key, {})
        count = self._ask.choices
        return [turns[choice] for choice in range(count)] if len(turns) == count else []

    def _recorded(self, turn: Turn, role: Role) -> ModelReply:
        return _reply_from_turn(
            turn,
            prompt=self._registry.prompt(self._seat, turn) if self._ask.return_token_ids else b"",
            decode_tokens=role.rendering.renderer.token_bytes if role.rendering is not None else None,
        )

    async def _replay(self, replies: list[ModelReply]) -> None:
        if self.answering is not None:
            for choice, reply in enumerate(replies):
                on_delta = self._delta_writer(choice)
                assert on_delta is not None
                await on_delta(delta_from_reply(reply))
        self._complete(replies)

    def _counted(self, session: Session, turn: Turn) -> None:
        count = self._metrics.count
        self._calls._count_news(self._seat, session)
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


async def _tokenised(ask: ClientRequest, role: Role) -> ClientRequest:
    """The ask with ids in the place of texts."""
    if not role.upstream.accepts_tokens:
        raise BadRequestError("the model's engine takes no token ids: ask for a chat completion", "prompt")
    found: list[bytes | str] = []
    for prompt in ask.prompts:
        if isinstance(prompt, str):
            if role.rendering is None:
                raise BadRequestError(
                    "no tokenizer is here that could make tokens of a text: send token ids, or record tokens",
                    "prompt",
                )
            prompt = await role.rendering.encode(prompt)  # noqa: PLW2901  (the same, as engines read it)
        if not prompt:
            raise BadRequestError("a prompt has at least one token", "prompt")
        found.append(prompt)
    return msgspec.structs.replace(ask, prompts=tuple(found))


def _recordable(messages: Iterable[Message]) -> None:
    """What cannot be recorded is not sampled from: a part of a message may hold a number without end."""
    try:
        for message in messages:
            if isinstance(message.content, tuple):
                _encode(message)
    except OverflowError:
        raise MessageError("a number in a message's content is larger than 64 bits hold") from None


def _role(session: Session, model: str) -> Role:
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


def _key(
    named: str, before: str, ask: ClientRequest, new: int, scope: bytes, role: str, sampling: Sampling
) -> str:
    """What tells a request from others: its name, what it adds to the turn that it continues, and how it samples.

    A name alone would not do: a client that gave it to two requests would get the answer to the other one.

    The whole body would do, but a conversation's hundredth request would cost a hundred times its second.
    """
    digest = blake2b(before.encode(), digest_size=16)
    for message in ask.messages[len(ask.messages) - new :]:
        digest.update(bytes(message) if isinstance(message, msgspec.Raw) else _encode(message))
    digest.update(_encode((named, role, ask.n, scope, ask.tool_choice, ask.top_logprobs, sampling)))
    for prompt in ask.prompts:
        digest.update(_encode(prompt))
    return digest.hexdigest()


def _mark(request: Request) -> tuple[bool, str]:
    """Whether the client says that it sends this again, and the name that it gave the request, if any."""
    name = request.headers.get("idempotency-key", "")
    count = request.headers.get("x-stainless-retry-count", "")
    return bool(name) or (count.isdecimal() and bool(count.strip("0"))), name
