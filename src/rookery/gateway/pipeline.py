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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core import Finish, Message, UpstreamError
from rookery.gateway.chat_renderers.protocol import RenderError
from rookery.gateway.chat_renderers.tool_prompt import dropped_tools_message
from rookery.gateway.sent import HeldCalls, Sent, without_half_call
from rookery.gateway.session import MODEL_CALL_SECONDS, Role, Session
from rookery.gateway.stops import Stops
from rookery.trajectories import HistoryMatch
from rookery.upstreams.protocol import NO_TOOLS, Delta, ModelReply, ModelRequest, OnDelta

if TYPE_CHECKING:
    from rookery.gateway.chat_renderers.protocol import ChatRenderer
    from rookery.gateway.chat_renderers.threaded import ThreadedRenderer
    from rookery.gateway.http import Cut

TAIL = 256
"""Ids of the last prompt that a chat format gets to see when it extends an answer."""


async def run_turn(
    session: Session,
    role: Role,
    request: ModelRequest,
    on_delta: OnDelta | None,
    key: str = "",
    match: HistoryMatch | None = None,
    cut: "Callable[[], Cut | None] | None" = None,
) -> ModelReply:
    """Make one model call and record it. See `Session.call` for the arguments."""
    if match is None:
        match = session.recorder.match_history(role.name, request.messages, request.tools.scope)
    prompt, added = request.tokens, None
    if role.record == "tokens" and not prompt:
        prompt, added = await _prompt(session, role, match, request)
    sampling = request.sampling
    if role.name == "policy" and not role.beside:
        sampling = session.budgeted(sampling, len(prompt) // 4)
    reading = _Reading(role, request, prompt, on_delta, over_http=bool(key))
    sent = msgspec.structs.replace(
        request,
        model=role.model,
        messages=() if prompt else request.messages if role.upstream.accepts_raw_json else match.messages(),
        tokens=prompt,
        tools=NO_TOOLS if prompt else request.tools,
        tool_choice=request.tool_choice if request.tools else None,
        sampling=sampling,
        want_tokens=role.record != "plain",
        seed=session.draw_seed(),
        affinity=session.attempt,
        avoid=session.avoid,
        stop_ids=role.rendering.renderer.stop_token_ids if prompt and role.rendering is not None else (),
        memo=session.memo(role.name),
    )
    started, at = time.time(), time.monotonic()
    try:
        timeout = session.limits.model_call or MODEL_CALL_SECONDS
        reply = await role.upstream.complete(sent, timeout=timeout, on_delta=reading.told, on_wait=session.on_wait)
        message, finish = await reading.read(reply)
    except BaseException:
        how = cut() if cut is not None and not session.closed else None
        # Without token IDs each delta counts as one token: too rough for what a stalled client left unread.
        if how == "closed" or (how == "stalled" and reading.sent.sampled):
            facts = {"started": started, "seconds": time.monotonic() - at, "queued": 0.0, "key": key}
            _record_partial(session, role, match, reading.sent, prompt, added, facts)
        raise
    if role.record == "plain":  # also if the engine returns token IDs without being asked
        prompt, reply = b"", _without_tokens(msgspec.structs.replace(reply, prompt=b""))
    elif reply.sampled and not (reply.prompt or prompt):
        session.promptless += 1
        reply = _without_tokens(reply)
    prompt_tokens = reply.prompt_tokens or len(sent.tokens) // 4
    turn = session.recorder.record(
        match,
        prompt=(reply.prompt or prompt) if added is None else None,
        appended=added,
        response=message,
        sampled=reply.sampled,
        logprobs=reply.logprobs,
        version=reply.version,
        spans=reply.spans,
        finish=finish,
        prompt_tokens=prompt_tokens,
        sampled_tokens=reply.sampled_tokens,
        started=started,
        seconds=time.monotonic() - at,
        queued=reply.queued,
        upstream=reply.replica,
        extras=reply.extras,
        key=key,
    )
    session.count(turn)
    return msgspec.structs.replace(
        reply,
        message=message,
        finish=finish,
        prompt=reply.prompt or prompt,
        prompt_tokens=prompt_tokens,
        recorded_turn=turn,
        decode_tokens=role.rendering.renderer.token_bytes if role.rendering is not None else None,
    )


def _record_partial(
    session: Session,
    role: Role,
    place: HistoryMatch,
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
        appended=added,
        prompt_tokens=len(prompt) // 4,
        **sent.turn(ids=ids),
        **facts,
    )
    session.count(turn)


def _without_tokens(reply: ModelReply) -> ModelReply:
    """Return the reply without its token data."""
    return msgspec.structs.replace(reply, sampled=b"", logprobs=b"", spans=(), extras={})


async def count_prompt_tokens(session: Session, role: Role, request: ModelRequest) -> int:
    """Return the number of prompt tokens: exact if the gateway renders the prompt, otherwise an estimate."""
    place = session.recorder.match_history(role.name, request.messages, request.tools.scope)
    node = place.turn
    if role.rendering is not None:
        prompt, _, _ = await _rendered(role.rendering, place, request)
        return len(prompt) // 4
    before = node.length if node is not None else 0
    new = place.new_messages if before else place.messages()
    shown: list[object] = [*new, *(() if before else request.tools.schemas)]
    return before + sum(len(msgspec.json.encode(one)) for one in shown) // 4


async def _prompt(
    session: Session, role: Role, place: HistoryMatch, request: ModelRequest
) -> tuple[bytes, bytes | None]:
    """The ids to sample from, and those of them that are new, where they extend an earlier turn."""
    assert role.rendering is not None
    prompt, added, refused = await _rendered(role.rendering, place, request)
    session.rerendered += refused
    return prompt, added


async def _rendered(
    rendering: "ThreadedRenderer", place: HistoryMatch, request: ModelRequest
) -> tuple[bytes, bytes | None, bool]:
    """A prompt, what of it is new, and whether it could not extend the turn before it."""
    tools, choice = request.tools.schemas, request.tool_choice
    if tools and choice != "none" and getattr(rendering.renderer, "rejects_tools", False):
        raise RenderError(dropped_tools_message(rendering.renderer.name))
    node = place.turn
    refused = False
    if node is not None and node.sampled:
        added = await rendering.extend(node.prompt_tail(TAIL), node.sampled, place.new_messages, tools, choice)
        if added is not None:
            return node.tokens() + added, added, False
        refused = True
    return await rendering.render(place.messages(), tools, choice), None, refused


class _Reading:
    """Makes a message of an answer, while it comes or at its end."""

    def __init__(
        self, role: Role, request: ModelRequest, prompt: bytes, on_delta: OnDelta | None, *, over_http: bool
    ) -> None:
        self._rendering = role.rendering if prompt and not request.tokens else None
        self._tail = prompt[-4 * TAIL :]
        self._at = len(prompt) // 4
        self._tools = request.tools.schemas
        self._on_delta = on_delta
        self._stops = (
            Stops(request.sampling.stop) if request.sampling.stop and role.rendering is not None else None
        )
        self._reader = None
        self._plain = _Plain(role.rendering.renderer) if request.tokens and role.rendering is not None else None
        self._upstream = role.upstream
        self._calls = HeldCalls()
        self._over_http = over_http
        self.sent = Sent()
        self.told: OnDelta | None = None
        if on_delta is not None:
            self.told = self._tell
            if self._rendering is not None:
                self._reader = self._rendering.renderer.new_reply_parser(
                    self._tail, self._tools, prompt_length=self._at
                )

    async def _tell(self, delta: Delta) -> None:
        assert self._on_delta is not None
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
        await self._on_delta(delta)

    def _stopped(self, text: str) -> str:
        return text if self._stops is None else self._stops.feed(text)

    async def read(self, reply: ModelReply) -> tuple[Message, Finish]:
        """The message and how it ended; what was held back of it is sent first."""
        message, finish = await self._whole(reply)
        if self._over_http:  # an environment sees how the answer ended, and decides itself
            message = without_half_call(message, finish)
        if self._on_delta is not None and (calls := self._calls.rest(message.tool_calls)):
            await self._on_delta(Delta(tool_calls=calls))
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
            last, message = await rendering.finish(self._reader, len(reply.sampled) // 4)
            if self._stops is not None:
                last = msgspec.structs.replace(last, content=self._stops.end(last.content))
            if last.content or last.reasoning:
                assert self._on_delta is not None
                await self._on_delta(msgspec.structs.replace(last, tool_calls=()))
        else:
            message = await rendering.parse(self._tail, reply.sampled, self._tools, prompt_length=self._at)
        if self._stops is not None:
            message = self._stops.cut(message)
        if message.tool_calls and finish == "stop":
            finish = "tool_calls"
        return message, finish

    async def _text(self, plain: "_Plain", reply: ModelReply) -> Message:
        """What follows a prompt of ids is text, whatever a chat would make of it."""
        if self._on_delta is None:
            message = Message("assistant", plain.whole(reply.sampled))
        else:
            last = plain.end() if self._stops is None else self._stops.end(plain.end())
            if last:
                await self._on_delta(Delta(content=last))
            message = Message("assistant", _Plain(plain.rendering).whole(reply.sampled))
        return message if self._stops is None else self._stops.cut(message)


class _Plain:
    """The text that ids stand for, without those that end an answer."""

    def __init__(self, rendering: "ChatRenderer") -> None:
        self.rendering = rendering
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, sampled: bytes) -> str:
        if not sampled:
            return ""
        ids, ends = memoryview(sampled).cast("i").tolist(), self.rendering.stop_token_ids
        pieces = self.rendering.token_bytes(sampled)
        return self._decode(b"".join(piece for token, piece in zip(ids, pieces, strict=True) if token not in ends))

    def end(self) -> str:
        return self._decode(b"", True)

    def whole(self, sampled: bytes) -> str:
        return self.feed(sampled) + self.end()
