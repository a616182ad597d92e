"""Request models of vLLM at commit a014e35, with its validation.

From `entrypoints/openai/{chat_completion,completion,engine}/protocol.py` and
`entrypoints/scale_out/token_in_token_out/protocol.py`.

Behaviour:
- fields, types, defaults and bounds are those of vLLM's models; other fields are ignored;
- a refusal is a `VLLMError` with the parameter that vLLM names.
"""

from typing import Annotated, Any, Final, Literal

import msgspec

from tests.engine_standins.validation import Invalid
from tests.engine_standins.vllm_params import SamplingParams, Unsupported, VLLMError

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Salt = Annotated[str, msgspec.Meta(min_length=1)]
MAX_STOPS: Final = 4
MAX_PROMPTS: Final = 1024
_AS_THEY_ARE: Final = (
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "logprob_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "stream_interval",
    "structured_outputs",
    "allowed_token_ids",
    "bad_words",
    "repetition_detection",
    "thinking_token_budget",
)
IGNORED: Final = (
    "user",
    "priority",
    "session_id",
    "cache_salt",
    "return_token_offsets",
    "routed_experts_prompt_start",
    "spaces_between_special_tokens",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "documents",
    "chat_template_kwargs",
    "media_io_kwargs",
    "reasoning_effort",
    "mm_processor_kwargs",
    "return_assistant_tokens_mask",
    "suffix",
    "length_penalty",
    "assistant_tokens_mask",
    "token_offsets",
)
"""Known to the models, and without any effect on the embedded policy."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


# ------------------------------------------------------------------------------------------------- bodies


class Common(msgspec.Struct, kw_only=True):
    """Fields of both chat completions and completions."""

    model: str | None = None
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = 0.0
    response_format: dict[str, Any] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float = 1.0
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    structured_outputs: dict[str, Any] | None = None
    priority: Int64 = 0
    request_id: str | None = None
    session_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    routed_experts_prompt_start: Natural = 0
    return_token_offsets: bool | None = False
    cache_salt: Salt | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    repetition_detection: dict[str, Any] | None = None
    stream_interval: Annotated[int, msgspec.Meta(ge=1)] | None = None
    thinking_token_budget: int | None = None


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class ChatRequest(Common, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = "none"
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool | None = True
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None
    return_assistant_tokens_mask: bool = False


class CompletionRequest(Common, kw_only=True):
    prompt: str | list[Any] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    n: int = 1
    suffix: str | None = None
    prompt_embeds: Any = None
    add_special_tokens: bool = True


class GenerateRequest(msgspec.Struct, kw_only=True):
    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    sampling_params: dict[str, Any]
    request_id: str | None = None
    assistant_tokens_mask: list[int] | None = None
    token_offsets: list[list[int]] | None = None
    features: dict[str, Any] | None = None
    content_parts: list[dict[str, Any]] | None = None
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    priority: Int64 = 0
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


# ------------------------------------------------------------------------- what is checked before the types


def before_both(fields: dict[str, Any], counted: str) -> None:
    """Run the validators of the raw body. `counted` is the field with the number of alternatives."""
    if fields.get("stream_options") and not fields.get("stream"):
        raise VLLMError("stream_options are for stream=true", "stream_options")
    shape = fields.get("response_format")
    if isinstance(shape, dict) and shape.get("type") == "json_schema" and shape.get("json_schema") is None:
        raise VLLMError("a response_format of type json_schema has a json_schema", "response_format")
    for name in ("prompt_logprobs", counted):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float):
            raise VLLMError(f"{name} is a whole number", name, value)
        if value < 0 and value != -1:
            raise VLLMError(f"{name} is -1 or not below 0", name, value)
        if name == "prompt_logprobs" and fields.get("stream") and value:
            raise VLLMError("a stream has no prompt_logprobs", name)


def before_chat(fields: dict[str, Any]) -> None:
    before_both(fields, "top_logprobs")
    if fields.get("top_logprobs") and not fields.get("logprobs"):
        raise VLLMError("top_logprobs needs logprobs=true", "top_logprobs")
    if fields.get("continue_final_message") and fields.get("add_generation_prompt"):
        raise VLLMError("continue_final_message and add_generation_prompt exclude each other")
    _tool_usage(fields)


def _tool_usage(fields: dict[str, Any]) -> None:
    if fields.get("tools") == []:
        raise VLLMError("tools cannot be an empty list", "tools")
    if "tool_choice" not in fields and fields.get("tools"):
        fields["tool_choice"] = "auto"
    choice = fields.get("tool_choice")
    if choice is None or choice == "none":
        return
    if fields.get("tools") is None:
        raise VLLMError("a tool_choice needs tools", "tool_choice")
    if not isinstance(choice, dict):
        if choice not in ("auto", "required"):
            raise VLLMError("tool_choice is none, auto, required or a function", "tool_choice")
        return
    function = choice.get("function")
    if not isinstance(function, dict):
        raise VLLMError("tool_choice has no function", "tool_choice.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise VLLMError("the function of tool_choice has no name", "tool_choice.function.name")
    if name not in [tool.get("function", {}).get("name") for tool in fields["tools"] if isinstance(tool, dict)]:
        raise VLLMError("tool_choice names none of the tools", "tool_choice")


def before_completion(fields: dict[str, Any]) -> None:
    if fields.get("max_tokens") is None:
        fields["max_tokens"] = 16
    before_both(fields, "logprobs")
    prompt, embeds = fields.get("prompt"), fields.get("prompt_embeds")
    if prompt in (None, "") and embeds in (None, []):
        raise VLLMError("there is neither a prompt nor prompt_embeds", "prompt")
    ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    if isinstance(prompt, list) and not ids and len(prompt) > MAX_PROMPTS:
        raise VLLMError(f"{len(prompt)} prompts are more than {MAX_PROMPTS}", "prompt")


def check_stops(body: Common) -> None:
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOPS:
        raise Invalid("too_long", ("body", "stop"), f"at most {MAX_STOPS} stop texts", body.stop)


def prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Return a list of single prompts."""
    prompt = body.prompt
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    if prompt and all(isinstance(part, str) for part in prompt):
        return list(prompt)
    lists = [prompt] if not any(isinstance(part, list) for part in prompt) else prompt
    for ids in lists:
        if not isinstance(ids, list) or not all(
            isinstance(token, int) and not isinstance(token, bool) for token in ids
        ):
            raise Invalid("int_type", ("body", "prompt"), "a prompt is a text or ids, not a mixture", prompt)
        if any(token < 0 for token in ids):
            raise Invalid("greater_than_equal", ("body", "prompt"), "an id is not below 0", prompt)
    return list(lists)


def check_formats(body: Common) -> None:
    if (body.response_format or {"type": "text"}).get("type") != "text":
        raise Unsupported("response_format")


def sampling(body: Common, *, n: int, logprobs: int | None) -> SamplingParams:
    try:
        bias = {int(token): min(100.0, max(-100.0, value)) for token, value in (body.logit_bias or {}).items()}
    except ValueError:
        raise VLLMError("logit_bias has keys that are no ids", "logit_bias", list(body.logit_bias or ())) from None
    options = {
        name: value
        for name in (
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "temperature",
            "top_p",
            "top_k",
        )
        if (value := getattr(body, name)) is not None
    }
    return SamplingParams(
        n=n,
        logprobs=logprobs,
        min_p=body.min_p or 0.0,
        seed=body.seed,
        stop=body.stop,
        logit_bias=bias or None,
        **options,
        **{name: getattr(body, name) for name in _AS_THEY_ARE},
    )


# ---------------------------------------------------------------------------------------------- tokenizer


class TokenizeText(msgspec.Struct, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChat(msgspec.Struct, kw_only=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class Detokenize(msgspec.Struct, kw_only=True):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]
    model: str | None = None
