"""The dialect of OpenAI's legacy completions API, which continues a prompt of text or token IDs.

Guarantees:
- OpenAI's client library can be used unchanged;
- token IDs in a prompt are passed to the inference engine unchanged; the gateway tokenises a text prompt itself;
- several prompts with several choices each are answered in OpenAI's order;
- `echo` repeats the prompt before the reply if its text is known; logprobs of prompt tokens are not available;
- errors have the same format as in OpenAI's chat API.
"""

import re
from typing import Annotated, Any, Final

import msgspec

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
    PROBABILITY,
    STOPS,
    TEMPERATURE,
    TEXT,
    completion_schema,
    describe_operations,
    object_schema,
)
from rookery.gateway.dialects.shared import (
    MAX_CHOICES,
    decode_body,
    decode_logprobs,
    encode,
    format_delta_logprobs,
    format_reply_logprobs,
    get_finish_reason,
    openai_usage,
)
from rookery.upstreams.protocol import DecodeTokens, Delta, ModelReply
from rookery.upstreams.token_ids import encode_ids, parse_ids

_MAX_TOP_LOGPROBS: Final = 5


class _Request(OpenAIRequest, frozen=True, kw_only=True):
    prompt: msgspec.Raw
    best_of: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOP_LOGPROBS)] | None = None


