"""Reply options of vLLM and its three formats of logprobs, at commit a014e35.

Behaviour:
- the sampled token comes first among the alternatives and counts as one of them, whatever its rank;
- no value is below -9999, because JSON has no infinities.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.streaming import DeltaDecoder

LOWEST: Final = -9999.0


class ReplyOptions(NamedTuple):
    """The options of one reply."""

    kind: str
    """chat, completion or generate."""
    name: str
    model: str
    created: int
    jobs: Sequence[SamplingJob]
    """`n` for each prompt."""
    n: int = 1
    begun: str = ""
    logprobs: int | None = None
    """Number of alternatives; None for no logprobs."""
    as_ids: bool = False
    """Tokens in logprobs as `token_id:N`."""
    token_ids: bool = False
    tools: bool = False
    """True if calls are looked for."""
    named: bool = False
    """True if a tool was chosen by its name."""
    required: bool = False
    parallel: bool = True
    special: bool = False
    """True if special tokens are part of the text."""
    usage: bool = False
    continuous: bool = False
    hidden: bool = False
    """`include_reasoning: false`: no ids and no logprobs on the choices."""

    def deltas(self, job: SamplingJob) -> DeltaDecoder:
        tools = self.kind == "chat" and self.tools
        return DeltaDecoder(
            prefix=self.begun,
            prompt_length=len(job.prompt),
            stop=job.stop,
            calls_as_text=not tools and self.special,
            hide_calls=not tools and not self.special,
        )

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs[:: self.n])

    def head(self, object_: str) -> dict[str, Any]:
        return {"id": self.name, "object": object_, "created": self.created, "model": self.model}


def token_text(token: int) -> str:
    """Decode a single token. A byte that is not a character becomes the replacement character."""
    if token >= chat.BEGIN:
        return chat.NAMES.get(token, f"<{token}>")
    return chr(token) if token < 128 else "\N{REPLACEMENT CHARACTER}"


def _step(job: SamplingJob, at: int, alternatives: int) -> dict[int, float]:
    """Return the sampled token and the most likely ones, in the order of vLLM's dictionary."""
    found = {job.tokens[at]: max(job.logprobs[at], LOWEST)}
    for token, logprob in job.tops[at][: max(alternatives, 0)] if job.tops else ():
        found.setdefault(token, max(logprob, LOWEST))
    return found


def chat_logprobs(reply_options: ReplyOptions, job: SamplingJob, first: int, last: int) -> dict[str, Any] | None:
    """Return the logprobs of a chat. The sampled token counts as the first alternative."""
    if reply_options.logprobs is None or reply_options.hidden:
        return None
    content = []
    for at in range(first, last):
        step = _step(job, at, reply_options.logprobs)
        names = {token: f"token_id:{token}" if reply_options.as_ids else token_text(token) for token in step}
        entry: dict[str, Any] = {
            "token": names[job.tokens[at]],
            "logprob": step[job.tokens[at]],
            "bytes": list(token_text(job.tokens[at]).encode()),
        }
        shown = list(step.items())[: reply_options.logprobs]
        entry["top_logprobs"] = [
            {"token": names[token], "logprob": logprob, "bytes": list(names[token].encode())}
            for token, logprob in shown
        ]
        content.append(entry)
    return {"content": content}


def completion_logprobs(
    reply_options: ReplyOptions, job: SamplingJob, first: int, last: int, offset: int
) -> dict[str, Any] | None:
    if reply_options.logprobs is None:
        return None
    offsets, names, values, tops = [], [], [], []
    for at in range(first, last):
        step = _step(job, at, reply_options.logprobs)
        text = {token: f"token_id:{token}" if reply_options.as_ids else token_text(token) for token in step}
        name = text[job.tokens[at]]
        offsets.append(offset)
        offset += len(name)
        names.append(name)
        values.append(step[job.tokens[at]])
        tops.append({text[token]: logprob for token, logprob in list(step.items())[: reply_options.logprobs + 1]})
    return {"text_offset": offsets, "token_logprobs": values, "tokens": names, "top_logprobs": tops}


def generate_logprobs(
    reply_options: ReplyOptions, job: SamplingJob, first: int, last: int
) -> dict[str, Any] | None:
    if reply_options.logprobs is None:
        return None
    content = []
    for at in range(first, last):
        step = _step(job, at, reply_options.logprobs)
        shown = list(step.items())[: max(reply_options.logprobs, 1)]
        content.append(
            {
                "token": f"token_id:{job.tokens[at]}",
                "logprob": step[job.tokens[at]],
                "bytes": None,
                "top_logprobs": [
                    {"token": f"token_id:{token}", "logprob": logprob, "bytes": None} for token, logprob in shown
                ],
            }
        )
    return {"content": content}
