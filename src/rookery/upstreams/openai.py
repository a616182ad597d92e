"""Any OpenAI-compatible server: `/chat/completions`, and `/completions` where token ids go in.

Promises:
- as those of `http.py` and `wire.py`;
- token ids and logprobs are asked for as vLLM has them; a server that refuses to give them is asked without.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from rookery.upstreams.chunks import Chunks
from rookery.upstreams.format import About, Ask, Format, Gather
from rookery.upstreams.protocol import ModelReply, ModelRequest
from rookery.upstreams.replica import Replica
from rookery.upstreams.served import HttpUpstream, whole
from rookery.upstreams.structured import token_options
from rookery.upstreams.urls import redact
from rookery.upstreams.wire import RESERVED, decode_reply, encode_request

__all__ = ["CHAT", "COMPLETIONS", "Chat", "OpenAIUpstream", "redact", "whole"]


class Chat:
    """`/chat/completions`, and its older sister."""

    path = "chat/completions"

    def more(self, ask: Ask) -> dict[str, Any] | None:  # noqa: ARG002  (a kind may)
        """Fields of the kind's own."""
        return None

    def encode(self, ask: Ask) -> bytes:
        return encode_request(
            ask.request,
            model=ask.model,
            sampling=ask.sampling,
            without=ask.without,
            reasoning=ask.reasoning,
            stream=ask.stream,
            more=self.more(ask),
        )

    def decode(self, data: bytes, ask: Ask, about: About) -> ModelReply:
        request = ask.request
        return decode_reply(
            data,
            want_tokens=request.want_tokens,
            prompt=request.tokens,
            seen=ask.seen,
            named=request.top_logprobs > 0,
            about=about,
            memo=request.memo,
        )

    def streams(self, request: ModelRequest) -> bool:  # noqa: ARG002  (whatever it is)
        return True

    def gather(self, ask: Ask) -> Gather:
        return Chunks(ask)


class Completions(Chat):
    """`/completions`, with token ids as its prompt."""

    path = "completions"

    def encode(self, ask: Ask) -> bytes:
        return super().encode(with_options(ask, token_options(ask.sampling.extra, None, "openai")))


def with_options(ask: Ask, extra: Mapping[str, Any]) -> Ask:
    """The ask with other options of the engine's."""
    if extra == ask.sampling.extra:
        return ask
    return msgspec.structs.replace(ask, sampling=msgspec.structs.replace(ask.sampling, extra=dict(extra)))


CHAT: Final = Chat()
COMPLETIONS: Final = Completions()


class OpenAIUpstream(HttpUpstream):
    """The `openai` upstream."""

    reserved: ClassVar[frozenset[str]] = RESERVED

    def format(self, replica: Replica, ask: Ask) -> Format:  # noqa: ARG002  (all are equal)
        return COMPLETIONS if ask.request.tokens else CHAT
