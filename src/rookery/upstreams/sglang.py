"""Upstream for SGLang: token IDs through `/generate`, messages through `/chat/completions`.

Runs in runner processes and gateway shards.

Guarantees:
- a stream is parsed whether its events repeat the whole reply so far (the default) or hold only what is new.
  Tokens that were received before are not decoded again;
- a chat call that wants token IDs is not streamed, because the server refuses that: the caller gets its reply in
  one piece;
- a call that is cancelled or times out is aborted by its ID, because the server notices a closed connection late;
- the policy version is the one that the server reports, with one span per version if it changes within a stream.
"""

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from rookery.core import Message, ints
from rookery.upstreams.error_replies import ServerError, error_text, parse_error, preview
from rookery.upstreams.format import (
    ErrorReply,
    ReplyContext,
    ReplyFormatError,
    StreamParser,
    Tops,
    WireOptions,
    pack_logprobs,
    parse_finish,
    parse_version,
)
from rookery.upstreams.http_upstream import CONCURRENCY_QUERY_SECONDS, HttpUpstream
from rookery.upstreams.openai import OpenAIFormat
from rookery.upstreams.openai_format import RESERVED, Id, encode_request
from rookery.upstreams.protocol import LoadMetrics, ModelReply, ModelRequest
from rookery.upstreams.replica import MISSING, Replica
from rookery.upstreams.structured_output import Constraint, refuse_option, token_options
from rookery.upstreams.token_ids import encode_prompt

_OUTSIDE: Final = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "cache_salt",
        "custom_logit_processor",
        "extra_key",
        "lora_path",
        "priority",
        "return_hidden_states",
        "return_routed_experts",
        "routed_dp_rank",
        "session_id",
        "session_params",
    }
)
"""Fields of `sampling.extra` that are sent at the top level of the request, not in `sampling_params`."""
_NOTHING: Final = msgspec.Raw(b"null")


class _Finish(msgspec.Struct, frozen=True):
    type: str = ""
    message: Any = None
    status_code: int | None = None


class _Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    logprob: float
    id: Id


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish | str | None = None
    weight_version: Any = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    output_token_logprobs: msgspec.Raw = _NOTHING
    output_top_logprobs: msgspec.Raw = _NOTHING


class _Answer(msgspec.Struct, frozen=True):
    meta_info: _Meta | None = None
    output_ids: msgspec.Raw = _NOTHING
    text: str | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Answer).decode
_Listed: TypeAlias = list[Id] | None
_Logged: TypeAlias = list[_Entry] | None
_Topped: TypeAlias = list[list[_Entry] | None] | None
_decode_ids: Callable[[bytes | msgspec.Raw], _Listed] = msgspec.json.Decoder(_Listed).decode
decode_entries: Callable[[bytes | msgspec.Raw], _Logged] = msgspec.json.Decoder(_Logged).decode
_decode_tops: Callable[[bytes | msgspec.Raw], _Topped] = msgspec.json.Decoder(_Topped).decode
_encode = msgspec.json.Encoder().encode


def read_answer(data: bytes) -> tuple[_Answer, _Meta]:
    try:
        answer = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplyFormatError(f"the reply is not one of /generate: {error}; it begins {preview(data)}") from None
    if answer.error is not None:
        raise ErrorReply(parse_error(data), data)
    if answer.meta_info is None:
        raise ReplyFormatError(f"the reply has no meta_info; it begins {preview(data)}")
    finish = answer.meta_info.finish_reason
    if isinstance(finish, _Finish) and finish.type == "abort" and (finish.status_code or 0) >= 400:
        failure = ServerError(error_text(finish.message or "aborted"), str(finish.status_code))
        raise ErrorReply(failure, _encode({"error": {"message": failure.text, "code": finish.status_code}}))
    return answer, answer.meta_info


def _finish(finish: _Finish | str) -> str:
    return finish if isinstance(finish, str) else finish.type


