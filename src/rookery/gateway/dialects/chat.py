"""OpenAI chat completions, streamed and not.

Promises:
- what OpenAI's own library sends is understood, and what it is sent, it reads as from OpenAI;
- fields that we do not know are tolerated; those that sampling engines know go on to the engine as they are;
- an error has OpenAI's shape; one that a retry cannot mend has a status that its library does not retry;
- a stream's last events come only after its turn was recorded: whoever saw them may rely on the turn.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

from rookery.core import Finish, Message, Sampling, ints
from rookery.gateway.dialects.protocol import Ask, BadRequestError, Problem
from rookery.gateway.session import Reply, Spell, Tops
from rookery.upstreams.protocol import CallDelta, Delta

MAX_CHOICES: Final = 64
MAX_TOP: Final = 20

PROBLEMS: Final[dict[Problem, tuple[int, str, str | None]]] = {
    "bad_request": (400, "invalid_request_error", None),
    "unauthorized": (401, "authentication_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "method": (405, "invalid_request_error", "method_not_allowed"),
    "gone": (410, "invalid_request_error", "rollout_gone"),
    "conflict": (409, "invalid_request_error", "conflict"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "truncated": (400, "invalid_request_error", "rollout_truncated"),
    "context": (400, "invalid_request_error", "context_length_exceeded"),
    "unavailable": (503, "server_error", "upstream_unavailable"),
    "timeout": (504, "server_error", "upstream_timeout"),
    "upstream": (502, "server_error", "upstream_error"),
    "internal": (500, "server_error", "internal_error"),
}
"""Status, type and code. A spent budget is a 400: OpenAI's library tries 408, 409, 429 and 5xx again."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Number = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False


class _Named(msgspec.Struct, frozen=True):
    name: str


class _Choice(msgspec.Struct, frozen=True):
    type: str = "function"
    function: _Named | None = None


class _Request(msgspec.Struct, frozen=True):
    messages: Annotated[list[Raw], msgspec.Meta(min_length=1)]
    model: str = ""
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    tools: Raw | UnsetType = UNSET  # with None instead, msgspec would take nothing but null
    functions: Raw | UnsetType = UNSET
    tool_choice: str | _Choice | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = 1
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP)] | None = None
    return_token_ids: bool | None = False
    # What engines know about sampling and rendering beyond ours goes on as it stands.
    frequency_penalty: Raw | UnsetType = UNSET
    presence_penalty: Raw | UnsetType = UNSET
    repetition_penalty: Raw | UnsetType = UNSET
    min_p: Raw | UnsetType = UNSET
    min_tokens: Raw | UnsetType = UNSET
    logit_bias: Raw | UnsetType = UNSET
    ignore_eos: Raw | UnsetType = UNSET
    stop_token_ids: Raw | UnsetType = UNSET
    bad_words: Raw | UnsetType = UNSET
    response_format: Raw | UnsetType = UNSET
    structured_outputs: Raw | UnsetType = UNSET
    guided_json: Raw | UnsetType = UNSET
    guided_regex: Raw | UnsetType = UNSET
    guided_choice: Raw | UnsetType = UNSET
    guided_grammar: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    parallel_tool_calls: Raw | UnsetType = UNSET
    reasoning_effort: Raw | UnsetType = UNSET


_PASSED: Final = tuple(_Request.__struct_fields__[_Request.__struct_fields__.index("frequency_penalty") :])
_NULL: Final = b"null"
_decode = msgspec.json.Decoder(_Request).decode
_encode = msgspec.json.Encoder().encode


class _OutFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class _OutCall(msgspec.Struct, frozen=True):
    id: str
    function: _OutFunction
    type: str = "function"


