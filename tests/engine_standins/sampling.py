"""Sampling parameters, with SGLang's validation, and the logits processor that applies them.

The vLLM stand-in converts its parameters to these. Bans and biases come first, then penalties, then (in the
sampler) temperature, top-k and top-p, as in both engines. A request that uses none of these costs nothing.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from rookery.upstreams.embedded.llama import Floats
from tests.engine_standins.batch import StandinJob
from tests.engine_standins.requests import SamplingFields, Unsupported


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of SGLang; None means the default."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = -1
    min_p: float | None = 0.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_new_tokens: int | None = 0
    n: int | None = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def of(self, name: str) -> Any:
        """Return the value, or the default if it is null."""
        value = getattr(self, name)
        if value is not None:
            return value
        return next(field.default for field in msgspec.structs.fields(self) if field.name == name)

    @property
    def greedy(self) -> bool:
        return bool(0 <= self.of("temperature") < 1e-6)

    def verify(self, vocab: int) -> None:
        """Raise if SGLang refuses the parameters. The messages are our own: clients depend on the status only."""
        least, most = self.of("min_new_tokens"), self.max_new_tokens
        temperature, top_k = self.of("temperature"), self.of("top_k")
        for name, valid in (
            ("temperature", math.isfinite(temperature) and temperature >= 0.0),
            ("top_p", 0.0 < self.of("top_p") <= 1.0),
            ("min_p", 0.0 <= self.of("min_p") <= 1.0),
            ("top_k", top_k == -1 or top_k >= 1),
            ("frequency_penalty", -2.0 <= self.of("frequency_penalty") <= 2.0),
            ("presence_penalty", -2.0 <= self.of("presence_penalty") <= 2.0),
            ("repetition_penalty", 0.0 < self.of("repetition_penalty") <= 2.0),
            ("max_new_tokens", most is None or most >= 0),
            ("min_new_tokens", least >= 0 and (most is None or least <= most)),
            ("logit_bias", all(token.isdecimal() and int(token) < vocab for token in self.logit_bias or {})),
        ):
            if not valid:
                raise ValueError(f"{name} is out of range: {getattr(self, name)!r}")
        grammars = [name for name in ("json_schema", "regex", "ebnf", "structural_tag") if getattr(self, name)]
        if len(grammars) > 1:
            raise ValueError(f"only one of {', '.join(grammars)} can be set")
        for name in (*grammars, *(name for name in ("stop_regex", "custom_params") if getattr(self, name))):
            raise Unsupported(name)
        if most == 0:
            raise Unsupported("max_new_tokens=0")


_COMMON: Final = set(SamplingFields.__struct_fields__) & set(SamplingParams.__struct_fields__)


def from_fields(fields: SamplingFields, most: int | None, **more: Any) -> SamplingParams:
    """Return the parameters of a request whose fields have OpenAI's names. `most` is the maximum of tokens."""
    common = {name: getattr(fields, name) for name in _COMMON} | more
    return SamplingParams(
        max_new_tokens=most, min_new_tokens=fields.min_tokens, sampling_seed=fields.seed, **common
    )


class LogitsProcessor(NamedTuple):
    """Penalties, biases, `min_p` and banned end tokens."""

    presence: float
    frequency: float
    repetition: float
    min_p: float
    temperature: float
    """Temperature of the sampling, after which `min_p` is applied."""
    bias: Mapping[int, float]
    ends: frozenset[int]
    """Tokens that are banned until the job has its minimum number of tokens."""

    @property
    def changes_something(self) -> bool:
        return bool(self.presence or self.frequency or self.repetition != 1.0 or self.min_p or self.bias)

    def apply(self, logits: Floats, job: StandinJob) -> Floats:
        """Return the logits from which the next token of a job is sampled."""
        row = logits.copy()
        for token, bias in self.bias.items():
            row[token] += bias
        if len(job.tokens) < job.min_tokens:
            row[list(self.ends)] = -np.inf
        if self.repetition != 1.0:
            used = list({*job.prompt, *job.tokens})
            row[used] = np.where(row[used] > 0, row[used] / self.repetition, row[used] * self.repetition)
        if self.presence or self.frequency:
            counts = np.bincount(np.asarray(job.tokens, dtype=np.int64), minlength=len(row))
            row -= (self.frequency * counts + self.presence * (counts > 0)).astype(np.float32)
        if self.min_p > 0.0 and self.temperature > 0.0:
            scaled = row / np.float32(max(self.temperature, 1e-4))
            row[scaled < scaled.max() + np.log(np.float32(self.min_p))] = -np.inf
        return row
