"""The dialect of Anthropic's Messages API, including token counting. Runs in gateway shards.

Guarantees:
- Anthropic's client library and Claude Code can be used unchanged;
- a field that changes the meaning of a request is supported or rejected. Unknown content blocks are shown to the
  model as JSON; tools that run on Anthropic's servers are not offered;
- cache hints, signatures and billing headers are not part of a message: if an agent changes them between turns,
  the conversation still counts as unedited;
- tool call arguments that a client sends back are restored as they were sampled, also if they are not a JSON
  object;
- errors have Anthropic's format; an error that a retry cannot fix has a status that Anthropic's client library
  does not retry.
"""

import secrets
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET

from rookery.core import Message, Sampling, ToolCall, ToolSchema
from rookery.gateway.dialects.messages_stream import (
    MessagesReplyStream,
    get_stop_reason,
    make_anthropic_error,
    make_content_blocks,
    make_usage,
)
from rookery.gateway.dialects.protocol import BadRequestError, ClientRequest, ErrorKind, Operation
from rookery.gateway.dialects.schemas import (
    COUNT,
    FLAG,
    INPUT_USAGE,
    NAME,
    PROBABILITY,
    TEMPERATURE,
    TEXT,
    TEXTS,
    describe_operations,
    list_schema,
    messages_schema,
    object_schema,
)
from rookery.gateway.dialects.shared import (
    NULL,
    SINGLE_CALL,
    Content,
    Count,
    Field,
    Probability,
    Temperature,
    TopK,
    decode_body,
    encode,
    encode_json,
    make_response_format,
    merge_text_parts,
    move_system_first,
    normalise_stops,
    reject_fields,
    require_text,
)
from rookery.gateway.tools import MAX_CACHED_BYTES, ToolsError, make_tool_set
from rookery.upstreams.protocol import NO_TOOLS, DecodeTokens, ModelReply, ToolSet

INVALID: Final = "INVALID_JSON"
"""Key of the object in which tool call arguments that are not a JSON object are sent, as in Anthropic's API."""
_BILLING_PREFIX: Final = "x-anthropic-billing-header:"
"""Claude Code starts its system prompt with this line, which is not for the model and differs between requests."""


class _Choice(msgspec.Struct, frozen=True):
    type: str = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class _Thinking(msgspec.Struct, frozen=True):
    type: str = "enabled"


class _Edit(msgspec.Struct, frozen=True):
    type: str = ""


class _Management(msgspec.Struct, frozen=True):
    edits: list[_Edit] | None = None


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    model: str = ""
    system: str | list[Any] | None = None
    max_tokens: Count | None = None
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    tools: Field = UNSET
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: Any = None
    output_format: Any = None
    context_management: _Management | None = None
    # Rejected unless the value is empty.
    thread: Field = UNSET
    compaction: Field = UNSET
    container: Field = UNSET
    mcp_servers: Field = UNSET
    # Ignored, because they do not change the reply: identity, location, billing, caching, diagnostics.
    betas: Field = UNSET
    billing_policy: Field = UNSET
    cache_control: Field = UNSET
    diagnostics: Field = UNSET
    fallback_credit_token: Field = UNSET
    fallbacks: Field = UNSET
    inference_geo: Field = UNSET
    metadata: Field = UNSET
    service_tier: Field = UNSET
    speed: Field = UNSET
    user_profile_id: Field = UNSET
    workspace_id: Field = UNSET


_UNSUPPORTED_FIELDS: Final = {
    "compaction": "compact the conversation in the client",
    "container": "the gateway runs no code for the model",
    "mcp_servers": "connect the client to them, and send their tools",
}

_decode = msgspec.json.Decoder(_Request).decode


_REQUEST_SCHEMA: Final = object_schema(
    ["messages"],
    "MessagesRequest",
    model=TEXT,
    messages=messages_schema(
        ["user", "assistant", "system"],
        {"type": ["string", "array"], "items": object_schema(["type", "text"], type={"const": "text"}, text=TEXT)},
    ),
    system={"type": ["string", "null"], "description": "A string or a list of content blocks."},
    stream=FLAG,
    max_tokens=COUNT,
    temperature=TEMPERATURE,
    top_p=PROBABILITY,
    stop_sequences=TEXTS,
    thinking={"type": ["object", "null"], "properties": {"type": TEXT}},
    tools={
        "type": ["array", "null"],
        "items": object_schema(
            ["name"],
            name=NAME,
            type={"type": ["string", "null"]},
            description={"type": ["string", "null"]},
            input_schema={"type": ["object", "null"]},
        ),
    },
    tool_choice={
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {"type": {"enum": ["auto", "any", "none"]}, "name": {"type": ["string", "null"]}},
    },
)
_RESPONSE_SCHEMA: Final = object_schema(
    ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
    "MessagesResponse",
    type={"const": "message"},
    role={"const": "assistant"},
    content=list_schema({"type": "object", "required": ["type"]}),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]},
    usage=INPUT_USAGE,
)
_ERROR_SCHEMA: Final = object_schema(
    ["type", "error"],
    "AnthropicError",
    type={"const": "error"},
    error=object_schema(["type", "message"], type=TEXT, message=TEXT),
)


