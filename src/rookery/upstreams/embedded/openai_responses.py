"""What the embedded policy's server answers, in OpenAI's shapes with vLLM's token ids. Pure: no socket, no clock.

Promises:
- an error is `{"error": {"message", "type", "param", "code"}}`, whatever went wrong;
- token ids and logprobs describe the same tokens: all that were sampled, the one that ended the answer too;
- every answer and every chunk says the version of the weights that drew it.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from rookery.core import RookeryError, Truncation, UpstreamError, UsageError
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.openai_requests import ParsedRequest, RequestError
from rookery.upstreams.embedded.streaming import CallDelta, Delta, DeltaDecoder, spelled
from rookery.upstreams.embedded.upstream import PreparedRequest, reply

encode = msgspec.json.Encoder().encode
DONE: Final = b"data: [DONE]\n\n"
_KINDS: Final = {400: "invalid_request_error", 404: "invalid_request_error", 429: "rate_limit_error"}
_STATUS: Final = {"upstream.rejected": 400, "upstream.timeout": 504, "upstream.unreachable": 503}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    said = message.encode("utf-8", "replace").decode()
    return {"error": {"message": said, "type": kind, "param": param, "code": code}}


def refusal(error: RequestError | RookeryError | Truncation) -> tuple[int, dict[str, Any]]:
    """Status and body for what a request raised."""
    if isinstance(error, RequestError):
        return error.status, error_body(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, Truncation):
        return 400, error_body(400, str(error), code="context_length_exceeded")
    status = 400 if isinstance(error, UsageError) else 500
    if isinstance(error, UpstreamError):
        status = _STATUS.get(error.code, 500)
    return status, error_body(status, str(error))


# ---------------------------------------------------------------------------------------- what is common


class ResponseBuilder:
    """What all answers to one request have in common."""

    def __init__(
        self, order: ParsedRequest, asked: Sequence[PreparedRequest], *, name: str, created: int, model: str
    ) -> None:
        self.order = order
        self.asked = asked
        self.version = 0
        self._name = name
        self._about = {"created": created, "model": model}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._name, "object": kind, **self._about, "weight_version": self.version}

    def usage(self) -> dict[str, Any]:
        prompts = self.asked[:: self.order.n]
        prompt = sum(len(asked.prompt) for asked in prompts)
        sampled = sum(len(asked.job.tokens) for asked in self.asked)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": sum(asked.job.reused for asked in prompts)},
        }

    def _logprobs(self, job: SamplingJob, first: int, last: int) -> dict[str, Any] | None:
        if not self.order.logprobs:
            return None
        tokens, values = job.tokens[first:last], job.logprobs[first:last]
        if not self.order.chat:
            names = [token_name(token) for token in tokens]
            return {"tokens": names, "token_logprobs": values, "top_logprobs": None, "text_offset": None}
        entries = [
            {
                "token": token_name(token),
                "logprob": value,
                "bytes": [token] if token < chat.BEGIN else None,
                "top_logprobs": [],
            }
            for token, value in zip(tokens, values, strict=True)
        ]
        return {"content": entries, "refusal": None}

    # ------------------------------------------------------------------------------------- whole answers

    def answer(self) -> dict[str, Any]:
        """The answer to a request whose jobs have all ended."""
        body = self._head("chat.completion" if self.order.chat else "text_completion")
        if self.order.chat and self.order.token_ids:
            body["prompt_token_ids"] = self.asked[0].prompt
        body["choices"] = [self._choice(number, asked) for number, asked in enumerate(self.asked)]
        body["usage"] = self.usage()
        return body

    def _choice(self, number: int, asked: PreparedRequest) -> dict[str, Any]:
        job = asked.job
        choice: dict[str, Any] = {"index": number, "logprobs": self._logprobs(job, 0, len(job.tokens))}
        if self.order.chat:
            said = reply(asked, version=self.version, queued=0.0, replica="")
            message: dict[str, Any] = {"role": "assistant", "content": said.message.content, "refusal": None}
            if said.message.tool_calls:
                message["tool_calls"] = [
                    _call(CallDelta(0, call.id, call.name, call.arguments)) for call in said.message.tool_calls
                ]
            choice |= {"message": message, "finish_reason": said.finish}
        else:
            choice |= {"text": spelled(job.tokens[: job.text]), "finish_reason": job.finish}
        if self.order.token_ids:
            choice["token_ids"] = job.tokens
            if not self.order.chat:
                choice["prompt_token_ids"] = asked.prompt
        return choice

    # -------------------------------------------------------------------------------------------- chunks

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One event of a stream."""
        body = self._head("chat.completion.chunk" if self.order.chat else "text_completion")
        body["choices"] = choices
        if self.order.usage:
            body["usage"] = None
        return event(body | more)


