"""OpenAI's older completions: text or token ids in, what follows them out.

Promises:
- what OpenAI's own library sends is understood, and what it is sent, it reads as from OpenAI;
- ids that come in are what the engine gets: nothing is tokenised that was tokens; a text is tokenised once;
- several prompts, each with several choices, are answered in the order of OpenAI's;
- `echo` tells the prompt before its answer, where its text is known; logprobs of a prompt's tokens are not known;
- errors are those of chat.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Raw

from rookery.core import ints
from rookery.gateway.dialects.openai import PASSED, OpenAIAnswering, OpenAIRequest, about, error_body
from rookery.gateway.dialects.protocol import Ask, BadRequestError, Problem
from rookery.gateway.dialects.shared import (
    MAX_CHOICES,
    encode,
    entries,
    finish_of,
    ids,
    logprob_entries,
    openai_usage,
    read,
)
from rookery.gateway.session import Reply, Spell
from rookery.upstreams.protocol import Delta

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Ids = Annotated[list[_Id], msgspec.Meta(min_length=1)]
_MOST_TOP: Final = 5


class _Request(OpenAIRequest, frozen=True, kw_only=True):
    prompt: Any
    best_of: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOP)] | None = None


_DEFAULT_TOKENS: Final = 16
_NAMES: Final = ("cmpl", "text_completion")
_decode = msgspec.json.Decoder(_Request).decode


class CompletionsDialect:
    """`completions`."""

    name = "completions"
    paths: tuple[str, ...] = ("/completions",)

    def ask(self, body: bytes) -> Ask:
        request = read(_decode, body)
        prompts = _prompts(request.prompt)
        n = request.n or 1
        if n * len(prompts) > MAX_CHOICES:
            raise BadRequestError(f"at most {MAX_CHOICES} answers are given at once", "n")
        if request.best_of is not None and request.best_of != n:
            raise BadRequestError("best_of samples answers that nobody sees: leave it out, or say n", "best_of")
        if request.suffix:
            raise BadRequestError("nothing is put between a prompt and a suffix: leave it out", "suffix")
        limit = request.max_tokens
        return Ask(
            prompts=prompts,
            model=request.model,
            sampling=request.sampling(_DEFAULT_TOKENS if limit is None else limit, PASSED),
            n=n,
            stream=bool(request.stream),
            usage=request.usage,
            logprobs=request.logprobs is not None,
            top_logprobs=request.logprobs or 0,
            ids=bool(request.return_token_ids),
            own=tuple(prompts) if request.echo else None,
        )

    def whole(self, ask: Ask, replies: list[Reply]) -> bytes:
        answer = {
            **about(ask, *_NAMES),
            "choices": [self._choice(ask, index, reply) for index, reply in enumerate(replies)],
            "usage": openai_usage(replies, ask.n),
        }
        return encode(answer)

    @staticmethod
    def _choice(ask: Ask, index: int, reply: Reply) -> dict[str, Any]:
        before = _echoed(ask, index, reply.spell)
        choice: dict[str, Any] = {
            "index": index,
            "text": before + reply.text,
            "logprobs": None,
            "finish_reason": _finish(reply),
        }
        if ask.logprobs:
            listed = logprob_entries(ask, reply)
            found = msgspec.json.decode(listed) if isinstance(listed, Raw) else listed
            choice["logprobs"] = _logprobs(found or [], len(before))
        if ask.ids:
            prompt = ask.prompts[index // ask.n]
            choice["token_ids"] = ids(reply.turn.sampled)
            choice["prompt_token_ids"] = ids(prompt) if isinstance(prompt, bytes) else []
        return choice

    def answering(self, ask: Ask, spell: Spell | None = None) -> "CompletionsAnswering":
        return CompletionsAnswering(ask, spell)

    def error(self, problem: Problem, message: str, where: str | None = None) -> tuple[int, bytes]:
        return error_body(problem, message, where)


class CompletionsAnswering(OpenAIAnswering):
    """Streamed completions."""

    def __init__(self, ask: Ask, spell: Spell | None) -> None:
        super().__init__(ask, spell, about(ask, *_NAMES))
        self._offsets: dict[int, int] = {}
        """By choice: how much text was told."""

    def piece(self, choice: int, delta: Delta) -> bytes:
        ask = self._ask
        text = delta.content
        if choice not in self._offsets:
            text = _echoed(ask, choice, self._spell) + text
            self._offsets[choice] = len(text) - len(delta.content)
        told: dict[str, Any] | None = None
        if ask.logprobs and delta.logprob_content is not None and self._spell is None:
            told = _logprobs(msgspec.json.decode(delta.logprob_content), self._offsets[choice])
        elif ask.logprobs and delta.logprobs:
            listed = entries(delta.sampled, delta.logprobs, delta.tops, ask.top_logprobs, self._spell)
            told = _logprobs(listed, self._offsets[choice])
        self._offsets[choice] += len(delta.content)
        if not text and told is None and not (ask.ids and delta.sampled):
            return b""
        said: dict[str, Any] = {"index": choice, "text": text, "logprobs": told, "finish_reason": None}
        if ask.ids:
            said["token_ids"] = ids(delta.sampled)
        return self._chunk(said)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return b'%b,"choices":[%b]}\n\n' % (self._about, encode(choice))

    def end(self, choice: int, reply: Reply) -> bytes:
        first = b"" if choice in self._offsets else self.piece(choice, Delta())
        last = {"index": choice, "text": "", "logprobs": None, "finish_reason": _finish(reply)}
        return first + self._chunk(last)


def _finish(reply: Reply) -> str:
    """A completion calls no tools."""
    finish = finish_of(reply.finish)
    return "stop" if finish == "tool_calls" else finish


def _prompts(given: Any) -> tuple[bytes | str, ...]:
    """A text, ids, or a list of either."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise BadRequestError("a prompt is a text, a list of token ids, or a list of these", "prompt")
    if isinstance(given[0], int):
        return (_ids_of(given, "prompt"),)
    return tuple(one if isinstance(one, str) else _ids_of(one, f"prompt[{at}]") for at, one in enumerate(given))


def _ids_of(given: Any, where: str) -> bytes:
    try:
        return ints(msgspec.convert(given, _Ids))
    except msgspec.ValidationError:
        raise BadRequestError("token ids are whole numbers from 0 to 2147483647, at least one", where) from None


def _echoed(ask: Ask, choice: int, spell: Spell | None) -> str:
    """The prompt's text, where it comes before the answer; nothing where only its ids are known."""
    if ask.own is None:
        return ""
    prompt = ask.own[choice // ask.n]
    if isinstance(prompt, str):
        return prompt
    return b"".join(spell(prompt)).decode("utf-8", "replace") if spell is not None else ""


def _logprobs(listed: list[dict[str, Any]], offset: int) -> dict[str, Any]:
    """Chat's entries in the older shape."""
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
