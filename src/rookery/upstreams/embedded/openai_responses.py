"""Build responses of the embedded policy's server, in OpenAI's format with vLLM's fields for token IDs. Pure: no
I/O.

Guarantees:
- an error has the form `{"error": {"message": …, "type": …, "param": …, "code": …}}`;
- token IDs and logprobs describe the same tokens: all sampled tokens, including the one that ended the reply;
- every response and every chunk contains the version of the weights.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from rookery.core import RookeryError, Truncation, UpstreamError, UsageError
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.openai_requests import ParsedRequest, RequestError
from rookery.upstreams.embedded.streaming import DecodedCall, DecodedDelta, DeltaDecoder, completion_text
from rookery.upstreams.embedded.upstream import PreparedRequest, build_reply

encode = msgspec.json.Encoder().encode
DONE: Final = b"data: [DONE]\n\n"
_KINDS: Final = {400: "invalid_request_error", 404: "invalid_request_error", 429: "rate_limit_error"}
_STATUS: Final = {"upstream.rejected": 400, "upstream.timeout": 504, "upstream.unreachable": 503}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    text = message.encode("utf-8", "replace").decode()
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def error_response(error: RequestError | RookeryError | Truncation) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body of the response to a request that raised `error`."""
    if isinstance(error, RequestError):
        return error.status, error_body(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, Truncation):
        return 400, error_body(400, str(error), code="context_length_exceeded")
    status = 400 if isinstance(error, UsageError) else 500
    if isinstance(error, UpstreamError):
        status = _STATUS.get(error.code, 500)
    return status, error_body(status, str(error))


# ---- responses


