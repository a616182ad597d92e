"""SGLang: token ids in through `/generate`, messages through `/chat/completions`.

Promises:
- as those of `http.py`;
- a stream is understood whether its events hold everything so far, which is the default, or what is new; the cost
  of an event does not grow with what was told before;
- a chat whose tokens are wanted is not streamed, since the server refuses that: its news come in one piece;
- a call that is given up is aborted by its name, since the server is slow to notice a closed connection;
- the version is the server's own where it says one, by token where it changed within a stream.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from rookery.core import Message, ints
from rookery.upstreams.complaints import Complaint, complaint, head_of, text_of
from rookery.upstreams.format import (
    About,
    Ask,
    Complained,
    Format,
    Gather,
    Tops,
    WireError,
    finish_of,
    packed,
    version_number,
)
from rookery.upstreams.ids import written
from rookery.upstreams.openai import Chat
from rookery.upstreams.protocol import ModelReply, ModelRequest
from rookery.upstreams.replica import Replica
from rookery.upstreams.served import HttpUpstream
from rookery.upstreams.servers import MISSING, SIZE_SECONDS
from rookery.upstreams.structured import sglang_constraint, token_options
from rookery.upstreams.wire import RESERVED, Id

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
"""Fields of `sampling.extra` that are the request's own and not the sampling's."""
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
_decode_entries: Callable[[bytes | msgspec.Raw], _Logged] = msgspec.json.Decoder(_Logged).decode
_decode_tops: Callable[[bytes | msgspec.Raw], _Topped] = msgspec.json.Decoder(_Topped).decode
_encode = msgspec.json.Encoder().encode


def _read(data: bytes) -> tuple[_Answer, _Meta]:
    try:
        answer = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not an answer with tokens: {error}; it begins {head_of(data)}") from None
    if answer.error is not None:
        raise Complained(complaint(data), data)
    if answer.meta_info is None:
        raise WireError(f"no meta_info in the answer; it begins {head_of(data)}")
    finish = answer.meta_info.finish_reason
    if isinstance(finish, _Finish) and finish.type == "abort" and (finish.status_code or 0) >= 400:
        said = Complaint(text_of(finish.message or "aborted"), str(finish.status_code))
        raise Complained(said, _encode({"error": {"message": said.text, "code": finish.status_code}}))
    return answer, answer.meta_info


def _finish(said: _Finish | str) -> str:
    return said if isinstance(said, str) else said.type


def _ids(text: bytes | msgspec.Raw) -> list[int] | None:
    try:
        return _decode_ids(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"the answer's token ids cannot be read: {error}") from None


def _entries(text: bytes | msgspec.Raw) -> list[_Entry] | None:
    try:
        return _decode_entries(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"the answer's logprobs cannot be read: {error}") from None


def _alternatives(text: bytes | msgspec.Raw) -> list[Tops]:
    try:
        listed = _decode_tops(text) or []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"the answer's top logprobs cannot be read: {error}") from None
    return [tuple((entry.id, entry.logprob) for entry in entries or ()) for entries in listed]


def _same(ids: list[int], entries: list[_Entry]) -> list[float]:
    """The logprobs, which name the tokens that they are of."""
    if len(ids) != len(entries):
        raise WireError(f"the answer has {len(ids)} token ids but {len(entries)} logprobs")
    if any(entry.id != token for entry, token in zip(entries, ids, strict=True)):
        raise WireError("the answer's logprobs are of other tokens than its ids")
    return [entry.logprob for entry in entries]


class Generate:
    """`/generate`."""

    path = "/generate"

    def encode(self, ask: Ask) -> bytes:
        request, sampling = ask.request, ask.sampling
        params: dict[str, Any] = {"max_new_tokens": sampling.max_tokens}  # left out it would be 128
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
        body: dict[str, Any] = {"input_ids": written(request.tokens, request.memo), "sampling_params": params}
        for name, value in token_options(sampling.extra, sglang_constraint, "sglang").items():
            (body if name in _OUTSIDE else params)[name] = value
        if request.want_tokens or ask.seen:
            body["return_logprob"] = True
            if request.top_logprobs:
                body["top_logprobs_num"] = request.top_logprobs
        if ask.stream:
            body["stream"] = True
        body["rid"] = ask.id
        return _encode(body)

    def decode(self, data: bytes, ask: Ask, about: About) -> ModelReply:
        answer, meta = _read(data)
        if meta.finish_reason is None:
            raise WireError("the answer has no finish_reason: it is not complete")
        entries = _entries(meta.output_token_logprobs)
        ids = _ids(answer.output_ids)
        if ids is None:
            if entries is None:
                raise WireError("the answer has no token ids")
            ids = [entry.id for entry in entries]
        version = version_number(meta.weight_version)
        return ModelReply(
            message=Message("assistant", answer.text or ""),
            finish=finish_of(_finish(meta.finish_reason)),
            prompt=ask.request.tokens,
            sampled=ints(ids),
            logprobs=b"" if entries is None else packed(_same(ids, entries)),
            version=about.version if version is None else version,
            prompt_tokens=len(ask.request.tokens) // 4,
            sampled_tokens=len(ids),
            queued=about.queued,
            replica=about.replica,
            tops=tuple(_alternatives(meta.output_top_logprobs)) if ask.request.top_logprobs else (),
        )

    def streams(self, request: ModelRequest) -> bool:  # noqa: ARG002  (whatever it is)
        return True

    def gather(self, ask: Ask) -> Gather:
        return _Tokens(ask)


class _Growing:
    """A JSON list that comes again and again, longer each time: gives what is new of it."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = b"["

    def new(self, text: bytes) -> bytes | None:
        """The new entries as a list; None where it is not the same list."""
        if not text.startswith(self._last):
            return None
        tail = text[len(self._last) :].lstrip()
        if len(self._last) > 1:
            if tail[:1] not in (b",", b"]"):  # [1 is no beginning of [12]
                return None
            tail = tail.removeprefix(b",")
        self._last = text[:-1].rstrip()
        return b"[" + tail


class _Tokens(Gather):
    """Events hold everything so far, or with the server's `--incremental-streaming-output` what is new."""

    __slots__ = ("_growing_entries", "_growing_ids", "_growing_tops", "_incremental", "_text")

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask)
        self._incremental: bool | None = None
        self._growing_ids = _Growing()
        self._growing_entries = _Growing()
        self._growing_tops = _Growing()
        self._text = 0

    def event(self, data: bytes) -> None:
        answer, meta = _read(data)
        if (version := version_number(meta.weight_version)) is not None:
            self.version(version)
        reason = None if meta.finish_reason is None else _finish(meta.finish_reason)
        ids, entries, tops = self._new(answer, meta, aborted=reason == "abort")
        if ids:
            self.tokens(ids, None if entries is None else _same(ids, entries))
            if tops is not None:
                self.alternatives(tops)
        if answer.text:
            self._said(answer.text)
        if reason is not None:
            self.finish = finish_of(reason)

    def _new(
        self, answer: _Answer, meta: _Meta, *, aborted: bool
    ) -> tuple[list[int], list[_Entry] | None, list[Tops] | None]:
        listed, logged, topped = map(
            bytes, (answer.output_ids, meta.output_token_logprobs, meta.output_top_logprobs)
        )
        total = meta.completion_tokens
        want = self.ask.request.top_logprobs > 0
        if self._incremental is not True and (text := self._growing_ids.new(listed)) is not None:
            ids = _ids(text) or []
            if total is None or self.count + len(ids) == total:
                if self.count:
                    self._incremental = False
                entries = _entries(self._growing_entries.new(logged) or logged)
                tops = _alternatives(self._growing_tops.new(topped) or topped) if want else None
                return ids, entries, tops
        ids, entries = _ids(listed) or [], _entries(logged)
        if total is None or self.count + len(ids) == total:
            if self.count:
                self._incremental = True
            if entries is None or len(entries) == len(ids):
                return ids, entries, _alternatives(topped) if want else None
        if not aborted:
            raise WireError(f"an event with {len(ids)} tokens after {self.count}, of {total}")
        # Aborted while it waited for its turn: all of the logprobs, and of the ids the last one.
        entries = entries[self.count :] if entries is not None and len(entries) == total else []
        return [entry.id for entry in entries], entries, None

    def _said(self, text: str) -> None:
        if not self._incremental:
            text, self._text = text[self._text :], max(self._text, len(text))
        if text:
            self.text(text)


