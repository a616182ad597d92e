"""Parts of replies that both engines have: decoded text, log probabilities, token counts, events of streams."""

from collections.abc import Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.streaming import DecodedDelta, DeltaDecoder
from tests.engine_standins.batch import StandinJob

encode = msgspec.json.Encoder().encode
DONE: Final = b"data: [DONE]\n\n"
Chunks: TypeAlias = list[dict[str, Any]]


def event(body: Any) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


class Run(msgspec.Struct, kw_only=True):
    """One sequence and the options of its reply."""

    job: StandinJob
    name: str = ""
    """ID of the request, by which the sequence can be aborted."""
    logprobs: bool = False
    tops: int = 0
    """Number of alternatives per token in the log probabilities."""
    special: bool = False
    """True if special tokens are part of the text."""
    begun: str = ""
    """Start of a tool call with which the prompt ends."""
    tools: bool = False
    """True if tool calls are parsed."""

    def __post_init__(self) -> None:
        self.job.top_count = self.tops

    def decoder(self, *, stop: bool) -> DeltaDecoder:
        """Return a decoder for the reply. `stop`: withhold text that may be the beginning of a stop string."""
        return DeltaDecoder(
            prefix=self.begun,
            prompt_length=len(self.job.prompt),
            stop=self.job.stop if stop else (),
            calls_as_text=not self.tools and self.special,
            hide_calls=not self.tools and not self.special,
        )

    def decode(self) -> DecodedDelta:
        """Return text and tool calls of the complete reply."""
        return self.decoder(stop=True).finish(self.job.tokens, self.job.text_tokens)


R = TypeVar("R", bound=Run)


def token_text(token: int) -> str:
    """Decode a single token. A byte that is not a character becomes the replacement character."""
    if token >= chat.BEGIN:
        return chat.NAMES.get(token, f"<{token}>")
    return chr(token) if token < 128 else "\N{REPLACEMENT CHARACTER}"


def alternatives(run: Run, at: int) -> dict[str, float]:
    """Return the log probabilities of the most likely tokens at an index."""
    return {token_text(token): value for token, value in (run.job.tops[at][: run.tops] if run.tops else ())}


def chat_logprobs(run: Run, first: int, last: int) -> dict[str, Any] | None:
    """Return the log probabilities of tokens in the format of chat completions."""
    if not run.logprobs:
        return None
    content = []
    for at in range(first, last):
        name = token_text(run.job.tokens[at])
        tops = [
            {"token": other, "bytes": list(other.encode()), "logprob": value}
            for other, value in alternatives(run, at).items()
        ]
        entry = {"token": name, "bytes": list(name.encode()), "logprob": run.job.logprobs[at]}
        content.append(entry | {"top_logprobs": tops})
    return {"content": content}


def usage(runs: Sequence[Run], n: int = 1) -> dict[str, Any]:
    """Return the token counts of a request with `n` choices per prompt."""
    prompt = sum(len(run.job.prompt) for run in runs[::n])
    sampled = sum(len(run.job.tokens) for run in runs)
    return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}


class StreamWriter(Generic[R]):
    """Write the events of one stream. Subclasses know the format of an engine's endpoint."""

    withholds_stops = True
    """True if text that may be the beginning of a stop string is withheld."""
    begins_at_once = True
    """True if the head of the response is sent before the first token is sampled."""

    def __init__(self, runs: Sequence[R]) -> None:
        self._decoders = [run.decoder(stop=self.withholds_stops) for run in runs]
        self._sent = [0] * len(runs)
        self._runs = runs

    def events(self, number: int, ready: int, ended: bool) -> list[bytes]:
        """Return the events for the tokens of one choice up to `ready`. `ended`: there are no more."""
        run = self._runs[number]
        decoder, tokens = self._decoders[number], run.job.tokens
        first, self._sent[number] = self._sent[number], ready
        delta = decoder.finish(tokens, run.job.text_tokens) if ended else decoder.feed(tokens, ready)
        return [event(chunk) for chunk in self.chunks(number, first, ready, ended, delta)]

    def chunks(self, number: int, first: int, ready: int, ended: bool, delta: DecodedDelta) -> Chunks:
        """Return the events of the tokens from `first` to `ready`, whose text and tool calls are `delta`."""
        raise NotImplementedError

    def end(self) -> list[bytes]:
        """Return the events after the last token."""
        return [DONE]
