"""The turn pipeline: one model call from what a door asks to a recorded turn, the same for every door.

Promises:
- what trains is what was sampled: ids are copied from what the engine returned, and in tokens mode the next prompt
  is the sampled ids with the new messages after them;
- a history that was edited, or that a chat format cannot extend for sure, begins a sequence of its own;
- in plain mode no ids are kept;
- a turn is recorded once, before its reply reaches the door, and as complete only when the answer is complete;
- an answer whose client closed the stream is a partial turn: its tokens count, and nobody gets it as an answer;
- what is told of an answer while it comes is the beginning of the message that is recorded;
- ids without the ids of their prompt are not recorded: what they were sampled from is not known.
"""

import codecs
import time
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core import Finish, Message, UpstreamError
from rookery.gateway.renderings.protocol import Unrenderable
from rookery.gateway.renderings.tool_prompts import without_tools
from rookery.gateway.sent import HeldCalls, Sent, without_half_call
from rookery.gateway.session import MODEL_CALL_SECONDS, Call, Reply, Role, Session
from rookery.gateway.stops import Stops
from rookery.trajectories import Place
from rookery.upstreams.protocol import Delta, ModelReply, ModelRequest, News

if TYPE_CHECKING:
    from rookery.gateway.renderings.offloop import Offloop
    from rookery.gateway.renderings.protocol import Rendering

TAIL = 256
"""Ids of the last prompt that a chat format gets to see when it extends an answer."""


