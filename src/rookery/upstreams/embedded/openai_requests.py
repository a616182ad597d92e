"""The bodies that OpenAI clients send to the embedded policy's server. Pure: no socket, no clock.

Promises:
- fields that are not known are passed over: clients of all kinds send them;
- a wrong type and a value that cannot be are refused in words that name the field;
- what would be ignored silently although an answer depends on it (images, alternatives) is refused too;
- every choice of a request has a seed of its own, made of the request's; the first has the request's itself.
"""

import re
import secrets
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from rookery.core import Message, Sampling, ToolCall, ToolSchema, ints
from rookery.core.seeds import derive_seed
from rookery.upstreams.embedded import chat
from rookery.upstreams.protocol import ModelRequest, ToolSet

CHOICES: Final = 64
STOPS: Final = 16
STOP_CHARACTERS: Final = 512
T = TypeVar("T")


class RequestError(Exception):
    """What is wrong with a request, in OpenAI's terms."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class ParsedRequest(NamedTuple):
    """A request as it is understood."""

    chat: bool
    model: str
    asks: tuple[ModelRequest, ...]
    """One for each choice: `n` of the first prompt, then `n` of the second."""
    n: int
    stream: bool
    usage: bool
    """Whether a stream ends with the usage."""
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
    n: Annotated[int, msgspec.Meta(ge=1, le=CHOICES)] | None = None
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


_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


def decoded(body: bytes, kind: type[T]) -> T:
    """The body, or `RequestError` that says in which field it is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON that can be read: {error}") from None


def _refusal(error: msgspec.ValidationError, place: str = "") -> RequestError:
    said = str(error)
    found = _PLACE.search(said)
    param = place + (found[1] if found else "") or None
    what = (said[: found.start()] if found else said).replace("`", "")
    what = what[:1].lower() + what[1:]
    return RequestError(f"{param or 'the body'}: {what}", param=param)


# -------------------------------------------------------------------------------------------- into orders


def chat_order(body: bytes, context: int) -> ParsedRequest:
    """Of `/chat/completions`. `context`: the tokens that a prompt and its answer may have."""
    said = decoded(body, _Chat)
    if said.top_logprobs:
        raise RequestError(
            "the embedded policy does not return alternatives: top_logprobs must be 0", param="top_logprobs"
        )
    tools = read_tools(said.tools or [])
    messages = tuple(read_message(message, number) for number, message in enumerate(said.messages))
    _check_length(sum(map(_least, messages)), context)
    most = said.max_completion_tokens if said.max_completion_tokens is not None else said.max_tokens
    one = ModelRequest(
        model=said.model or "",
        messages=messages,
        tools=ToolSet(tools),
        tool_choice=_tool_choice(said.tool_choice, tools),
        sampling=_sampling(said, most),
    )
    if said.parallel_tool_calls is False:
        sampling = msgspec.structs.replace(one.sampling, extra={"parallel_tool_calls": False})
        one = msgspec.structs.replace(one, sampling=sampling)
    return _order(said, (one,), is_chat=True, logprobs=bool(said.logprobs))


def completion_order(body: bytes, context: int) -> ParsedRequest:
    """Of `/completions`."""
    said = decoded(body, _Completion)
    if said.logprobs is not None and said.logprobs > 1:
        raise RequestError(
            "the embedded policy does not return alternatives: logprobs must be 0 or 1", param="logprobs"
        )
    if said.logprobs is not None and said.logprobs < 0:
        raise RequestError("logprobs: expected int >= 0", param="logprobs")
    if said.echo:
        raise RequestError("the embedded policy does not echo prompts", param="echo")
    if said.best_of is not None and said.best_of != (said.n or 1):
        raise RequestError("the embedded policy returns every completion: best_of must equal n", param="best_of")
    sampling = _sampling(said, said.max_tokens)
    prompts = _prompts(said.prompt, context)
    if len(prompts) * (said.n or 1) > CHOICES:
        raise RequestError(f"prompts times n can be at most {CHOICES}", param="prompt")
    asks = tuple(ModelRequest(model=said.model or "", tokens=ids, sampling=sampling) for ids in prompts)
    # `logprobs: 0` asks for the sampled tokens' own, `false` for none.
    return _order(said, asks, is_chat=False, logprobs=said.logprobs is not None and said.logprobs is not False)


