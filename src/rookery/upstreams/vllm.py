"""vLLM: token ids in through `/inference/v1/generate`, messages through `/chat/completions`.

Promises:
- a server that lacks the token endpoint, or disables it (403 unless it runs with `--enable-scale-out`), is
  detected by the first call and asked through `/completions` from then on;
- a stream of the token endpoint that says it has ended, without a finish, was aborted: its last event has no
  tokens, and the server leaves such events out; it is never taken for a complete answer;
- freezing uses `/pause` and `/resume`, which exist where vLLM runs in its development mode, as does its size.
"""

from typing import Any, ClassVar, Final

import msgspec

from rookery.core import Message, ints
from rookery.upstreams.complaints import complaint, head_of, text_of
from rookery.upstreams.format import About, Ask, Complained, Format, Gather, Tops, WireError, finish_of, packed
from rookery.upstreams.ids import written
from rookery.upstreams.logprobs import Logprobs, read_logprobs, values_of
from rookery.upstreams.openai import Chat, with_options
from rookery.upstreams.protocol import ModelReply, ModelRequest
from rookery.upstreams.replica import Replica
from rookery.upstreams.served import HttpUpstream
from rookery.upstreams.servers import SIZE_SECONDS
from rookery.upstreams.structured import token_options, vllm_constraint
from rookery.upstreams.wire import RESERVED, Id

_OUTSIDE: Final = frozenset({"priority", "cache_salt", "kv_transfer_params", "ec_transfer_params", "features"})
"""Fields of `sampling.extra` that are the request's own and not the sampling's."""


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    finish_reason: str | None = None
    token_ids: list[Id] | None = None
    logprobs: Logprobs | None = None


class _ChoiceSeen(_Choice, frozen=True):
    logprobs: msgspec.Raw = msgspec.Raw(b"null")  # type: ignore[assignment]


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    error: Any = None


class _AnswerSeen(_Answer, frozen=True):
    choices: list[_ChoiceSeen] | None = None  # type: ignore[assignment]


_decode = msgspec.json.Decoder(_Answer).decode
_decode_seen = msgspec.json.Decoder(_AnswerSeen).decode
_encode = msgspec.json.Encoder().encode


