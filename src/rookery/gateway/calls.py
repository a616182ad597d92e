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
from rookery.core.errors import behind
from rookery.gateway.dialects.protocol import Answering, Ask, BadRequestError, Counts, Dialect, Keeps, Problem
from rookery.gateway.http import EVENTS, Answer, Cut, Request
from rookery.gateway.media import check_media
from rookery.gateway.metrics import Metrics
from rookery.gateway.pipeline import counted
from rookery.gateway.registry import Registry
from rookery.gateway.renderings.protocol import Unrenderable
from rookery.gateway.seat import Seat, choice_key, name_in
from rookery.gateway.session import Call, Reply, Role, Session
from rookery.gateway.tools import NO_TOOLS, Tools, ToolsError, tools_in
from rookery.trajectories import MessageError
from rookery.upstreams.hangs import UpstreamEvidence
from rookery.upstreams.protocol import CallDelta, Delta, News

RETRY_SECONDS: Final = 600.0
"""How long a retry waits for the call that it repeats."""
_PROBLEMS: Final[dict[str, Problem]] = {
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
            ask = dialect.ask(request.body)
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
            problem, message, where = self._problem(seat, behind(raised))
            self._fail(dialect, out, telling, problem, message, where)

    async def count(self, seat: Seat, dialect: Dialect, request: Request, out: Answer) -> None:
        """How many tokens a request would begin with; nothing is sampled."""
        assert isinstance(dialect, Counts)
        try:
            ask = dialect.ask(request.body)
            session = self._registry.session(seat)
            role = _role(session, ask.model)
            ask = self._whole(seat, session, dialect, ask)
            call = Call(messages=ask.messages, tools=_tools(ask), tool_choice=ask.tool_choice)
            new = session.recorder.find(role.name, ask.messages, call.tools.scope).new
            _recordable(new)
            check_media(new, seat.registration.network, seat.registration.allow)
            out.send(200, dialect.counted(await counted(session, role, call)))
            self._metrics.count("requests", label="status", value="200")
        except _EXPECTED as raised:
            self._fail(dialect, out, None, *self._problem(seat, behind(raised)))

    async def recall(self, seat: Seat, dialect: Dialect, name: str, request: Request, out: Answer) -> None:
        """An answer that was given before, or its end."""
        assert isinstance(dialect, Keeps)
        session = self._registry.session(seat)
        key = name.partition("_")[2]
        known = seat.named.get(key)
        if known is None:
            self._fail(dialect, out, None, "not_found", f"there is no answer {name[:200]!r} in this rollout")
            return
        if request.method == "DELETE":
            del seat.named[key]
            out.send(200, dialect.forgotten(name))
        else:
            turn = self._registry.turn(seat, known[0])
            reply = Reply(message=turn.response, finish=turn.finish, turn=turn)
            out.send(200, dialect.kept(name, reply, session.roles[turn.role].model))
        self._metrics.count("requests", label="status", value="200")

    def _whole(self, seat: Seat, session: Session, dialect: Dialect, ask: Ask) -> Ask:
        """An ask with calls as they were sampled, and with all before it, where it goes on from an answer."""
        if ask.objects:
            respelled = session.respelled
            messages = tuple(
                [respelled.restored(one) if isinstance(one, Message) else one for one in ask.messages]
            )
            return msgspec.structs.replace(ask, messages=messages)
        if ask.references:
            ask = self._resolved(seat, dialect, ask)
        if not ask.after:
            return ask
        known = seat.named.get(ask.after)
        if known is None or not isinstance(dialect, Keeps):
            raise BadRequestError(
                f"there is no answer {ask.after[:200]!r} to go on from: send the whole history",
                "previous_response_id",
            )
        index, head = known
        return dialect.continued(ask, self._registry.history(seat, index), head)

    def _resolved(self, seat: Seat, dialect: Dialect, ask: Ask) -> Ask:
        """The ask with parts of earlier answers in the place of the references to them."""
        assert isinstance(dialect, Keeps)
        answers: dict[str, Message] = {}
        for reference in ask.references:
            answer = dialect.referenced(reference)
            known = seat.named.get(answer)
            if known is None:
                said = f"there is no item {reference[:200]!r} in this rollout: send the item itself"
                raise BadRequestError(said, "input")
            if answer not in answers:
                answers[answer] = self._registry.turn(seat, known[0]).response
        return dialect.resolved(ask, answers)

    def _fail(
        self,
        dialect: Dialect,
        out: Answer,
        telling: "_Telling | None",
        problem: Problem,
        message: str,
        where: str | None = None,
    ) -> None:
        if out.begun:
            assert telling is not None
            assert telling.answering is not None
            out.end(telling.answering.broken(problem, message))
            status = 200
        else:
            status, body = dialect.error(problem, message, where)
            out.send(status, body)
        self._metrics.count("requests", label="status", value=str(status))

    def _count_news(self, seat: Seat, session: Session) -> None:
        for name, by in seat.news_of(session).items():
            self._metrics.count(name, by)

    def _problem(self, seat: Seat, error: BaseException) -> tuple[Problem, str, str | None]:
        """What to tell the client; what it is not about is raised on."""
        match error:
            case BadRequestError():
                return error.problem, str(error), error.where
            case MessageError():
                return "bad_request", str(error), "messages"
            case ToolsError():
                return "bad_request", str(error), "tools"
            case Unrenderable():
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

    def __init__(self, calls: Calls, seat: Seat, dialect: Dialect, ask: Ask, out: Answer, began: float) -> None:
        self._calls = calls
        self._registry = calls._registry
        self._metrics = calls._metrics
        self._seat = seat
        self._dialect = dialect
        self._ask = ask
        self._out = out
        self._began = began
        self.answering: Answering | None = None
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
        tools = _tools(ask)
        own = seat.sampling(role.name)
        sampling = own.over(ask.sampling.over(role.sampling))
        if ask.sampling.extra and (own.extra or role.sampling.extra):  # one option replaces itself, not the others
            extra = {**role.sampling.extra, **ask.sampling.extra, **own.extra}
            sampling = msgspec.structs.replace(sampling, extra=extra)
        place = session.recorder.find(role.name, ask.messages, tools.scope)
        _recordable(place.new)
        check_media(place.new, seat.registration.network, seat.registration.allow)
        before = seat.key_of(place.turn.index) if place.turn is not None else ""
        key = _key(named, before, ask, len(place.new), tools.scope, role.name, sampling)
        if marked and (turns := await self._again(key)):
            self._metrics.count("replays")
            if ask.id:  # the name that its client may have seen
                self._ask = msgspec.structs.replace(ask, id=name_in(turns[0].key))
                self._answers(self._ask, role)
            await self._replay([self._recorded(turn, role) for turn in turns])
            return
        if seat.ended is not None:  # while the retry waited
            raise GoneError(f"rollout {seat.id} was {seat.ended}")
        if seat.truncated is not None and role.name == "policy":
            raise Truncation(seat.truncated, "its budget was spent before")
        call = Call(
            messages=ask.messages,
            tools=tools,
            tool_choice=ask.tool_choice,
            sampling=sampling,
            top_logprobs=ask.top_logprobs,
            logprobs=ask.logprobs,
            key=key,
            place=place,
            cut=self._cut if ask.stream else None,
        )
        with seat.asks(key):
            async with seat.within():
                seat.calls += 1
                try:
                    replies = await self._ask_all(session, role, call)
                except Unrenderable:
                    seat.calls -= 1  # refused here, before a model was asked
                    raise
        seat.failure = ""
        for reply in replies:
            self._counted(session, reply.turn)
        self._complete(replies)

    def _cut(self) -> Cut | None:
        return self._out.cut

    def _answers(self, ask: Ask, role: Role) -> None:
        if ask.stream:
            spell = role.rendering.rendering.spelled if role.rendering is not None else None
            self.answering = self._dialect.answering(ask, spell)

    async def _ask_all(self, session: Session, role: Role, call: Call) -> list[Reply]:
        ask = self._ask
        calls = [self._choice(call, choice) for choice in range(ask.choices)]
        if len(calls) == 1:
            return [await session.call(role, calls[0], self._news(0))]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(session.call(role, one, self._news(choice))) for choice, one in enumerate(calls)
            ]
        return [task.result() for task in tasks]

    def _choice(self, call: Call, choice: int) -> Call:
        ask = self._ask
        if not choice and not ask.id and not ask.prompts:
            return call
        changes: dict[str, Any] = {"key": choice_key(call.key, choice, ask.id, ask.head)}
        if call.sampling.seed is not None and (place := choice % ask.n):
            # As vLLM numbers the choices of one prompt. With one seed all of them would be the same.
            seed = (call.sampling.seed + place + 2**63) % 2**64 - 2**63
            changes["sampling"] = msgspec.structs.replace(call.sampling, seed=seed)
        if ask.prompts:
            changes["tokens"] = ask.prompts[choice // ask.n]
        return msgspec.structs.replace(call, **changes)

    def _news(self, choice: int) -> News | None:
        answering, out = self.answering, self._out
        if answering is None:
            return None

        async def news(delta: Delta) -> None:
            data = answering.piece(choice, delta)
            if not data:
                return
            if not out.begun:
                self._metrics.first_piece_seconds.add(time.perf_counter() - self._began)
                out.begin(200, EVENTS, ((b"cache-control", b"no-cache"),))
            await out.write(data)

        return news

    def _complete(self, replies: list[Reply]) -> None:
        out, answering = self._out, self.answering
        self._metrics.count("requests", label="status", value="200")
        if answering is None:
            out.send(200, self._dialect.whole(self._ask, replies))
            return
        if not out.begun:
            out.begin(200, EVENTS, ((b"cache-control", b"no-cache"),))
        ends = b"".join(answering.end(choice, reply) for choice, reply in enumerate(replies))
        out.end(ends + answering.done(replies))

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

    def _recorded(self, turn: Turn, role: Role) -> Reply:
        return Reply(
            message=turn.response,
            finish=turn.finish,
            turn=turn,
            prompt=self._registry.prompt(self._seat, turn) if self._ask.ids else b"",
            spell=role.rendering.rendering.spelled if role.rendering is not None else None,
        )

    async def _replay(self, replies: list[Reply]) -> None:
        if self.answering is not None:
            for choice, reply in enumerate(replies):
                news = self._news(choice)
                assert news is not None
                await news(whole(reply))
        self._complete(replies)

    def _counted(self, session: Session, turn: Turn) -> None:
        count = self._metrics.count
        self._calls._count_news(self._seat, session)
        count("turns")
        count("prompt_tokens", turn.prompt_tokens)
        count("sampled_tokens", turn.sampled_tokens)


def whole(reply: Reply) -> Delta:
    """A reply as one piece of a stream."""
    message = reply.message
    return Delta(
        content=message.text,
        reasoning=message.reasoning or "",
        tool_calls=tuple(
            CallDelta(at, call.id, call.name, call.arguments) for at, call in enumerate(message.tool_calls)
        ),
        sampled=reply.turn.sampled,
        logprobs=reply.turn.logprobs,
        prompt=reply.prompt,
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


def _tools(ask: Ask) -> Tools:
    if isinstance(ask.tools, Tools):
        return ask.tools
    return tools_in(bytes(ask.tools)) if ask.tools is not None else NO_TOOLS


async def _tokenised(ask: Ask, role: Role) -> Ask:
    """The ask with ids in the place of texts."""
    if not role.upstream.tokens_in:
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


def _key(named: str, before: str, ask: Ask, new: int, scope: bytes, role: str, sampling: Sampling) -> str:
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
