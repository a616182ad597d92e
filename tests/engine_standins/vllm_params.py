"""vLLM's `SamplingParams` (`sampling_params.py` at commit a014e35): fields, defaults, validation.

Behaviour:
- a value that vLLM refuses raises `VLLMError`, with the parameter if vLLM names it;
- a parameter that vLLM supports and the stand-in does not raises `Unsupported`.
"""

from typing import Any, Final

import msgspec

MAX_N: Final = 16384
MAX_LOGPROBS: Final = 20
MIN_TEMPERATURE: Final = 1e-2
"""What is above 0 and below is taken for this."""
GREEDY: Final = 1e-5
UNSUPPORTED: Final = (
    "prompt_logprobs",
    "logprob_token_ids",
    "structured_outputs",
    "bad_words",
    "repetition_detection",
    "trace_decode_token_ids",
    "thinking_token_budget",
    "flat_logprobs",
)


class VLLMError(Exception):
    """A `VLLMValidationError`: status 400, with the parameter if there is one."""

    def __init__(self, message: str, parameter: str | None = None, value: Any = None) -> None:
        details = [
            f"{name}={part}" for name, part in (("parameter", parameter), ("value", value)) if part is not None
        ]
        super().__init__(f"{message} ({', '.join(details)})" if details else message)
        self.parameter = parameter


class Unsupported(Exception):
    """vLLM supports this and the stand-in does not: 501, so that a test cannot pass by accident."""

    def __init__(self, field: str) -> None:
        super().__init__(f"the stand-in does not do {field!r}, which vLLM does")


class SamplingParams(msgspec.Struct, kw_only=True):
    """Sampling parameters of `/inference/v1/generate`; the other requests are converted to them."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream_interval: int | None = None
    structured_outputs: dict[str, Any] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY

    def verify(self, vocab: int) -> None:
        """Raise if vLLM refuses the parameters. Messages are our own: clients use status, type and parameter."""
        if 0 < self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.seed == -1:
            self.seed = None
        most = self.max_tokens
        wanted = vocab if self.logprobs == -1 else self.logprobs or 0
        for name, fine in (
            ("n", 1 <= self.n <= MAX_N and (self.n == 1 or not self.greedy)),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0),
            ("repetition_penalty", 0.0 < self.repetition_penalty < float("inf")),
            ("top_k", self.top_k >= -1),
            ("min_p", 0.0 <= self.min_p <= 1.0),
            ("min_tokens", 0 <= self.min_tokens <= (self.min_tokens if most is None else most)),
            ("stop", all(self.stops) and (self.detokenize or not self.stops)),
        ):
            if not fine:  # of these vLLM does not name the parameter
                raise VLLMError(f"{name} cannot be {getattr(self, name)!r} here")
        for name, fine in (
            ("temperature", 0.0 <= self.temperature <= 2.0),
            ("top_p", 0.0 < self.top_p <= 1.0),
            ("max_tokens", most is None or most >= 1),
            ("stream_interval", self.stream_interval is None or self.stream_interval >= 1),
            ("logprobs", self.logprobs is None or (self.logprobs >= -1 and wanted <= MAX_LOGPROBS)),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= -1),
            ("logit_bias", all(0 <= token < vocab for token in self.logit_bias or {})),
            ("allowed_token_ids", self.allowed_token_ids is None or bool(self.allowed_token_ids)),
            ("allowed_token_ids", all(0 <= token < vocab for token in self.allowed_token_ids or ())),
        ):
            if not fine:
                raise VLLMError(f"{name} is out of range", name, getattr(self, name))
        for name in UNSUPPORTED:
            if getattr(self, name):
                raise Unsupported(name)