def _read(data: bytes, ask: Ask) -> _Answer:
    try:
        return (_decode_seen if ask.seen else _decode)(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not an answer with tokens: {error}; it begins {head_of(data)}") from None


def _logprobs(choice: _Choice, ask: Ask) -> tuple[list[float] | None, msgspec.Raw | None, tuple[Tops, ...]]:
    """The values; as they were written and with their alternatives, where the caller looks at them."""
    if ask.seen:
        return read_logprobs(choice.logprobs)  # type: ignore[arg-type]
    return None if choice.logprobs is None else values_of(choice.logprobs), None, ()


class Generate:
    """`/inference/v1/generate`: ids in, ids out, no text."""

    path = "/inference/v1/generate"

    def encode(self, ask: Ask) -> bytes:
        request, sampling = ask.request, ask.sampling
        params: dict[str, Any] = {}
        for name in ("temperature", "top_p", "top_k", "max_tokens", "seed"):
            if (value := getattr(sampling, name)) is not None:
                params[name] = value
        if sampling.stop:
            params["stop"] = sampling.stop
        else:
            params["detokenize"] = False  # there is no text in the answer: only stop texts need it
        if request.stop_ids:
            params["stop_token_ids"] = request.stop_ids
        if request.want_tokens or ask.seen:
            params["logprobs"] = request.top_logprobs
        body: dict[str, Any] = {"model": ask.model} if ask.model else {}
        body["token_ids"] = written(request.tokens, request.memo)
        body["sampling_params"] = params
        for name, value in token_options(sampling.extra, vllm_constraint, "vllm").items():
            (body if name in _OUTSIDE else params)[name] = value
        if ask.stream:
            body["stream"] = True
        if ask.id:
            body["request_id"] = ask.id
        return _encode(body)

    def decode(self, data: bytes, ask: Ask, about: About) -> ModelReply:
        request = ask.request
        answer = _read(data, ask)
        if not answer.choices:
            said = f": {text_of(answer.error)}" if answer.error else f"; it begins {head_of(data)}"
            raise WireError(f"no choices in the answer{said}")
        choice = answer.choices[0]
        if choice.finish_reason is None:
            raise WireError("the answer has no finish_reason: it is not complete")
        ids = choice.token_ids
        if ids is None:
            raise WireError("the answer has no token ids")
        values, written, tops = _logprobs(choice, ask)
        if values is not None and len(values) != len(ids):
            raise WireError(f"the answer has {len(ids)} token ids but {len(values)} logprobs")
        return ModelReply(
            message=Message("assistant", ""),
            finish=finish_of(choice.finish_reason),
            prompt=request.tokens,
            sampled=ints(ids),
            logprobs=b"" if values is None else packed(values),
            version=about.version,
            prompt_tokens=len(request.tokens) // 4,
            sampled_tokens=len(ids),
            queued=about.queued,
            replica=about.replica,
            tops=tops,
            logprob_content=written,
        )

    def streams(self, request: ModelRequest) -> bool:  # noqa: ARG002  (whatever it is)
        return True

    def gather(self, ask: Ask) -> Gather:
        return _Tokens(ask)


class _Tokens(Gather):
    __slots__ = ()

    def event(self, data: bytes) -> None:
        chunk = _read(data, self.ask)
        if chunk.error is not None:
            raise Complained(complaint(data), data)
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        if choice.token_ids:
            values, written, tops = _logprobs(choice, self.ask)
            if written is not None:
                self.as_written(written)
            if tops:
                self.alternatives(list(tops))
            self.tokens(choice.token_ids, values)
        if choice.finish_reason is not None:
            self.finish = finish_of(choice.finish_reason)

    def ended(self) -> str:
        if self.finish is None and self.done:
            self.finish = "abort"
        return super().ended()


class _VllmChat(Chat):
    def more(self, ask: Ask) -> dict[str, Any] | None:
        return {"request_id": ask.id} if ask.id else None


class _VllmCompletions(_VllmChat):
    """Where the token endpoint is missing."""

    path = "completions"

    def encode(self, ask: Ask) -> bytes:
        return super().encode(with_options(ask, token_options(ask.sampling.extra, vllm_constraint, "vllm")))

    def more(self, ask: Ask) -> dict[str, Any] | None:
        fields: dict[str, Any] = super().more(ask) or {}
        if ask.sampling.max_tokens is None:
            fields["max_tokens"] = None  # said, it means all that fits; left out, 16
        if ask.request.stop_ids:
            fields["stop_token_ids"] = ask.request.stop_ids
        if ask.request.top_logprobs:
            fields["return_tokens_as_token_ids"] = True
        return fields


_GENERATE: Final = Generate()
_CHAT: Final = _VllmChat()
_COMPLETIONS: Final = _VllmCompletions()


class VllmUpstream(HttpUpstream):
    """The `vllm` upstream."""

    reserved: ClassVar[frozenset[str]] = RESERVED | {
        "token_ids",
        "sampling_params",
        "request_id",
        "return_token_ids",
        "include_reasoning",
        "output_kind",
    }
    vitals = "/health"
    freezing: ClassVar[dict[str, tuple[str, bytes]]] = {
        "keep": ("/pause?mode=keep", b"{}"),
        "abort": ("/pause?mode=abort", b"{}"),
        "thaw": ("/resume", b"{}"),
    }

    def format(self, replica: Replica, ask: Ask) -> Format:
        if not ask.request.tokens:
            return _CHAT
        path = _GENERATE.path
        return _COMPLETIONS if path in replica.lacks or path in ask.without else _GENERATE

    def optional(self, spoken: Format) -> bool:
        return spoken is _GENERATE

    async def size(self, replica: Replica) -> int | None:
        url = replica.endpoint("/server_info?config_format=json")
        answer = await replica.exchange(url, None, seconds=SIZE_SECONDS)
        if answer.status != 200:
            return None
        try:
            said = _decode_info(answer.body).vllm_config
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return said.scheduler_config.max_num_seqs * max(1, said.parallel_config.data_parallel_size)


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