class ChoiceStream:
    """The chunks of one choice, in the order of its tokens."""

    def __init__(self, sheet: ResponseBuilder, number: int) -> None:
        self._sheet = sheet
        self._number = number
        self._asked = asked = sheet.asked[number]
        self._deltas = DeltaDecoder(
            begun=asked.begun, at=len(asked.prompt), stop=asked.job.stop, plain=not sheet.order.chat
        )
        self._told = 0
        self.over = False

    def news(self, ended: bool) -> bytes:
        """What there is to tell since the last time; `ended`: the job has ended for certain.

        Before that, another thread may be about to add to it: only tokens that have their logprob are there.
        """
        job, order = self._asked.job, self._sheet.order
        first, last = self._told, len(job.logprobs)
        if self.over or (not ended and first == last):
            return b""
        self._told, self.over = last, ended
        before = self._head() if not first else b""
        delta = self._deltas.end(job.tokens, job.text) if ended else self._deltas.more(job.tokens, last)
        if not (delta or ended or order.token_ids or order.logprobs):
            return before
        choice: dict[str, Any] = {
            "index": self._number,
            "logprobs": self._sheet._logprobs(job, first, last),
            "finish_reason": self._finish() if ended else None,
        }
        if order.token_ids:
            choice["token_ids"] = job.tokens[first:last]
            if not order.chat and not first:
                choice["prompt_token_ids"] = self._asked.prompt
        if not order.chat:
            return before + self._sheet.chunk([{**choice, "text": delta.text}])
        *earlier, final = _deltas(delta) or [{}]
        for one in earlier:
            told = {"index": self._number, "delta": one, "logprobs": None, "finish_reason": None}
            before += self._sheet.chunk([{**told, "token_ids": []} if order.token_ids else told])
        return before + self._sheet.chunk([{**choice, "delta": final}])

    def _head(self) -> bytes:
        """The first chunk of a chat's choice: who speaks. The prompt's ids go with the very first of all."""
        order, asked = self._sheet.order, self._asked
        if not order.chat:
            return b""
        silent = asked.begun or asked.job.tokens[0] == chat.CALL
        delta = {"role": "assistant", "content": None if silent else ""}
        choice = {"index": self._number, "delta": delta, "logprobs": None, "finish_reason": None}
        more = {"prompt_token_ids": asked.prompt} if order.token_ids and not self._number else {}
        return self._sheet.chunk([choice], **more)

    def _finish(self) -> str:
        job = self._asked.job
        return "tool_calls" if job.finish == "stop" and self._deltas.calls else job.finish


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def token_name(token: int) -> str:
    """A token as text: a byte that is no character of its own is written as OpenAI does."""
    if token >= chat.BEGIN:
        return chat.NAMES.get(token, f"<{token}>")
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


def _deltas(delta: Delta) -> list[dict[str, Any]]:
    """The deltas of a chat for one piece of an answer: its text, then one for each piece of a call."""
    told: list[dict[str, Any]] = [{"content": delta.text}] if delta.text else []
    return told + [{"tool_calls": [{"index": call.index, **_call(call)}]} for call in delta.calls]


def _call(call: CallDelta) -> dict[str, Any]:
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
