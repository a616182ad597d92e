"""Anthropic's answers: blocks of content, the events of a stream, and errors.

Promises:
- a stream's blocks come one after the other; put together by Anthropic's own library they are the whole answer;
- a tool's input is told when it is complete: what is no JSON object would break the library that reads it;
- while pieces arrive that cannot be sent yet, as those of a tool call, a ping shows that the stream is alive.
"""

import secrets
from hashlib import blake2b
from typing import Any, Final

from rookery.core import Message
from rookery.gateway.dialects.protocol import Ask, Problem
from rookery.gateway.dialects.shared import ALIVE, CallsInOrder, Told, as_object, encode, event, stopped_by
from rookery.gateway.session import Reply
from rookery.upstreams.protocol import Delta

PROBLEMS: Final[dict[Problem, tuple[int, str]]] = {
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
"""Status and type. Not `overloaded_error`: agents give up on it sooner than on others."""
PING: Final = event("ping", {"type": "ping"})


def problem_of(problem: Problem, message: str) -> tuple[int, dict[str, Any]]:
    status, kind = PROBLEMS[problem]
    error: dict[str, Any] = {"type": kind, "message": message}
    if problem == "thread":  # the code by which Anthropic's libraries know to send the whole conversation instead
        error["details"] = {"error_code": "thread_unsupported_request"}
    return status, {"type": "error", "error": error}


def blocks_of(message: Message, *, thinks: bool) -> list[dict[str, Any]]:
    """The content of an answer."""
    blocks: list[dict[str, Any]] = []
    if message.reasoning and thinks:
        blocks.append(
            {"type": "thinking", "thinking": message.reasoning, "signature": signature(message.reasoning)}
        )
    if message.text or not message.tool_calls:
        blocks.append({"type": "text", "text": message.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": input_of(call.arguments)}
        for call in message.tool_calls
    ]
    return blocks


def input_of(arguments: str) -> dict[str, Any]:
    found = as_object(arguments)
    return {"INVALID_JSON": arguments} if found is None else found


def signature(thinking: str) -> str:
    """Clients want one, and bring it back; we know a thought by its text."""
    return blake2b(thinking.encode("utf-8", "replace"), digest_size=16).hexdigest()


def usage_of(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.turn.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": reply.turn.sampled_tokens,
    }


def stop_of(ask: Ask, reply: Reply) -> tuple[str, str | None]:
    """Why the answer ended, and the stop sequence that ended it."""
    if reply.finish in ("length", "abort"):
        return "max_tokens", None
    if reply.finish == "content_filter":
        return "refusal", None
    if reply.message.tool_calls:
        return "tool_use", None
    stop = stopped_by(reply, ask.sampling.stop)
    return ("stop_sequence" if stop else "end_turn"), stop


class MessagesAnswering:
    """One streamed message."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._begun = False
        self._index = -1
        self._open = ""
        """The kind of the block that is being told."""
        self._calls = CallsInOrder()
        self._late: list[str] = []
        self._late_thought: list[str] = []
        """What came among calls: it follows them."""
        self._said = False
        self._thought: list[str] = []
        self._unsaid = 0

    def piece(self, choice: int, delta: Delta) -> bytes:  # noqa: ARG002
        out: list[bytes] = []
        if not self._begun:
            out.append(self._begin(len(delta.prompt) // 4))
        if delta.reasoning and self._ask.own:
            if self._calls.begun:
                self._late_thought.append(delta.reasoning)
            else:
                out += self._more("thinking", delta.reasoning)
        if delta.content:
            if self._calls.begun:
                self._late.append(delta.content)
            else:
                out += self._more("text", delta.content)
        for call in delta.tool_calls:
            for told in self._calls.feed(call):
                out += self._call(told)
        if not out:
            self._unsaid += 1
            if self._unsaid % ALIVE == 0:
                return PING
        return b"".join(out)

    def _begin(self, prompt: int) -> bytes:
        self._begun = True
        message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self._ask.model,
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
        self._open = kind
        self._said = self._said or kind != "thinking"
        return [
            *out,
            event(
                "content_block_start",
                {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **block}},
            ),
        ]

    def _stop(self) -> list[bytes]:
        if not self._open:
            return []
        out: list[bytes] = []
        if self._open == "thinking":
            out.append(self._delta({"type": "signature_delta", "signature": signature("".join(self._thought))}))
            self._thought = []
        self._open = ""
        return [*out, event("content_block_stop", {"type": "content_block_stop", "index": self._index})]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n' % (
            self._index,
            encode(delta),
        )

    def _more(self, kind: str, text: str) -> list[bytes]:
        empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
        out = self._start(kind, empty) if self._open != kind else []
        if kind == "thinking":
            self._thought.append(text)
        out.append(self._delta({"type": f"{kind}_delta", kind: text}))
        return out

    def _call(self, told: Told) -> list[bytes]:
        if told.kind == "begin":
            return self._start("tool_use", {"id": told.id, "name": told.name, "input": {}})
        if told.kind == "more":
            return []
        text = told.text if as_object(told.text) is not None else encode({"INVALID_JSON": told.text}).decode()
        return [self._delta({"type": "input_json_delta", "partial_json": text}), *self._stop()]

    def end(self, choice: int, reply: Reply) -> bytes:  # noqa: ARG002
        out = [] if self._begun else [self._begin(reply.turn.prompt_tokens)]
        for told in self._calls.finish(reply.message.tool_calls):
            out += self._call(told)
        if self._late_thought:
            out += self._more("thinking", "".join(self._late_thought))
        if self._late:
            out += self._more("text", "".join(self._late))
        if not self._said:  # as the whole answer has it: there is always something to read
            out += self._start("text", {"text": ""})
        return b"".join((*out, *self._stop()))

    def done(self, replies: list[Reply]) -> bytes:
        (reply,) = replies
        reason, stop = stop_of(self._ask, reply)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        end = event("message_delta", {"type": "message_delta", "delta": delta, "usage": usage_of(reply)})
        return end + event("message_stop", {"type": "message_stop"})

    def broken(self, problem: Problem, message: str) -> bytes:
        return event("error", problem_of(problem, message)[1])