async def played(session: Session, role: Role, call: Call, news: News | None) -> Reply:
    """One turn."""
    place = call.place or session.recorder.find(role.name, call.messages, call.tools.scope)
    prompt, added = call.tokens, None
    if role.record == "tokens" and not prompt:
        prompt, added = await _prompt(session, role, place, call)
    sampling = call.sampling
    if role.name == "policy" and not role.beside:
        sampling = session.budgeted(sampling, len(prompt) // 4)
    raw = role.upstream.raw_in
    request = ModelRequest(
        model=role.model,
        messages=() if prompt else call.messages if raw else place.messages(),
        tokens=prompt,
        tools=() if prompt else call.tools.outgoing if raw else call.tools.schemas,
        tool_choice=call.tool_choice if call.tools.schemas else None,
        sampling=sampling,
        want_tokens=role.record != "plain",
        seed=session.draw_seed(),
        affinity=session.attempt,
        avoid=session.avoid,
        stop_ids=role.rendering.rendering.stop if prompt and role.rendering is not None else (),
        top_logprobs=call.top_logprobs,
        want_logprobs=call.logprobs,
        memo=session.memo(role.name),
    )
    reading = _Reading(role, call, prompt, news)
    queued = await session.enter(role)
    started, at = time.time(), time.monotonic()
    try:
        timeout = session.limits.model_call or MODEL_CALL_SECONDS
        reply = await role.upstream.complete(request, timeout=timeout, news=reading.told, held=session.held)
        message, finish = await reading.read(reply)
    except BaseException:
        how = call.cut() if call.cut is not None and not session.closed else None
        # Without ids each piece counts as one token. That is too rough for all that a stalled client left unread.
        if how == "closed" or (how == "stalled" and reading.sent.sampled):
            facts = {"started": started, "seconds": time.monotonic() - at, "queued": queued, "key": call.key}
            _record_partial(session, role, place, reading.sent, prompt, added, facts)
        raise
    finally:
        role.credits.give()
    if role.record == "plain":  # also where the engine tells ids unasked
        prompt, reply = b"", _untold(msgspec.structs.replace(reply, prompt=b""))
    elif reply.sampled and not (reply.prompt or prompt):
        session.promptless += 1
        reply = _untold(reply)
    turn = session.recorder.record(
        place,
        prompt=(reply.prompt or prompt) if added is None else None,
        added=added,
        response=message,
        sampled=reply.sampled,
        logprobs=reply.logprobs,
        version=reply.version,
        spans=reply.spans,
        finish=finish,
        prompt_tokens=reply.prompt_tokens or len(request.tokens) // 4,
        sampled_tokens=reply.sampled_tokens,
        started=started,
        seconds=time.monotonic() - at,
        queued=queued + reply.queued,
        upstream=reply.replica,
        extras=reply.extras,
        key=call.key,
    )
    session.count(turn)
    return Reply(
        message=message,
        finish=finish,
        turn=turn,
        prompt=reply.prompt or prompt,
        tops=reply.tops,
        logprob_content=reply.logprob_content,
        spell=role.rendering.rendering.spelled if role.rendering is not None else None,
    )


def _record_partial(
    session: Session,
    role: Role,
    place: Place,
    sent: Sent,
    prompt: bytes,
    added: bytes | None,
    facts: dict[str, Any],
) -> None:
    """Records what was sampled of an answer whose client closed the stream. Nothing is recorded where nothing is
    known to have been sampled."""
    if not sent.tokens:
        return
    prompt = prompt or sent.prompt
    ids = role.record != "plain" and bool(prompt)
    turn = session.recorder.record(
        place,
        prompt=(prompt if ids else b"") if added is None else None,
        added=added,
        prompt_tokens=len(prompt) // 4,
        **sent.turn(ids=ids),
        **facts,
    )
    session.count(turn)


def _untold(reply: ModelReply) -> ModelReply:
    """The answer without its ids."""
    return msgspec.structs.replace(reply, sampled=b"", logprobs=b"", spans=(), extras={})


async def counted(session: Session, role: Role, call: Call) -> int:
    """How many tokens a call's prompt has: exactly where we render it, else about so many."""
    place = session.recorder.find(role.name, call.messages, call.tools.scope)
    node = place.turn
    if role.rendering is not None:
        prompt, _, _ = await _rendered(role.rendering, place, call)
        return len(prompt) // 4
    before = node.length if node is not None else 0
    new = place.new if before else place.messages()
    shown: list[object] = [*new, *(() if before else call.tools.schemas)]
    return before + sum(len(msgspec.json.encode(one)) for one in shown) // 4


async def _prompt(session: Session, role: Role, place: Place, call: Call) -> tuple[bytes, bytes | None]:
    """The ids to sample from, and those of them that are new, where they extend an earlier turn."""
    assert role.rendering is not None
    prompt, added, refused = await _rendered(role.rendering, place, call)
    session.rerendered += refused
    return prompt, added


async def _rendered(rendering: "Offloop", place: Place, call: Call) -> tuple[bytes, bytes | None, bool]:
    """A prompt, what of it is new, and whether it could not extend the turn before it."""
    tools, choice = call.tools.schemas, call.tool_choice
    if tools and choice != "none" and getattr(rendering.rendering, "refuses_tools", False):
        raise Unrenderable(without_tools(rendering.rendering.name))
    node = place.turn
    refused = False
    if node is not None and node.sampled:
        added = await rendering.extend(node.tail(TAIL), node.sampled, place.new, tools, choice)
        if added is not None:
            return node.tokens() + added, added, False
        refused = True
    return await rendering.render(place.messages(), tools, choice), None, refused


class _Reading:
    """Makes a message of an answer, while it comes or at its end."""

    def __init__(self, role: Role, call: Call, prompt: bytes, news: News | None) -> None:
        self._rendering = role.rendering if prompt and not call.tokens else None
        self._tail = prompt[-4 * TAIL :]
        self._at = len(prompt) // 4
        self._tools = call.tools.schemas
        self._news = news
        self._stops = Stops(call.sampling.stop) if call.sampling.stop and role.rendering is not None else None
        self._reader = None
        self._plain = _Plain(role.rendering.rendering) if call.tokens and role.rendering is not None else None
        self._upstream = role.upstream
        self._calls = HeldCalls()
        self._over_http = bool(call.key)
        self.sent = Sent()
        self.told: News | None = None
        if news is not None:
            self.told = self._tell
            if self._rendering is not None:
                self._reader = self._rendering.rendering.reader(self._tail, self._tools, at=self._at)

    async def _tell(self, delta: Delta) -> None:
        assert self._news is not None
        if self._reader is not None:
            read = self._reader.feed(delta.sampled, delta.logprobs)
            delta = msgspec.structs.replace(
                delta, content=read.content, reasoning=read.reasoning, tool_calls=read.tool_calls
            )
            if self._stops is not None:
                delta = msgspec.structs.replace(delta, content=self._stops.feed(delta.content))
        elif self._plain is not None:
            text = self._stopped(self._plain.feed(delta.sampled))
            delta = msgspec.structs.replace(delta, content=text, reasoning="", tool_calls=())
        if delta.tool_calls:
            delta = msgspec.structs.replace(delta, tool_calls=self._calls.feed(delta.tool_calls))
        self.sent.note(delta, self._upstream.version)
        await self._news(delta)

    def _stopped(self, text: str) -> str:
        return text if self._stops is None else self._stops.feed(text)

    async def read(self, reply: ModelReply) -> tuple[Message, Finish]:
        """The message and how it ended; what was held back of it is sent first."""
        message, finish = await self._whole(reply)
        if self._over_http:  # an environment sees how the answer ended, and decides itself
            message = without_half_call(message, finish)
        if self._news is not None and (calls := self._calls.rest(message.tool_calls)):
            await self._news(Delta(tool_calls=calls))
        return message, finish

    async def _whole(self, reply: ModelReply) -> tuple[Message, Finish]:
        rendering, message, finish = self._rendering, reply.message, reply.finish
        if finish == "abort":
            raise UpstreamError(f"{reply.replica}: the engine aborted the answer", cause="upstream.error")
        if self._plain is not None and reply.sampled:
            return await self._text(self._plain, reply), finish
        if rendering is None:
            return message, finish
        if self._reader is not None:
            last, message = await rendering.end(self._reader, len(reply.sampled) // 4)
            if self._stops is not None:
                last = msgspec.structs.replace(last, content=self._stops.end(last.content))
            if last.content or last.reasoning:
                assert self._news is not None
                await self._news(msgspec.structs.replace(last, tool_calls=()))
        else:
            message = await rendering.parse(self._tail, reply.sampled, self._tools, at=self._at)
        if self._stops is not None:
            message = self._stops.cut(message)
        if message.tool_calls and finish == "stop":
            finish = "tool_calls"
        return message, finish

    async def _text(self, plain: "_Plain", reply: ModelReply) -> Message:
        """What follows a prompt of ids is text, whatever a chat would make of it."""
        if self._news is None:
            message = Message("assistant", plain.whole(reply.sampled))
        else:
            last = plain.end() if self._stops is None else self._stops.end(plain.end())
            if last:
                await self._news(Delta(content=last))
            message = Message("assistant", _Plain(plain.rendering).whole(reply.sampled))
        return message if self._stops is None else self._stops.cut(message)


class _Plain:
    """The text that ids stand for, without those that end an answer."""

    def __init__(self, rendering: "Rendering") -> None:
        self.rendering = rendering
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, sampled: bytes) -> str:
        if not sampled:
            return ""
        ids, ends = memoryview(sampled).cast("i").tolist(), self.rendering.stop
        pieces = self.rendering.spelled(sampled)
        return self._decode(b"".join(piece for token, piece in zip(ids, pieces, strict=True) if token not in ends))

    def end(self) -> str:
        return self._decode(b"", True)

    def whole(self, sampled: bytes) -> str:
        return self.feed(sampled) + self.end()