class ResponseBuilder:
    """Build the complete response to one request, or the chunks of a streamed response.

    `name` is the ID of the response, `created` its time in seconds since the epoch.
    """

    def __init__(
        self, parsed: ParsedRequest, prepared: Sequence[PreparedRequest], *, name: str, created: int, model: str
    ) -> None:
        self.parsed = parsed
        self.prepared = prepared
        self.version = 0
        self._name = name
        self._about = {"created": created, "model": model}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._name, "object": kind, **self._about, "weight_version": self.version}

    def usage(self) -> dict[str, Any]:
        prompts = self.prepared[:: self.parsed.n]
        prompt = sum(len(prepared.prompt) for prepared in prompts)
        sampled = sum(len(prepared.job.tokens) for prepared in self.prepared)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": sum(prepared.job.reused for prepared in prompts)},
        }

    def _logprobs(self, job: SamplingJob, first: int, last: int) -> dict[str, Any] | None:
        if not self.parsed.logprobs:
            return None
        tokens, values = job.tokens[first:last], job.logprobs[first:last]
        if not self.parsed.chat:
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
        """Return the body of the complete response. All sequences of the request must have ended."""
        body = self._head("chat.completion" if self.parsed.chat else "text_completion")
        if self.parsed.chat and self.parsed.token_ids:
            body["prompt_token_ids"] = self.prepared[0].prompt
        body["choices"] = [self._choice(number, prepared) for number, prepared in enumerate(self.prepared)]
        body["usage"] = self.usage()
        return body

    def _choice(self, number: int, prepared: PreparedRequest) -> dict[str, Any]:
        job = prepared.job
        choice: dict[str, Any] = {"index": number, "logprobs": self._logprobs(job, 0, len(job.tokens))}
        if self.parsed.chat:
            built = build_reply(prepared, version=self.version, queued=0.0, replica="")
            message: dict[str, Any] = {"role": "assistant", "content": built.message.content, "refusal": None}
            if built.message.tool_calls:
                message["tool_calls"] = [
                    _call(DecodedCall(0, call.id, call.name, call.arguments)) for call in built.message.tool_calls
                ]
            choice |= {"message": message, "finish_reason": built.finish}
        else:
            choice |= {"text": completion_text(job.tokens[: job.text_tokens]), "finish_reason": job.finish}
        if self.parsed.token_ids:
            choice["token_ids"] = job.tokens
            if not self.parsed.chat:
                choice["prompt_token_ids"] = prepared.prompt
        return choice

    # -------------------------------------------------------------------------------------------- chunks

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Return one chunk with these choices, encoded as a server-sent event. `more` are further fields."""
        body = self._head("chat.completion.chunk" if self.parsed.chat else "text_completion")
        body["choices"] = choices
        if self.parsed.usage:
            body["usage"] = None
        return encode_event(body | more)


class ChoiceStream:
    """Build the chunks of one choice (reply) of a streamed response, in the order of its tokens."""

    def __init__(self, builder: ResponseBuilder, number: int) -> None:
        self._builder = builder
        self._number = number
        self._prepared = prepared = builder.prepared[number]
        self._deltas = DeltaDecoder(
            prefix=prepared.reply_prefix,
            prompt_length=len(prepared.prompt),
            stop=prepared.job.stop,
            calls_as_text=not builder.parsed.chat,
        )
        self._sent = 0
        self.finished = False

    def new_chunks(self, ended: bool) -> bytes:
        """Return the chunks for the tokens that are new since the last call; empty if there are none.

        `ended` is True if the sequence has certainly ended. Before that, the inference thread may be adding a
        token, so that only tokens that have a logprob already are used.
        """
        job, parsed = self._prepared.job, self._builder.parsed
        first, last = self._sent, len(job.logprobs)
        if self.finished or (not ended and first == last):
            return b""
        self._sent, self.finished = last, ended
        before = self._head() if not first else b""
        delta = self._deltas.finish(job.tokens, job.text_tokens) if ended else self._deltas.feed(job.tokens, last)
        if not (delta or ended or parsed.token_ids or parsed.logprobs):
            return before
        choice: dict[str, Any] = {
            "index": self._number,
            "logprobs": self._builder._logprobs(job, first, last),
            "finish_reason": self._finish() if ended else None,
        }
        if parsed.token_ids:
            choice["token_ids"] = job.tokens[first:last]
            if not parsed.chat and not first:
                choice["prompt_token_ids"] = self._prepared.prompt
        if not parsed.chat:
            return before + self._builder.chunk([{**choice, "text": delta.text}])
        *earlier, final = to_chunk_deltas(delta) or [{}]
        for one in earlier:
            earlier_choice = {"index": self._number, "delta": one, "logprobs": None, "finish_reason": None}
            before += self._builder.chunk(
                [{**earlier_choice, "token_ids": []} if parsed.token_ids else earlier_choice]
            )
        return before + self._builder.chunk([{**choice, "delta": final}])

    def _head(self) -> bytes:
        """Return the first chunk of a chat choice, with the role. That of choice 0 also has the prompt's token
        IDs, if they were requested."""
        parsed, prepared = self._builder.parsed, self._prepared
        if not parsed.chat:
            return b""
        silent = prepared.reply_prefix or prepared.job.tokens[0] == chat.CALL
        delta = {"role": "assistant", "content": None if silent else ""}
        choice = {"index": self._number, "delta": delta, "logprobs": None, "finish_reason": None}
        more = {"prompt_token_ids": prepared.prompt} if parsed.token_ids and not self._number else {}
        return self._builder.chunk([choice], **more)

    def _finish(self) -> str:
        job = self._prepared.job
        return "tool_calls" if job.finish == "stop" and self._deltas.calls else job.finish


def encode_event(body: dict[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def token_name(token: int) -> str:
    """Return a token as text. A byte that is not a character on its own is written as `bytes:\\xNN`, as OpenAI
    does."""
    if token >= chat.BEGIN:
        return chat.NAMES.get(token, f"<{token}>")
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


def to_chunk_deltas(delta: DecodedDelta) -> list[dict[str, Any]]:
    """Return the chat deltas for one piece of a reply: its text, then one for each piece of a tool call."""
    deltas: list[dict[str, Any]] = [{"content": delta.text}] if delta.text else []
    return deltas + [{"tool_calls": [{"index": call.index, **_call(call)}]} for call in delta.calls]


def _call(call: DecodedCall) -> dict[str, Any]:
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
