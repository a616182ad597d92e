"""The dialect of OpenAI's Responses API. Runs in gateway shards.

Guarantees:
- OpenAI's client library, its agents SDK and Codex can be used unchanged;
- a field that changes the meaning of a request is supported or rejected. Unknown items are shown to the model as
  JSON; tools that run on OpenAI's servers are not offered;
- a client can continue a reply by its ID or by sending its items back; in both cases the gateway recognises the
  conversation and can extend the sampled tokens;
- IDs of replies are valid until the session ends, also after a restart of the shard;
- errors have OpenAI's format; an error that a retry cannot fix has a status that OpenAI's client library does not
  retry.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Raw

from rookery.core import Message, Sampling
from rookery.gateway.dialects.protocol import BadRequestError, ClientRequest, ErrorKind, Operation
from rookery.gateway.dialects.responses_items import (
    RequestTools,
    find_references,
    get_reply_id,
    insert_items,
    parse_items,
    parse_tools,
    qualify_name,
)
from rookery.gateway.dialects.responses_stream import ResponsesReplyStream, make_response
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
    object_schema,
)
from rookery.gateway.dialects.shared import (
    MAX_TOP_LOGPROBS,
    NULL,
    SINGLE_CALL,
    Count,
    Field,
    Probability,
    Seed,
    Temperature,
    decode_body,
    encode,
    make_response_format,
    move_system_first,
    openai_error,
    reject_fields,
)
from rookery.upstreams.protocol import DecodeTokens, ModelReply

ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"
LOGPROBS: Final = "message.output_text.logprobs"


class ResponseContext(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a request of the Responses API that are needed later to format its response."""

    request_tools: RequestTools = RequestTools()
    input: str | list[Any] = ""
    """The input of the request if it refers to items of earlier replies by ID; otherwise empty."""
    instructions: str = ""
    encrypt_reasoning: bool = False
    """True if the client wants reasoning as `encrypted_content`."""
    echoed_fields: dict[str, Any] = {}
    created: int = 0


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input: str | list[Any] = []
    model: str = ""
    instructions: str | list[Any] | None = None
    stream: bool | None = False
    store: bool | None = True
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = False
    include: list[str] | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    seed: Seed | None = None
    tools: Field = UNSET
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    text: Any = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    # Rejected unless the value is empty.
    access_programs: Field = UNSET
    context_management: Field = UNSET
    image: Field = UNSET
    moderation: Field = UNSET
    prompt: Field = UNSET
    # Ignored, because they do not change the reply: identity, billing, caching, limits on tools that run on
    # OpenAI's servers, and hints on effort.
    client_metadata: Field = UNSET
    max_tool_calls: Field = UNSET
    prompt_cache_key: Field = UNSET
    prompt_cache_options: Field = UNSET
    prompt_cache_retention: Field = UNSET
    reasoning: Field = UNSET
    safety_identifier: Field = UNSET
    service_tier: Field = UNSET
    stream_options: Field = UNSET
    user: Field = UNSET


_UNSUPPORTED_FIELDS: Final = {
    "access_programs": "the gateway has no access programs",
    "image": "replies are text",
    "context_management": "compact the conversation in the client",
    "moderation": "the gateway does not moderate",
    "prompt": "prompt templates are not stored; send the instructions and the input",
}

_decode = msgspec.json.Decoder(_Request).decode


_REQUEST_SCHEMA: Final = object_schema(
    ["input"],
    "ResponsesRequest",
    model=TEXT,
    input={
        "type": ["string", "array"],
        "minItems": 1,
        "items": object_schema(
            ["role", "content"],
            type={"const": "message"},
            role={"enum": ["system", "developer", "user", "assistant"]},
            content=TEXT,
        ),
    },
    instructions={"type": ["string", "null"]},
    stream=FLAG,
    store=FLAG,
    include=TEXTS,
    max_output_tokens=COUNT,
    temperature=TEMPERATURE,
    top_p=PROBABILITY,
    tools={
        "type": ["array", "null"],
        "items": object_schema(
            ["type", "name"], type={"const": "function"}, name=NAME, parameters={"type": "object"}
        ),
    },
    tool_choice={"enum": ["none", "auto", "required", None]},
    previous_response_id={"type": "null", "description": "The ID of an earlier response of the session."},
    background={"enum": [False, None]},
    conversation={"type": "null"},
    metadata={"type": ["object", "null"]},
)
_RESPONSE_SCHEMA: Final = object_schema(
    ["id", "object", "created_at", "model", "status", "output", "usage", "error"],
    "ResponsesResponse",
    object={"const": "response"},
    status={"enum": ["completed", "incomplete"]},
    output=list_schema({"type": "object", "required": ["type", "id"]}),
    usage=INPUT_USAGE,
)


