"""Format responses of OpenAI's Responses API: complete objects and stream events. Runs in gateway shards.

Guarantees:
- items are sent one after the other, each from start to end, in the order of OpenAI's own events;
- the object that OpenAI's client library builds from the events equals the complete response;
- while parts of a reply arrive that cannot be sent yet, repeated `response.in_progress` events keep the stream
  alive.
"""

import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rookery.core import ToolCall
from rookery.gateway.dialects.protocol import ClientRequest, ErrorKind
from rookery.gateway.dialects.responses_items import (
    call_item,
    message_item,
    reasoning_item,
    text_part,
)
from rookery.gateway.dialects.shared import (
    KEEPALIVE_INTERVAL,
    CallEvent,
    CallSequencer,
    decode_logprobs,
    event,
    format_delta_logprobs,
    format_reply_logprobs,
    openai_error,
)
from rookery.upstreams.protocol import DecodeTokens, Delta, ModelReply

if TYPE_CHECKING:
    from rookery.gateway.dialects.responses import ResponseContext

_FAILED = {
    "bad_request": "invalid_prompt",
    "context": "context_length_exceeded",
    "truncated": "invalid_prompt",
    "gone": "invalid_prompt",
}
"""Error codes for kinds of errors that clients must not retry. All other kinds have the code `server_error`."""


def make_response_object(
    client_request: ClientRequest, stem: str, output: Iterable[Any] = (), **more: Any
) -> dict[str, Any]:
    """Return a response object with the reply ID `stem`.

    Its status is `in_progress` unless `more` overrides it.
    """
    context: ResponseContext = client_request.dialect_data
    return {
        "id": f"resp_{stem}",
        "object": "response",
        "created_at": context.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": client_request.model,
        "output": list(output),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
        **context.echoed_fields,
        **more,
    }


def make_end_fields(reply: ModelReply) -> dict[str, Any]:
    """Return the fields of a response object that are known only when the reply is complete: status and usage."""
    turn = reply.turn
    fields: dict[str, Any] = {
        "status": "completed",
        "completed_at": int(time.time()),
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": turn.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + turn.sampled_tokens,
        },
    }
    if reply.finish in ("length", "abort", "content_filter"):
        reason = "content_filter" if reply.finish == "content_filter" else "max_output_tokens"
        fields |= {"status": "incomplete", "completed_at": None, "incomplete_details": {"reason": reason}}
    return fields


def make_response(client_request: ClientRequest, stem: str, reply: ModelReply) -> dict[str, Any]:
    """Return the complete response object for a reply with the ID `stem`."""
    context: ResponseContext = client_request.dialect_data
    end, message = make_end_fields(reply), reply.message
    status = end["status"]
    output: list[dict[str, Any]] = []
    if message.reasoning:
        output.append(reasoning_item(stem, 0, message.reasoning, encrypted=context.encrypt_reasoning))
    if message.text or not message.tool_calls:
        last = status if not message.tool_calls else "completed"
        output.append(message_item(stem, len(output), message.text, get_logprobs(client_request, reply), last))
    output += [
        call_item(stem, number, call, context.request_tools) for number, call in enumerate(message.tool_calls)
    ]
    if message.tool_calls:
        output[-1]["status"] = status
    return make_response_object(client_request, stem, output, **end)


def get_logprobs(client_request: ClientRequest, reply: ModelReply) -> list[Any]:
    """Return the logprobs of a reply in the format of the Responses API; empty if the client requested none."""
    if not client_request.want_logprobs:
        return []
    return [_convert_logprob(entry) for entry in decode_logprobs(format_reply_logprobs(client_request, reply))]


def _convert_logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """Convert the logprob of one token from the format of chat completions to that of the Responses API.

    In chat completions `bytes` may be null or missing; in the Responses API it is always a list.
    """
    tops = [{**top, "bytes": top.get("bytes") or []} for top in entry.get("top_logprobs") or ()]
    return {**entry, "bytes": entry.get("bytes") or [], "top_logprobs": tops}


