"""OpenAI chat completions, streamed and not.

Promises:
- what OpenAI's own library sends is understood, and what it is sent, it reads as from OpenAI;
- a field that changes the meaning of a request is supported or refused; those that sampling engines know go on to
  the engine as they are;
- an error has OpenAI's shape; one that a retry cannot mend has a status that its library does not retry;
- a stream's last events come only after its turn was recorded: whoever saw them may rely on the turn.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Raw

from rookery.core import Message
from rookery.gateway.dialects.openai import PASSED, OpenAIAnswering, OpenAIRequest, about, error_body
from rookery.gateway.dialects.protocol import Ask, BadRequestError, Problem
from rookery.gateway.dialects.shared import (
    ALIVE,
    MAX_TOP,
    NULL,
    ONE_CALL,
    Count,
    Field,
    encode,
    entries,
    finish_of,
    ids,
    logprob_entries,
    openai_usage,
    read,
    refuse,
)
from rookery.gateway.session import Reply, Spell
from rookery.upstreams.protocol import CallDelta, Delta


class _Named(msgspec.Struct, frozen=True):
    name: str


class _Choice(msgspec.Struct, frozen=True):
    type: str = "function"
    function: _Named | None = None


class _Request(OpenAIRequest, frozen=True, kw_only=True):
    messages: Annotated[list[Raw], msgspec.Meta(min_length=1)]
    tools: Field = UNSET  # with None instead, msgspec would take nothing but null
    tool_choice: str | _Choice | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP)] | None = None
    # What engines know about sampling and rendering beyond ours goes on as it stands.
    bad_words: Field = UNSET
    chat_template_kwargs: Field = UNSET
    reasoning_effort: Field = UNSET
    # What is refused, unless it asks for nothing.
    audio: Field = UNSET
    functions: Field = UNSET
    function_call: Field = UNSET
    moderation: Field = UNSET
    web_search_options: Field = UNSET
    modalities: list[str] | None = None
    parallel_tool_calls: bool | None = None
    # A hint that models may follow or not.
    verbosity: Field = UNSET


_REFUSED: Final = {
    "audio": "answers are text",
    "functions": "send `tools` instead",
    "function_call": "send `tool_choice` instead",
    "moderation": "nothing here moderates",
    "web_search_options": "nothing here searches the web",
}

_FIELDS: Final = _Request.__struct_fields__
_PASSED: Final = (*PASSED, *_FIELDS[_FIELDS.index("bad_words") : _FIELDS.index("audio")])
_decode = msgspec.json.Decoder(_Request).decode


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
        request = read(_decode, body)
        refuse(request, _REFUSED)
        if set(request.modalities or ()) - {"text"}:
            raise BadRequestError("modalities: answers are text", "modalities")
        if request.top_logprobs and not request.logprobs:
            raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        limits = [n for n in (request.max_tokens, request.max_completion_tokens) if n is not None]
        tools = request.tools if request.tools is not UNSET and bytes(request.tools) != NULL else None
        sampling = request.sampling(min(limits) if limits else None, _PASSED)
        if tools is not None and request.parallel_tool_calls is False:
            sampling = msgspec.structs.replace(sampling, extra={**sampling.extra, **ONE_CALL})
        return Ask(
            messages=tuple(request.messages),
            model=request.model,
            tools=tools,
            tool_choice=_tool_choice(request.tool_choice),
            sampling=sampling,
            n=request.n or 1,
            stream=bool(request.stream),
            usage=request.usage,
            logprobs=bool(request.logprobs),
            top_logprobs=request.top_logprobs or 0,
            ids=bool(request.return_token_ids),
        )

    def whole(self, ask: Ask, replies: list[Reply]) -> bytes:
        answer: dict[str, Any] = {
            **about(ask, "chatcmpl", "chat.completion"),
            "choices": [self._choice(ask, index, reply) for index, reply in enumerate(replies)],
            "usage": openai_usage(replies, ask.n),
        }
        if ask.ids:
            answer["prompt_token_ids"] = ids(replies[0].prompt)
        return encode(answer)

    @staticmethod
    def _choice(ask: Ask, index: int, reply: Reply) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": _message(reply.message),
            "logprobs": _logprobs(ask, reply) if ask.logprobs else None,
            "finish_reason": finish_of(reply.finish),
        }
        if ask.ids:
            choice["token_ids"] = ids(reply.turn.sampled)
        return choice

    def answering(self, ask: Ask, spell: Spell | None = None) -> "ChatAnswering":
        return ChatAnswering(ask, spell)

    def error(self, problem: Problem, message: str, where: str | None = None) -> tuple[int, bytes]:
        return error_body(problem, message, where)


class ChatAnswering(OpenAIAnswering):
    """One streamed chat completion."""

    def __init__(self, ask: Ask, spell: Spell | None) -> None:
        super().__init__(ask, spell, about(ask, "chatcmpl", "chat.completion.chunk"))
        self._begun: set[int] = set()
        self._silent = 0
        self._prompt = ask.ids

    def piece(self, choice: int, delta: Delta) -> bytes:
        """The chunks for one piece of the answer.

        A chunk has at most one `tool_calls` entry, and a call's ID and name come in a chunk before its arguments.
        OpenAI and vLLM send them this way, and some clients read only the first entry of a chunk.
        """
        ask = self._ask
        said: dict[str, Any] = {}
        if choice not in self._begun:
            self._begun.add(choice)
            said = {"role": "assistant", "content": ""}
        if delta.content:
            said["content"] = delta.content
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        calls = [told for call in delta.tool_calls for told in _call_deltas(call)]
        if not said and calls:
            said = {"tool_calls": [calls.pop(0)]}
        shown = delta.sampled and (ask.logprobs or ask.ids)
        if not said and not shown:
            self._silent += 1
            return self._chunk(choice, {}) if self._silent % ALIVE == 0 else b""
        more = tail = b""
        if ask.ids:
            more = b',"token_ids":' + encode(ids(delta.sampled))
        logprobs = b"null"
        if ask.logprobs and delta.logprob_content is not None and self._spell is None:
            logprobs = encode({"content": delta.logprob_content})
        elif ask.logprobs and delta.logprobs:
            told = entries(delta.sampled, delta.logprobs, delta.tops, ask.top_logprobs, self._spell)
            logprobs = encode({"content": told})
        if self._prompt and delta.prompt:
            self._prompt = False
            tail = b',"prompt_token_ids":' + encode(ids(delta.prompt))
        first = self._chunk(choice, said, logprobs, more, tail)
        if not calls:
            return first
        more = b',"token_ids":[]' if ask.ids else b""
        return first + b"".join([self._chunk(choice, {"tool_calls": [call]}, b"null", more) for call in calls])

    def _chunk(
        self, choice: int, said: dict[str, Any], logprobs: bytes = b"null", more: bytes = b"", tail: bytes = b""
    ) -> bytes:
        return b'%b,"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}]%b}\n\n' % (
            self._about,
            choice,
            encode(said),
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


def _call_deltas(call: CallDelta) -> Iterator[dict[str, Any]]:
    """The `tool_calls` entries for one piece of a call: its ID and name, then arguments."""
    if call.id or call.name:
        head: dict[str, Any] = {"index": call.index}
        if call.id:
            head |= {"id": call.id, "type": "function"}
        yield {**head, "function": {"name": call.name, "arguments": ""}}
    if call.arguments:
        yield {"index": call.index, "function": {"arguments": call.arguments}}


def _logprobs(ask: Ask, reply: Reply) -> dict[str, Any] | None:
    content = logprob_entries(ask, reply)
    return None if content is None else {"content": content}
