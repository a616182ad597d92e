"""Upstream for any OpenAI-compatible server: `/chat/completions`, and `/completions` for calls with token IDs.

Runs in runner processes and gateway shards. Token IDs and logprobs are requested with vLLM's fields; a server that
rejects these fields is called without them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from rookery.upstreams.format import ReplyContext, StreamParser, WireOptions
from rookery.upstreams.http_upstream import HttpUpstream
from rookery.upstreams.openai_format import RESERVED, decode_reply, encode_request
from rookery.upstreams.openai_stream import Chunks
from rookery.upstreams.protocol import ModelReply, ModelRequest
from rookery.upstreams.structured_output import token_options

__all__ = ["CHAT", "COMPLETIONS", "OpenAIFormat", "OpenAIUpstream"]


class OpenAIFormat:
    """Decode replies of `/chat/completions` and `/completions`. A subclass adds `encode`, for requests to one of
    them."""

    path = "chat/completions"

    def decode(self, data: bytes, request: ModelRequest, context: ReplyContext) -> ModelReply:
        return decode_reply(
            data,
            want_tokens=request.want_tokens,
            prompt=request.tokens,
            raw_logprobs=request.shows_logprobs,
            named=request.top_logprobs > 0,
            context=context,
            prompt_cache=request.prompt_cache,
        )

    def streams(self, request: ModelRequest) -> bool:  # noqa: ARG002  (whatever it is)
        return True

    def stream_parser(self, request: ModelRequest) -> StreamParser:
        return Chunks(request)


class Chat(OpenAIFormat):
    """Format of the endpoint `/chat/completions`."""

    encode = staticmethod(encode_request)


class Completions(OpenAIFormat):
    """Format of the endpoint `/completions`, with token IDs as the prompt."""

    path = "completions"

    def encode(self, request: ModelRequest, options: WireOptions) -> bytes:
        return encode_request(with_extra(request, token_options(request.sampling.extra, None, "openai")), options)


def with_extra(request: ModelRequest, extra: Mapping[str, Any]) -> ModelRequest:
    """Return a copy of the request whose `sampling.extra` (additional options for the inference engine) is
    `extra`."""
    if extra == request.sampling.extra:
        return request
    sampling = msgspec.structs.replace(request.sampling, extra=dict(extra))
    return msgspec.structs.replace(request, sampling=sampling)


CHAT: Final = Chat()
COMPLETIONS: Final = Completions()


class OpenAIUpstream(HttpUpstream):
    """Upstream for any OpenAI-compatible server."""

    reserved: ClassVar[frozenset[str]] = RESERVED
    message_format = CHAT
    token_format = COMPLETIONS
    load_metrics = "all_kinds"
