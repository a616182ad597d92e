"""Requests and answers of the benchmark `gateway`: requests like an agent's, answers in the format of vLLM.

Every request contains a number and the prompt length to report; the answer starts with that number. An answer to
another request is therefore detected.

Guarantees:
- an answer holds 500 sampled tokens with IDs and log probabilities, the prompt's IDs, and a text that starts with
  the number of its question, streamed or not;
- the IDs of a conversation are one sequence: the prompt IDs of a turn are the prompt and sampled IDs of the turn
  before, followed by the IDs of the new message;
- `check_answer` accepts an answer only if its text, log probabilities and end are complete.
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
"""Prompt tokens that the message after an answer adds."""
SHORT_PROMPT = 900
LONG_PROMPT = 32_768
TURNS = 100
LONG_PROMPT_TURNS = 20
_LONGEST = (
    max(LONG_PROMPT + LONG_PROMPT_TURNS * (TOKENS + NEW_TOKENS), SHORT_PROMPT + TURNS * (TOKENS + NEW_TOKENS))
    + TOKENS
)
_WORDS = (" the", " answer", " is", " 42", ",", " since", " six", " times", " seven", " makes", " so", ".")
_QUESTION = b"Question %08d after %05d tokens."
_QUESTION_START = b"Question "
_PLACEHOLDER = re.compile(rb'(@N@|"@[BCPST]@")')

ANSWER_REST = "".join(_WORDS[i % len(_WORDS)] for i in range(1, TOKENS))
"""Text of an answer after its number."""


class WrongAnswerError(RuntimeError):
    """An answer is incomplete or belongs to another request."""


# ---------------------------------------------------------------------------------------------------- requests


def question(number: int, prompt_tokens: int) -> bytes:
    """Return the text of the last message, which tells the upstream what to answer."""
    return _QUESTION % (number, prompt_tokens)


class RequestFactory:
    """Builds requests of one kind, which differ only in their number."""

    def __init__(self, *, size: int, prompt_tokens: int, stream: bool = False) -> None:
        rng = random.Random(size)  # noqa: S311  (same text in every process)
        self.prompt_tokens = prompt_tokens
        self.stream = stream
        self._numbers = itertools.count(1)
        options: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 1.0, "logprobs": True}
        if stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        messages = [{"role": "system", "content": "You are a careful agent."}, {"role": "user", "content": "@Q@"}]
        template = orjson.dumps(options | {"messages": messages})
        before, _, self._after = template.partition(b"@Q@")
        filler_size = max(0, size - len(template) - len(question(0, 0)))
        filler = "".join(rng.choices(_WORDS, k=filler_size))[:filler_size]
        self._before = before + filler.encode() + b" "

    def next(self) -> tuple[int, bytes]:
        """Return an unused number and the request body with it."""
        number = next(self._numbers)
        return number, self._before + question(number, self.prompt_tokens) + self._after

    def open_conversation(self) -> tuple[int, bytes]:
        """Return an unused number and a body without its end, to which `next_turn` appends."""
        number = next(self._numbers)
        return number, self._before + question(number, self.prompt_tokens)

    def next_turn(self, history: bytes, number: int, turn: int) -> tuple[int, bytes]:
        """Append the answer to question `number` and the next question. `turn` turns came before it."""
        following = next(self._numbers)
        text = question(following, self.prompt_tokens + turn * (TOKENS + NEW_TOKENS))
        answer = b'"},{"role":"assistant","content":"%08d%s"},{"role":"user","content":"' % (
            number,
            ANSWER_REST.encode(),
        )
        return following, history + answer + text

    def close_body(self, history: bytes) -> bytes:
        """Return the complete request body of a history."""
        return history + self._after


# ----------------------------------------------------------------------------------------------------- answers


def parse_question(body: bytes) -> tuple[int, int] | None:
    """Return the number and the prompt length in the last question of a request."""
    at = body.rfind(_QUESTION_START)
    try:
        return int(body[at + 9 : at + 17]), int(body[at + 24 : at + 29])
    except ValueError:
        return None


@cache
def _sequence() -> tuple[bytes, list[int]]:
    """Return token IDs as JSON without brackets, and the offset of each."""
    rng = random.Random(0)  # noqa: S311  (same IDs in every process)
    texts = [b"%d" % rng.randrange(150_000) for _ in range(_LONGEST)]
    starts = list(itertools.accumulate((len(text) + 1 for text in texts), initial=0))
    return b",".join(texts), starts


def ids(first: int, last: int) -> bytes:
    """Return a slice of the ID sequence as a JSON array."""
    text, starts = _sequence()
    return b"[" + text[starts[first] : starts[last] - 1] + b"]"


def _logprob(at: int, logprob: float) -> dict[str, Any]:
    piece = _WORDS[at % len(_WORDS)] if at else "@N@"
    raw: object = list(piece.encode()) if at else "@B@"
    return {"token": piece, "logprob": logprob, "bytes": raw, "top_logprobs": []}


@cache
def _logprobs() -> tuple[dict[str, Any], ...]:
    rng = random.Random(TOKENS)  # noqa: S311  (full-length floats, the same in every process)
    return tuple(_logprob(at, -rng.expovariate(3.0)) for at in range(TOKENS))


_USAGE = {
    "prompt_tokens": "@C@",
    "total_tokens": "@T@",
    "completion_tokens": TOKENS,
    "prompt_tokens_details": None,
}


@cache
def _full_template() -> list[bytes]:
    """Return a chat completion split at its placeholders: literals and placeholder names alternate."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": f"@N@{ANSWER_REST}",
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
    return _PLACEHOLDER.split(
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


def _fill_template(pieces: list[bytes], values: Mapping[bytes, bytes]) -> bytes:
    return b"".join(values[piece.strip(b'"@')] if at % 2 else piece for at, piece in enumerate(pieces))


def _template_values(number: int, prompt_tokens: int) -> dict[bytes, bytes]:
    name = b"%08d" % number
    return {
        b"N": name,
        b"B": b"[" + b",".join(b"%d" % byte for byte in name) + b"]",
        b"C": b"%d" % prompt_tokens,
        b"T": b"%d" % (prompt_tokens + TOKENS),
    }


def full_answer(number: int, prompt_tokens: int) -> bytes:
    """Return the body of a non-streamed answer."""
    values = _template_values(number, prompt_tokens)
    values[b"P"] = ids(0, prompt_tokens)
    values[b"S"] = ids(prompt_tokens, prompt_tokens + TOKENS)
    return _fill_template(_full_template(), values)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _chunk(event: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(event), event)


@lru_cache(maxsize=4)
def _stream_template(prompt_tokens: int) -> tuple[bytes, bytes, bytes]:
    """Return the first event, the first token's event with placeholders, and all others as HTTP chunks."""
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


def stream_answer(number: int, prompt_tokens: int) -> tuple[bytes, bytes]:
    """Return the chunks that an engine sends with its first token, and all later chunks."""
    begins, first, others = _stream_template(prompt_tokens)
    filled = _fill_template(_PLACEHOLDER.split(first), _template_values(number, prompt_tokens))
    return _chunk(begins) + _chunk(filled), others


# ------------------------------------------------------------------------------------------------------ checks


def check_answer(number: int, body: bytes, *, stream: bool) -> None:
    """Raise WrongAnswerError unless `body` is the complete answer to question `number`."""
    try:
        text, logprobs, finish, usage = (_read_stream if stream else _read_full)(body)
        tokens, sampled = [entry["token"] for entry in logprobs], usage["completion_tokens"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise WrongAnswerError(f"the answer to {number} cannot be parsed ({error!r}): {body[:200]!r}") from error
    if text != f"{number:08d}{ANSWER_REST}":
        raise WrongAnswerError(f"the answer to {number} has another text: {text[:80]!r}, {len(text)} characters")
    if "".join(tokens) != text or len(tokens) != TOKENS:
        raise WrongAnswerError(
            f"the answer to {number} has {len(tokens)} log probabilities, or not those of its text"
        )
    if finish != "stop" or sampled != TOKENS:
        raise WrongAnswerError(f"the answer to {number} ended with {finish!r} and reports {usage}")


_Read = tuple[str, list[dict[str, Any]], str | None, dict[str, Any]]


def _read_full(body: bytes) -> _Read:
    answer = orjson.loads(body)
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["logprobs"]["content"], choice["finish_reason"], answer["usage"]


def _read_stream(body: bytes) -> _Read:
    events = [event.partition(b"data: ")[2] for event in body.replace(b"\r\n", b"\n").split(b"\n\n") if event]
    if events[-1] != b"[DONE]":
        raise ValueError("the stream does not end with [DONE]")
    text, logprobs, finish, usage = "", list[dict[str, Any]](), None, dict[str, Any]()
    for event in map(orjson.loads, events[:-1]):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            logprobs += (choice.get("logprobs") or {}).get("content") or []
            finish = choice.get("finish_reason") or finish
    return text, logprobs, finish, usage