class _SglangChat(Chat):
    def more(self, ask: Ask) -> dict[str, Any] | None:
        fields: dict[str, Any] = {"rid": ask.id}
        if ask.request.want_tokens:
            fields["return_prompt_token_ids"] = True
        return fields

    def streams(self, request: ModelRequest) -> bool:
        return not request.want_tokens


_GENERATE: Final = Generate()
_CHAT: Final = _SglangChat()


class SglangUpstream(HttpUpstream):
    """The `sglang` upstream."""

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
    names = True
    vitals = "/health"
    freezing: ClassVar[dict[str, tuple[str, bytes]]] = {
        # Retracted, not in place: what is computed of a call's past is of the old weights, and hinders new ones.
        "keep": ("/pause_generation", b'{"mode":"retract"}'),
        "abort": ("/pause_generation", b'{"mode":"abort"}'),
        "thaw": ("/continue_generation", b"{}"),
    }

    def format(self, replica: Replica, ask: Ask) -> Format:  # noqa: ARG002  (all are equal)
        return _GENERATE if ask.request.tokens else _CHAT

    def farewell(self, ask: Ask) -> tuple[str, bytes] | None:
        return "/abort_request", _encode({"rid": ask.id})

    async def size(self, replica: Replica) -> int | None:
        for path in ("/server_info", "/get_server_info"):
            answer = await replica.exchange(replica.endpoint(path), None, seconds=SIZE_SECONDS)
            if answer.status not in MISSING:
                break
        if answer.status != 200:
            return None
        try:
            said = _decode_info(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        per_rank = [state.effective_max_running_requests_per_dp or 0 for state in said.internal_states]
        return sum(per_rank) or said.max_running_requests


class _State(msgspec.Struct, frozen=True):
    effective_max_running_requests_per_dp: int | None = None


class _Info(msgspec.Struct, frozen=True):
    max_running_requests: int | None = None
    internal_states: list[_State] = []


_decode_info = msgspec.json.Decoder(_Info).decode