class ResponsesReplyStream:
    """Formats one streamed response of the Responses API as server-sent events."""

    def __init__(self, client_request: ClientRequest, decode_tokens: DecodeTokens | None) -> None:
        context: ResponseContext = client_request.dialect_data
        self._request = client_request
        self._context = context
        self._decode_tokens = decode_tokens
        self._stem = client_request.reply_id or secrets.token_hex(12)
        self._sequence = -1
        self._output: list[dict[str, Any]] = []
        self._current = ""
        """The kind of the output item that has begun and not ended: `reasoning`, `message` or empty."""
        self._text_parts: list[str] = []
        self._calls = CallSequencer()
        self._late_text: list[str] = []
        self._late_reasoning: list[str] = []
        """`_late_text` and `_late_reasoning` hold text and reasoning that arrived after a tool call had begun.
        They are sent after all calls."""
        self._begun = False
        self._silent = 0

    # ---- pieces

    def format_delta(self, choice: int, delta: Delta) -> bytes:  # noqa: ARG002
        out: list[bytes] = [] if self._begun else [self._begin()]
        if delta.reasoning:
            if self._calls.started:
                self._late_reasoning.append(delta.reasoning)
            else:
                out += self._append_text("reasoning", delta.reasoning)
        if delta.content:
            if self._calls.started:
                self._late_text.append(delta.content)
            else:
                out += self._append_text("message", delta.content, self._logprobs(delta))
        for call in delta.tool_calls:
            for call_event in self._calls.feed(call):
                out += self._call(call_event)
        if not out:
            self._silent += 1
            if self._silent % KEEPALIVE_INTERVAL == 0:
                return self._event(
                    "response.in_progress", response=make_response_object(self._request, self._stem)
                )
        return b"".join(out)

    def _begin(self) -> bytes:
        self._begun = True
        current = make_response_object(self._request, self._stem)
        return self._event("response.created", response=current) + self._event(
            "response.in_progress", response=current
        )

    def _event(self, kind: str, **data: Any) -> bytes:
        self._sequence += 1
        return event(kind, {"type": kind, "sequence_number": self._sequence, **data})

    def _logprobs(self, delta: Delta) -> list[Any]:
        content = format_delta_logprobs(self._request, delta, self._decode_tokens)
        return [_convert_logprob(entry) for entry in decode_logprobs(content)]

    @property
    def _index(self) -> int:
        """Index of the current output item."""
        return len(self._output)

    def _position(self, kind: str) -> dict[str, Any]:
        prefix = "rs" if kind == "reasoning" else "msg"
        return {"item_id": f"{prefix}_{self._stem}_{self._index}", "output_index": self._index, "content_index": 0}

    def _append_text(self, kind: str, text: str, logprobs: list[Any] | None = None) -> list[bytes]:
        out: list[bytes] = []
        if self._current != kind:
            out += self._close()
            self._current = kind
            if kind == "reasoning":
                item = reasoning_item(
                    self._stem, self._index, "", encrypted=self._context.encrypt_reasoning, status="in_progress"
                )
                part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            else:
                item, part = message_item(self._stem, self._index, None, status="in_progress"), text_part("")
            out.append(self._event("response.output_item.added", output_index=self._index, item=item))
            out.append(self._event("response.content_part.added", **self._position(kind), part=part))
        self._text_parts.append(text)
        if kind == "reasoning":
            out.append(self._event("response.reasoning_text.delta", **self._position(kind), delta=text))
        elif text:
            more = {"delta": text, "logprobs": logprobs or []}
            out.append(self._event("response.output_text.delta", **self._position(kind), **more))
        return out

    def _close(self, status: str = "completed", logprobs: Iterable[Any] = ()) -> list[bytes]:
        """Return the events that end the current reasoning or message item; empty if there is none."""
        kind, text = self._current, "".join(self._text_parts)
        if kind not in ("reasoning", "message"):
            return []
        position, listed = self._position(kind), list(logprobs)
        if kind == "reasoning":
            item = reasoning_item(self._stem, self._index, text, encrypted=self._context.encrypt_reasoning)
            out = [self._event("response.reasoning_text.done", **position, text=text)]
            part: dict[str, Any] = {"type": "reasoning_text", "text": text}
        else:
            item, part = message_item(self._stem, self._index, text, listed, status), text_part(text, listed)
            out = [self._event("response.output_text.done", **position, text=text, logprobs=listed)]
        out.append(self._event("response.content_part.done", **position, part=part))
        self._current, self._text_parts = "", []
        return [*out, self._done(item)]

    def _done(self, item: dict[str, Any]) -> bytes:
        data = self._event("response.output_item.done", output_index=self._index, item=item)
        self._output.append(item)
        return data

    def _call(self, call_event: CallEvent, status: str = "completed") -> list[bytes]:
        custom = self._context.request_tools.name(call_event.name).custom
        before = self._close() if call_event.kind == "begin" else []
        call = ToolCall(call_event.id, call_event.name, call_event.text)
        item = call_item(self._stem, call_event.at, call, self._context.request_tools, status=status)
        position = {"item_id": item["id"], "output_index": self._index}
        if call_event.kind == "begin":
            # The input of a tool that takes plain text, and with it the call ID, is known only at the end.
            return before if custom else [*before, self._added(item)]
        if call_event.kind == "more":
            delta = {"delta": call_event.text}
            return [] if custom else [self._event("response.function_call_arguments.delta", **position, **delta)]
        if not custom:
            done = {"arguments": call_event.text, "name": item["name"]}
            return [self._event("response.function_call_arguments.done", **position, **done), self._done(item)]
        text = item["input"]
        out = [self._added(item)]
        if text:
            out.append(self._event("response.custom_tool_call_input.delta", **position, delta=text))
        return [
            *out,
            self._event("response.custom_tool_call_input.done", **position, input=text),
            self._done(item),
        ]

    def _added(self, item: dict[str, Any]) -> bytes:
        empty = {"input": ""} if "input" in item else {"arguments": ""}
        started = {**item, "status": "in_progress", **empty}
        return self._event("response.output_item.added", output_index=self._index, item=started)

    # ---- ends

    def format_choice_end(self, choice: int, reply: ModelReply) -> bytes:  # noqa: ARG002
        out = [] if self._begun else [self._begin()]
        status, calls = make_end_fields(reply)["status"], reply.message.tool_calls
        listed = get_logprobs(self._request, reply)
        if self._current == "message":
            out += self._close("completed" if calls else status, listed)
        out += self._close()
        for call_event in self._calls.finish(calls):
            out += self._call(call_event, status if call_event.at == len(calls) - 1 else "completed")
        if self._late_reasoning:
            out += self._append_text("reasoning", "".join(self._late_reasoning))
            out += self._close()
        if self._late_text or not any(item["type"] != "reasoning" for item in self._output):
            out += self._append_text("message", "".join(self._late_text))
            out += self._close(status, listed if not calls else ())
        return b"".join(out)

    def format_end(self, replies: list[ModelReply]) -> bytes:
        (reply,) = replies
        end = make_end_fields(reply)
        current = make_response_object(self._request, self._stem, self._output, **end)
        return self._event(f"response.{end['status']}", response=current)

    def format_failure(self, problem: ErrorKind, message: str) -> bytes:
        """Return both error events that OpenAI defines.

        Client libraries raise on `error`, and Codex reads `response.failed`.
        """
        error = openai_error(problem, message)[1]
        call_event = self._event("error", code=error["code"], message=message, param=None, error=error)
        failed = {"code": _FAILED.get(problem, "server_error"), "message": message}
        current = make_response_object(self._request, self._stem, self._output, status="failed", error=failed)
        return call_event + self._event("response.failed", response=current)
