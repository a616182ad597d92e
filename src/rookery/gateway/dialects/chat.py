"""The dialect of OpenAI's chat completions API. Runs in gateway shards.

Guarantees:
- OpenAI's client library can be used unchanged;
- a field that changes the meaning of a request is supported or rejected; sampling fields that inference engines
  know are passed to the inference engine unchanged;
- errors have OpenAI's format; an error that a retry cannot fix has a status that OpenAI's client library does not
  retry;
- the last events of a stream are sent after the gateway has recorded the turn, so that a client that received them
  can rely on the record.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Raw

from rookery.core import Message
from rookery.gateway.dialects.openai import (
    PASSED_FIELDS,
    OpenAIReplyStream,
    OpenAIRequest,
    format_openai_error,
    make_envelope,
)
from rookery.gateway.dialects.protocol import BadRequestError, ClientRequest, ErrorKind, Operation
from rookery.gateway.dialects.schemas import (
    COUNT,
    FLAG,
    OBJECTS,
    PROBABILITY,
    STOPS,
    TEMPERATURE,
    TEXT,
    completion_schema,
    describe_operations,
    messages_schema,
    object_schema,
)
from rookery.gateway.dialects.shared import (
    KEEPALIVE_INTERVAL,
    MAX_TOP_LOGPROBS,
    NULL,
    SINGLE_CALL,
    Count,
    Field,
    decode_body,
    encode,
    format_delta_logprobs,
    format_reply_logprobs,
    get_finish_reason,
    openai_usage,
    reject_fields,
)
from rookery.gateway.tools import parse_chat_tools
from rookery.upstreams.openai_format import ChatToolCall
from rookery.upstreams.protocol import NO_TOOLS, CallDelta, DecodeTokens, Delta, ModelReply
from rookery.upstreams.token_ids import encode_ids


class _Named(msgspec.Struct, frozen=True):
    name: str


class _Choice(msgspec.Struct, frozen=True):
    type: str = "function"
    function: _Named | None = None


class _Request(OpenAIRequest, frozen=True, kw_only=True):
    messages: Annotated[list[Raw], msgspec.Meta(min_length=1)]
    tools: Field = UNSET  # with None as default, msgspec would accept only null
    tool_choice: str | _Choice | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    # Passed to the inference engine unchanged.
    bad_words: Field = UNSET
    chat_template_kwargs: Field = UNSET
    reasoning_effort: Field = UNSET
    # Rejected unless the value is empty.
    audio: Field = UNSET
    functions: Field = UNSET
    function_call: Field = UNSET
    moderation: Field = UNSET
    web_search_options: Field = UNSET
    modalities: list[str] | None = None
    parallel_tool_calls: bool | None = None
    # Ignored: a hint that models may follow or not.
    verbosity: Field = UNSET


_UNSUPPORTED_FIELDS: Final = {
    "audio": "replies are text",
    "functions": "send `tools` instead",
    "function_call": "send `tool_choice` instead",
    "moderation": "the gateway does not moderate",
    "web_search_options": "the gateway does not search the web",
}

_FIELDS: Final = _Request.__struct_fields__
_PASSED_FIELDS: Final = (*PASSED_FIELDS, *_FIELDS[_FIELDS.index("bad_words") : _FIELDS.index("audio")])
_decode = msgspec.json.Decoder(_Request).decode


_REQUEST_SCHEMA: Final = object_schema(
    ["messages"],
    "ChatCompletionRequest",
    model=TEXT,
    messages=messages_schema(
        ["system", "developer", "user", "assistant", "tool"],
        {"type": ["string", "array", "null"], "items": {"type": "object"}},
    ),
    stream=FLAG,
    stream_options={"type": ["object", "null"], "properties": {"include_usage": FLAG}},
    tools=OBJECTS,
    tool_choice={"type": ["string", "object", "null"]},
    n={"type": ["integer", "null"], "minimum": 1, "maximum": 64},
    temperature=TEMPERATURE,
    top_p=PROBABILITY,
    max_tokens=COUNT,
    max_completion_tokens=COUNT,
    stop=STOPS,
    seed={"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1},
    logprobs=FLAG,
    top_logprobs={"type": ["integer", "null"], "minimum": 0, "maximum": 20},
)
_RESPONSE_SCHEMA: Final = completion_schema(
    "ChatCompletionResponse",
    "chat.completion",
    object_schema(
        ["index", "message", "finish_reason"],
        message={"type": "object", "required": ["role", "content"]},
        finish_reason={"enum": ["stop", "length", "tool_calls", "content_filter"]},
    ),
    usage={"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]},
)


class ChatDialect:
    """Dialect of OpenAI's chat completions API. Serves `/chat/completions`."""

    name = "chat"
    paths: tuple[str, ...] = ("/chat/completions",)

    def parse_request(self, body: bytes) -> ClientRequest:
        request = decode_body(_decode, body)
        reject_fields(request, _UNSUPPORTED_FIELDS)
        if set(request.modalities or ()) - {"text"}:
            raise BadRequestError("the only supported value of modalities is text", "modalities")
        if request.top_logprobs and not request.logprobs:
            raise BadRequestError("top_logprobs requires that logprobs is true", "top_logprobs")
        limits = [n for n in (request.max_tokens, request.max_completion_tokens) if n is not None]
        tools = request.tools if request.tools is not UNSET and bytes(request.tools) != NULL else None
        sampling = request.sampling(min(limits) if limits else None, _PASSED_FIELDS)
        if tools is not None and request.parallel_tool_calls is False:
            sampling = msgspec.structs.replace(sampling, extra={**sampling.extra, **SINGLE_CALL})
        return ClientRequest(
            messages=tuple(request.messages),
            model=request.model,
            tools=NO_TOOLS if tools is None else parse_chat_tools(bytes(tools)),
            tool_choice=_tool_choice(request.tool_choice),
            sampling=sampling,
            n=request.n or 1,
            stream=bool(request.stream),
            include_usage=request.usage,
            want_logprobs=bool(request.logprobs),
            top_logprobs=request.top_logprobs or 0,
            return_token_ids=bool(request.return_token_ids),
        )

    def format_response(self, client_request: ClientRequest, replies: list[ModelReply]) -> bytes:
        response: dict[str, Any] = {
            **make_envelope(client_request, "chatcmpl", "chat.completion"),
            "choices": [self._choice(client_request, index, reply) for index, reply in enumerate(replies)],
            "usage": openai_usage(replies, client_request.n),
        }
        if client_request.return_token_ids:
            response["prompt_token_ids"] = encode_ids(replies[0].prompt)
        return encode(response)

    @staticmethod
    def _choice(client_request: ClientRequest, index: int, reply: ModelReply) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": _message(reply.message),
            "logprobs": _logprobs(client_request, reply) if client_request.want_logprobs else None,
            "finish_reason": get_finish_reason(reply.finish),
        }
        if client_request.return_token_ids:
            choice["token_ids"] = encode_ids(reply.sampled)
        return choice

    def open_stream(
        self, client_request: ClientRequest, decode_tokens: DecodeTokens | None = None
    ) -> "ChatReplyStream":
        return ChatReplyStream(client_request, decode_tokens)

    def format_error(self, problem: ErrorKind, message: str, where: str | None = None) -> tuple[int, bytes]:
        return format_openai_error(problem, message, where)

    def describe_operations(self) -> dict[str, Operation]:
        return describe_operations(self, "Create a chat completion.", _REQUEST_SCHEMA, _RESPONSE_SCHEMA)


