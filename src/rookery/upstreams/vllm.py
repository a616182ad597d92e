"""Upstream for vLLM: token IDs through `/inference/v1/generate`, messages through `/chat/completions`.

Runs in runner processes and gateway shards.

Guarantees:
- a server that lacks `/inference/v1/generate`, or disables it (status 403 unless it runs with
  `--enable-scale-out`), is detected by the first call; calls to it use `/completions` from then on;
- a stream of `/inference/v1/generate` that announces its end without a finish reason was aborted, because
  versions before 0.32 omit the last event of an aborted call if it has no tokens. Such a reply has the finish
  reason `abort`;
- alternatives to a token are read in both of vLLM's formats: with a field `token_id`, as 0.32 sends them, and with
  names such as `token_id:42`, as earlier versions do;
- sampling is stopped and continued with `/pause` and `/resume`, and the concurrency limit is read from
  `/server_info`. vLLM has these endpoints only in its development mode.
"""

from typing import Any, ClassVar, Final

import msgspec

from rookery.core import Message, ints
from rookery.upstreams.error_replies import error_text, parse_error, preview
from rookery.upstreams.format import (
    ErrorReply,
    ReplyContext,
    ReplyFormatError,
    StreamParser,
    Tops,
    WireOptions,
    pack_logprobs,
    parse_finish,
)
from rookery.upstreams.http_upstream import CONCURRENCY_QUERY_SECONDS, HttpUpstream
from rookery.upstreams.logprobs import Logprobs, logprob_values, read_logprobs
from rookery.upstreams.openai import OpenAIFormat, with_extra
from rookery.upstreams.openai_format import RESERVED, Id, encode_request
from rookery.upstreams.protocol import LoadMetrics, ModelReply, ModelRequest
from rookery.upstreams.replica import Replica
from rookery.upstreams.structured_output import Constraint, token_options
from rookery.upstreams.token_ids import encode_prompt

_OUTSIDE: Final = frozenset({"priority", "cache_salt", "kv_transfer_params", "ec_transfer_params", "features"})
"""Fields of `sampling.extra` that are sent at the top level of the request, not in `sampling_params`."""


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    finish_reason: str | None = None
    token_ids: list[Id] | None = None
    logprobs: Logprobs | None = None


class _ChoiceRawLogprobs(_Choice, frozen=True):
    logprobs: msgspec.Raw = msgspec.Raw(b"null")  # type: ignore[assignment]


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    error: Any = None


class _AnswerRawLogprobs(_Answer, frozen=True):
    choices: list[_ChoiceRawLogprobs] | None = None  # type: ignore[assignment]


_decode = msgspec.json.Decoder(_Answer).decode
_decode_raw_logprobs = msgspec.json.Decoder(_AnswerRawLogprobs).decode
_encode = msgspec.json.Encoder().encode


