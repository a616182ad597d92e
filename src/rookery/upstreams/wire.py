"""The OpenAI protocol as bytes: requests out, answers in. Pure: no socket, no clock.

Promises:
- a message is written in the server's shape and means the same when it comes back;
- an answer is understood completely or raises `WireError`: nothing is padded, guessed or cut to fit;
- token ids and logprobs describe the same tokens, or the answer is refused;
- unknown fields of an answer are skipped, not decoded: they are most of its bytes.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec

from rookery.core import Finish, Message, Sampling, ToolCall, floats, ints
from rookery.upstreams.protocol import ModelReply, ModelRequest

RESERVED: Final = frozenset({"model", "messages", "prompt", "stream", "n"})
"""What `sampling.extra` may not set: another answer shape than the one that is read."""

LEARNABLE: Final = ("return_token_ids", "logprobs", "max_tokens")
"""Fields that some servers refuse; a call can go on without them (`max_tokens` under its newer name)."""

_FINISH: Final[dict[str, Finish]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "abort": "abort",
    "eos_token": "stop",
    "stop_sequence": "stop",
}


class WireError(Exception):
    """An answer that cannot be understood; the text says what is wrong with it."""


# ---------------------------------------------------------------------------------------------- requests


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, frozen=True):
    id: str
    function: _Function
    type: str = "function"


class _Outgoing(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str
    content: str | tuple[dict[str, Any], ...] | None
    tool_calls: tuple[_Call, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


_encode = msgspec.json.Encoder().encode


def outgoing(message: Message, *, reasoning: bool = False) -> Message | _Outgoing:
    """The message as servers read it. A plain one already is."""
    if not message.tool_calls and message.reasoning is None and message.content is not None:
        return message
    calls = tuple(_Call(call.id, _Function(call.name, call.arguments)) for call in message.tool_calls)
    content = message.content
    if content is None and not calls:
        content = ""  # null is for messages that only call tools; templates fail on it elsewhere
    return _Outgoing(
        role=message.role,
        content=content,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning_content=message.reasoning if reasoning else None,
    )


def encode_request(
    request: ModelRequest,
    *,
    model: str,
    sampling: Sampling,
    without: frozenset[str] = frozenset(),
    reasoning: bool = False,
) -> bytes:
    """The body of the call: of `/completions` where token ids go in, of `/chat/completions` else."""
    body: dict[str, Any] = {"model": model}
    chat = not request.tokens
    if chat:
        body["messages"] = [outgoing(message, reasoning=reasoning) for message in request.messages]
        if request.tools:
            body["tools"] = [{"type": "function", "function": schema} for schema in request.tools]
            if (choice := request.tool_choice) is not None:
                named = choice not in ("auto", "none", "required")
                body["tool_choice"] = {"type": "function", "function": {"name": choice}} if named else choice
    else:
        body["prompt"] = memoryview(request.tokens).cast("i").tolist()
    if sampling.temperature is not None:
        body["temperature"] = sampling.temperature
    if sampling.top_p is not None:
        body["top_p"] = sampling.top_p
    if sampling.top_k is not None:
        body["top_k"] = sampling.top_k
    if sampling.max_tokens is not None:
        body["max_completion_tokens" if "max_tokens" in without else "max_tokens"] = sampling.max_tokens
    if sampling.stop:
        body["stop"] = sampling.stop
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if request.want_tokens:
        if "logprobs" not in without:
            body["logprobs"] = True if chat else 1
        if "return_token_ids" not in without:
            body["return_token_ids"] = True
    if sampling.extra:
        body.update(sampling.extra)
    return _encode(body)


# ----------------------------------------------------------------------------------------------- answers

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _Logprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Logprob] | None = None
    token_logprobs: list[float] | None = None


class _SampledFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _SampledCall(msgspec.Struct, frozen=True):
    id: str | None = None
    function: _SampledFunction | None = None


class _Incoming(msgspec.Struct, frozen=True):
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_SampledCall] | None = None
    function_call: _SampledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    message: _Incoming | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[_Id] | None = None
    prompt_token_ids: list[_Id] | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[_Id] | None = None
    weight_version: Any = None
    metadata: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


def decode_reply(
    data: bytes,
    *,
    want_tokens: bool = True,
    prompt: bytes = b"",
    version: int = 0,
    queued: float = 0.0,
    replica: str = "",
) -> ModelReply:
    """The answer in `data`. `prompt` are the ids that went in, `version` is taken where the answer has none."""
    try:
        answer = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a chat completion: {error}; it begins {_head(data)}") from None
    if not answer.choices:
        said = f": {_text(answer.error)}" if answer.error else f"; it begins {_head(data)}"
        raise WireError(f"no choices in the answer{said}")
    choice = answer.choices[0]
    if choice.finish_reason is None:
        raise WireError("the answer has no finish_reason: it is not complete")
    finish = _FINISH.get(choice.finish_reason)
    if finish is None:
        raise WireError(f"unknown finish_reason {choice.finish_reason[:80]!r}")
    if choice.message is not None:
        message = _message(choice.message)
    elif choice.text is not None:
        message = Message("assistant", choice.text)
    else:
        raise WireError("the answer's choice has no message")
    sampled = logprobs = b""
    prompt_ids: list[int] | None = None
    ids = choice.token_ids
    if want_tokens and ids is not None:
        prompt_ids = answer.prompt_token_ids if answer.prompt_token_ids is not None else choice.prompt_token_ids
        sampled = ints(ids)
        logprobs = _logprobs(choice.logprobs, len(ids))
    if prompt_ids:
        prompt = ints(prompt_ids)
    usage = answer.usage
    n_prompt = usage.prompt_tokens if usage is not None else None
    n_sampled = usage.completion_tokens if usage is not None else None
    return ModelReply(
        message=message,
        finish=finish,
        prompt=prompt,
        sampled=sampled,
        logprobs=logprobs,
        version=_version(answer, version),
        prompt_tokens=len(prompt) // 4 if n_prompt is None else n_prompt,
        sampled_tokens=len(sampled) // 4 if n_sampled is None else n_sampled,
        queued=queued,
        replica=replica,
    )


def _message(said: _Incoming) -> Message:
    calls: tuple[ToolCall, ...] = ()
    if said.tool_calls:
        calls = tuple(_call(call.function, call.id, n) for n, call in enumerate(said.tool_calls))
    elif said.function_call is not None:
        calls = (_call(said.function_call, None, 0),)
    content = said.content if said.content is not None else said.refusal
    return Message(
        role="assistant",
        content=tuple(content) if isinstance(content, list) else content,
        tool_calls=calls,
        reasoning=said.reasoning_content if said.reasoning_content is not None else said.reasoning,
    )


def _call(function: _SampledFunction | None, call_id: str | None, n: int) -> ToolCall:
    if function is None:
        function = _SampledFunction()
    arguments = function.arguments
    if arguments is None:
        arguments = "{}"
    elif not isinstance(arguments, str):
        arguments = _encode(arguments).decode()
    return ToolCall(call_id or f"call_{n}", function.name or "", arguments)


def _logprobs(given: _Logprobs | None, tokens: int) -> bytes:
    if given is None:
        return b""
    if given.content is not None:
        values = [entry.logprob for entry in given.content]
    elif given.token_logprobs is not None:
        values = given.token_logprobs
    else:
        return b""
    if len(values) != tokens:
        raise WireError(f"the answer has {tokens} token ids but {len(values)} logprobs")
    try:
        return floats(values)
    except OverflowError:
        raise WireError("the answer has a logprob that is not a 32-bit float") from None


def _version(answer: _Answer, fallback: int) -> int:
    found = version_number(answer.weight_version)
    if found is None and isinstance(answer.metadata, dict):
        found = version_number(answer.metadata.get("weight_version"))
    return fallback if found is None else found


def version_number(value: object) -> int | None:
    """A policy version, where the value is one: an integer, or a string of digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19:
        return int(value)
    return None