def _order(said: _Common, asks: tuple[ModelRequest, ...], *, is_chat: bool, logprobs: bool) -> ParsedRequest:
    n = said.n or 1
    options = said.stream_options
    root = said.seed if said.seed is not None else secrets.randbits(63)
    seeds = [root, *(derive_seed(root, "choice", number) for number in range(1, n))]
    each = [
        msgspec.structs.replace(ask, sampling=msgspec.structs.replace(ask.sampling, seed=seed))
        for ask in asks
        for seed in seeds
    ]
    return ParsedRequest(
        chat=is_chat,
        model=said.model or "",
        asks=tuple(each),
        n=n,
        stream=bool(said.stream),
        usage=bool(options is not None and options.include_usage),
        logprobs=logprobs,
        token_ids=bool(said.return_token_ids),
    )


def _sampling(said: _Common, most: int | None) -> Sampling:
    stop = (said.stop,) if isinstance(said.stop, str) else tuple(said.stop or ())
    if len(stop) > STOPS:
        raise RequestError(f"stop must have at most {STOPS} strings", param="stop")
    if not all(0 < len(text) <= STOP_CHARACTERS for text in stop):
        raise RequestError(f"a stop string must have 1 to {STOP_CHARACTERS} characters", param="stop")
    return Sampling(
        temperature=said.temperature,
        top_p=said.top_p,
        top_k=said.top_k,
        max_tokens=most,
        stop=stop,
        seed=said.seed,
    )


def read_message(said: MessageBody, number: int) -> Message:
    content: str | None
    if isinstance(said.content, list):
        place = f"messages[{number}].content"
        content = "".join(_part(part, f"{place}[{at}]") for at, part in enumerate(said.content))
    else:
        content = said.content
    calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in said.tool_calls or ())
    return Message(said.role, content, calls, tool_call_id=said.tool_call_id, name=said.name)


def _part(part: dict[str, Any], place: str) -> str:
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise RequestError(
            f"{place}: the embedded policy supports only text, not a part of type {_short(kind)}", param=place
        )
    if not isinstance(text, str):
        raise RequestError(f"{place}: the part has no text", param=place)
    return text


def read_tools(said: list[dict[str, Any]]) -> tuple[ToolSchema, ...]:
    found: list[ToolSchema] = []
    for number, tool in enumerate(said):
        if tool.get("type") != "function":  # web_search and the like: the client's affair
            continue
        place = f"tools[{number}].function"
        try:
            schema = msgspec.convert(tool.get("function"), _Schema)
        except msgspec.ValidationError as error:
            inner = f"{place}." if " - at " in str(error) else place
            raise _refusal(error, inner) from None
        found.append(ToolSchema(schema.name, schema.description or "", schema.parameters or {}))
    return tuple(found)


def _tool_choice(said: str | _Choice | None, tools: tuple[ToolSchema, ...]) -> str | None:
    if said is None or said in ("auto", "none"):
        return said
    if said == "required":
        if not tools:
            raise RequestError(
                "tool_choice requires a tool call, but the request has no tools", param="tool_choice"
            )
        return said
    if isinstance(said, str):
        words = f"tool_choice: {_short(said)} is not auto, none, required or a function"
        raise RequestError(words, param="tool_choice")
    name = said.function.name
    if name not in (tool.name for tool in tools):
        raise RequestError(f"tool_choice: there is no tool {_short(name)}", param="tool_choice")
    return name


def _check_length(least: int, context: int) -> None:
    """Megabytes are not made into tokens first: that takes long, and holds up everybody."""
    if least >= context:
        words = f"the prompt is too long: it has at least {least} tokens, and with its answer {context} fit"
        raise RequestError(words, code="context_length_exceeded")


def _least(message: Message) -> int:
    """Tokens that a message has at least: no character has less than a byte."""
    return len(message.text) + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)


def _prompts(said: str | list[int | str | list[int]], context: int) -> list[bytes]:
    """Each prompt's ids: a text's are its bytes behind a `<begin>`."""
    if isinstance(said, str):
        return [_ids(said, "prompt", context)]
    if not said:
        raise RequestError("the prompt is empty", param="prompt")
    if isinstance(said[0], int):
        return [_ids(said, "prompt", context)]
    return [_ids(prompt, f"prompt[{number}]", context) for number, prompt in enumerate(said)]


def _ids(prompt: object, place: str, context: int) -> bytes:
    if isinstance(prompt, str):
        _check_length(len(prompt), context)
        return ints([chat.BEGIN, *chat.text_ids(prompt)])
    if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
        raise RequestError(f"{place}: all prompts must be strings, or all must be lists of token IDs", param=place)
    if not prompt:
        raise RequestError(f"{place}: it is empty", param=place)
    _check_length(len(prompt), context)
    if not all(0 <= token < 1 << 31 for token in prompt):
        raise RequestError(f"{place}: it contains numbers that are not token IDs", param=place)
    return ints(prompt)


def _short(value: object) -> str:
    return f"{value!r:.60}"