class ChatDialect:
    """`chat/completions`."""

    name = "chat"
    paths: tuple[str, ...] = ("/chat/completions",)

    def ask(self, body: bytes) -> Ask:
        try:
            request = _decode(body)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$")
            raise BadRequestError(
                f"{what}{f' (at {where[1:-1]})' if where else ''}", where[1:-1] or None
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequestError(f"the body is not JSON: {error}") from None
        if request.functions is not UNSET and bytes(request.functions) not in (_NULL, b"[]"):
            raise BadRequestError("`functions` is the form before `tools`; write tools", "functions")
        if request.top_logprobs and not request.logprobs:
            raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        stop = request.stop
        limits = [n for n in (request.max_tokens, request.max_completion_tokens) if n is not None]
        tools = request.tools if request.tools is not UNSET and bytes(request.tools) != _NULL else None
        return Ask(
            messages=tuple(request.messages),
            model=request.model,
            tools=tools,
            tool_choice=_tool_choice(request.tool_choice),
            sampling=Sampling(
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                max_tokens=min(limits) if limits else None,
                stop=tuple(text for text in ((stop,) if isinstance(stop, str) else stop or ()) if text),
                seed=request.seed,
                extra={
                    name: value.copy()
                    for name in _PASSED
                    if (value := getattr(request, name)) is not UNSET and bytes(value) != _NULL
                },
            ),
            n=request.n or 1,
            stream=bool(request.stream),
            usage=request.stream_options is not None and bool(request.stream_options.include_usage),
            logprobs=bool(request.logprobs),
            top_logprobs=request.top_logprobs or 0,
            ids=bool(request.return_token_ids),
        )

    def whole(self, ask: Ask, replies: list[Reply]) -> bytes:
        answer: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": ask.model,
            "choices": [self._choice(ask, index, reply) for index, reply in enumerate(replies)],
            "usage": _usage(replies),
        }
        if ask.ids:
            answer["prompt_token_ids"] = _ids(replies[0].prompt)
        return _encode(answer)

    @staticmethod
    def _choice(ask: Ask, index: int, reply: Reply) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": _message(reply.message),
            "logprobs": _logprobs(ask, reply) if ask.logprobs else None,
            "finish_reason": finish_of(reply.finish),
        }
        if ask.ids:
            choice["token_ids"] = _ids(reply.turn.sampled)
        return choice

    def answering(self, ask: Ask, spell: Spell | None = None) -> "ChatAnswering":
        return ChatAnswering(ask, spell)

    def error(self, problem: Problem, message: str, where: str | None = None) -> tuple[int, bytes]:
        status, kind, code = PROBLEMS[problem]
        return status, _encode({"error": {"message": message, "type": kind, "param": where, "code": code}})