class ChatReplyStream(OpenAIReplyStream):
    """Formats one streamed response of OpenAI's chat completions API."""

    def __init__(self, client_request: ClientRequest, decode_tokens: DecodeTokens | None) -> None:
        super().__init__(
            client_request, decode_tokens, make_envelope(client_request, "chatcmpl", "chat.completion.chunk")
        )
        self._begun: set[int] = set()
        self._silent = 0
        self._prompt = client_request.return_token_ids

    def format_delta(self, choice: int, delta: Delta) -> bytes:
        """Return the stream chunks for the next part of a choice's reply; empty if there is nothing to send.

        A chunk has at most one `tool_calls` entry, and the ID and name of a call come in a chunk before its
        arguments. OpenAI and vLLM send them this way, and some clients read only the first entry of a chunk.
        """
        client_request = self._request
        fields: dict[str, Any] = {}
        if choice not in self._begun:
            self._begun.add(choice)
            fields = {"role": "assistant", "content": ""}
        if delta.content:
            fields["content"] = delta.content
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        calls = [entry for call in delta.tool_calls for entry in _call_deltas(call)]
        if not fields and calls:
            fields = {"tool_calls": [calls.pop(0)]}
        has_tokens = delta.sampled and (client_request.want_logprobs or client_request.return_token_ids)
        if not fields and not has_tokens:
            self._silent += 1
            return self._chunk(choice, {}) if self._silent % KEEPALIVE_INTERVAL == 0 else b""
        more = tail = b""
        if client_request.return_token_ids:
            more = b',"token_ids":' + bytes(encode_ids(delta.sampled))
        content = format_delta_logprobs(client_request, delta, self._decode_tokens)
        logprobs = b"null" if content is None else encode({"content": content})
        if self._prompt and delta.prompt:
            self._prompt = False
            tail = b',"prompt_token_ids":' + bytes(encode_ids(delta.prompt))
        first = self._chunk(choice, fields, logprobs, more, tail)
        if not calls:
            return first
        more = b',"token_ids":[]' if client_request.return_token_ids else b""
        return first + b"".join([self._chunk(choice, {"tool_calls": [call]}, b"null", more) for call in calls])

    def _chunk(
        self, choice: int, fields: dict[str, Any], logprobs: bytes = b"null", more: bytes = b"", tail: bytes = b""
    ) -> bytes:
        return b'%b,"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}]%b}\n\n' % (
            self._envelope,
            choice,
            encode(fields),
            logprobs,
            more,
            tail,
        )

    def format_choice_end(self, choice: int, reply: ModelReply) -> bytes:
        first = b"" if choice in self._begun else self.format_delta(choice, Delta())
        return first + b'%b,"choices":[{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}]}\n\n' % (
            self._envelope,
            choice,
            get_finish_reason(reply.finish).encode(),
        )


def _tool_choice(choice: str | _Choice | None) -> str | None:
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise BadRequestError(
            "tool_choice must be none, auto, required or an object that names a function", "tool_choice"
        )
    if choice is None or isinstance(choice, str):
        return choice
    if choice.function is None:
        raise BadRequestError(
            "tool_choice is an object without `function`, which must name a function", "tool_choice"
        )
    return choice.function.name


def _message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [ChatToolCall.from_call(call) for call in message.tool_calls]
        fields["content"] = message.content or None
    elif message.content is None:
        fields["content"] = ""
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    return fields


def _call_deltas(call: CallDelta) -> Iterator[dict[str, Any]]:
    """Yield the `tool_calls` entries for one part of a tool call: first the ID and name, then the arguments."""
    if call.id or call.name:
        head: dict[str, Any] = {"index": call.index}
        if call.id:
            head |= {"id": call.id, "type": "function"}
        yield {**head, "function": {"name": call.name, "arguments": ""}}
    if call.arguments:
        yield {"index": call.index, "function": {"arguments": call.arguments}}


def _logprobs(client_request: ClientRequest, reply: ModelReply) -> dict[str, Any] | None:
    content = format_reply_logprobs(client_request, reply)
    return None if content is None else {"content": content}
