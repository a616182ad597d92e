"""Format responses of Anthropic's Messages API: content blocks, stream events and errors. Runs in gateway shards.

Guarantees:
- the content blocks of a stream are sent one after the other; Anthropic's client library joins them to the
  complete reply;
- the input of a tool call is sent when it is complete, because Anthropic's client library cannot parse input that
  is not a JSON object;
- while parts of a reply arrive that cannot be sent yet, such as parts of a tool call, pings keep the stream alive.
"""

import secrets
from hashlib import blake2b
from typing import Any, Final

from rookery.core import Message
from rookery.gateway.dialects.protocol import ClientRequest, ErrorKind
from rookery.gateway.dialects.shared import (
    KEEPALIVE_INTERVAL,
    CallEvent,
    CallSequencer,
    encode,
    event,
    find_stop_string,
    parse_object,
)
from rookery.upstreams.protocol import Delta, ModelReply

ANTHROPIC_ERRORS: Final[dict[ErrorKind, tuple[int, str]]] = {
    "bad_request": (400, "invalid_request_error"),
    "thread": (400, "invalid_request_error"),
    "unauthorized": (401, "authentication_error"),
    "not_found": (404, "not_found_error"),
    "method": (405, "invalid_request_error"),
    "gone": (410, "invalid_request_error"),
    "conflict": (409, "invalid_request_error"),
    "too_large": (413, "request_too_large"),
    "truncated": (400, "invalid_request_error"),
    "context": (400, "invalid_request_error"),
    "unavailable": (503, "api_error"),
    "timeout": (504, "timeout_error"),
    "upstream": (502, "api_error"),
    "internal": (500, "api_error"),
}
"""Status and type of an error in Anthropic's format, by kind of error. The type `overloaded_error` is not used,
because agents retry it less often than other errors."""
PING: Final = event("ping", {"type": "ping"})


def make_anthropic_error(problem: ErrorKind, message: str) -> tuple[int, dict[str, Any]]:
    status, kind = ANTHROPIC_ERRORS[problem]
    error: dict[str, Any] = {"type": kind, "message": message}
    if problem == "thread":  # with this code, Anthropic's libraries send the whole conversation instead
        error["details"] = {"error_code": "thread_unsupported_request"}
    return status, {"type": "error", "error": error}


def make_content_blocks(message: Message, *, thinks: bool) -> list[dict[str, Any]]:
    """Return the content blocks of a complete reply. Reasoning is included only if `thinks`."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning and thinks:
        blocks.append(
            {"type": "thinking", "thinking": message.reasoning, "signature": signature(message.reasoning)}
        )
    if message.text or not message.tool_calls:
        blocks.append({"type": "text", "text": message.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": parse_input(call.arguments)}
        for call in message.tool_calls
    ]
    return blocks


def parse_input(arguments: str) -> dict[str, Any]:
    found = parse_object(arguments)
    return {"INVALID_JSON": arguments} if found is None else found


def signature(thinking: str) -> str:
    """Return a signature for a thinking block.

    Clients require it and send it back; the gateway does not verify it.
    """
    return blake2b(thinking.encode("utf-8", "replace"), digest_size=16).hexdigest()


def make_usage(reply: ModelReply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": reply.sampled_tokens,
    }


def get_stop_reason(client_request: ClientRequest, reply: ModelReply) -> tuple[str, str | None]:
    """Return Anthropic's stop reason of a reply, and the stop sequence that ended it (None if none did)."""
    if reply.finish in ("length", "abort"):
        return "max_tokens", None
    if reply.finish == "content_filter":
        return "refusal", None
    if reply.message.tool_calls:
        return "tool_use", None
    stop = find_stop_string(reply, client_request.sampling.stop)
    return ("stop_sequence" if stop else "end_turn"), stop


