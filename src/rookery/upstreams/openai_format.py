"""Encode requests and decode replies of the OpenAI endpoints `/chat/completions` and `/completions`.

Pure: no socket, no clock.

Guarantees:
- a message keeps its meaning when it is encoded for the server and parsed again; a message that is JSON already is
  sent unchanged;
- a reply is parsed completely or raises `ReplyFormatError`: nothing is padded, guessed or cut to fit;
- token IDs and logprobs describe the same tokens, or `ReplyFormatError` is raised.

Unknown fields, which are most bytes of a reply, are skipped without decoding.
"""

from typing import Annotated, Any, Final

import msgspec

from rookery.core import Message, ToolCall, ints
from rookery.core.messages import Role
from rookery.upstreams.error_replies import error_text, preview
from rookery.upstreams.format import (
    ReplyContext,
    ReplyFormatError,
    Tops,
    WireOptions,
    pack_logprobs,
    parse_finish,
    parse_version,
)
from rookery.upstreams.logprobs import (
    Logprobs,
    RawLogprobs,
    SplitReply,
    convert_logprobs,
    logprob_values,
    split_logprobs,
)
from rookery.upstreams.protocol import ModelReply, ModelRequest
from rookery.upstreams.token_ids import PromptCache, encode_prompt, extract_prompt_ids, parse_ids

RESERVED: Final = frozenset({"model", "messages", "prompt", "stream", "stream_options", "n"})
"""Fields that `sampling.extra` may not set, since they change the format of the reply."""

DEFAULT_OPTIONS: Final = WireOptions()
_USAGE: Final = {"include_usage": True}


# ---------------------------------------------------------------------------------------------- requests


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ChatToolCall(msgspec.Struct, frozen=True):
    """A complete tool call in the format of OpenAI's chat API."""

    id: str
    function: _Function
    type: str = "function"

    @classmethod
    def from_call(cls, call: ToolCall) -> "ChatToolCall":
        return cls(call.id, _Function(call.name, call.arguments))


