"""Read the arguments of `Model.chat`: Rookery's own types, or plain dictionaries in OpenAI's format.

Runs in a runner process. A wrong argument raises `ChatArgumentError`, which names the field, before the model is
called.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, get_args

import msgspec

from rookery.core import Fault, Message, Sampling, ToolCall, ToolSchema, UsageError
from rookery.core.messages import Role
from rookery.gateway.tools import cached_tool_set, parse_chat_tools
from rookery.upstreams.protocol import NO_TOOLS, ToolSet

MessagesInput: TypeAlias = str | Sequence[Message | Mapping[str, Any]]
ToolsInput: TypeAlias = Sequence[ToolSchema | Mapping[str, Any]]
SamplingInput: TypeAlias = Sampling | Mapping[str, Any]

_ROLES: Final = get_args(Role)
_MESSAGE: Final = (
    *("role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content"),
    *("refusal", "function_call"),
)
_UNUSED: Final = frozenset({"annotations", "audio", "index", "cache_control", "provider_specific_fields"})
"""Fields that clients copy from a response into the next request and that no chat template reads."""
_PASSED: Final = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "min_tokens", "logit_bias"),
    *("ignore_eos", "stop_token_ids", "structured_outputs", "response_format", "parallel_tool_calls"),
    *("reasoning_effort", "chat_template_kwargs"),
)
"""Sampling parameters of OpenAI and of inference engines that are passed to the inference engine unchanged."""
_SAMPLING: Final = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "extra",
        "extra_body",
    ),
    *_PASSED,
)


class ChatArgumentError(UsageError):
    """An argument of `Model.chat` is wrong. `field` is the path of the wrong value, such as `messages[2].role`."""

    cause = "bug.environment"

    def __init__(
        self, message: str, *, cause: str | None = None, fault: Fault | None = None, field: str = ""
    ) -> None:
        super().__init__(message, cause=cause, fault=fault)
        self.field = field


# ---- messages


def read_messages(messages: MessagesInput) -> tuple[Message, ...]:
    """Return a conversation as messages. A string becomes one user message.

    Raises `ChatArgumentError` if a message is invalid or there is none.
    """
    if isinstance(messages, str):
        return (Message("user", messages),)
    if isinstance(messages, list | tuple) and set(map(type, messages)) == {Message}:
        return tuple(messages)
    entries = _sequence(messages, "messages", "a string or a list of messages")
    if not entries:
        raise _error("messages", "is empty: a conversation needs at least one message")
    return tuple(_message(entry, f"messages[{at}]") for at, entry in enumerate(entries))


def _message(entry: Any, field: str) -> Message:
    if isinstance(entry, Message):
        return entry
    entry = _mapping(entry, field, "a Message or a dictionary")
    _known(entry, field, _MESSAGE, _UNUSED)
    role = entry.get("role")
    call_id = _text(entry, "tool_call_id", field)
    if role == "function":  # OpenAI's format before tool calls had IDs
        role, call_id = "tool", call_id or "call_0"
    if role not in _ROLES:
        raise _error(f"{field}.role", f"must be one of {', '.join(_ROLES)}, {_got(role, 'role' in entry)}")
    calls = _calls(entry, field)
    content = _content(entry.get("content"), f"{field}.content")
    if content is None:
        content = _text(entry, "refusal", field)
    if content is None and not calls and role != "assistant":
        raise _error(
            f"{field}.content",
            f"must be a string or a list of parts, {_got(None, 'content' in entry)}",
        )
    reasoning = _text(entry, "reasoning_content", field)
    if reasoning is None:
        reasoning = _text(entry, "reasoning", field)
    return Message(role, content, calls, call_id, _text(entry, "name", field), reasoning)


def _content(content: Any, field: str) -> str | tuple[dict[str, Any], ...] | None:
    if content is None or isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for at, part in enumerate(_sequence(content, field, "a string or a list of parts")):
        where = f"{field}[{at}]"
        mapping = (
            {"type": "text", "text": part} if isinstance(part, str) else _mapping(part, where, "a dictionary")
        )
        if not isinstance(mapping.get("type"), str):
            raise _error(f"{where}.type", f"must be a string, {_got(mapping.get('type'), 'type' in mapping)}")
        if mapping["type"] == "text" and not isinstance(mapping.get("text"), str):
            raise _error(f"{where}.text", f"must be a string, {_got(mapping.get('text'), 'text' in mapping)}")
        _json(mapping, where)
        parts.append(dict(mapping))
    return tuple(parts)


def _calls(entry: Mapping[str, Any], field: str) -> tuple[ToolCall, ...]:
    calls = entry.get("tool_calls")
    if calls is None and entry.get("function_call") is not None:
        return (_function(entry["function_call"], "call_0", f"{field}.function_call"),)
    if calls is None:
        return ()
    parsed = []
    for at, call in enumerate(_sequence(calls, f"{field}.tool_calls", "a list")):
        where = f"{field}.tool_calls[{at}]"
        if isinstance(call, ToolCall):
            parsed.append(call)
            continue
        _mapping(call, where, "a ToolCall or a dictionary")
        _known(call, where, ("id", "type", "function"), frozenset({"index"}))
        if call.get("type") not in (None, "function"):
            raise _error(f"{where}.type", f"must be 'function', {_got(call['type'])}")
        name = _text(call, "id", where) or f"call_{at}"
        parsed.append(_function(call.get("function"), name, f"{where}.function"))
    return tuple(parsed)


def _function(entry: Any, call_id: str, field: str) -> ToolCall:
    function = _mapping(entry, field, "a dictionary with name and arguments")
    _known(function, field, ("name", "arguments"))
    name = _required(function, "name", field)
    arguments = function.get("arguments")
    if arguments is None:
        arguments = "{}"
    elif isinstance(arguments, Mapping):
        arguments = _json(arguments, f"{field}.arguments").decode()
    elif not isinstance(arguments, str):
        raise _error(f"{field}.arguments", f"must be JSON text or a dictionary, {_got(arguments)}")
    return ToolCall(call_id, name, arguments)


# ---- tools


def read_tools(tools: ToolsInput) -> ToolSet:
    """Return the tools of a call as a tool set.

    A tool is a `ToolSchema`, or a dictionary in OpenAI's format, whose inner `function` level may be left out.
    """
    entries = _sequence(tools, "tools", "a list of tools")
    if not entries:
        return NO_TOOLS
    if all(type(entry) is ToolSchema for entry in entries):
        return cached_tool_set(tuple(entries))
    parsed = [_tool(entry, f"tools[{at}]") for at, entry in enumerate(entries)]
    return parse_chat_tools(b"[" + b",".join(_json(tool, f"tools[{at}]") for at, tool in enumerate(parsed)) + b"]")


def _tool(entry: Any, field: str) -> dict[str, Any]:
    """Check one tool and return it in OpenAI's chat format."""
    if isinstance(entry, ToolSchema):
        return {"type": "function", "function": msgspec.structs.asdict(entry)}
    entry = _mapping(entry, field, "a ToolSchema or a dictionary")
    if entry.get("type") not in (None, "function"):
        raise _error(f"{field}.type", f"must be 'function', {_got(entry['type'])}")
    if "function" in entry:
        _known(entry, field, ("type", "function"))
        field = f"{field}.function"
        function = _mapping(entry["function"], field, "a dictionary")
    else:
        function = {name: value for name, value in entry.items() if name != "type"}
    _known(function, field, ("name", "description", "parameters", "strict"))
    _required(function, "name", field)
    _text(function, "description", field)
    if function.get("parameters") is not None:
        _mapping(function["parameters"], f"{field}.parameters", "a JSON schema (a dictionary)")
    return {"type": "function", "function": dict(function)}


def read_tool_choice(choice: str | Mapping[str, Any] | None, tools: ToolSet) -> str | None:
    """Return the tool choice: `auto`, `none`, `required` or the name of one of the tools.

    A dictionary is read in OpenAI's format.
    """
    if choice is None:
        return None
    name = choice
    if isinstance(choice, Mapping):
        inner = choice.get("function", choice)
        name = _required(_mapping(inner, "tool_choice.function", "a dictionary"), "name", "tool_choice.function")
    if not isinstance(name, str):
        raise _error("tool_choice", f"must be auto, none, required or the name of a tool, {_got(name)}")
    known = [schema.name for schema in tools.schemas]
    if name not in ("auto", "none", "required", *known):
        raise _error(
            "tool_choice", f"is {name!r:.80}, which is not one of the call's tools: {', '.join(known) or 'none'}"
        )
    return name


# ---- sampling


def read_sampling(sampling: SamplingInput) -> Sampling:
    """Return the sampling parameters of a call.

    A dictionary may use OpenAI's names, and names of parameters of inference engines, which are passed to the
    engine unchanged.
    """
    if isinstance(sampling, Sampling):
        return sampling
    sampling = _mapping(sampling, "sampling", "a Sampling or a dictionary")
    _known(sampling, "sampling", _SAMPLING)
    fields = {name: value for name, value in sampling.items() if value is not None}
    limits = [fields.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in fields]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise _error(
            "sampling.max_completion_tokens",
            f"is {limits[1]!r}, but max_tokens is {limits[0]!r}: set only one of them",
        )
    extra: dict[str, Any] = {name: fields[name] for name in _PASSED if name in fields}
    for name in ("extra", "extra_body"):
        if name in fields:
            extra |= _mapping(fields[name], f"sampling.{name}", "a dictionary")
    for name, value in extra.items():
        _json(value, f"sampling.{name}")
    return Sampling(
        temperature=_number(fields, "temperature", 0.0, float("inf")),
        top_p=_number(fields, "top_p", 0.0, 1.0),
        top_k=_integer(fields.get("top_k"), "top_k", None),
        max_tokens=_integer(limits[0], "max_tokens", 1) if limits else None,
        stop=_stops(fields.get("stop")),
        seed=_integer(fields.get("seed"), "seed", None),
        extra=extra,
    )


