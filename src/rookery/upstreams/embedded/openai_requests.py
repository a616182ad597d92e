"""Parse the requests that OpenAI clients send to the embedded policy's server. Pure: no socket, no clock.

Guarantees:
- unknown fields are ignored, since clients send many;
- a wrong type or an invalid value is refused with an error that names the field;
- options that would change the reply and are not supported (images, top logprobs) are refused too;
- the first choice of a request uses the seed of the request; each further choice (`n` above 1) has its own seed,
  derived from it.
"""

import re
import secrets
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from rookery.core import Message, Sampling, ToolCall, ToolSchema, ints
from rookery.core.seeds import derive_seed
from rookery.upstreams.embedded import chat
from rookery.upstreams.protocol import ModelRequest, ToolSet

MAX_CHOICES: Final = 64
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 512
T = TypeVar("T")


class RequestError(Exception):
    """Raised for an invalid request, with the fields of OpenAI's error format and the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class ParsedRequest(NamedTuple):
    """A parsed request to `/chat/completions` or `/completions`."""

    chat: bool
    model: str
    requests: tuple[ModelRequest, ...]
    """One request per choice to return: `n` for the first prompt, then `n` for the second, and so on."""
    n: int
    stream: bool
    usage: bool
    """True if the last event of a stream must contain the token counts."""
    logprobs: bool
    token_ids: bool


# ------------------------------------------------------------------------------------------------- bodies

_Count = Annotated[int, msgspec.Meta(ge=1)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: _Count | None = None
    return_token_ids: bool | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class MessageBody(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Schema(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Named(msgspec.Struct):
    name: str


class _Choice(msgspec.Struct):
    type: Literal["function"]
    function: _Named


class _Chat(_Common, kw_only=True):
    messages: Annotated[list[MessageBody], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | _Choice | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None


class _Completion(_Common, kw_only=True):
    prompt: str | list[int | str | list[int]]
    logprobs: int | bool | None = None
    echo: bool | None = None
    best_of: int | None = None


class Update(msgspec.Struct):
    """The body of `/update_weights`."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None = None


_FIELD_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode the JSON body of a request. Raises `RequestError`, which names the invalid field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _validation_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body of the request is not valid JSON: {error}") from None


def _validation_error(error: msgspec.ValidationError, field: str = "") -> RequestError:
    text = str(error)
    match = _FIELD_PATH.search(text)
    param = field + (match[1] if match else "") or None
    problem = (text[: match.start()] if match else text).replace("`", "")
    problem = problem[:1].lower() + problem[1:]
    return RequestError(f"{param or 'the body'}: {problem}", param=param)


# -------------------------------------------------------------------------------------------- parsing


def parse_chat_request(body: bytes, context: int) -> ParsedRequest:
    """Parse the body of `/chat/completions`. `context` is the maximum number of tokens of prompt and reply."""
    parsed = decode_body(body, _Chat)
    if parsed.top_logprobs:
        raise RequestError(
            "the embedded policy does not return alternatives: top_logprobs must be 0", param="top_logprobs"
        )
    tools = read_tools(parsed.tools or [])
    messages = tuple(read_message(message, number) for number, message in enumerate(parsed.messages))
    _check_length(sum(map(_min_tokens, messages)), context)
    most = parsed.max_completion_tokens if parsed.max_completion_tokens is not None else parsed.max_tokens
    one = ModelRequest(
        model=parsed.model or "",
        messages=messages,
        tools=ToolSet(tools),
        tool_choice=_tool_choice(parsed.tool_choice, tools),
        sampling=_sampling(parsed, most),
    )
    if parsed.parallel_tool_calls is False:
        sampling = msgspec.structs.replace(one.sampling, extra={"parallel_tool_calls": False})
        one = msgspec.structs.replace(one, sampling=sampling)
    return _build_request(parsed, (one,), is_chat=True, logprobs=bool(parsed.logprobs))


def parse_completion_request(body: bytes, context: int) -> ParsedRequest:
    """Parse the body of `/completions`. `context` is the maximum number of tokens of prompt and reply."""
    parsed = decode_body(body, _Completion)
    if parsed.logprobs is not None and parsed.logprobs > 1:
        raise RequestError(
            "the embedded policy does not return alternatives: logprobs must be 0 or 1", param="logprobs"
        )
    if parsed.logprobs is not None and parsed.logprobs < 0:
        raise RequestError("logprobs: expected int >= 0", param="logprobs")
    if parsed.echo:
        raise RequestError(
            "the embedded policy does not return the prompt with the reply: echo must be false", param="echo"
        )
    if parsed.best_of is not None and parsed.best_of != (parsed.n or 1):
        raise RequestError("the embedded policy returns every completion: best_of must equal n", param="best_of")
    sampling = _sampling(parsed, parsed.max_tokens)
    prompts = _prompts(parsed.prompt, context)
    if len(prompts) * (parsed.n or 1) > MAX_CHOICES:
        raise RequestError(
            f"the number of prompts times n must be at most {MAX_CHOICES}",
            param="prompt",
        )
    requests = tuple(ModelRequest(model=parsed.model or "", tokens=ids, sampling=sampling) for ids in prompts)
    # `logprobs: 0` asks for the sampled tokens' own, `false` for none.
    return _build_request(
        parsed, requests, is_chat=False, logprobs=parsed.logprobs is not None and parsed.logprobs is not False
    )


