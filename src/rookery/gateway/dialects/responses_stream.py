"""OpenAI's responses as they are answered: whole, and as the events of a stream.

Promises:
- items come one after the other, each from its beginning to its end, in the order of OpenAI's own events;
- what OpenAI's own library puts together from the events is the whole answer;
- an answer that was cut is incomplete and says why; one that broke is failed, and never complete.
"""

import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core import ToolCall
from rookery.gateway.dialects.protocol import Ask, Problem
from rookery.gateway.dialects.responses_items import (
    call_item,
    message_item,
    reasoning_item,
    text_part,
)
from rookery.gateway.dialects.shared import (
    ALIVE,
    CallsInOrder,
    Told,
    entries,
    event,
    logprob_entries,
    openai_error,
)
from rookery.gateway.session import Reply, Spell
from rookery.upstreams.protocol import Delta

if TYPE_CHECKING:
    from rookery.gateway.dialects.responses import Own

_FAILED = {
    "bad_request": "invalid_prompt",
    "context": "context_length_exceeded",
    "truncated": "invalid_prompt",
    "gone": "invalid_prompt",
}
"""What clients know not to try again; all else is `server_error`."""


def response(ask: Ask, stem: str, output: Iterable[Any] = (), **more: Any) -> dict[str, Any]:
    """The object that an answer is, at any time of its life."""
    own: Own = ask.own
    return {
        "id": f"resp_{stem}",
        "object": "response",
        "created_at": own.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": ask.model,
        "output": list(output),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
        **own.about,
        **more,
    }


def ended(reply: Reply) -> dict[str, Any]:
    """How an answer ended, and what it cost."""
    turn = reply.turn
    found: dict[str, Any] = {
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
        found |= {"status": "incomplete", "completed_at": None, "incomplete_details": {"reason": reason}}
    return found


def settled(ask: Ask, stem: str, reply: Reply) -> dict[str, Any]:
    """A whole answer."""
    own: Own = ask.own
    end, message = ended(reply), reply.message
    status = end["status"]
    output: list[dict[str, Any]] = []
    if message.reasoning:
        output.append(reasoning_item(stem, 0, message.reasoning, seal=own.seal))
    if message.text or not message.tool_calls:
        last = status if not message.tool_calls else "completed"
        output.append(message_item(stem, len(output), message.text, shown(ask, reply), last))
    output += [call_item(stem, number, call, own.offer) for number, call in enumerate(message.tool_calls)]
    if message.tool_calls:
        output[-1]["status"] = status
    return response(ask, stem, output, **end)


def shown(ask: Ask, reply: Reply) -> list[Any]:
    """The logprobs that the client asked for."""
    if not ask.logprobs:
        return []
    found = logprob_entries(ask, reply)
    if isinstance(found, msgspec.Raw):
        found = msgspec.json.decode(found)
    return [_listed(entry) for entry in found or ()]


def _listed(entry: dict[str, Any]) -> dict[str, Any]:
    """As responses have it: bytes are a list also where there are none."""
    tops = [{**top, "bytes": top.get("bytes") or []} for top in entry.get("top_logprobs") or ()]
    return {**entry, "bytes": entry.get("bytes") or [], "top_logprobs": tops}


class ResponsesAnswering:
    """One streamed response."""

    def __init__(self, ask: Ask, spell: Spell | None) -> None:
        own: Own = ask.own
        self._ask = ask
        self._own = own
        self._spell = spell
        self._stem = ask.id or secrets.token_hex(12)
        self._sequence = -1
        self._output: list[dict[str, Any]] = []
        self._open = ""
        """The kind of the item that is being told."""
        self._told: list[str] = []
        self._calls = CallsInOrder()
        self._late: list[str] = []
        self._late_thought: list[str] = []
        """What came among calls: it follows them."""
        self._begun = False
        self._silent = 0

    # ---- pieces

    def piece(self, choice: int, delta: Delta) -> bytes:  # noqa: ARG002
        out: list[bytes] = [] if self._begun else [self._begin()]
        if delta.reasoning:
            if self._calls.begun:
                self._late_thought.append(delta.reasoning)
            else:
                out += self._more("reasoning", delta.reasoning)
        if delta.content:
            if self._calls.begun:
                self._late.append(delta.content)
            else:
                out += self._more("message", delta.content, self._logprobs(delta))
        for call in delta.tool_calls:
            for told in self._calls.feed(call):
                out += self._call(told)
        if not out:
            self._silent += 1
            if self._silent % ALIVE == 0:
                return self._event("response.in_progress", response=response(self._ask, self._stem))
        return b"".join(out)

    def _begin(self) -> bytes:
        self._begun = True
        now = response(self._ask, self._stem)
        return self._event("response.created", response=now) + self._event("response.in_progress", response=now)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._sequence += 1
        return event(kind, {"type": kind, "sequence_number": self._sequence, **data})

    def _logprobs(self, delta: Delta) -> list[Any]:
        ask = self._ask
        if not ask.logprobs:
            return []
        if delta.logprob_content is not None and self._spell is None:
            found: list[Any] = msgspec.json.decode(delta.logprob_content)
        elif delta.logprobs:
            found = entries(delta.sampled, delta.logprobs, delta.tops, ask.top_logprobs, self._spell)
        else:
            found = []
        return [_listed(entry) for entry in found]

    @property
    def _at(self) -> int:
        """The place of the item that is being told."""
        return len(self._output)

    def _place(self, kind: str) -> dict[str, Any]:
        prefix = "rs" if kind == "reasoning" else "msg"
        return {"item_id": f"{prefix}_{self._stem}_{self._at}", "output_index": self._at, "content_index": 0}

    def _more(self, kind: str, text: str, logprobs: list[Any] | None = None) -> list[bytes]:
        out: list[bytes] = []
        if self._open != kind:
            out += self._close()
            self._open = kind
            if kind == "reasoning":
                item = reasoning_item(self._stem, self._at, "", seal=self._own.seal, status="in_progress")
                part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            else:
                item, part = message_item(self._stem, self._at, None, status="in_progress"), text_part("")
            out.append(self._event("response.output_item.added", output_index=self._at, item=item))
            out.append(self._event("response.content_part.added", **self._place(kind), part=part))
        self._told.append(text)
        if kind == "reasoning":
            out.append(self._event("response.reasoning_text.delta", **self._place(kind), delta=text))
        elif text:
            more = {"delta": text, "logprobs": logprobs or []}
            out.append(self._event("response.output_text.delta", **self._place(kind), **more))
        return out

    def _close(self, status: str = "completed", logprobs: Iterable[Any] = ()) -> list[bytes]:
        """The end of the item that is being told."""
        kind, text = self._open, "".join(self._told)
        if kind not in ("reasoning", "message"):
            return []
        place, listed = self._place(kind), list(logprobs)
        if kind == "reasoning":
            item = reasoning_item(self._stem, self._at, text, seal=self._own.seal)
            out = [self._event("response.reasoning_text.done", **place, text=text)]
            part: dict[str, Any] = {"type": "reasoning_text", "text": text}
        else:
            item, part = message_item(self._stem, self._at, text, listed, status), text_part(text, listed)
            out = [self._event("response.output_text.done", **place, text=text, logprobs=listed)]
        out.append(self._event("response.content_part.done", **place, part=part))
        self._open, self._told = "", []
        return [*out, self._done(item)]

    def _done(self, item: dict[str, Any]) -> bytes:
        data = self._event("response.output_item.done", output_index=self._at, item=item)
        self._output.append(item)
        return data

    def _call(self, told: Told, status: str = "completed") -> list[bytes]:
        custom = self._own.offer.name(told.name).custom
        before = self._close() if told.kind == "begin" else []
        call = ToolCall(told.id, told.name, told.text)
        item = call_item(self._stem, told.at, call, self._own.offer, status=status)
        place = {"item_id": item["id"], "output_index": self._at}
        if told.kind == "begin":
            # What a tool that takes plain text is told is known at its end only, and with it the id of its call.
            return before if custom else [*before, self._added(item)]
        if told.kind == "more":
            delta = {"delta": told.text}
            return [] if custom else [self._event("response.function_call_arguments.delta", **place, **delta)]
        if not custom:
            done = {"arguments": told.text, "name": item["name"]}
            return [self._event("response.function_call_arguments.done", **place, **done), self._done(item)]
        text = item["input"]
        out = [self._added(item)]
        if text:
            out.append(self._event("response.custom_tool_call_input.delta", **place, delta=text))
        return [*out, self._event("response.custom_tool_call_input.done", **place, input=text), self._done(item)]

    def _added(self, item: dict[str, Any]) -> bytes:
        empty = {"input": ""} if "input" in item else {"arguments": ""}
        begun = {**item, "status": "in_progress", **empty}
        return self._event("response.output_item.added", output_index=self._at, item=begun)

    # ---- ends

    def end(self, choice: int, reply: Reply) -> bytes:  # noqa: ARG002
        out = [] if self._begun else [self._begin()]
        status, calls = ended(reply)["status"], reply.message.tool_calls
        listed = shown(self._ask, reply)
        if self._open == "message":
            out += self._close("completed" if calls else status, listed)
        out += self._close()
        for told in self._calls.finish(calls):
            out += self._call(told, status if told.at == len(calls) - 1 else "completed")
        if self._late_thought:
            out += self._more("reasoning", "".join(self._late_thought))
            out += self._close()
        if self._late or not any(item["type"] != "reasoning" for item in self._output):
            out += self._more("message", "".join(self._late))
            out += self._close(status, listed if not calls else ())
        return b"".join(out)

    def done(self, replies: list[Reply]) -> bytes:
        (reply,) = replies
        end = ended(reply)
        now = response(self._ask, self._stem, self._output, **end)
        return self._event(f"response.{end['status']}", response=now)

    def broken(self, problem: Problem, message: str) -> bytes:
        """Both that OpenAI has: libraries raise on the one, Codex reads the other."""
        error = openai_error(problem, message)[1]
        told = self._event("error", code=error["code"], message=message, param=None, error=error)
        failed = {"code": _FAILED.get(problem, "server_error"), "message": message}
        now = response(self._ask, self._stem, self._output, status="failed", error=failed)
        return told + self._event("response.failed", response=now)