_DEFAULT_TOKENS: Final = 16
_NUMBERS: Final = re.compile(rb"\[\s*-?[0-9]")
"""Beginning of a JSON list of numbers, which may be long and is converted without a Python integer for each."""
_NAMES: Final = ("cmpl", "text_completion")
_decode = msgspec.json.Decoder(_Request).decode
_decode_prompt = msgspec.json.Decoder(str | list[msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode


_REQUEST_SCHEMA: Final = object_schema(
    ["prompt"],
    "CompletionRequest",
    model=TEXT,
    prompt={
        "type": "array",
        "minItems": 1,
        "items": {"type": "integer", "minimum": 0, "maximum": 255},
        "description": "Token IDs, a text, or a list of either.",
    },
    stream=FLAG,
    n={"type": ["integer", "null"], "minimum": 1, "maximum": 8},
    echo=FLAG,
    temperature=TEMPERATURE,
    top_p=PROBABILITY,
    max_tokens=COUNT,
    stop=STOPS,
    logprobs={"type": ["integer", "null"], "minimum": 0, "maximum": _MAX_TOP_LOGPROBS},
)
_RESPONSE_SCHEMA: Final = completion_schema(
    "CompletionResponse",
    "text_completion",
    object_schema(
        ["index", "text", "finish_reason", "logprobs"],
        text=TEXT,
        finish_reason={"enum": ["stop", "length", "content_filter"]},
    ),
)


class CompletionsDialect:
    """Dialect of OpenAI's legacy completions API. Serves `/completions`."""

    name = "completions"
    paths: tuple[str, ...] = ("/completions",)

    def parse_request(self, body: bytes) -> ClientRequest:
        request = decode_body(_decode, body)
        prompts = _prompts(request.prompt)
        n = request.n or 1
        if n * len(prompts) > MAX_CHOICES:
            raise BadRequestError(f"at most {MAX_CHOICES} completions per request are supported", "n")
        if request.best_of is not None and request.best_of != n:
            raise BadRequestError(
                "best_of is not supported unless it equals n: leave it out, and use n", "best_of"
            )
        if request.suffix:
            raise BadRequestError("suffix is not supported: leave it out", "suffix")
        limit = request.max_tokens
        return ClientRequest(
            prompts=prompts,
            model=request.model,
            sampling=request.sampling(_DEFAULT_TOKENS if limit is None else limit, PASSED_FIELDS),
            n=n,
            stream=bool(request.stream),
            include_usage=request.usage,
            want_logprobs=request.logprobs is not None,
            top_logprobs=request.logprobs or 0,
            return_token_ids=bool(request.return_token_ids),
            dialect_data=tuple(prompts) if request.echo else None,
        )

    def format_response(self, client_request: ClientRequest, replies: list[ModelReply]) -> bytes:
        response = {
            **make_envelope(client_request, *_NAMES),
            "choices": [self._choice(client_request, index, reply) for index, reply in enumerate(replies)],
            "usage": openai_usage(replies, client_request.n),
        }
        return encode(response)

    @staticmethod
    def _choice(client_request: ClientRequest, index: int, reply: ModelReply) -> dict[str, Any]:
        before = _echoed(client_request, index, reply.decode_tokens)
        choice: dict[str, Any] = {
            "index": index,
            "text": before + reply.text,
            "logprobs": None,
            "finish_reason": _finish(reply),
        }
        if client_request.want_logprobs:
            listed = decode_logprobs(format_reply_logprobs(client_request, reply))
            choice["logprobs"] = _logprobs(listed, len(before))
        if client_request.return_token_ids:
            prompt = client_request.prompts[index // client_request.n]
            choice["token_ids"] = encode_ids(reply.sampled)
            choice["prompt_token_ids"] = encode_ids(prompt) if isinstance(prompt, bytes) else []
        return choice

    def open_stream(
        self, client_request: ClientRequest, decode_tokens: DecodeTokens | None = None
    ) -> "CompletionsReplyStream":
        return CompletionsReplyStream(client_request, decode_tokens)

    def format_error(self, problem: ErrorKind, message: str, where: str | None = None) -> tuple[int, bytes]:
        return format_openai_error(problem, message, where)

    def describe_operations(self) -> dict[str, Operation]:
        return describe_operations(self, "Continue a prompt.", _REQUEST_SCHEMA, _RESPONSE_SCHEMA)


class CompletionsReplyStream(OpenAIReplyStream):
    """Formats one streamed response of OpenAI's legacy completions API."""

    def __init__(self, client_request: ClientRequest, decode_tokens: DecodeTokens | None) -> None:
        super().__init__(client_request, decode_tokens, make_envelope(client_request, *_NAMES))
        self._offsets: dict[int, int] = {}
        """Number of characters sent so far, by index of the choice."""

    def format_delta(self, choice: int, delta: Delta) -> bytes:
        client_request = self._request
        text = delta.content
        if choice not in self._offsets:
            text = _echoed(client_request, choice, self._decode_tokens) + text
            self._offsets[choice] = len(text) - len(delta.content)
        content = format_delta_logprobs(client_request, delta, self._decode_tokens)
        logprobs = None if content is None else _logprobs(decode_logprobs(content), self._offsets[choice])
        self._offsets[choice] += len(delta.content)
        if not text and logprobs is None and not (client_request.return_token_ids and delta.sampled):
            return b""
        fields: dict[str, Any] = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None}
        if client_request.return_token_ids:
            fields["token_ids"] = encode_ids(delta.sampled)
        return self._chunk(fields)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return b'%b,"choices":[%b]}\n\n' % (self._envelope, encode(choice))

    def format_choice_end(self, choice: int, reply: ModelReply) -> bytes:
        first = b"" if choice in self._offsets else self.format_delta(choice, Delta())
        last = {"index": choice, "text": "", "logprobs": None, "finish_reason": _finish(reply)}
        return first + self._chunk(last)


def _finish(reply: ModelReply) -> str:
    """Return OpenAI's finish reason of a reply. `tool_calls` becomes `stop`, as completions have no tool calls."""
    finish = get_finish_reason(reply.finish)
    return "stop" if finish == "tool_calls" else finish


def _prompts(prompt: msgspec.Raw) -> tuple[bytes | str, ...]:
    """Return the prompts in the field `prompt` of a request: each is a text or token IDs (int32 bytes).

    Raises `BadRequestError` if the field is invalid.
    """
    text = bytes(prompt)
    if _NUMBERS.match(text):
        return (_parse_ids(text, "prompt"),)
    decoded = decode_body(_decode_prompt, text) if text.startswith((b'"', b"[")) else []
    if isinstance(decoded, str):
        return (decoded,)
    if not decoded:
        raise BadRequestError("the prompt must be a string, a list of token IDs, or a list of these", "prompt")
    return tuple(_parse_prompt(bytes(item), f"prompt[{at}]") for at, item in enumerate(decoded))


def _parse_prompt(text: bytes, where: str) -> bytes | str:
    return decode_body(_decode_text, text) if text.startswith(b'"') else _parse_ids(text, where)


def _parse_ids(text: bytes, where: str) -> bytes:
    try:
        ids = parse_ids(text)
    except ValueError:
        ids = b""
    if not ids:
        raise BadRequestError(
            "a token prompt must have at least one ID; IDs are integers from 0 to 2147483647", where
        )
    return ids


def _echoed(client_request: ClientRequest, choice: int, decode_tokens: DecodeTokens | None) -> str:
    """Return the text of a choice's prompt, which precedes the reply if the client requests `echo`.

    Returns an empty string without `echo`, or if the prompt is token IDs and cannot be decoded.
    """
    if client_request.dialect_data is None:
        return ""
    prompt = client_request.dialect_data[choice // client_request.n]
    if isinstance(prompt, str):
        return prompt
    return b"".join(decode_tokens(prompt)).decode("utf-8", "replace") if decode_tokens is not None else ""


def _logprobs(listed: list[dict[str, Any]], offset: int) -> dict[str, Any]:
    """Convert logprobs from the format of OpenAI's chat API to that of its completions API.

    `offset` is the position of the first token in the text of the choice.
    """
    offsets: list[int] = []
    for entry in listed:
        offsets.append(offset)
        offset += len(entry["token"])
    tops = [{top["token"]: top["logprob"] for top in entry.get("top_logprobs") or ()} for entry in listed]
    return {
        "tokens": [entry["token"] for entry in listed],
        "token_logprobs": [entry["logprob"] for entry in listed],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }
