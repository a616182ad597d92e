"""Upstream for llama.cpp's server: token IDs through `/completion`, messages through `/chat/completions`.

Runs in runner processes and gateway shards.

Guarantees:
- a call with token IDs sets all sampling parameters, so that the server's own defaults (top-k 40, top-p 0.95,
  min-p 0.05) never apply: a trainer assumes that tokens are sampled from the whole distribution;
- log probabilities are those of the model before temperature and filters, one for each sampled token;
- the token that ended a reply is one of its sampled tokens, as with vLLM and SGLang. A call with stop strings is
  always streamed, because a whole reply lacks the log probabilities of the tokens of its stop string.

llama.cpp ends a reply at the model's own end-of-sequence tokens and at stop strings. It has no parameter for other
stop token IDs, and no endpoints to pause sampling or to replace weights.
"""

import json
from typing import Any, ClassVar, Final

import msgspec

from rookery.core import Finish, Message, ints
from rookery.upstreams.error_replies import parse_error, preview
from rookery.upstreams.format import (
    ErrorReply,
    ReplyContext,
    ReplyFormatError,
    StreamParser,
    Tops,
    WireOptions,
    pack_logprobs,
)
from rookery.upstreams.http_upstream import CONCURRENCY_QUERY_SECONDS, HttpUpstream
from rookery.upstreams.openai import Chat
from rookery.upstreams.openai_format import RESERVED, Id
from rookery.upstreams.protocol import ModelReply, ModelRequest
from rookery.upstreams.replica import Replica
from rookery.upstreams.structured_output import Constraint, refuse_option, token_options
from rookery.upstreams.token_ids import encode_prompt

_FINISH: Final[dict[str, Finish]] = {"eos": "stop", "word": "stop", "limit": "length"}
# Temperature comes first, as in vLLM and SGLang; llama.cpp's own order applies it last.
_SAMPLERS: Final = ("penalties", "temperature", "top_k", "top_p", "min_p")


class _TopToken(msgspec.Struct, frozen=True):
    id: Id
    logprob: float


class _TokenLogprob(_TopToken, frozen=True):
    top_logprobs: list[_TopToken] = []


class _Completion(msgspec.Struct, frozen=True):
    """JSON of a complete reply of `/completion`, or of one event of a stream."""

    content: str = ""
    tokens: list[Id] = []
    completion_probabilities: list[_TokenLogprob] = []
    stop: bool = False
    stop_type: str = ""
    error: Any = None


_decode = msgspec.json.Decoder(_Completion).decode
_encode = msgspec.json.Encoder().encode


def _read(data: bytes) -> _Completion:
    try:
        completion = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplyFormatError(
            f"the reply is not a completion of llama.cpp: {error}; it begins {preview(data)}"
        ) from None
    if completion.error is not None:
        raise ErrorReply(parse_error(data), data)
    return completion


def _read_stream(data: bytes) -> _Completion:
    """Join the events of a stream that was received as a whole."""
    parts = [_read(line.removeprefix(b"data:")) for line in data.splitlines() if line.startswith(b"data:")]
    return msgspec.structs.replace(
        parts[-1],
        content="".join(part.content for part in parts),
        tokens=[token for part in parts for token in part.tokens],
        completion_probabilities=[entry for part in parts for entry in part.completion_probabilities],
    )


def _logprobs(completion: _Completion) -> list[float]:
    """Return the log probabilities of the sampled tokens. Raises `ReplyFormatError` if they are of other
    tokens."""
    if [entry.id for entry in completion.completion_probabilities] != completion.tokens:
        raise ReplyFormatError("the log probabilities in the reply belong to other tokens than its token IDs")
    return [entry.logprob for entry in completion.completion_probabilities]


def _tops(completion: _Completion, count: int) -> tuple[Tops, ...]:
    if not count:
        return ()
    return tuple(
        tuple((top.id, top.logprob) for top in entry.top_logprobs[:count])
        for entry in completion.completion_probabilities
    )