class ResponsesDialect:
    """Dialect of OpenAI's Responses API. Serves `/responses`, `/responses/input_tokens` and `/responses/ID`."""

    name = "responses"
    paths: tuple[str, ...] = ("/responses",)
    count_paths: tuple[str, ...] = ("/responses/input_tokens",)
    stored_path = "/responses/"

    def parse_request(self, body: bytes) -> ClientRequest:
        request = decode_body(_decode, body)
        reject_fields(request, _UNSUPPORTED_FIELDS)
        if request.truncation not in (None, "auto", "disabled"):  # a prompt that is too long is a separate error
            raise BadRequestError("truncation must be auto or disabled", "truncation")
        if request.background:
            raise BadRequestError("background responses are not supported; request a stream", "background")
        if request.conversation is not None:
            raise BadRequestError(
                "conversations are not stored; send all input items, or a previous_response_id", "conversation"
            )
        request_tools = RequestTools()
        if request.tools is not UNSET and bytes(request.tools) != NULL:
            request_tools = parse_tools(bytes(request.tools))
        instructions = _instructions(request.instructions)
        after = request.previous_response_id or ""
        references = find_references(request.input)
        messages = () if references else tuple(parse_items(request.input))
        if not messages and not after and not references:
            raise BadRequestError("the input is empty: send at least one item", "input")
        first = (Message("system", instructions),) if instructions else ()
        include = request.include or []
        return ClientRequest(
            messages=messages if after else move_system_first((*first, *messages), merge=False),
            model=request.model,
            tools=request_tools.tools,
            tool_choice=_tool_choice(request.tool_choice, request_tools),
            sampling=Sampling(
                temperature=request.temperature,
                top_p=request.top_p,
                max_tokens=request.max_output_tokens,
                seed=request.seed,
                extra=_format(request.text)
                | (SINGLE_CALL if request_tools.tools.schemas and request.parallel_tool_calls is False else {}),
            ),
            stream=bool(request.stream),
            want_logprobs=LOGPROBS in include or bool(request.top_logprobs),
            top_logprobs=request.top_logprobs or 0,
            reply_id=secrets.token_hex(12) if request.store is not False else "",
            previous_id=after.removeprefix("resp_"),
            references=references,
            instruction_length=len(instructions),
            dialect_data=ResponseContext(
                request_tools=request_tools,
                input=request.input if references else "",
                instructions=instructions,
                encrypt_reasoning=ENCRYPTED_REASONING in include,
                created=int(time.time()),
                echoed_fields={
                    "instructions": request.instructions,
                    "max_output_tokens": request.max_output_tokens,
                    "metadata": request.metadata or {},
                    "parallel_tool_calls": request.parallel_tool_calls is not False,
                    "previous_response_id": request.previous_response_id,
                    "store": request.store is not False,
                    "temperature": request.temperature,
                    "text": request.text if isinstance(request.text, dict) else {"format": {"type": "text"}},
                    "tool_choice": request.tool_choice or "auto",
                    "top_p": request.top_p,
                },
            ),
        )

    def format_response(self, client_request: ClientRequest, replies: list[ModelReply]) -> bytes:
        (reply,) = replies
        return encode(make_response(client_request, client_request.reply_id or secrets.token_hex(12), reply))

    def open_stream(
        self, client_request: ClientRequest, decode_tokens: DecodeTokens | None = None
    ) -> ResponsesReplyStream:
        return ResponsesReplyStream(client_request, decode_tokens)

    def format_error(self, problem: ErrorKind, message: str, where: str | None = None) -> tuple[int, bytes]:
        status, error = openai_error(problem, message, "input" if where == "messages" else where)
        return status, encode({"error": error})

    def format_token_count(self, tokens: int) -> bytes:
        return b'{"object":"response.input_tokens","input_tokens":%d}' % tokens

    def describe_operations(self) -> dict[str, Operation]:
        return describe_operations(self, "Create a response.", _REQUEST_SCHEMA, _RESPONSE_SCHEMA)

    def find_referenced_response(self, name: str) -> str:
        return get_reply_id(name)

    def resolve_references(self, client_request: ClientRequest, answers: Mapping[str, Message]) -> ClientRequest:
        context: ResponseContext = client_request.dialect_data
        assert not isinstance(context.input, str)
        messages = tuple(parse_items(insert_items(context.input, answers, context.request_tools)))
        if not client_request.previous_id:
            first = (Message("system", context.instructions),) if context.instructions else ()
            messages = move_system_first((*first, *messages), merge=False)
        return msgspec.structs.replace(client_request, messages=messages)

    def prepend_history(
        self, client_request: ClientRequest, history: Sequence[Message], head: int
    ) -> ClientRequest:
        context: ResponseContext = client_request.dialect_data
        first = [Message("system", context.instructions)] if context.instructions else []
        if head and history and isinstance(text := history[0].content, str):
            rest = text[head:].removeprefix("\n\n")
            history = [*([Message(history[0].role, rest)] if rest else []), *history[1:]]
        own = (message for message in client_request.messages if isinstance(message, Message))
        return msgspec.structs.replace(
            client_request, messages=move_system_first((*first, *history, *own), merge=False)
        )

    def format_stored(self, name: str, reply: ModelReply, model: str) -> bytes:
        context = ResponseContext(created=int(reply.turn.started))
        return encode(
            make_response(ClientRequest(model=model, dialect_data=context), name.removeprefix("resp_"), reply)
        )

    def format_deleted(self, name: str) -> bytes:
        return encode({"id": name, "object": "response.deleted", "deleted": True})