class MessagesDialect:
    """Dialect of Anthropic's Messages API. Serves `/messages` and `/messages/count_tokens`."""

    name = "messages"
    paths: tuple[str, ...] = ("/messages",)
    count_paths: tuple[str, ...] = ("/messages/count_tokens",)
    header = "anthropic-version"

    def parse_request(self, body: bytes) -> ClientRequest:
        request = decode_body(_decode, body)
        if request.thread is not UNSET and bytes(request.thread) != NULL:
            message = "threads are not supported; send the whole conversation without `thread`"
            raise BadRequestError(message, "thread", "thread")
        reject_fields(request, _UNSUPPORTED_FIELDS)
        for edit in (request.context_management and request.context_management.edits) or ():
            # The chat format decides whether earlier thinking is part of the prompt.
            if not edit.type.startswith("clear_thinking"):
                message = f"the context edit {edit.type!r} is not supported; edit the conversation in the client"
                raise BadRequestError(message, "context_management.edits")
        if request.thinking is not None and request.thinking.type not in ("enabled", "disabled", "adaptive"):
            raise BadRequestError("thinking.type must be enabled, disabled or adaptive", "thinking.type")
        tools = NO_TOOLS
        if request.tools is not UNSET and bytes(request.tools) != NULL:
            raw = bytes(request.tools)
            tools = _parse_tools_cached(raw) if len(raw) <= MAX_CACHED_BYTES else _parse_tools(raw)
        extra: dict[str, Any] = {}
        if (schema := _schema(request)) is not None:
            extra["response_format"] = make_response_format("answer", schema)
        choice = request.tool_choice
        if tools and choice is not None and choice.disable_parallel_tool_use:
            extra |= SINGLE_CALL
        thinks = request.thinking is not None and request.thinking.type != "disabled"
        return ClientRequest(
            messages=convert_messages(request.system, request.messages),
            model=request.model,
            tools=tools,
            tool_choice=_tool_choice(choice),
            sampling=Sampling(
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                max_tokens=request.max_tokens,
                stop=normalise_stops(request.stop_sequences),
                extra=extra,
            ),
            stream=bool(request.stream),
            object_arguments=True,
            dialect_data=thinks,
        )

    def format_response(self, client_request: ClientRequest, replies: list[ModelReply]) -> bytes:
        (reply,) = replies
        reason, stop = get_stop_reason(client_request, reply)
        return encode(
            {
                "id": f"msg_{secrets.token_hex(12)}",
                "type": "message",
                "role": "assistant",
                "model": client_request.model,
                "content": make_content_blocks(reply.message, thinks=client_request.dialect_data),
                "stop_reason": reason,
                "stop_sequence": stop,
                "usage": make_usage(reply),
            }
        )

    def open_stream(
        self,
        client_request: ClientRequest,
        decode_tokens: DecodeTokens | None = None,  # noqa: ARG002
    ) -> MessagesReplyStream:
        return MessagesReplyStream(client_request)

    def format_error(self, problem: ErrorKind, message: str, where: str | None = None) -> tuple[int, bytes]:
        status, error = make_anthropic_error(problem, f"{where}: {message}" if where else message)
        return status, encode(error)

    def format_token_count(self, tokens: int) -> bytes:
        return b'{"input_tokens":%d}' % tokens

    def describe_operations(self) -> dict[str, Operation]:
        return describe_operations(self, "Create a message.", _REQUEST_SCHEMA, _RESPONSE_SCHEMA, _ERROR_SCHEMA)

    def format_models(self, names: Sequence[str]) -> bytes:
        listed = [
            {
                "type": "model",
                "id": name,
                "display_name": name,
                "created_at": "1970-01-01T00:00:00Z",
                "lifecycle": "active",
            }
            for name in names
        ]
        first, last = (names[0], names[-1]) if names else (None, None)
        return encode({"data": listed, "has_more": False, "first_id": first, "last_id": last})


# ---- parsing


