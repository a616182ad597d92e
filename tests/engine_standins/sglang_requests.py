"""Request models and sampling parameters of SGLang at commit cce0a12, with its validation.

From `managers/io_struct.py`, `sampling/sampling_params.py` and `entrypoints/openai/protocol.py`.

Behaviour:
- fields, types, defaults and bounds are those of SGLang's models; unknown fields are ignored;
- a refusal is a `ValueError` where SGLang raises one. Each endpoint of SGLang formats it in its own way;
- a sampling parameter that does not exist, or has a wrong type, is a server error, as in SGLang.
"""

import math
from typing import Any, Final, Literal

import msgspec

Names = str | list[str]


class Broken(Exception):
    """SGLang would fail with an uncaught exception: 500, `Internal Server Error`."""


class Unsupported(Exception):
    """SGLang supports this and the stand-in does not: 501, so that a test cannot pass by accident."""

    def __init__(self, field: str) -> None:
        super().__init__(f"the stand-in does not do {field!r}, which SGLang does")


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters; None means the default."""

    max_new_tokens: int | None = 128
    stop: Names | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: Names | None = None
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
        warm, top_k = self.of("temperature"), self.of("top_k")
        for name, fine in (
            ("temperature", math.isfinite(warm) and warm >= 0.0),
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
            if not fine:
                raise ValueError(f"{name} is out of range: {getattr(self, name)!r}")
        shapes = [name for name in ("json_schema", "regex", "ebnf", "structural_tag") if getattr(self, name)]
        if len(shapes) > 1:
            raise ValueError(f"of {', '.join(shapes)} only one can be set")
        for name in (*shapes, *(name for name in ("stop_regex", "custom_params") if getattr(self, name))):
            raise Unsupported(name)
        if most == 0:
            raise Unsupported("max_new_tokens=0")


# --------------------------------------------------------------------------------------------- /generate


class Generate(msgspec.Struct, kw_only=True):
    """The fields of `GenerateReqInput` that the stand-in supports."""

    rid: Names | None = None
    session_id: str | None = None
    text: Names | None = None
    input_ids: list[Any] | None = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    sampling_params: list[dict[str, Any]] | dict[str, Any] | None = None
    return_logprob: list[bool] | bool | None = None
    logprob_start_len: list[int] | int | None = None
    top_logprobs_num: list[int] | int | None = None
    token_ids_logprob: list[Any] | None = None
    return_sampling_mask: list[bool] | bool | None = None
    return_text_in_logprobs: bool = False
    return_flat_raw_top_logprobs: bool = False
    stream: bool = False
    log_metrics: bool = True
    return_hidden_states: bool | Literal["last"] = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    modalities: list[str] | None = None
    session_params: dict[str, Any] | None = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    routing_key: str | None = None
    conversation_id: str | None = None
    background: bool = False
    require_reasoning: bool = False
    max_thinking_tokens: int | None = None
    priority: int | None = None
    extra_key: Names | None = None
    no_logs: bool = False
    custom_labels: dict[str, str] | None = None
    return_bytes: bool = False
    return_entropy: bool = False
    return_prompt_token_ids: bool = False
    cache_salt: Names | None = None


class Abort(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool = False
    finished_reason: dict[str, Any] | None = None
    abort_message: str | None = None


class Pause(msgspec.Struct, kw_only=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(msgspec.Struct, kw_only=True):
    torch_empty_cache: bool = True


class UpdateFromDisk(msgspec.Struct, kw_only=True):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    flush_cache: bool = True
    manifest: dict[str, Any] | None = None


class UpdateVersion(msgspec.Struct, kw_only=True):
    new_version: str
    abort_all_requests: bool = True


# ------------------------------------------------------------------------------------------------ OpenAI


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Common(msgspec.Struct, kw_only=True):
    model: str = "default"
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    n: int = 1
    presence_penalty: float = 0.0
    response_format: dict[str, Any] | None = None
    seed: int | None = None
    stop: Names | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    return_hidden_states: bool | Literal["last"] = False
    return_routed_experts: bool = False
    return_cached_tokens_details: bool = False
    return_spec_tokens_details: bool = False
    return_token_ids: bool = False
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int = 0
    regex: str | None = None
    ebnf: str | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: Names | None = None
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    lora_path: Any = None
    session_id: str | None = None
    session_params: dict[str, Any] | None = None
    custom_logit_processor: Any = None
    custom_params: dict[str, Any] | None = None
    rid: Names | None = None
    extra_key: Names | None = None
    cache_salt: Names | None = None
    priority: int | None = None


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class Chat(Common, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "required", "none"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    return_sampling_mask: bool = False
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | float | None = None
    continue_final_message: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    input_ids: list[int] | None = None


class Completion(Common, kw_only=True):
    prompt: str | list[Any]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int = 16
    suffix: str | None = None
    json_schema: str | None = None


IGNORED: Final = (
    "user",
    "priority",
    "session_id",
    "cache_salt",
    "extra_key",
    "log_metrics",
    "no_logs",
    "custom_labels",
    "routing_key",
    "conversation_id",
    "chat_template_kwargs",
    "reasoning_effort",
    "separate_reasoning",
    "stream_reasoning",
    "suffix",
    "best_of",
    "modalities",
    "routed_experts_start_len",
    "load_format",
    "is_async",
    "recapture_cuda_graph",
    "token_step",
    "manifest",
    "spaces_between_special_tokens",
)
"""Known to the models, and without any effect on the embedded policy."""
UNSUPPORTED: Final = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "token_ids_logprob",
    "return_sampling_mask",
    "return_hidden_states",
    "return_routed_experts",
    "return_entropy",
    "return_bytes",
    "lora_path",
    "custom_logit_processor",
    "session_params",
    "return_flat_raw_top_logprobs",
    "max_thinking_tokens",
    "background",
    "bootstrap_room",
    "echo",
    "continue_final_message",
    "return_cached_tokens_details",
    "return_spec_tokens_details",
)
AS_THEY_ARE: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "regex",
    "ebnf",
    "n",
    "no_stop_trim",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
    "custom_params",
)
"""What the OpenAI requests call as the sampling parameters do."""
