"""What model calls look like in the OpenAPI description, dialect by dialect."""

from typing import Any, Final

_COUNT = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1}
_NUMBER = {"type": ["number", "null"], "minimum": 0, "maximum": 100}
_SHARE = {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1}
_FLAG = {"type": ["boolean", "null"]}
_OBJECTS = {"type": ["array", "null"], "items": {"type": "object"}}
_TEXTS = {"type": ["array", "null"], "items": {"type": "string"}}
_STOPS = {"type": ["string", "array", "null"], "items": {"type": "string"}}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    """At least one."""
    return {"type": "array", "minItems": 1, "items": item}


def _messages(roles: list[str], content: dict[str, Any]) -> dict[str, Any]:
    return _list_of(_object(["role", "content"], role={"enum": roles}, content=content))


def _completion(kind: str, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What OpenAI's chat and its older completions answer."""
    required = ["id", "object", "created", "model", "choices", "usage"]
    return _object(required, object={"const": kind}, choices=_list_of(choice), **more)


ANSWER: dict[str, Any] = _completion(
    "chat.completion",
    _object(
        ["index", "message", "finish_reason"],
        message={"type": "object", "required": ["role", "content"]},
        finish_reason={"enum": ["stop", "length", "tool_calls", "content_filter"]},
    ),
    usage={"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]},
)

CHAT: dict[str, Any] = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "model": {"type": "string"},
        "messages": _messages(
            ["system", "developer", "user", "assistant", "tool"],
            {"type": ["string", "array", "null"], "items": {"type": "object"}},
        ),
        "stream": _FLAG,
        "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
        "tools": _OBJECTS,
        "tool_choice": {"type": ["string", "object", "null"]},
        "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 64},
        "temperature": _NUMBER,
        "top_p": _SHARE,
        "max_tokens": _COUNT,
        "max_completion_tokens": _COUNT,
        "stop": _STOPS,
        "seed": {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1},
        "logprobs": _FLAG,
        "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    },
}

_NAMED = {"type": "string", "minLength": 1}
_FUNCTION = _object(["type", "name"], type={"const": "function"}, name=_NAMED, parameters={"type": "object"})
_USAGE = {"type": "object", "required": ["input_tokens", "output_tokens"]}

COMPLETION: dict[str, Any] = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "model": {"type": "string"},
        "prompt": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "integer", "minimum": 0, "maximum": 255},
            "description": "Token ids; or a text, or a list of either.",
        },
        "stream": _FLAG,
        "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 8},
        "echo": _FLAG,
        "temperature": _NUMBER,
        "top_p": _SHARE,
        "max_tokens": _COUNT,
        "stop": _STOPS,
        "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
    },
}
COMPLETION_ANSWER: dict[str, Any] = _completion(
    "text_completion",
    _object(
        ["index", "text", "finish_reason", "logprobs"],
        text={"type": "string"},
        finish_reason={"enum": ["stop", "length", "content_filter"]},
    ),
)
RESPONSE: dict[str, Any] = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "model": {"type": "string"},
        "input": {
            "type": ["string", "array"],
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "type": {"const": "message"},
                    "role": {"enum": ["system", "developer", "user", "assistant"]},
                    "content": {"type": "string"},
                },
            },
        },
        "instructions": {"type": ["string", "null"]},
        "stream": _FLAG,
        "store": _FLAG,
        "include": _TEXTS,
        "max_output_tokens": _COUNT,
        "temperature": _NUMBER,
        "top_p": _SHARE,
        "tools": {"type": ["array", "null"], "items": _FUNCTION},
        "tool_choice": {"enum": ["none", "auto", "required", None]},
        "previous_response_id": {"type": "null", "description": "The id of an answer of this session."},
        "background": {"enum": [False, None]},
        "conversation": {"type": "null"},
        "metadata": {"type": ["object", "null"]},
    },
}
RESPONSE_ANSWER: dict[str, Any] = {
    "type": "object",
    "required": ["id", "object", "created_at", "model", "status", "output", "usage", "error"],
    "properties": {
        "object": {"const": "response"},
        "status": {"enum": ["completed", "incomplete"]},
        "output": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["type", "id"]}},
        "usage": _USAGE,
    },
}
MESSAGES: dict[str, Any] = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "model": {"type": "string"},
        "messages": _messages(
            ["user", "assistant", "system"],
            {
                "type": ["string", "array"],
                "items": _object(["type", "text"], type={"const": "text"}, text={"type": "string"}),
            },
        ),
        "system": {"type": ["string", "null"], "description": "Or a list of blocks."},
        "stream": _FLAG,
        "max_tokens": _COUNT,
        "temperature": _NUMBER,
        "top_p": _SHARE,
        "stop_sequences": _TEXTS,
        "thinking": {"type": ["object", "null"], "properties": {"type": {"type": "string"}}},
        "tools": {
            "type": ["array", "null"],
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": _NAMED,
                    "type": {"type": ["string", "null"]},
                    "description": {"type": ["string", "null"]},
                    "input_schema": {"type": ["object", "null"]},
                },
            },
        },
        "tool_choice": {
            "type": ["object", "null"],
            "required": ["type"],
            "properties": {"type": {"enum": ["auto", "any", "none"]}, "name": {"type": ["string", "null"]}},
        },
    },
}
MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
    "properties": {
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "content": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["type"]}},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]},
        "usage": _USAGE,
    },
}
TOKENS: dict[str, Any] = {
    "type": "object",
    "required": ["input_tokens"],
    "properties": {"input_tokens": {"type": "integer", "minimum": 0}},
}
ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}

SCHEMAS: Final = {
    "Completion": COMPLETION,
    "CompletionAnswer": COMPLETION_ANSWER,
    "Response": RESPONSE,
    "ResponseAnswer": RESPONSE_ANSWER,
    "Messages": MESSAGES,
    "MessagesAnswer": MESSAGE,
    "TokenCount": TOKENS,
    "AnthropicError": ANTHROPIC_ERROR,
}
REQUIRED: Final = frozenset({"ChatCompletion", "Completion", "Response", "Messages"})
"""Bodies that must be there."""
FAILING: Final = ("400", "401", "404", "410", "413", "502", "503", "504")
CALLS: Final[dict[str, tuple[str, str, str, str, bool]]] = {
    "/chat/completions": (
        "A chat completion, streamed where `stream` is true.",
        "ChatCompletion",
        "ChatCompletionAnswer",
        "Error",
        True,
    ),
    "/completions": ("What follows a prompt.", "Completion", "CompletionAnswer", "Error", True),
    "/responses": ("A response.", "Response", "ResponseAnswer", "Error", True),
    "/responses/input_tokens": ("How long its prompt would be.", "Response", "TokenCount", "Error", False),
    "/messages": ("A message, as Anthropic has them.", "Messages", "MessagesAnswer", "AnthropicError", True),
    "/messages/count_tokens": ("How long its prompt would be.", "Messages", "TokenCount", "AnthropicError", False),
}
"""What it is, what is asked, what is answered, the shape of an error, and whether it can be streamed."""