def read_ids(text: bytes | msgspec.Raw) -> list[int] | None:
    try:
        return _decode_ids(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplyFormatError(
            f"the token IDs in the reply are not in SGLang's format: {error}; check the server's version"
        ) from None


def read_entries(text: bytes | msgspec.Raw) -> list[_Entry] | None:
    try:
        return decode_entries(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplyFormatError(
            f"the logprobs in the reply are not in SGLang's format: {error}; check the server's version"
        ) from None


def read_alternatives(text: bytes | msgspec.Raw) -> list[Tops]:
    try:
        listed = _decode_tops(text) or []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplyFormatError(
            f"the top logprobs in the reply are not in SGLang's format: {error}; check the server's version"
        ) from None
    return [tuple((entry.id, entry.logprob) for entry in entries or ()) for entries in listed]


def _same(ids: list[int], entries: list[_Entry]) -> list[float]:
    """Return the logprobs in `entries`. Raises `ReplyFormatError` if they belong to other tokens than `ids`."""
    if len(ids) != len(entries):
        raise ReplyFormatError(f"the reply has {len(ids)} token IDs but {len(entries)} logprobs")
    if any(entry.id != token for entry, token in zip(entries, ids, strict=True)):
        raise ReplyFormatError("the logprobs in the reply belong to other tokens than its token IDs")
    return [entry.logprob for entry in entries]


def _encode_constraint(constraint: Constraint) -> dict[str, Any]:
    kind, value = constraint
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else value
        return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}
    if kind == "choice":
        return {"regex": _encode_choices(value)}
    return {"ebnf" if kind == "grammar" else kind: value}


def _encode_choices(values: Any) -> str:
    """Return a regular expression that matches exactly the given texts."""
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise refuse_option("the output constraint choice must be a list of strings")
    return f"({'|'.join(map(re.escape, values))})"


class Generate:
    """Format of the endpoint `/generate`, which takes and returns token IDs."""

    path = "/generate"

    def encode(self, request: ModelRequest, options: WireOptions) -> bytes:
        sampling = request.sampling
        params: dict[str, Any] = {"max_new_tokens": sampling.max_tokens}  # the default is 128
        if sampling.temperature is not None:
            params["temperature"] = sampling.temperature
        if sampling.top_p is not None:
            params["top_p"] = sampling.top_p
        if sampling.top_k is not None and sampling.top_k > 0:
            params["top_k"] = sampling.top_k
        if sampling.stop:
            params["stop"] = sampling.stop
        if request.stop_ids:
            params["stop_token_ids"] = request.stop_ids
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        body: dict[str, Any] = {
            "input_ids": encode_prompt(request.tokens, request.prompt_cache),
            "sampling_params": params,
        }
        for name, value in token_options(sampling.extra, _encode_constraint, "sglang").items():
            (body if name in _OUTSIDE else params)[name] = value
        if request.want_tokens or request.shows_logprobs:
            body["return_logprob"] = True
            if request.top_logprobs:
                body["top_logprobs_num"] = request.top_logprobs
        if options.stream:
            body["stream"] = True
        body["rid"] = request.id
        return _encode(body)

    def decode(self, data: bytes, request: ModelRequest, context: ReplyContext) -> ModelReply:
        answer, meta = read_answer(data)
        if meta.finish_reason is None:
            raise ReplyFormatError("the reply has no finish_reason: it is incomplete")
        entries = read_entries(meta.output_token_logprobs)
        ids = read_ids(answer.output_ids)
        if ids is None:
            if entries is None:
                raise ReplyFormatError("the reply has no token IDs")
            ids = [entry.id for entry in entries]
        version = parse_version(meta.weight_version)
        return ModelReply(
            message=Message("assistant", answer.text or ""),
            finish=parse_finish(_finish(meta.finish_reason)),
            prompt=request.tokens,
            sampled=ints(ids),
            logprobs=b"" if entries is None else pack_logprobs(_same(ids, entries)),
            version=context.version if version is None else version,
            prompt_tokens=len(request.tokens) // 4,
            sampled_tokens=len(ids),
            queued=context.queued,
            replica=context.replica,
            tops=tuple(read_alternatives(meta.output_top_logprobs)) if request.top_logprobs else (),
        )

    def streams(self, request: ModelRequest) -> bool:  # noqa: ARG002  (whatever it is)
        return True

    def stream_parser(self, request: ModelRequest) -> StreamParser:
        return _Tokens(request)


class _Growing:
    """Extract the new entries of a JSON list that is sent again and again with more entries at its end."""

    def __init__(self) -> None:
        self._last = b"["

    def new(self, text: bytes) -> bytes | None:
        """Return the entries that `text` adds to the list passed last, as a JSON list; None if it does not begin
        with it."""
        if not text.startswith(self._last):
            return None
        tail = text[len(self._last) :].lstrip()
        if len(self._last) > 1:
            if tail[:1] not in (b",", b"]"):  # [1 is no beginning of [12]
                return None
            tail = tail.removeprefix(b",")
        self._last = text[:-1].rstrip()
        return b"[" + tail


class _Tokens(StreamParser):
    """Parser for a streamed reply of `/generate`.

    Each event holds the whole reply so far or, if the server runs with `--incremental-streaming-output`, only what
    is new.
    """

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._incremental: bool | None = None
        self._growing_ids = _Growing()
        self._growing_entries = _Growing()
        self._growing_tops = _Growing()
        self._text = 0

    def event(self, data: bytes) -> None:
        answer, meta = read_answer(data)
        if (version := parse_version(meta.weight_version)) is not None:
            self.version(version)
        reason = None if meta.finish_reason is None else _finish(meta.finish_reason)
        ids, entries, tops = self._new(answer, meta, aborted=reason == "abort")
        if ids:
            self.tokens(ids, None if entries is None else _same(ids, entries))
            if tops is not None:
                self.alternatives(tops)
        if answer.text:
            self._add_text(answer.text)
        if reason is not None:
            self.finish = parse_finish(reason)

    def _new(
        self, answer: _Answer, meta: _Meta, *, aborted: bool
    ) -> tuple[list[int], list[_Entry] | None, list[Tops] | None]:
        listed, logged, top_lists = map(
            bytes, (answer.output_ids, meta.output_token_logprobs, meta.output_top_logprobs)
        )
        total = meta.completion_tokens
        want = self.request.top_logprobs > 0
        if self._incremental is not True and (text := self._growing_ids.new(listed)) is not None:
            ids = read_ids(text) or []
            if total is None or self.count + len(ids) == total:
                if self.count:
                    self._incremental = False
                entries = read_entries(self._growing_entries.new(logged) or logged)
                tops = read_alternatives(self._growing_tops.new(top_lists) or top_lists) if want else None
                return ids, entries, tops
        ids, entries = read_ids(listed) or [], read_entries(logged)
        if total is None or self.count + len(ids) == total:
            if self.count:
                self._incremental = True
            if entries is None or len(entries) == len(ids):
                return ids, entries, read_alternatives(top_lists) if want else None
        if not aborted:
            raise ReplyFormatError(
                f"the stream has {self.count} tokens and an event with {len(ids)}, "
                f"but reports {total} tokens in total"
            )
        # Aborted in the queue: the event has all logprobs, but only the last token ID.
        entries = entries[self.count :] if entries is not None and len(entries) == total else []
        return [entry.id for entry in entries], entries, None

    def _add_text(self, text: str) -> None:
        if not self._incremental:
            text, self._text = text[self._text :], max(self._text, len(text))
        if text:
            self.text(text)


class _SglangChat(OpenAIFormat):
    def encode(self, request: ModelRequest, options: WireOptions) -> bytes:
        fields: dict[str, Any] = {"rid": request.id}
        if request.want_tokens:
            fields["return_prompt_token_ids"] = True
        return encode_request(request, options, fields)

    def streams(self, request: ModelRequest) -> bool:
        return not request.want_tokens


_GENERATE: Final = Generate()
_CHAT: Final = _SglangChat()


class SglangUpstream(HttpUpstream):
    """Upstream for SGLang servers."""

    reserved: ClassVar[frozenset[str]] = RESERVED | {
        "input_ids",
        "text",
        "sampling_params",
        "rid",
        "return_logprob",
        "logprob_start_len",
        "return_token_ids",
        "return_prompt_token_ids",
    }
    needs_ids = True
    message_format = _CHAT
    token_format = _GENERATE
    health_path = "/health"
    identity_paths = ("/model_info", "/get_model_info")
    load_metrics = LoadMetrics(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        tokens=("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
    )
    control_requests: ClassVar[dict[str, tuple[str, bytes]]] = {
        # `retract`, not `in_place`: the KV cache of a call belongs to the old weights.
        "keep": ("/pause_generation", b'{"mode":"retract"}'),
        "abort": ("/pause_generation", b'{"mode":"abort"}'),
        "thaw": ("/continue_generation", b"{}"),
    }

    def is_identity(self, body: bytes) -> bool:
        try:
            return _decode_model(body).is_generation
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False

    def abort_request(self, request: ModelRequest) -> tuple[str, bytes] | None:
        return "/abort_request", _encode({"rid": request.id})

    async def query_concurrency_limit(self, replica: Replica) -> int | None:
        for path in ("/server_info", "/get_server_info"):
            response = await replica.exchange(path, None, seconds=CONCURRENCY_QUERY_SECONDS)
            if response.status not in MISSING:
                break
        if response.status != 200:
            return None
        try:
            info = _decode_info(response.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        per_rank = [state.effective_max_running_requests_per_dp or 0 for state in info.internal_states]
        return sum(per_rank) or info.max_running_requests


class _State(msgspec.Struct, frozen=True):
    effective_max_running_requests_per_dp: int | None = None


class _Info(msgspec.Struct, frozen=True):
    max_running_requests: int | None = None
    internal_states: list[_State] = []


class _Model(msgspec.Struct, frozen=True):
    model_path: str
    tokenizer_path: str
    is_generation: bool


_decode_model = msgspec.json.Decoder(_Model).decode
_decode_info = msgspec.json.Decoder(_Info).decode