def _instructions(instructions: str | list[Any] | None) -> str:
    if instructions is None or isinstance(instructions, str):
        return instructions or ""
    return "\n\n".join(message.text for message in parse_items(instructions) if message.text)


def _tool_choice(choice: Any, request_tools: RequestTools) -> str | None:
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise BadRequestError(
                "tool_choice must be none, auto, required or an object that names a tool", "tool_choice"
            )
        return choice
    if not isinstance(choice, dict):
        raise BadRequestError("tool_choice must be a string or an object", "tool_choice")
    kind, name = choice.get("type"), choice.get("name")
    if kind in ("function", "custom"):
        if not isinstance(name, str) or not name:
            raise BadRequestError(
                "tool_choice has no `name`, which must be the name of a tool", "tool_choice.name"
            )
        return qualify_name(choice.get("namespace"), name)
    if kind == "allowed_tools":
        listed = [one for one in choice.get("tools") or () if isinstance(one, dict)]
        allowed = {qualify_name(one.get("namespace"), str(one.get("name"))) for one in listed}
        if missing := sorted({tool.name for tool in request_tools.tools.schemas} - allowed):
            message = (
                f"allowed_tools must list every tool of the request; remove the others ({', '.join(missing)})"
            )
            raise BadRequestError(message, "tool_choice.tools")
        return "required" if choice.get("mode") == "required" else "auto"
    raise BadRequestError(f"tool_choice of type {str(kind)[:80]!r} is not supported", "tool_choice.type")


def _format(text: Any) -> dict[str, Any]:
    """Return the field `text.format` of a request, the required format of the reply, as `response_format`.

    The result is passed to the inference engine with the sampling parameters; it is empty for plain text.
    """
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(form, dict):
        return {}
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise BadRequestError("the type of text.format must be text, json_object or json_schema", "text.format")
    if kind == "json_schema":
        return {
            "response_format": make_response_format(
                form.get("name") or "answer", form.get("schema"), form.get("strict")
            )
        }
    return {"response_format": Raw(b'{"type":"json_object"}')} if kind == "json_object" else {}
