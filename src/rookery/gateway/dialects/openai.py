"""What OpenAI's chat and its older completions have in common: fields of a request, ends of a stream, errors.

Promises:
- what both can be asked is read alike in both;
- sampling fields that engines know and we do not go on to the engine as they are.
"""

import secrets
import time
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET

from rookery.core import Sampling
from rookery.gateway.dialects.protocol import Ask, Problem
from rookery.gateway.dialects.shared import (
    MAX_CHOICES,
    NULL,
    Count,
    Field,
    Seed,
    Share,
    Temperature,
    TopK,
    encode,
    openai_error,
    openai_usage,
    stops_of,
)
from rookery.gateway.session import Reply, Spell


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False


class OpenAIRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both have."""

    model: str = ""
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = 1
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    return_token_ids: bool | None = False
    # What engines know about sampling beyond ours goes on as it stands.
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
    # What changes nothing about an answer: who asks, what is billed, kept or cached, and which words are likely.
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
        """Whether a stream ends with what it cost."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, max_tokens: int | None, passed: Iterable[str]) -> Sampling:
        """With the fields that are `passed` on."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens,
            stop=stops_of(self.stop),
            seed=self.seed,
            extra={
                name: value.copy()
                for name in passed
                if (value := getattr(self, name)) is not UNSET and bytes(value) != NULL
            },
        )


_FIELDS: Final = OpenAIRequest.__struct_fields__
PASSED: Final = _FIELDS[_FIELDS.index("frequency_penalty") : _FIELDS.index("cache_control")]
"""Those of both that go on."""


def about(ask: Ask, prefix: str, kind: str) -> dict[str, Any]:
    """What every answer, and every piece of one, begins with."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": ask.model,
    }


def error_body(problem: Problem, message: str, where: str | None = None) -> tuple[int, bytes]:
    """Status and body."""
    status, error = openai_error(problem, message, where)
    return status, encode({"error": error})


class OpenAIAnswering:
    """A stream without named events."""

    def __init__(self, ask: Ask, spell: Spell | None, begins: dict[str, Any]) -> None:
        self._ask = ask
        self._spell = spell
        self._about = b"data: " + encode(begins)[:-1]

    def done(self, replies: list[Reply]) -> bytes:
        usage = b""
        if self._ask.usage:
            usage = b'%b,"choices":[],"usage":%b}\n\n' % (self._about, encode(openai_usage(replies, self._ask.n)))
        return usage + b"data: [DONE]\n\n"

    def broken(self, problem: Problem, message: str) -> bytes:
        return b"data: " + encode({"error": openai_error(problem, message)[1]}) + b"\n\n"
