"""Request fields, stream endings and errors shared by OpenAI's chat and legacy completions APIs.

Some sampling fields, which inference engines know and Rookery does not use, are passed to the inference engine
unchanged.
"""

import random
import time
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET

from rookery.core import Sampling
from rookery.gateway.dialects.protocol import ClientRequest, ErrorKind
from rookery.gateway.dialects.shared import (
    MAX_CHOICES,
    NULL,
    Count,
    Field,
    Probability,
    Seed,
    Temperature,
    TopK,
    encode,
    normalise_stops,
    openai_error,
    openai_usage,
)
from rookery.upstreams.protocol import DecodeTokens, ModelReply


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request fields that OpenAI's chat and legacy completions APIs have in common."""

    model: str = ""
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = 1
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    return_token_ids: bool | None = False
    # Passed to the inference engine unchanged.
    frequency_penalty: Field = UNSET
    presence_penalty: Field = UNSET
    repetition_penalty: Field = UNSET
    min_p: Field = UNSET
    min_tokens: Field = UNSET
    logit_bias: Field = UNSET
    ignore_eos: Field = UNSET
    stop_token_ids: Field = UNSET
    structured_outputs: Field = UNSET
    allowed_token_ids: Field = UNSET
    priority: Field = UNSET
    cache_salt: Field = UNSET
    response_format: Field = UNSET
    guided_json: Field = UNSET
    guided_regex: Field = UNSET
    guided_choice: Field = UNSET
    guided_grammar: Field = UNSET
    # Ignored, because they do not change the reply: identity of the caller, billing, storage, caching,
    # predictions.
    cache_control: Field = UNSET
    metadata: Field = UNSET
    prediction: Field = UNSET
    prompt_cache_key: Field = UNSET
    prompt_cache_options: Field = UNSET
    prompt_cache_retention: Field = UNSET
    safety_identifier: Field = UNSET
    service_tier: Field = UNSET
    store: Field = UNSET
    usage_: Field = msgspec.field(name="usage", default=UNSET)
    user: Field = UNSET

    @property
    def usage(self) -> bool:
        """True if the client wants token counts at the end of a stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, max_tokens: int | None, passed: Iterable[str]) -> Sampling:
        """Return the sampling parameters. The fields named in `passed` go unchanged to the inference engine."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens,
            stop=normalise_stops(self.stop),
            seed=self.seed,
            extra={
                name: value.copy()
                for name in passed
                if (value := getattr(self, name)) is not UNSET and bytes(value) != NULL
            },
        )


_FIELDS: Final = OpenAIRequest.__struct_fields__
PASSED_FIELDS: Final = _FIELDS[_FIELDS.index("frequency_penalty") : _FIELDS.index("cache_control")]
"""Names of the fields common to both APIs that are passed to the inference engine unchanged."""


def make_envelope(client_request: ClientRequest, prefix: str, kind: str) -> dict[str, Any]:
    """Return the fields with which every response and every stream chunk starts: ID, `object`, time and model."""
    return {
        "id": f"{prefix}-{random.getrandbits(96):024x}",
        "object": kind,
        "created": int(time.time()),
        "model": client_request.model,
    }


def format_openai_error(problem: ErrorKind, message: str, where: str | None = None) -> tuple[int, bytes]:
    """Return the status and the body of an error response in OpenAI's format."""
    status, error = openai_error(problem, message, where)
    return status, encode({"error": error})


class OpenAIReplyStream:
    """Base class for streams of OpenAI's chat and completions APIs: unnamed events, and `[DONE]` at the end."""

    def __init__(
        self, client_request: ClientRequest, decode_tokens: DecodeTokens | None, begins: dict[str, Any]
    ) -> None:
        self._request = client_request
        self._decode_tokens = decode_tokens
        self._envelope = b"data: " + encode(begins)[:-1]

    def format_end(self, replies: list[ModelReply]) -> bytes:
        usage = b""
        if self._request.include_usage:
            usage = b'%b,"choices":[],"usage":%b}\n\n' % (
                self._envelope,
                encode(openai_usage(replies, self._request.n)),
            )
        return usage + b"data: [DONE]\n\n"

    def format_failure(self, problem: ErrorKind, message: str) -> bytes:
        return b"data: " + encode({"error": openai_error(problem, message)[1]}) + b"\n\n"
