"""What is asked and answered in the `gateway` bench: requests as an agent sends them, answers in vLLM's shape.

Every request names a number and how many prompt tokens the answer is to report; the answer begins with that
number. So an answer that belongs to another request, or to nobody, is seen.

Promises:
- an answer holds 500 sampled tokens with ids and logprobs, the prompt's ids, and a text that begins with the
  number of the question it answers, streamed or whole;
- the ids of one conversation are one sequence: a turn's prompt ids are the last turn's prompt and sampled ids,
  and then those of the new message;
- `check` takes an answer for right only when its text, its logprobs and its end are all there.
"""

import itertools
import random
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import orjson

from benchmarks.instant_model import MODEL

TOKENS = 500
NEW_TOKENS = 20
"""Of the message after an answer."""
SHORT_PROMPT = 900
LONG_PROMPT = 32_768
TURNS = 100
_LONGEST = max(LONG_PROMPT, SHORT_PROMPT + TURNS * (TOKENS + NEW_TOKENS)) + TOKENS
_WORDS = (" the", " answer", " is", " 42", ",", " since", " six", " times", " seven", " makes", " so", ".")
_ASKED = b"Question %08d after %05d tokens."
_MARK = b"Question "
_PLACE = re.compile(rb'(@N@|"@[BCPST]@")')

REST = "".join(_WORDS[i % len(_WORDS)] for i in range(1, TOKENS))
"""The text of an answer after the number."""


class WrongAnswer(RuntimeError):  # noqa: N818  (says what happened)
    """An answer that is not the one that was asked for."""


# ---------------------------------------------------------------------------------------------------- requests


def question(number: int, prompt_tokens: int) -> bytes:
    """The text of the last message: the upstream reads what to answer from it."""
    return _ASKED % (number, prompt_tokens)


class Ask:
    """Requests of one kind, which differ by their number alone."""

    def __init__(self, *, size: int, prompt_tokens: int, stream: bool = False) -> None:
        chance = random.Random(size)  # noqa: S311  (the same text at every start)
        self.prompt_tokens = prompt_tokens
        self.stream = stream
        self._numbers = itertools.count(1)
        options: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 1.0, "logprobs": True}
        if stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        messages = [{"role": "system", "content": "You are a careful agent."}, {"role": "user", "content": "@Q@"}]
        whole = orjson.dumps(options | {"messages": messages})
        before, _, self._after = whole.partition(b"@Q@")
        room = size - len(whole) - len(question(0, 0))
        filler = "".join(chance.choices(_WORDS, k=max(0, room)))[: max(0, room)]
        self._before = before + filler.encode() + b" "

    def next(self) -> tuple[int, bytes]:
        """A number that was not used before, and the body that asks for it."""
        number = next(self._numbers)
        return number, self._before + question(number, self.prompt_tokens) + self._after

    def opened(self) -> tuple[int, bytes]:
        """Like `next`, without the end: `turn` goes on from it."""
        number = next(self._numbers)
        return number, self._before + question(number, self.prompt_tokens)

    def turn(self, history: bytes, number: int, turn: int) -> tuple[int, bytes]:
        """The history with the answer to `number` and the next question; how many turns came before is `turn`."""
        following = next(self._numbers)
        asked = question(following, self.prompt_tokens + turn * (TOKENS + NEW_TOKENS))
        answer = b'"},{"role":"assistant","content":"%08d%s"},{"role":"user","content":"' % (number, REST.encode())
        return following, history + answer + asked

    def closed(self, history: bytes) -> bytes:
        """A body from a history."""
        return history + self._after


# ----------------------------------------------------------------------------------------------------- answers


def asked(body: bytes) -> tuple[int, int] | None:
    """The number and the prompt tokens of a request's last question."""
    at = body.rfind(_MARK)
    try:
        return int(body[at + 9 : at + 17]), int(body[at + 24 : at + 29])
    except ValueError:
        return None


@cache
def _sequence() -> tuple[bytes, list[int]]:
    """Ids as JSON without brackets, and where each of them begins."""
    chance = random.Random(0)  # noqa: S311  (the same ids at every start)
    texts = [b"%d" % chance.randrange(150_000) for _ in range(_LONGEST)]
    starts = list(itertools.accumulate((len(text) + 1 for text in texts), initial=0))
    return b",".join(texts), starts


def ids(first: int, last: int) -> bytes:
    """Ids of the one sequence, as a JSON array."""
    text, starts = _sequence()
    return b"[" + text[starts[first] : starts[last] - 1] + b"]"


def _logprob(at: int, logprob: float) -> dict[str, Any]:
    piece = _WORDS[at % len(_WORDS)] if at else "@N@"
    spelled: object = list(piece.encode()) if at else "@B@"
    return {"token": piece, "logprob": logprob, "bytes": spelled, "top_logprobs": []}


@cache
def _logprobs() -> tuple[dict[str, Any], ...]:
    chance = random.Random(TOKENS)  # noqa: S311  (full-length floats, the same at every start)
    return tuple(_logprob(at, -chance.expovariate(3.0)) for at in range(TOKENS))