def _finish(completion: _Completion) -> Finish:
    finish = _FINISH.get(completion.stop_type)
    if finish is None:
        raise ReplyFormatError(f"the reply has the unknown stop_type {completion.stop_type[:80]!r}")
    return finish


def _encode_constraint(constraint: Constraint) -> dict[str, Any]:
    kind, value = constraint
    if kind == "json":
        return {"json_schema": json.loads(value) if isinstance(value, str) else value}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "grammar":
        return {"grammar": value}
    raise refuse_option(
        f"llama.cpp has no parameter for the output format {kind!r}; use json, json_object or grammar"
    )


class NativeCompletion:
    """Format of llama.cpp's own endpoint `/completion`, which takes token IDs and returns them with log
    probabilities."""

    path = "/completion"

    def encode(self, request: ModelRequest, options: WireOptions) -> bytes:
        sampling = request.sampling
        body: dict[str, Any] = {
            "prompt": encode_prompt(request.tokens, request.prompt_cache),
            "n_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_k": max(0, sampling.top_k or 0),
            "min_p": 0.0,
            "samplers": _SAMPLERS,
            "n_probs": max(1, request.top_logprobs),
            "return_tokens": True,
            "cache_prompt": True,
        }
        if sampling.stop:
            body["stop"] = sampling.stop
        if (seed := request.seed if sampling.seed is None else sampling.seed) is not None:
            body["seed"] = seed % 2**32
        if options.stream or sampling.stop:
            body["stream"] = True
        return _encode(body | dict(token_options(sampling.extra, _encode_constraint, "llamacpp")))

    def decode(self, data: bytes, request: ModelRequest, context: ReplyContext) -> ModelReply:
        completion = _read_stream(data) if data.startswith(b"data:") else _read(data)
        if not completion.stop:
            raise ReplyFormatError("the field stop of the reply is not true: the reply is incomplete")
        return ModelReply(
            message=Message("assistant", completion.content),
            finish=_finish(completion),
            prompt=request.tokens,
            sampled=ints(completion.tokens),
            logprobs=pack_logprobs(_logprobs(completion)),
            version=context.version,
            prompt_tokens=len(request.tokens) // 4,
            sampled_tokens=len(completion.tokens),
            queued=context.queued,
            replica=context.replica,
            tops=_tops(completion, request.top_logprobs),
        )

    def streams(self, request: ModelRequest) -> bool:  # noqa: ARG002  (every call can be streamed)
        return True

    def stream_parser(self, request: ModelRequest) -> StreamParser:
        return _Stream(request)


class _Stream(StreamParser):
    """Parser for a streamed reply. Each event holds only what is new; the last event says how the reply ended."""

    def event(self, data: bytes) -> None:
        completion = _read(data)
        if completion.tokens:
            self.tokens(completion.tokens, _logprobs(completion))
            if tops := _tops(completion, self.request.top_logprobs):
                self.alternatives(list(tops))
        if completion.content:
            self.text(completion.content)
        if completion.stop:
            self.finish = _finish(completion)
            self.done = True


_COMPLETION: Final = NativeCompletion()
_CHAT: Final = Chat()


class LlamaCppUpstream(HttpUpstream):
    """Upstream for llama.cpp's `llama-server`."""

    reserved: ClassVar[frozenset[str]] = RESERVED | {"n_predict", "n_probs", "return_tokens", "cache_prompt"}
    message_format = _CHAT
    token_format = _COMPLETION
    health_path = "/health"
    identity_paths = ("/props",)

    def is_identity(self, body: bytes) -> bool:
        try:
            return _decode_properties(body).total_slots > 0
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False

    async def query_concurrency_limit(self, replica: Replica) -> int | None:
        """Query the number of slots, which is how many calls the server processes at once."""
        reply = await replica.exchange("/props", None, seconds=CONCURRENCY_QUERY_SECONDS)
        if reply.status != 200:
            return None
        try:
            return _decode_properties(reply.body).total_slots
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


class _Properties(msgspec.Struct, frozen=True):
    total_slots: int


_decode_properties = msgspec.json.Decoder(_Properties).decode