class MessagesReplyStream:
    """Formats one streamed response of Anthropic's Messages API as server-sent events."""

    def __init__(self, client_request: ClientRequest) -> None:
        self._request = client_request
        self._begun = False
        self._index = -1
        self._current = ""
        """The type of the content block that has begun and not ended; empty if there is none."""
        self._calls = CallSequencer()
        self._late_text: list[str] = []
        self._late_reasoning: list[str] = []
        """`_late_text` and `_late_reasoning` hold text and reasoning that arrived after a tool call had begun.
        They are sent after all calls."""
        self._has_content = False
        self._reasoning: list[str] = []
        self._silent = 0

    def format_delta(self, choice: int, delta: Delta) -> bytes:  # noqa: ARG002
        out: list[bytes] = []
        if not self._begun:
            out.append(self._begin(len(delta.prompt) // 4))
        if delta.reasoning and self._request.dialect_data:
            if self._calls.started:
                self._late_reasoning.append(delta.reasoning)
            else:
                out += self._append_text("thinking", delta.reasoning)
        if delta.content:
            if self._calls.started:
                self._late_text.append(delta.content)
            else:
                out += self._append_text("text", delta.content)
        for call in delta.tool_calls:
            for call_event in self._calls.feed(call):
                out += self._call(call_event)
        if not out:
            self._silent += 1
            if self._silent % KEEPALIVE_INTERVAL == 0:
                return PING
        return b"".join(out)

    def _begin(self, prompt: int) -> bytes:
        self._begun = True
        message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": prompt,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        }
        return event("message_start", {"type": "message_start", "message": message}) + PING

    def _start(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        out = self._stop()
        self._index += 1
        self._current = kind
        self._has_content = self._has_content or kind != "thinking"
        return [
            *out,
            event(
                "content_block_start",
                {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **block}},
            ),
        ]

    def _stop(self) -> list[bytes]:
        if not self._current:
            return []
        out: list[bytes] = []
        if self._current == "thinking":
            out.append(self._delta({"type": "signature_delta", "signature": signature("".join(self._reasoning))}))
            self._reasoning = []
        self._current = ""
        return [*out, event("content_block_stop", {"type": "content_block_stop", "index": self._index})]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n' % (
            self._index,
            encode(delta),
        )

    def _append_text(self, kind: str, text: str) -> list[bytes]:
        empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
        out = self._start(kind, empty) if self._current != kind else []
        if kind == "thinking":
            self._reasoning.append(text)
        out.append(self._delta({"type": f"{kind}_delta", kind: text}))
        return out

    def _call(self, call_event: CallEvent) -> list[bytes]:
        if call_event.kind == "begin":
            return self._start("tool_use", {"id": call_event.id, "name": call_event.name, "input": {}})
        if call_event.kind == "more":
            return []
        text = (
            call_event.text
            if parse_object(call_event.text) is not None
            else encode({"INVALID_JSON": call_event.text}).decode()
        )
        return [self._delta({"type": "input_json_delta", "partial_json": text}), *self._stop()]

    def format_choice_end(self, choice: int, reply: ModelReply) -> bytes:  # noqa: ARG002
        out = [] if self._begun else [self._begin(reply.prompt_tokens)]
        for call_event in self._calls.finish(reply.message.tool_calls):
            out += self._call(call_event)
        if self._late_reasoning:
            out += self._append_text("thinking", "".join(self._late_reasoning))
        if self._late_text:
            out += self._append_text("text", "".join(self._late_text))
        if not self._has_content:  # as in a complete response, there is at least one block
            out += self._start("text", {"text": ""})
        return b"".join((*out, *self._stop()))

    def format_end(self, replies: list[ModelReply]) -> bytes:
        (reply,) = replies
        reason, stop = get_stop_reason(self._request, reply)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        end = event("message_delta", {"type": "message_delta", "delta": delta, "usage": make_usage(reply)})
        return end + event("message_stop", {"type": "message_stop"})

    def format_failure(self, problem: ErrorKind, message: str) -> bytes:
        return event("error", make_anthropic_error(problem, message)[1])