_USAGE = {
    "prompt_tokens": "@C@",
    "total_tokens": "@T@",
    "completion_tokens": TOKENS,
    "prompt_tokens_details": None,
}


@cache
def _whole() -> list[bytes]:
    """A chat completion, cut where a request's own parts stand: literal and name by turns."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": f"@N@{REST}",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": _logprobs()},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": "@S@",
    }
    return _PLACE.split(
        orjson.dumps(
            {
                "id": "chatcmpl-instant",
                "object": "chat.completion",
                "created": 1,
                "model": MODEL,
                "choices": [choice],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": _USAGE,
                "prompt_logprobs": None,
                "prompt_token_ids": "@P@",
                "kv_transfer_params": None,
            }
        )
    )


def _filled(pieces: list[bytes], values: Mapping[bytes, bytes]) -> bytes:
    return b"".join(values[piece.strip(b'"@')] if at % 2 else piece for at, piece in enumerate(pieces))


def _values(number: int, prompt_tokens: int) -> dict[bytes, bytes]:
    name = b"%08d" % number
    return {
        b"N": name,
        b"B": b"[" + b",".join(b"%d" % byte for byte in name) + b"]",
        b"C": b"%d" % prompt_tokens,
        b"T": b"%d" % (prompt_tokens + TOKENS),
    }


def whole_answer(number: int, prompt_tokens: int) -> bytes:
    """The body of an answer that is not streamed."""
    values = _values(number, prompt_tokens)
    values[b"P"] = ids(0, prompt_tokens)
    values[b"S"] = ids(prompt_tokens, prompt_tokens + TOKENS)
    return _filled(_whole(), values)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _chunk(event: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(event), event)


@lru_cache(maxsize=4)
def _streamed(prompt_tokens: int) -> tuple[bytes, bytes, bytes]:
    """The event that begins a stream, the first token's with its places, and all others as HTTP chunks."""
    frame = {"id": "chatcmpl-instant", "object": "chat.completion.chunk", "created": 1, "model": MODEL}

    def choice(delta: dict[str, Any], finish: str | None = None, **more: object) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None} | more]

    sampled = orjson.loads(ids(prompt_tokens, prompt_tokens + TOKENS))
    begins = _event(
        frame
        | {
            "choices": choice({"role": "assistant", "content": ""}),
            "prompt_token_ids": orjson.loads(ids(0, prompt_tokens)),
        }
    )
    events = []
    for at, (token, logprob) in enumerate(zip(sampled, _logprobs(), strict=True)):
        finish = "stop" if at == TOKENS - 1 else None
        delta, content = {"content": logprob["token"]}, {"content": [logprob]}
        events.append(_event(frame | {"choices": choice(delta, finish, logprobs=content, token_ids=[token])}))
    usage: dict[str, Any] = _USAGE | {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + TOKENS}
    events.append(_event(frame | {"choices": [], "usage": usage}))
    events.append(b"data: [DONE]\n\n")
    return begins, events[0], b"".join(map(_chunk, events[1:])) + b"0\r\n\r\n"


def streamed_answer(number: int, prompt_tokens: int) -> tuple[bytes, bytes]:
    """The chunks that an engine sends with its first token, and all others."""
    begins, first, others = _streamed(prompt_tokens)
    filled = _filled(_PLACE.split(first), _values(number, prompt_tokens))
    return _chunk(begins) + _chunk(filled), others


# ------------------------------------------------------------------------------------------------------ checks


def check(number: int, body: bytes, *, stream: bool) -> None:
    """Raises WrongAnswer, in words, unless `body` answers question `number` to its end."""
    try:
        text, logprobs, finish, usage = (_read_stream if stream else _read_whole)(body)
        tokens, sampled = [entry["token"] for entry in logprobs], usage["completion_tokens"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise WrongAnswer(f"an answer that cannot be read ({error!r}): {body[:200]!r}") from error
    if text != f"{number:08d}{REST}":
        raise WrongAnswer(f"the answer to {number} has another text: {text[:80]!r}, {len(text)} characters")
    if "".join(tokens) != text or len(tokens) != TOKENS:
        raise WrongAnswer(f"the answer to {number} has {len(tokens)} logprobs, or not its {TOKENS}")
    if finish != "stop" or sampled != TOKENS:
        raise WrongAnswer(f"the answer to {number} ended with {finish!r} and reports {usage}")


_Read = tuple[str, list[dict[str, Any]], str | None, dict[str, Any]]


def _read_whole(body: bytes) -> _Read:
    answer = orjson.loads(body)
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["logprobs"]["content"], choice["finish_reason"], answer["usage"]


def _read_stream(body: bytes) -> _Read:
    events = [event.partition(b"data: ")[2] for event in body.replace(b"\r\n", b"\n").split(b"\n\n") if event]
    if events[-1] != b"[DONE]":
        raise ValueError("the stream has no end")
    text, logprobs, finish, usage = "", list[dict[str, Any]](), None, dict[str, Any]()
    for event in map(orjson.loads, events[:-1]):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            logprobs += (choice.get("logprobs") or {}).get("content") or []
            finish = choice.get("finish_reason") or finish
    return text, logprobs, finish, usage