def _read(data: bytes, request: ModelRequest) -> _Answer:
    try:
        return (_decode_raw_logprobs if request.shows_logprobs else _decode)(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplyFormatError(
            f"the reply is not one of /inference/v1/generate: {error}; it begins {preview(data)}"
        ) from None


def _logprobs(choice: _Choice, request: ModelRequest) -> tuple[list[float] | None, tuple[Tops, ...]]:
    """Return the logprobs of a choice and, only if the caller requested logprobs, the alternatives to each token.

    Their JSON is not kept, because it has token IDs instead of the texts that clients of the gateway expect.
    """
    if request.shows_logprobs:
        values, _, tops = read_logprobs(choice.logprobs)  # type: ignore[arg-type]
        return values, tops
    return None if choice.logprobs is None else logprob_values(choice.logprobs), ()


def _encode_constraint(constraint: Constraint) -> dict[str, Any]:
    return {"structured_outputs": {constraint.kind: constraint.value}}


class Generate:
    """Format of the endpoint `/inference/v1/generate`, which takes and returns token IDs and no text."""

    path = "/inference/v1/generate"

    def encode(self, request: ModelRequest, options: WireOptions) -> bytes:
        sampling = request.sampling
        params: dict[str, Any] = {}
        for name in ("temperature", "top_p", "top_k", "max_tokens", "seed"):
            if (value := getattr(sampling, name)) is not None:
                params[name] = value
        if sampling.stop:
            params["stop"] = sampling.stop
        else:
            params["detokenize"] = False  # the reply has no text; only stop strings need it
        if request.stop_ids:
            params["stop_token_ids"] = request.stop_ids
        if request.want_tokens or request.shows_logprobs:
            params["logprobs"] = request.top_logprobs
        body: dict[str, Any] = {"model": request.model} if request.model else {}
        body["token_ids"] = encode_prompt(request.tokens, request.prompt_cache)
        body["sampling_params"] = params
        for name, value in token_options(sampling.extra, _encode_constraint, "vllm").items():
            (body if name in _OUTSIDE else params)[name] = value
        if options.stream:
            body["stream"] = True
        if request.id:
            body["request_id"] = request.id
        return _encode(body)

    def decode(self, data: bytes, request: ModelRequest, context: ReplyContext) -> ModelReply:
        answer = _read(data, request)
        if not answer.choices:
            detail = f": {error_text(answer.error)}" if answer.error else f"; it begins {preview(data)}"
            raise ReplyFormatError(f"the reply has no choices{detail}")
        choice = answer.choices[0]
        if choice.finish_reason is None:
            raise ReplyFormatError("the reply has no finish_reason: it is incomplete")
        ids = choice.token_ids
        if ids is None:
            raise ReplyFormatError("the reply has no token IDs")
        values, tops = _logprobs(choice, request)
        if values is not None and len(values) != len(ids):
            raise ReplyFormatError(f"the reply has {len(ids)} token IDs but {len(values)} logprobs")
        return ModelReply(
            message=Message("assistant", ""),
            finish=parse_finish(choice.finish_reason),
            prompt=request.tokens,
            sampled=ints(ids),
            logprobs=b"" if values is None else pack_logprobs(values),
            version=context.version,
            prompt_tokens=len(request.tokens) // 4,
            sampled_tokens=len(ids),
            queued=context.queued,
            replica=context.replica,
            tops=tops,
        )

    def streams(self, request: ModelRequest) -> bool:  # noqa: ARG002  (whatever it is)
        return True

    def stream_parser(self, request: ModelRequest) -> StreamParser:
        return _Tokens(request)


class _Tokens(StreamParser):
    def event(self, data: bytes) -> None:
        chunk = _read(data, self.request)
        if chunk.error is not None:
            raise ErrorReply(parse_error(data), data)
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        if choice.token_ids:
            values, tops = _logprobs(choice, self.request)
            if tops:
                self.alternatives(list(tops))
            self.tokens(choice.token_ids, values)
        if choice.finish_reason is not None:
            self.finish = parse_finish(choice.finish_reason)

    def ended(self) -> str:
        if self.finish is None and self.done:
            self.finish = "abort"
        return super().ended()


class _VllmChat(OpenAIFormat):
    def encode(self, request: ModelRequest, options: WireOptions) -> bytes:
        return encode_request(request, options, {"request_id": request.id} if request.id else None)


class _VllmCompletions(OpenAIFormat):
    """Format of the endpoint `/completions`, for servers without `/inference/v1/generate`."""

    path = "completions"

    def encode(self, request: ModelRequest, options: WireOptions) -> bytes:
        fields: dict[str, Any] = {"request_id": request.id} if request.id else {}
        if request.sampling.max_tokens is None:
            fields["max_tokens"] = None  # null means as many as fit; the default is 16
        if request.stop_ids:
            fields["stop_token_ids"] = request.stop_ids
        if request.top_logprobs:
            fields["return_tokens_as_token_ids"] = True
        request = with_extra(request, token_options(request.sampling.extra, _encode_constraint, "vllm"))
        return encode_request(request, options, fields)


_GENERATE: Final = Generate()
_CHAT: Final = _VllmChat()
_COMPLETIONS: Final = _VllmCompletions()


class VllmUpstream(HttpUpstream):
    """Upstream for vLLM servers."""

    reserved: ClassVar[frozenset[str]] = RESERVED | {
        "token_ids",
        "sampling_params",
        "request_id",
        "return_token_ids",
        "include_reasoning",
        "output_kind",
    }
    message_format = _CHAT
    token_format = _GENERATE
    fallback_format = _COMPLETIONS
    health_path = "/health"
    identity_paths = ("/version",)
    load_metrics = LoadMetrics(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        tokens=("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    )
    pause_paths = ("/is_paused", "/is_sleeping")
    control_requests: ClassVar[dict[str, tuple[str, bytes]]] = {
        "keep": ("/pause?mode=keep", b"{}"),
        "abort": ("/pause?mode=abort", b"{}"),
        "thaw": ("/resume", b"{}"),
    }

    def is_identity(self, body: bytes) -> bool:
        try:
            return msgspec.json.decode(body, type=dict).keys() == {"version"}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False

    async def query_concurrency_limit(self, replica: Replica) -> int | None:
        response = await replica.exchange(
            "/server_info?config_format=json", None, seconds=CONCURRENCY_QUERY_SECONDS
        )
        if response.status != 200:
            return None
        try:
            config = _decode_info(response.body).vllm_config
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return config.scheduler_config.max_num_seqs * max(1, config.parallel_config.data_parallel_size)


class _Scheduler(msgspec.Struct, frozen=True):
    max_num_seqs: int


class _Parallel(msgspec.Struct, frozen=True):
    data_parallel_size: int = 1


class _Config(msgspec.Struct, frozen=True):
    scheduler_config: _Scheduler
    parallel_config: _Parallel = _Parallel()


class _Info(msgspec.Struct, frozen=True):
    vllm_config: _Config


_decode_info = msgspec.json.Decoder(_Info).decode
