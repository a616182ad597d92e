"""Decode request bodies: the OpenAI fields that both engines have, and errors located as pydantic locates them.

Types are converted as pydantic converts them: numeric strings are numbers, 1 is true, other types are strict.
"""

import re
from typing import Any, Literal, TypeVar

import msgspec
import orjson

from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.openai_requests import MessageBody, read_message, read_tools

T = TypeVar("T")
_LOCATION = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


class Invalid(Exception):
    """A validation error and its location, such as `('body', 'temperature')`."""

    def __init__(self, kind: str, where: tuple[str, ...], message: str, value: Any = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.where = where
        self.value = value

    def listed(self) -> dict[str, Any]:
        """Return the error as pydantic formats it."""
        return {"type": self.kind, "loc": self.where, "msg": str(self), "input": self.value}


class Unsupported(Exception):
    """The engine supports a field and the stand-in does not: status 501, so that no test passes by accident."""

    def __init__(self, field: str) -> None:
        super().__init__(f"the stand-in does not implement {field!r}")


def read(body: bytes) -> dict[str, Any]:
    """Decode a body to an object. NaN and infinities are refused."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Invalid("json_invalid", ("body", str(error.pos)), "the body is not JSON", {}) from None
    if not isinstance(fields, dict):
        raise Invalid("model_attributes_type", ("body",), "the body is not an object", fields)
    return fields


def convert(fields: Any, kind: type[T], location: str = "") -> T:
    """Convert an object to `kind`. `location` is its location in the body."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        words = str(error)
        if unknown := re.search(r"unknown field `(.+?)`", words):
            raise Unsupported(unknown[1]) from None
        found = _LOCATION.search(words)
        where = tuple(part for part in re.split(r"\.|\[|\]", f"{location}.{found[1] if found else ''}") if part)
        text = words[: found.start()] if found else words
        if missing := re.search(r"missing required field `(.+)`", text):
            raise Invalid("missing", ("body", *where, missing[1]), "the field is missing", fields) from None
        raise Invalid("value_error", ("body", *where), text, fields.get(where[0]) if where else fields) from None


# ------------------------------------------------------------------------------------------------ fields


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling parameters that both engines have under the same names."""

    n: int = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class OpenAIFields(SamplingFields, kw_only=True):
    """Fields of both chat completions and completions."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @property
    def with_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class ChatFields(OpenAIFields, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "required", "none"] | NamedTool | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class CompletionFields(OpenAIFields, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    max_tokens: int | None = 16


def render(body: ChatFields) -> tuple[chat.Prompt, bool]:
    """Return the prompt of a chat, and whether the reply may contain tool calls.

    Raises `Invalid`, `RequestError` or `ValueError`.
    """
    if not body.messages:
        raise ValueError("messages is empty")
    messages = [
        read_message(convert(message, MessageBody, f"messages.{number}"), number)
        for number, message in enumerate(body.messages)
    ]
    for number, tool in enumerate(body.tools or ()):
        if tool.get("type", "function") != "function":
            raise Invalid("literal_error", ("body", "tools", str(number), "type"), "not a function", tool)
    tools = read_tools([{"type": "function", **tool} for tool in body.tools or ()])
    choice = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    if isinstance(body.tool_choice, NamedTool) and choice not in [tool.name for tool in tools]:
        raise ValueError(f"tool_choice names {choice!r}, which is not one of the tools")
    if choice == "required" and not tools:
        raise ValueError("tool_choice requires a call, but there are no tools")
    return chat.prompt(messages, tools, choice if tools else None), bool(tools) and choice != "none"


def split_prompts(prompt: str | list[Any]) -> list[Any]:
    """Return the prompts of a completion request, which has one prompt or a list of them."""
    many = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int))
    return prompt if many else [prompt]  # type: ignore[return-value]