def _build_request(
    body: _Common, requests: tuple[ModelRequest, ...], *, is_chat: bool, logprobs: bool
) -> ParsedRequest:
    n = body.n or 1
    options = body.stream_options
    root = body.seed if body.seed is not None else secrets.randbits(63)
    seeds = [root, *(derive_seed(root, "choice", number) for number in range(1, n))]
    each = [
        msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=seed))
        for request in requests
        for seed in seeds
    ]
    return ParsedRequest(
        chat=is_chat,
        model=body.model or "",
        requests=tuple(each),
        n=n,
        stream=bool(body.stream),
        usage=bool(options is not None and options.include_usage),
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
    )


def _sampling(body: _Common, most: int | None) -> Sampling:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > MAX_STOPS:
        raise RequestError(f"stop must have at most {MAX_STOPS} strings", param="stop")
    if not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in stop):
        raise RequestError(f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        max_tokens=most,
        stop=stop,
        seed=body.seed,
    )


def read_message(body: MessageBody, number: int) -> Message:
    content: str | None
    if isinstance(body.content, list):
        field = f"messages[{number}].content"
        content = "".join(_part(part, f"{field}[{at}]") for at, part in enumerate(body.content))
    else:
        content = body.content
    calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in body.tool_calls or ())
    return Message(body.role, content, calls, tool_call_id=body.tool_call_id, name=body.name)


def _part(part: dict[str, Any], field: str) -> str:
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise RequestError(
            f"{field}: the embedded policy supports only text, not a part of type {_short(kind)}", param=field
        )
    if not isinstance(text, str):
        raise RequestError(f"{field}: the part has no text", param=field)
    return text


def read_tools(tools: list[dict[str, Any]]) -> tuple[ToolSchema, ...]:
    found: list[ToolSchema] = []
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":  # hosted tools such as web_search
            continue
        field = f"tools[{number}].function"
        try:
            schema = msgspec.convert(tool.get("function"), _Schema)
        except msgspec.ValidationError as error:
            inner = f"{field}." if " - at " in str(error) else field
            raise _validation_error(error, inner) from None
        found.append(ToolSchema(schema.name, schema.description or "", schema.parameters or {}))
    return tuple(found)


def _tool_choice(choice: str | _Choice | None, tools: tuple[ToolSchema, ...]) -> str | None:
    if choice is None or choice in ("auto", "none"):
        return choice
    if choice == "required":
        if not tools:
            raise RequestError(
                "tool_choice requires a tool call, but the request has no tools", param="tool_choice"
            )
        return choice
    if isinstance(choice, str):
        words = f"tool_choice: {_short(choice)} is not auto, none, required or a function"
        raise RequestError(words, param="tool_choice")
    name = choice.function.name
    if name not in (tool.name for tool in tools):
        raise RequestError(f"tool_choice: there is no tool {_short(name)}", param="tool_choice")
    return name


def _check_length(least: int, context: int) -> None:
    """Raise `RequestError` if a prompt of at least `least` tokens is too long.

    This is checked before the prompt is tokenised, because tokenising a huge prompt would block the event loop.
    """
    if least >= context:
        words = f"the prompt is too long: it has at least {least} tokens, and with its answer {context} fit"
        raise RequestError(words, code="context_length_exceeded")


def _min_tokens(message: Message) -> int:
    """Return a lower bound for the number of tokens of a message: one per character."""
    return len(message.text) + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)


def _prompts(prompt: str | list[int | str | list[int]], context: int) -> list[bytes]:
    """Return the token IDs of each prompt (int32 bytes). A text becomes the token `<begin>` and its UTF-8
    bytes."""
    if isinstance(prompt, str):
        return [_ids(prompt, "prompt", context)]
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [_ids(prompt, "prompt", context)]
    return [_ids(prompt, f"prompt[{number}]", context) for number, prompt in enumerate(prompt)]


def _ids(prompt: object, field: str, context: int) -> bytes:
    if isinstance(prompt, str):
        _check_length(len(prompt), context)
        return ints([chat.BEGIN, *chat.text_ids(prompt)])
    if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
        raise RequestError(f"{field}: all prompts must be strings, or all must be lists of token IDs", param=field)
    if not prompt:
        raise RequestError(f"{field} is empty: it needs at least one token ID", param=field)
    _check_length(len(prompt), context)
    if not all(0 <= token < 1 << 31 for token in prompt):
        raise RequestError(
            f"{field} contains numbers that are not token IDs: IDs are from 0 to 2147483647", param=field
        )
    return ints(prompt)


def _short(value: object) -> str:
    return f"{value!r:.60}"