def convert_messages(system: str | list[Any] | None, messages: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """Convert the system prompt and the messages of Anthropic's API to `Message`s. Raises `BadRequestError`."""
    return move_system_first(_read(system, messages), merge=True)


def _read(system: str | list[Any] | None, messages: Sequence[dict[str, Any]]) -> Iterator[Message]:
    if text := _content(system, "system", "\n\n"):
        yield Message("system", text)
    for at, message in enumerate(messages):
        role, content, where = message.get("role"), message.get("content"), f"messages.{at}"
        if content is not None and not isinstance(content, str | list):
            raise BadRequestError(
                "the content of a message must be a string or a list of blocks", f"{where}.content"
            )
        if role == "assistant":
            yield _assistant(content, where)
        elif role == "system":
            if text := _content(content, where, "\n"):
                yield Message("system", text)
        elif role == "user":
            yield from _user(content, where)
        else:
            raise BadRequestError("the role of a message must be user, assistant or system", f"{where}.role")


def _user(content: str | list[Any] | None, where: str) -> Iterator[Message]:
    """Yield the messages for one user message of Anthropic's API.

    Such a message may contain both user content and tool results.
    """
    if isinstance(content, str) or content is None:
        yield Message("user", content or "")
        return
    waiting: list[Any] = []
    for n, block in enumerate(content):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            if waiting:
                yield Message("user", _content(waiting, where, "\n"))
                waiting = []
            inner = block.get("content")
            if inner is not None and not isinstance(inner, str | list):
                raise BadRequestError(
                    "the content of a tool result must be a string or a list of blocks", f"{where}.content.{n}"
                )
            result = _content(inner, f"{where}.content.{n}", "\n")
            yield Message(
                "tool", result or "", tool_call_id=require_text(block, "tool_use_id", f"{where}.content.{n}")
            )
        else:
            waiting.append(block)
    if waiting or not content:
        yield Message("user", _content(waiting, where, "\n") or "")


def _assistant(content: str | list[Any] | None, where: str) -> Message:
    if isinstance(content, str) or content is None:
        return Message("assistant", content or "")
    parts: list[Any] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for n, block in enumerate(content):
        at = f"{where}.content.{n}"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            reasoning.append(require_text(block, "thinking", at))
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use":
            arguments = _arguments(block.get("input"))
            calls.append(ToolCall(require_text(block, "id", at), require_text(block, "name", at), arguments))
        else:
            parts.append(_part(block, at))
    text = merge_text_parts(parts, "")
    return Message(
        "assistant",
        text or (None if calls else ""),
        tuple(calls),
        reasoning="".join(reasoning) or None,
    )


def _arguments(arguments: Any) -> str:
    if isinstance(arguments, dict) and arguments.keys() == {INVALID} and isinstance(arguments[INVALID], str):
        return str(arguments[INVALID])
    return encode_json({} if arguments is None else arguments)


def _content(content: str | list[Any] | None, where: str, separator: str) -> Content:
    if isinstance(content, str) or content is None:
        return content
    parts = [
        _part(block, f"{where}.content.{n}" if where != "system" else f"system.{n}")
        for n, block in enumerate(content)
    ]
    if where == "system":
        parts = [part for part in parts if not (isinstance(part, str) and part.startswith(_BILLING_PREFIX))]
    return merge_text_parts(parts, separator)


def _part(block: Any, where: str) -> str | dict[str, Any]:
    """Return a content block as text, or, if it is an image, as a content part of OpenAI's chat API.

    Unknown blocks become JSON text.
    """
    if isinstance(block, str):
        return block
    if not isinstance(block, dict):
        raise BadRequestError("a content block must be an object", where)
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return require_text(block, "text", where)
    if kind == "image":
        if not isinstance(source, dict):
            raise BadRequestError("an image block needs a source", f"{where}.source")
        if source.get("type") not in ("base64", "url"):
            raise BadRequestError("the source of an image must be base64 or url", f"{where}.source.type")
        url = source.get("url") or f"data:{source.get('media_type', 'image/png')};base64,{source.get('data', '')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return require_text(source, "data", f"{where}.source")
    # Show unknown blocks to the model: without them it would reply to a different request.
    return encode_json({name: value for name, value in block.items() if name != "cache_control"})


def _tool_choice(choice: _Choice | None) -> str | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if not choice.name:
            raise BadRequestError("tool_choice of type tool needs a name", "tool_choice.name")
        return choice.name
    if choice.type not in ("auto", "any", "none"):
        raise BadRequestError("tool_choice.type must be auto, any, tool or none", "tool_choice.type")
    return "required" if choice.type == "any" else choice.type


def _schema(request: _Request) -> Any:
    """Return the JSON schema that the reply must follow, from `output_config` or the older `output_format`.

    Returns None if the request has neither.
    """
    config = request.output_config
    form = config.get("format") if isinstance(config, dict) else None
    form = form if form is not None else request.output_format
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        where = "output_format" if form is request.output_format else "output_config.format"
        raise BadRequestError("the only supported output format is json_schema", where)
    return form.get("schema")


class _Tool(msgspec.Struct, frozen=True):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


_items = msgspec.json.Decoder(list[_Tool]).decode


def _parse_tools(raw: bytes) -> ToolSet:
    try:
        items = _items(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ToolsError(f"the list of tools in the request is invalid: {error}") from None
    schemas: list[ToolSchema] = []
    for at, tool in enumerate(items):
        if tool.type not in (None, "custom"):
            continue  # a tool that runs on the provider's servers
        if not tool.name:
            raise ToolsError(f"tool {at} of the request has no name")
        schemas.append(ToolSchema(tool.name, tool.description or "", tool.input_schema or {}))
    return make_tool_set(schemas)


_parse_tools_cached = lru_cache(maxsize=64)(_parse_tools)
