"""The turn pipeline: one model call, from a request to a recorded turn.

Runs in runners for calls made in Python, and in gateway shards for HTTP calls.

Guarantees:
- the recorded token IDs are those that were sampled: they are copied from the inference engine's reply. In the
  record mode `tokens`, the next prompt is the earlier prompt and the sampled IDs, followed by the new messages;
- a conversation whose history was edited, or that the chat format cannot extend exactly, begins a new token
  sequence;
- in the record mode `plain`, no token IDs are recorded;
- a turn is recorded once, before the complete reply reaches the caller, and as complete only if the reply is
  complete;
- a reply whose client closed the stream is recorded as a partial turn: its tokens count against the budgets, and
  no retry gets it as a reply;
- the deltas (parts) of a streamed reply, joined, are the beginning of the recorded message;
- sampled token IDs are not recorded without the IDs of their prompt, because their context would be unknown.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from rookery.core import Extra, Finish, Message
from rookery.gateway.chat_renderers.protocol import RenderError
from rookery.gateway.chat_renderers.tool_prompt import dropped_tools_message
from rookery.gateway.reply_reader import PROMPT_TAIL, PartialReply, StreamedReply, read_reply
from rookery.trajectories import HistoryMatch
from rookery.trajectories.alternatives import pack_alternatives
from rookery.upstreams.protocol import NO_TOOLS, ModelReply, ModelRequest, OnDelta

if TYPE_CHECKING:
    from rookery.gateway.chat_renderers.threaded import ThreadedRenderer
    from rookery.gateway.http_messages import Disconnect
    from rookery.gateway.session import ModelRole, Session

MODEL_CALL_SECONDS = 600.0
"""Default time limit of one model call."""


async def run_turn(
    session: "Session",
    role: "ModelRole",
    request: ModelRequest,
    on_delta: OnDelta | None,
    key: str = "",
    match: HistoryMatch | None = None,
    disconnect: "Callable[[], Disconnect | None] | None" = None,
) -> ModelReply:
    """Make one model call and record it as a turn. See `Session.call` for the arguments."""
    if match is None:
        match = session.recorder.match_history(role.name, request.messages, request.tools.scope)
    prompt, added = request.tokens, None
    if role.record == "tokens" and not prompt:
        assert role.rendering is not None
        prompt, added, rerendered = await _render_prompt(role.rendering, match, request)
        session.rerendered += rerendered
    sampling, limits = request.sampling, session.limits
    has_budget = limits.tokens is not None or limits.context is not None
    if has_budget and role.name == "policy" and not role.sub_call:
        sampling = session.apply_budgets(sampling, len(prompt) // 4)
    upstream_request = msgspec.structs.replace(
        request,
        model=role.model,
        messages=() if prompt else request.messages if role.upstream.accepts_raw_json else match.messages(),
        tokens=prompt,
        tools=NO_TOOLS if prompt else request.tools,
        tool_choice=request.tool_choice if request.tools.schemas else None,
        sampling=sampling,
        want_tokens=role.record != "plain",
        # A client that asks for log probabilities gets exactly those that it asks for.
        top_logprobs=request.top_logprobs or (0 if request.want_logprobs else role.top_logprobs),
        seed=session.next_seed(),
        affinity=session.attempt,
        avoid=session.avoid,
        stop_ids=role.rendering.renderer.stop_token_ids if prompt and role.rendering is not None else (),
        prompt_cache=session.prompt_caches[role.name],
    )
    stream = StreamedReply(role, request, prompt, on_delta) if on_delta is not None else None
    turn = _OpenTurn(session, role, request, match, prompt, added, key, time.time(), time.monotonic())
    try:
        reply = await role.upstream.complete(
            upstream_request,
            timeout=limits.model_call or MODEL_CALL_SECONDS,
            on_delta=stream.add if stream is not None else None,
            on_wait=session.on_wait,
        )
        message, finish = await read_reply(role, request, prompt, reply, stream, over_http=bool(key))
    except BaseException:
        if stream is not None and disconnect is not None and not session.closed:
            turn.record_partial(stream.received, disconnect())
        raise
    return turn.record(reply, message, finish)


class _OpenTurn(msgspec.Struct, frozen=True):
    """A turn whose reply is being sampled, and is recorded when the call ends."""

    session: "Session"
    role: "ModelRole"
    request: ModelRequest
    match: HistoryMatch
    prompt: bytes
    """The token IDs of the prompt; empty if they are not known before the reply."""
    added: bytes | None
    """The part of the prompt after the tokens of the turn that it extends; None if it was rendered as a whole."""
    key: str
    started: float
    started_monotonic: float

    def record(self, reply: ModelReply, message: Message, finish: Finish) -> ModelReply:
        """Record the turn with its complete reply. Return the reply as the caller gets it."""
        session, role, prompt = self.session, self.role, self.prompt
        prompt_tokens = reply.prompt_tokens or len(prompt) // 4
        if role.record == "plain":  # also if the inference engine returns token IDs without being asked
            prompt, reply = b"", _without_tokens(msgspec.structs.replace(reply, prompt=b""))
        elif reply.sampled and not (reply.prompt or prompt):
            session.promptless += 1
            reply = _without_tokens(reply)
        turn = session.recorder.record(
            self.match,
            prompt=(reply.prompt or prompt) if self.added is None else None,
            appended=self.added,
            tools=self.request.tools.schemas,
            response=message,
            sampled=reply.sampled,
            logprobs=reply.logprobs,
            version=reply.version,
            spans=reply.spans,
            finish=finish,
            prompt_tokens=prompt_tokens,
            sampled_tokens=reply.sampled_tokens,
            started=self.started,
            seconds=time.monotonic() - self.started_monotonic,
            queued=reply.queued,
            upstream=reply.replica,
            extras=_with_alternatives(role, reply),
            key=self.key,
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

    def record_partial(self, received: PartialReply, disconnect: "Disconnect | None") -> None:
        """Record the received part of a reply as a partial turn, if its client has ended the stream.

        Does nothing if no token was received.
        """
        # Without token IDs each delta counts as one token: too rough for what a stalled client left unread.
        ended = disconnect == "closed" or (disconnect == "stalled" and received.sampled > 0)
        if not ended or not received.tokens:
            return
        prompt = self.prompt or received.prompt
        with_tokens = self.role.record != "plain" and bool(prompt)
        fields = received.turn_fields(with_tokens=with_tokens)
        if self.role.top_logprobs and fields["sampled"]:
            fields["extras"] = pack_alternatives((), len(fields["sampled"]) // 4, self.role.top_logprobs)
        turn = self.session.recorder.record(
            self.match,
            prompt=(prompt if with_tokens else b"") if self.added is None else None,
            appended=self.added,
            tools=self.request.tools.schemas,
            prompt_tokens=len(prompt) // 4,
            started=self.started,
            seconds=time.monotonic() - self.started_monotonic,
            queued=0.0,
            key=self.key,
            **fields,
        )
        self.session.count(turn)


def _with_alternatives(role: "ModelRole", reply: ModelReply) -> dict[str, Extra]:
    """Return the extras to record: those of the reply and, if the run records them, the most likely tokens."""
    if not role.top_logprobs or not reply.sampled:
        return reply.extras
    return {**reply.extras, **pack_alternatives(reply.tops, len(reply.sampled) // 4, role.top_logprobs)}


def _without_tokens(reply: ModelReply) -> ModelReply:
    """Return the reply without token IDs, logprobs and other per-token data."""
    return msgspec.structs.replace(reply, sampled=b"", logprobs=b"", spans=(), extras={})


async def count_prompt_tokens(session: "Session", role: "ModelRole", request: ModelRequest) -> int:
    """Return the number of prompt tokens of a request.

    It is exact if the role has a chat renderer, otherwise an estimate from the size of the new messages.
    """
    match = session.recorder.match_history(role.name, request.messages, request.tools.scope)
    node = match.turn
    if role.rendering is not None:
        prompt, _, _ = await _render_prompt(role.rendering, match, request)
        return len(prompt) // 4
    before = node.length if node is not None else 0
    new = match.new_messages if before else match.messages()
    rendered: list[object] = [*new, *(() if before else request.tools.schemas)]
    return before + sum(len(msgspec.json.encode(one)) for one in rendered) // 4


async def _render_prompt(
    rendering: "ThreadedRenderer", match: HistoryMatch, request: ModelRequest
) -> tuple[bytes, bytes | None, bool]:
    """Render a request to prompt token IDs, if possible by extending the tokens of the turn that it continues.

    Returns the prompt; the part that was appended to the earlier turn's tokens (None if the prompt was rendered as
    a whole); and whether it was rendered as a whole although it continues an earlier turn. Raises `RenderError`.
    """
    tools, choice = request.tools.schemas, request.tool_choice
    if tools and choice != "none" and getattr(rendering.renderer, "rejects_tools", False):
        raise RenderError(dropped_tools_message(rendering.renderer.name))
    node = match.turn
    rerendered = False
    if node is not None and node.sampled:
        added = await rendering.extend(
            node.prompt_tail(PROMPT_TAIL), node.sampled, match.new_messages, tools, choice
        )
        if added is not None:
            return node.tokens() + added, added, False
        rerendered = True
    return await rendering.render(match.messages(), tools, choice), None, rerendered