class _Outgoing(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str
    content: str | tuple[dict[str, Any], ...] | None
    tool_calls: tuple[ChatToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


_encode = msgspec.json.Encoder().encode


def _encode_message(message: Message, *, resend_reasoning: bool) -> _Outgoing:
    """Convert a message to OpenAI's chat format. Needed for messages with tool calls, with reasoning or without
    content; others have the right format already."""
    calls = tuple(map(ChatToolCall.from_call, message.tool_calls))
    content = message.content
    if content is None and not calls:
        content = ""  # null is for messages that only call tools; chat templates fail on it otherwise
    return _Outgoing(
        role=message.role,
        content=content,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning_content=message.reasoning if resend_reasoning else None,
    )


class SampledFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class SampledCall(msgspec.Struct, frozen=True):
    id: str | None = None
    function: SampledFunction | None = None


class _Written(msgspec.Struct, frozen=True):
    role: Role
    content: str | tuple[dict[str, Any], ...] | None = None
    tool_calls: tuple[SampledCall, ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


_decode_message = msgspec.json.Decoder(_Written).decode


def parse_message(message: Message | msgspec.Raw) -> Message:
    """Return a message, parsing it if it is JSON in OpenAI's chat format. Raises `ValueError` if it is invalid."""
    if isinstance(message, Message):
        return message
    try:
        decoded = _decode_message(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the message is not a valid chat message: {error}") from None
    calls = tuple(_call(call.function, call.id, n) for n, call in enumerate(decoded.tool_calls or ()))
    reasoning = decoded.reasoning_content if decoded.reasoning_content is not None else decoded.reasoning
    return Message(decoded.role, decoded.content, calls, decoded.tool_call_id, decoded.name, reasoning)


def encode_request(
    request: ModelRequest, options: WireOptions = DEFAULT_OPTIONS, extra_fields: dict[str, Any] | None = None
) -> bytes:
    """Return the JSON body of a request: for `/completions` if it has token IDs, else for `/chat/completions`.

    `extra_fields` are added to the body: fields that only one kind of inference engine has.
    """
    sampling, omit = request.sampling, options.omit
    body: dict[str, Any] = {"model": request.model}
    chat = not request.tokens
    if chat:
        messages: list[Message | msgspec.Raw | _Outgoing] = []
        for message in request.messages:
            # Messages that came over HTTP are JSON already, and plain messages need no conversion.
            if type(message) is Message and (
                message.tool_calls or message.reasoning is not None or message.content is None
            ):
                messages.append(_encode_message(message, resend_reasoning=options.resend_reasoning))
            else:
                messages.append(message)
        body["messages"] = messages
        if request.tools.schemas:
            body["tools"] = request.tools.raw or [
                {"type": "function", "function": tool} for tool in request.tools.schemas
            ]
            if (choice := request.tool_choice) is not None:
                named = choice not in ("auto", "none", "required")
                body["tool_choice"] = {"type": "function", "function": {"name": choice}} if named else choice
    else:
        body["prompt"] = encode_prompt(request.tokens, request.prompt_cache)
    if sampling.temperature is not None:
        body["temperature"] = sampling.temperature
    if sampling.top_p is not None:
        body["top_p"] = sampling.top_p
    if sampling.top_k is not None:
        body["top_k"] = sampling.top_k
    if sampling.max_tokens is not None:
        body["max_completion_tokens" if "max_tokens" in omit else "max_tokens"] = sampling.max_tokens
    if sampling.stop:
        body["stop"] = sampling.stop
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    tops = request.top_logprobs
    if (request.want_tokens or tops or request.want_logprobs) and "logprobs" not in omit:
        body["logprobs"] = True if chat else max(1, tops)
        if chat and tops:
            body["top_logprobs"] = tops
    if request.want_tokens and "return_token_ids" not in omit:
        body["return_token_ids"] = True
    if options.stream:
        body["stream"] = True
        if "stream_options" not in omit:
            body["stream_options"] = _USAGE
    if extra_fields:
        body.update(extra_fields)
    if sampling.extra:
        body.update(sampling.extra)
    return _encode(body)


# ----------------------------------------------------------------------------------------------- answers

_NULL: Final = msgspec.Raw(b"null")
Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _Incoming(msgspec.Struct, frozen=True):
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[SampledCall] | None = None
    function_call: SampledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    message: _Incoming | None = None
    text: str | None = None
    logprobs: Logprobs | None = None
    token_ids: msgspec.Raw = _NULL
    response_token_ids: msgspec.Raw = _NULL
    prompt_token_ids: list[Id] | None = None


class _ChoiceRawLogprobs(_Choice, frozen=True):
    logprobs: RawLogprobs | None = None  # type: ignore[assignment]


class ReportedUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: ReportedUsage | None = None
    prompt_token_ids: list[Id] | None = None
    weight_version: Any = None
    metadata: Any = None
    error: Any = None


class _AnswerRawLogprobs(_Answer, frozen=True):
    choices: list[_ChoiceRawLogprobs] | None = None  # type: ignore[assignment]


_UNKNOWN: Final = ReplyContext()
_decode = msgspec.json.Decoder(_Answer).decode
_decode_raw_logprobs = msgspec.json.Decoder(_AnswerRawLogprobs).decode


def decode_reply(
    data: bytes,
    *,
    want_tokens: bool = True,
    prompt: bytes = b"",
    raw_logprobs: bool = False,
    named: bool = True,
    context: ReplyContext = _UNKNOWN,
    prompt_cache: PromptCache | None = None,
) -> ModelReply:
    """Decode the JSON body of a complete reply. Raises `ReplyFormatError` if it is incomplete or invalid.

    With `want_tokens`, the result has the token IDs and logprobs, if the server returns token IDs. `prompt` holds
    the token IDs of the prompt, for a server that does not return them. With `raw_logprobs`, the result keeps the
    server's JSON of the logprobs. With both `raw_logprobs` and `named`, it also has the alternatives to each
    sampled token (top logprobs), if the server names tokens by ID (`token_id:…`). `context` has values for the
    result that are not in the body, such as the replica's name. `prompt_cache` caches the prompts of the
    conversation, so that only the new part of a long prompt is converted.
    """
    body, prompt_ids = extract_prompt_ids(data, prompt_cache) if want_tokens else (data, b"")
    try:
        answer, pieces = _read(body, raw_logprobs=raw_logprobs, named=named)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplyFormatError(f"the reply is not a chat completion: {error}; it begins {preview(data)}") from None
    if not answer.choices:
        detail = f": {error_text(answer.error)}" if answer.error else f"; it begins {preview(data)}"
        raise ReplyFormatError(f"the reply has no choices{detail}")
    choice = answer.choices[0]
    if choice.finish_reason is None:
        raise ReplyFormatError("the reply has no finish_reason: it is incomplete")
    finish = parse_finish(choice.finish_reason)
    if choice.message is not None:
        message = _message(choice.message)
    elif choice.text is not None:
        message = Message("assistant", choice.text)
    else:
        raise ReplyFormatError("the choice in the reply has no message")
    sampled = logprobs = b""
    as_written: msgspec.Raw | None = None
    tops: tuple[Tops, ...] = ()
    values: list[float] | None = None
    if pieces is not None:
        values, as_written = pieces.values, pieces.content if raw_logprobs else None
    elif raw_logprobs:
        values, as_written, tops = convert_logprobs(choice.logprobs, named=named)  # type: ignore[arg-type]
    elif choice.logprobs is not None:
        values = logprob_values(choice.logprobs)
    ids = choice.token_ids if choice.token_ids != _NULL else choice.response_token_ids
    if want_tokens and ids != _NULL:
        listed = answer.prompt_token_ids if answer.prompt_token_ids is not None else choice.prompt_token_ids
        prompt = prompt_ids or (ints(listed) if listed else prompt)
        text = bytes(ids)
        try:
            sampled = parse_ids(text)
        except ValueError as error:
            raise ReplyFormatError(f"the reply has invalid token IDs: {error}") from None
        if prompt_cache is not None and prompt_ids:
            prompt_cache.add_reply(sampled, text)
        if values is not None:
            if 4 * len(values) != len(sampled):
                raise ReplyFormatError(f"the reply has {len(sampled) // 4} token IDs but {len(values)} logprobs")
            logprobs = pack_logprobs(values)
    usage = answer.usage
    n_prompt = usage.prompt_tokens if usage is not None else None
    n_sampled = usage.completion_tokens if usage is not None else None
    return ModelReply(
        message=message,
        finish=finish,
        prompt=prompt,
        sampled=sampled,
        logprobs=logprobs,
        version=find_version(answer.weight_version, answer.metadata, context.version),
        prompt_tokens=len(prompt) // 4 if n_prompt is None else n_prompt,
        sampled_tokens=len(sampled) // 4 if n_sampled is None else n_sampled,
        queued=context.queued,
        replica=context.replica,
        tops=tops,
        logprob_content=as_written,
    )


def _read(data: bytes, *, raw_logprobs: bool, named: bool) -> tuple[_Answer, SplitReply | None]:
    """Decode the JSON of a reply. Also return the logprobs if they were extracted and decoded separately, else
    None."""
    if not (raw_logprobs and named) and (pieces := split_logprobs(data)) is not None:
        try:
            answer = _decode_raw_logprobs(pieces.rest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return (_decode_raw_logprobs if raw_logprobs else _decode)(data), None  # for the error's position
        if pieces.belongs([choice.logprobs for choice in answer.choices or ()]):
            return answer, pieces
    return (_decode_raw_logprobs if raw_logprobs else _decode)(data), None


def _message(message: _Incoming) -> Message:
    calls: tuple[ToolCall, ...] = ()
    if message.tool_calls:
        calls = tuple(_call(call.function, call.id, n) for n, call in enumerate(message.tool_calls))
    elif message.function_call is not None:
        calls = (_call(message.function_call, None, 0),)
    content = message.content if message.content is not None else message.refusal
    return Message(
        role="assistant",
        content=tuple(content) if isinstance(content, list) else content,
        tool_calls=calls,
        reasoning=message.reasoning_content if message.reasoning_content is not None else message.reasoning,
    )


def _call(function: SampledFunction | None, call_id: str | None, n: int) -> ToolCall:
    if function is None:
        function = SampledFunction()
    arguments = encode_arguments(function)
    return ToolCall(call_id or f"call_{n}", function.name or "", "{}" if arguments is None else arguments)


def encode_arguments(function: SampledFunction) -> str | None:
    """Return the arguments of a tool call as JSON text, also if the server sent an object; None if it sent
    none."""
    arguments = function.arguments
    return arguments if arguments is None or isinstance(arguments, str) else _encode(arguments).decode()


def find_version(version: object, metadata: object, fallback: int) -> int:
    found = parse_version(version)
    if found is None and isinstance(metadata, dict):
        found = parse_version(metadata.get("weight_version"))
    return fallback if found is None else found
