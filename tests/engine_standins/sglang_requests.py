"""Request models of SGLang at commit cce0a12, from `managers/io_struct.py` and `entrypoints/openai/protocol.py`.

Unknown fields are ignored. Those that SGLang knows and that have no effect on the embedded policy are left out.
"""

from typing import Any, Final, Literal

import msgspec

from tests.engine_standins.requests import ChatFields, CompletionFields, Unsupported

UNSUPPORTED: Final = (
    "input_embeds", "image_data", "video_data", "audio_data", "token_ids_logprob", "return_sampling_mask",
    "return_hidden_states", "return_routed_experts", "return_entropy", "return_bytes", "lora_path",
    "custom_logit_processor", "session_params", "return_flat_raw_top_logprobs", "max_thinking_tokens",
    "background", "bootstrap_room", "echo", "continue_final_message", "return_cached_tokens_details",
    "return_spec_tokens_details", "regex", "ebnf", "json_schema", "stop_regex", "custom_params",
)  # fmt: skip
"""Fields outside the sampling parameters that SGLang supports and the stand-in does not."""


def check_supported(fields: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if fields.get(name):
            raise Unsupported(name)
    if (fields.get("response_format") or {"type": "text"}).get("type") != "text":
        raise Unsupported("response_format")


class Generate(msgspec.Struct, kw_only=True):
    """The fields of `GenerateReqInput` that the stand-in supports."""

    rid: str | list[str] | None = None
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: list[dict[str, Any]] | dict[str, Any] | None = None
    return_logprob: list[bool] | bool | None = None
    logprob_start_len: list[int] | int | None = None
    top_logprobs_num: list[int] | int | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False


class Chat(ChatFields, kw_only=True):
    rid: str | list[str] | None = None
    no_stop_trim: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    return_sampling_mask: bool = False
    input_ids: list[int] | None = None


class Completion(CompletionFields, kw_only=True):
    rid: str | list[str] | None = None
    no_stop_trim: bool = False


class Abort(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool = False


class Pause(msgspec.Struct, kw_only=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class UpdateFromDisk(msgspec.Struct, kw_only=True):
    model_path: str
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class UpdateVersion(msgspec.Struct, kw_only=True):
    new_version: str
    abort_all_requests: bool = True