# ------------------------------------------------------------------------------------------------ errors


class Complaint(msgspec.Struct, frozen=True):
    """What a server said was wrong."""

    text: str
    code: str = ""


def complaint(data: bytes) -> Complaint:
    """The message of an error answer, whatever its shape; never raises, bounded, on one line."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Complaint(_clean(data[:2_000].decode("utf-8", "replace")))
    code = ""
    if isinstance(body, dict):
        inner = body.get("error")
        if isinstance(inner, dict):
            body = inner
        code = str(body.get("code") or body.get("type") or "")
        for key in ("message", "error", "detail"):
            if body.get(key):
                body = body[key]
                break
    return Complaint(_text(body), _clean(code)[:80])


_CONTEXT = re.compile(
    r"context[ _](length|window|size)"
    r"|max_model_len|maximum (model|sequence|input) length"
    r"|(prompt|input|request|messages?)\b[^.]{0,60}\b(too long|longer than)"
    r"|reduce the length of the (messages|prompt|input)",
    re.IGNORECASE,
)
_RENAMED = re.compile(r"\buse\W+max_completion_tokens", re.IGNORECASE)
_WINDOW = re.compile(r"(?:context|model|sequence)[ _](?:length|window|size)\D{0,40}?(\d+)", re.IGNORECASE)


def context_full(said: Complaint, max_tokens: int | None) -> bool:
    """Whether the request was refused because the conversation no longer fits the model's context.

    Not where `max_tokens` alone is as large as the context: that is a setting to fix, and would end every
    rollout at its first turn as if the policy had talked too long.
    """
    coded = said.code in ("context_length_exceeded", "exceed_context_size_error")
    if not coded and not _CONTEXT.search(said.text):
        return False
    window = _WINDOW.search(said.text)
    return window is None or max_tokens is None or max_tokens < int(window[1])


def refused_field(said: Complaint, body: bytes, sent: Iterable[str]) -> str | None:
    """Which of the fields `sent` the server complains about, if it is one that a call can do without."""
    for field in LEARNABLE:
        if field not in sent:
            continue
        if field == "max_tokens":
            if _RENAMED.search(said.text):
                return field
        elif field.encode() in body:
            return field
    return None


def _text(value: object) -> str:
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        return _clean(value["message"])
    return _clean(msgspec.json.encode(value)[:2_000].decode("utf-8", "replace"))


def _clean(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:2_000]).split())
    return line if len(line) <= 500 else f"{line[:499]}…"


def _head(data: bytes) -> str:
    return repr(_clean(data[:200].decode("utf-8", "replace"))[:120]) if data else "nothing: the answer is empty"