def _number(fields: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not low <= value <= high
        or value == float("inf")
    ):
        within = f"from {low:g} to {high:g}" if high < float("inf") else f"of at least {low:g}"
        raise _error(f"sampling.{name}", f"must be a number {within}, {_got(value)}")
    return float(value)


def _integer(value: Any, name: str, least: int | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        least_text = "" if least is None else f" of at least {least}"
        raise _error(f"sampling.{name}", f"must be an integer{least_text}, {_got(value)}")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = (
        (value,) if isinstance(value, str) else _sequence(value, "sampling.stop", "a string or a list of strings")
    )
    for at, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise _error(f"sampling.stop[{at}]", f"must be a string that is not empty, {_got(text)}")
    return tuple(texts)


# ---- checks


def _error(field: str, why: str) -> ChatArgumentError:
    return ChatArgumentError(f"chat(): {field} {why}", field=field)


def _got(value: Any, present: bool = True) -> str:
    return f"not {value!r:.80}" if present else "and it is missing"


def _sequence(value: Any, field: str, wanted: str) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise _error(field, f"must be {wanted}, {_got(value)}")
    return value


def _mapping(value: Any, field: str, wanted: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _error(field, f"must be {wanted}, {_got(value)}")
    for name in value:
        if not isinstance(name, str):
            raise _error(field, f"must have strings as keys, {_got(name)}")
    return value


def _known(
    value: Mapping[str, Any], field: str, names: Sequence[str], unused: frozenset[str] = frozenset()
) -> None:
    for name in value:
        if name in names or name in unused or value[name] is None:
            continue
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"the known fields are {', '.join(names)}"
        raise _error(f"{field}.{name}", f"is not a known field; {hint}")


def _text(value: Mapping[str, Any], name: str, field: str) -> str | None:
    text = value.get(name)
    if text is None or isinstance(text, str):
        return text
    raise _error(f"{field}.{name}", f"must be a string, {_got(text)}")


def _required(value: Mapping[str, Any], name: str, field: str) -> str:
    text = value.get(name)
    if isinstance(text, str) and text:
        return text
    raise _error(f"{field}.{name}", f"must be a string that is not empty, {_got(text, name in value)}")


def _json(value: Any, field: str) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _error(field, f"must be plain JSON data: {error}") from None
