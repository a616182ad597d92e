"""Parser for streamed replies of `/chat/completions` and `/completions`. Pure: no socket, no clock.

Guarantees:
- all guarantees of `rookery.upstreams.format` hold;
- an error in the middle of a stream raises `ErrorReply`; it is never taken for the end of a reply.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from rookery.core import ints
from rookery.upstreams.error_replies import parse_error, preview
from rookery.upstreams.format import ErrorReply, ReplyFormatError, StreamParser, parse_finish, parse_version
from rookery.upstreams.logprobs import Logprobs, RawLogprobs, convert_logprobs, decode_together, logprob_values
from rookery.upstreams.openai_format import Id, ReportedUsage, SampledFunction, encode_arguments
from rookery.upstreams.protocol import ModelRequest
from rookery.upstreams.token_ids import parse_ids


class _CallPiece(msgspec.Struct, frozen=True):
    index: int | None = None
    id: str | None = None
    function: SampledFunction | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_CallPiece] | None = None
    function_call: SampledFunction | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[Id] | None = None
    prompt_token_ids: list[Id] | None = None


class _ChoiceRawLogprobs(_Choice, frozen=True):
    logprobs: RawLogprobs | None = None  # type: ignore[assignment]


_NULL: Final = msgspec.Raw(b"null")


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: ReportedUsage | None = None
    prompt_token_ids: msgspec.Raw = _NULL
    weight_version: Any = None
    metadata: Any = None
    error: Any = None
    object: str = ""


class _ChunkRawLogprobs(_Chunk, frozen=True):
    choices: list[_ChoiceRawLogprobs] | None = None  # type: ignore[assignment]


_decode = msgspec.json.Decoder(_Chunk).decode
_decode_raw_logprobs = msgspec.json.Decoder(_ChunkRawLogprobs).decode
_decode_several = msgspec.json.Decoder(list[_Chunk]).decode
_decode_several_raw_logprobs = msgspec.json.Decoder(list[_ChunkRawLogprobs]).decode


class Chunks(StreamParser):
    """Parser for one streamed reply. Only the choice with index 0 is read, because one choice is requested."""

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._shows_logprobs = request.shows_logprobs
        self._named = request.top_logprobs > 0
        """True if the caller wants the alternatives to each token, for which each event is decoded on its own."""

    def events(self, events: list[bytes]) -> None:
        if len(events) < 2 or self._named:
            super().events(events)
            return
        # Decoding a hundred events at once costs a third of decoding each.
        decode = _decode_several_raw_logprobs if self._shows_logprobs else _decode_several
        try:
            chunks: Sequence[_Chunk] = decode(b"[%b]" % b",".join(events))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            chunks = ()
        if len(chunks) != len(events):  # an event is invalid: decode each, to report which
            super().events(events)
            return
        together = self._shows_logprobs and self.request.want_tokens and self._add_logprobs(chunks)
        for chunk, data in zip(chunks, events, strict=True):
            self._add_chunk(chunk, data, has_logprobs=together)

    def event(self, data: bytes) -> None:
        try:
            chunk = (_decode_raw_logprobs if self._shows_logprobs else _decode)(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ReplyFormatError(
                f"the stream has an event that is not a chunk of a reply: {error}; it begins {preview(data)}"
            ) from None
        self._add_chunk(chunk, data)

    def _add_logprobs(self, chunks: Sequence[_Chunk]) -> bool:
        """Decode the logprobs of several chunks together, and add them to the reply.

        Return False, and add nothing, if there is not one logprob for each token, as far as their numbers tell.
        Then each chunk must be checked on its own.
        """
        if self.count and not (self._logprobs or self._fresh_logprobs):
            return False
        lists: list[msgspec.Raw] = []
        tokens = 0
        for chunk in chunks:
            for choice in chunk.choices or ():
                if choice.token_ids or choice.logprobs is not None:
                    content = getattr(choice.logprobs, "content", _NULL)
                    if choice.index or content == _NULL:
                        return False
                    lists.append(content)
                    tokens += len(choice.token_ids or ())
        if not lists or (decoded := decode_together(lists)) is None or len(decoded[1]) != tokens:
            return False
        self.add_raw_logprobs(decoded[0])
        self._fresh_logprobs += decoded[1]
        return True

    def _add_chunk(self, chunk: _Chunk, data: bytes, *, has_logprobs: bool = False) -> None:
        """Add a chunk, which was decoded from `data`, to the reply.

        With `has_logprobs`, the logprobs of its tokens were added already, with those of other chunks.
        """
        if chunk.error is not None or chunk.object == "error":
            raise ErrorReply(parse_error(data), data)
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            self.sampled_tokens = chunk.usage.completion_tokens
        if chunk.weight_version is not None or chunk.metadata is not None:
            self._read_version(chunk.weight_version, chunk.metadata)
        want = self.request.want_tokens
        if want and chunk.prompt_token_ids is not _NULL and chunk.prompt_token_ids != _NULL:
            try:
                prompt_cache = self.request.prompt_cache
                read = prompt_cache.read if prompt_cache is not None else parse_ids
                self.prompt(read(bytes(chunk.prompt_token_ids)))
            except ValueError as error:
                raise ReplyFormatError(f"cannot parse the prompt's token IDs: {error}") from None
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        if choice.index:
            return
        delta = choice.delta
        if delta is not None:
            if delta.content:
                self._fresh_content.append(delta.content)
            if (
                delta.tool_calls
                or delta.function_call
                or delta.refusal
                or delta.reasoning
                or delta.reasoning_content
            ):
                self._add_delta(delta)
        elif choice.text:
            self.text(choice.text)
        if want and choice.prompt_token_ids:
            self.prompt(ints(choice.prompt_token_ids))
        if has_logprobs:
            if ids := choice.token_ids:
                if not self._fresh_ids:
                    self._first = len(ids)
                self._fresh_ids += ids
                self.count += len(ids)
        elif want or self._shows_logprobs:
            self._sampled(choice)
        if choice.finish_reason is not None:
            self.finish = parse_finish(choice.finish_reason)

    def _add_delta(self, delta: _Delta) -> None:
        """Add everything except the content."""
        if delta.refusal and not delta.content:
            self.text(delta.refusal)
        if thought := delta.reasoning_content or delta.reasoning:
            self.add_reasoning(thought)
        if delta.tool_calls:
            for piece in delta.tool_calls:
                function = piece.function or SampledFunction()
                index = piece.index
                if index is None:  # without an index, a new call begins with its ID or name
                    new = bool(piece.id or function.name)
                    index = len(self._calls) if new else max(0, len(self._calls) - 1)
                self.called(index, piece.id, function.name, encode_arguments(function))
        elif delta.function_call is not None:
            self.called(0, None, delta.function_call.name, encode_arguments(delta.function_call))

    def _sampled(self, choice: _Choice) -> None:
        values = None
        if self._shows_logprobs:
            values, as_written, tops = convert_logprobs(choice.logprobs, named=self._named)  # type: ignore[arg-type]
            if as_written is not None:
                self.add_raw_logprobs(as_written)
            if tops:
                self.alternatives(list(tops))
        elif choice.logprobs is not None:
            values = logprob_values(choice.logprobs)
        if choice.token_ids and self.request.want_tokens:
            self.tokens(choice.token_ids, values)
        elif values and self.count:
            raise ReplyFormatError("the reply has logprobs for tokens whose IDs are missing")

    def _read_version(self, weight_version: object, metadata: object) -> None:
        number = parse_version(weight_version)
        if number is None and isinstance(metadata, dict):
            number = parse_version(metadata.get("weight_version"))
        if number is not None:
            self.version(number)