class ChatAnswering:
    """One streamed chat completion."""

    def __init__(self, ask: Ask, spell: Spell | None) -> None:
        self._ask = ask
        self._spell = spell
        about = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": ask.model,
        }
        self._about = b"data: " + _encode(about)[:-1]
        self._begun: set[int] = set()
        self._prompt = ask.ids

    def piece(self, choice: int, delta: Delta) -> bytes:
        ask = self._ask
        said: dict[str, Any] = {}
        if choice not in self._begun:
            self._begun.add(choice)
            said = {"role": "assistant", "content": ""}
        if delta.content:
            said["content"] = delta.content
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            said["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        shown = delta.sampled and (ask.logprobs or ask.ids)
        if not said and not shown:
            return b""
        more = b""
        if ask.ids:
            more = b',"token_ids":' + _encode(_ids(delta.sampled))
        logprobs = b"null"
        if ask.logprobs and delta.logprob_content is not None and self._spell is None:
            logprobs = _encode({"content": delta.logprob_content})
        elif ask.logprobs and delta.logprobs:
            entries = _entries(delta.sampled, delta.logprobs, delta.tops, ask.top_logprobs, self._spell)
            logprobs = _encode({"content": entries})
        tail = b""
        if self._prompt and delta.prompt:
            self._prompt = False
            tail = b',"prompt_token_ids":' + _encode(_ids(delta.prompt))
        return b'%b,"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}]%b}\n\n' % (
            self._about,
            choice,
            _encode(said),
            logprobs,
            more,
            tail,
        )

    def end(self, choice: int, reply: Reply) -> bytes:
        first = b"" if choice in self._begun else self.piece(choice, Delta())
        return first + b'%b,"choices":[{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}]}\n\n' % (
            self._about,
            choice,
            finish_of(reply.finish).encode(),
        )

    def done(self, replies: list[Reply]) -> bytes:
        usage = b""
        if self._ask.usage:
            usage = b'%b,"choices":[],"usage":%b}\n\n' % (self._about, _encode(_usage(replies)))
        return usage + b"data: [DONE]\n\n"

    def broken(self, problem: Problem, message: str) -> bytes:
        _, kind, code = PROBLEMS[problem]
        error = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        return b"data: " + _encode(error) + b"\n\n"


def finish_of(finish: Finish) -> str:
    """As OpenAI calls it. An answer that was aborted for good ends like one that was cut."""
    return "length" if finish == "abort" else finish


def _tool_choice(choice: str | _Choice | None) -> str | None:
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise BadRequestError("tool_choice is none, auto, required or names a function", "tool_choice")
    if choice is None or isinstance(choice, str):
        return choice
    if choice.function is None:
        raise BadRequestError("tool_choice names no function", "tool_choice")
    return choice.function.name


def _message(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        said["tool_calls"] = [
            _OutCall(call.id, _OutFunction(call.name, call.arguments)) for call in message.tool_calls
        ]
        said["content"] = message.content or None
    elif message.content is None:
        said["content"] = ""
    if message.reasoning is not None:
        said["reasoning_content"] = message.reasoning
    return said


def _call_delta(call: CallDelta) -> dict[str, Any]:
    said: dict[str, Any] = {"index": call.index}
    function: dict[str, str] = {"arguments": call.arguments}
    if call.id or call.name:
        said |= {"id": call.id, "type": "function"}
        function["name"] = call.name
    said["function"] = function
    return said


def _usage(replies: list[Reply]) -> dict[str, Any]:
    prompt = replies[0].turn.prompt_tokens if replies else 0
    sampled = sum(reply.turn.sampled_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _ids(tokens: bytes) -> list[int]:
    return memoryview(tokens).cast("i").tolist() if tokens else []


def _logprobs(ask: Ask, reply: Reply) -> dict[str, Any] | None:
    if reply.logprob_content is not None and reply.spell is None:
        return {"content": reply.logprob_content}
    turn = reply.turn
    if not turn.logprobs:
        return None
    return {"content": _entries(turn.sampled, turn.logprobs, reply.tops, ask.top_logprobs, reply.spell)}


def _entries(sampled: bytes, logprobs: bytes, tops: Tops, most: int, spell: Spell | None) -> list[dict[str, Any]]:
    """The shape of OpenAI's. Where no tokenizer is at hand a token is named by its id, as engines do."""
    ids = _ids(sampled)
    values = cast("list[float]", memoryview(logprobs).cast("f").tolist())
    entries = _named(ids, values, spell(sampled) if spell is not None else None)
    for at, entry in enumerate(entries):
        entry["top_logprobs"] = []
        if most and at < len(tops):
            pairs = tops[at][:most]
            spelled = spell(ints([token for token, _ in pairs])) if spell is not None else None
            entry["top_logprobs"] = _named([token for token, _ in pairs], [value for _, value in pairs], spelled)
    return entries


def _named(ids: Sequence[int], values: Sequence[float], spelled: list[bytes] | None) -> list[dict[str, Any]]:
    if spelled is None:
        return [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None}
            for token, value in zip(ids, values, strict=True)
        ]
    return [
        {"token": text.decode("utf-8", "replace"), "logprob": value, "bytes": list(text)}
        for text, value in zip(spelled, values, strict=True)
    ]
