"""A call that is answered in parts, because weights changed in the middle of it. Pure: no socket, no clock.

Promises:
- the parts of an answer, joined, have their ids, logprobs and alternatives in order, and a span for each version;
- a part is asked for as if the parts before it were the end of the prompt: what is left of `max_tokens`, the same
  stops, and a seed of its own, so that no random number is drawn twice;
- a stop text that would begin in one part and end in the next is never missed: what may be its beginning is not
  counted as sampled before it is known that it is none;
- a call whose sampling remembers what it sampled (a grammar, a budget of thinking) is not continued.
"""

from typing import Final

import msgspec

from rookery.core import Extra, Message, Sampling, Span
from rookery.core.seeds import derive_seed
from rookery.upstreams.format import joined_json
from rookery.upstreams.protocol import Delta, ModelReply, ModelRequest

_MEMORYLESS: Final = frozenset(
    {
        "allowed_token_ids",
        "cache_salt",
        "detokenize",
        "extra_key",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "lora_path",
        "min_p",
        "no_stop_trim",
        "priority",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
    }
)
"""Options of engines that mean the same for the rest of an answer as for its beginning."""


def continuable(request: ModelRequest, sampling: Sampling) -> bool:
    """Whether the rest of an answer can be asked for from the tokens of its beginning."""
    return bool(request.tokens) and request.want_tokens and _MEMORYLESS.issuperset(sampling.extra)


def uncertain(sampling: Sampling) -> int:
    """How many tokens at the end of a part may begin a stop text: every token has a byte at least."""
    return max((len(text.encode("utf-8", "replace")) - 1 for text in sampling.stop), default=0)


def onward(request: ModelRequest, sampling: Sampling, sampled: bytes, part: int) -> ModelRequest:
    """The request for what follows `sampled`, as part number `part`. `sampling` is what the first part was asked
    with, the upstream's own included."""
    if not sampled:
        return request if not request.id else msgspec.structs.replace(request, id=f"{request.id}+{part}")
    count = len(sampled) // 4
    left = None if sampling.max_tokens is None else sampling.max_tokens - count
    seed = sampling.seed if sampling.seed is None else _seed(sampling.seed, count)
    return msgspec.structs.replace(
        request,
        tokens=request.tokens + sampled,
        sampling=msgspec.structs.replace(sampling, max_tokens=left, seed=seed),
        seed=None if request.seed is None else _seed(request.seed, count),
        id=f"{request.id}+{part}" if request.id else "",
    )


def _seed(seed: int, count: int) -> int:
    return derive_seed(seed, "part", count)


def heard(deltas: list[Delta], *, prompt: bytes, version: int) -> ModelReply:
    """What was told of a part that did not come to its end."""
    sampled = b"".join(delta.sampled for delta in deltas)
    written = [delta.logprob_content for delta in deltas if delta.logprob_content is not None]
    return ModelReply(
        message=Message("assistant", "".join(delta.content for delta in deltas)),
        finish="abort",
        prompt=prompt,
        sampled=sampled,
        logprobs=b"".join(delta.logprobs for delta in deltas),
        version=version,
        prompt_tokens=len(prompt) // 4,
        sampled_tokens=len(sampled) // 4,
        tops=tuple(top for delta in deltas for top in delta.tops),
        logprob_content=joined_json(written) if written else None,
    )


def spanned(reply: ModelReply, marks: list[tuple[int, int]]) -> ModelReply:
    """The answer with its versions by token: `marks` are the tokens from which on another one sampled."""
    count = len(reply.sampled) // 4
    spans: list[Span] = []
    start, version = 0, reply.version
    for mark, number in [*marks, (count, reply.version)]:
        if (end := min(mark, count)) > start:
            spans.append(Span(start, end, version))
            start = end
        version = number
    return msgspec.structs.replace(reply, **_versions(spans, reply.version))


def joined(parts: list[ModelReply], *, queued: float) -> ModelReply:
    """One answer. The last part says how it ended."""
    last = parts[-1]
    if len(parts) == 1:
        return last if last.queued == queued else msgspec.structs.replace(last, queued=queued)
    spans: list[Span] = []
    at = 0
    for part in parts:
        count = len(part.sampled) // 4
        own = part.spans or ((Span(0, count, part.version),) if count else ())
        spans += (Span(at + span.start, at + span.end, span.version) for span in own)
        at += count
    written = [part.logprob_content for part in parts if part.logprob_content is not None]
    said = [part.message for part in parts]
    calls = tuple(call for message in said for call in message.tool_calls)
    thought = "".join(message.reasoning or "" for message in said)
    return msgspec.structs.replace(
        last,
        message=Message("assistant", "".join(message.text for message in said), calls, reasoning=thought or None),
        prompt=parts[0].prompt,
        prompt_tokens=parts[0].prompt_tokens,
        sampled=b"".join(part.sampled for part in parts),
        logprobs=b"".join(part.logprobs for part in parts),
        sampled_tokens=sum(part.sampled_tokens for part in parts),
        queued=queued,
        tops=tuple(top for part in parts for top in part.tops),
        logprob_content=joined_json(written) if written else None,
        extras=_extras(parts),
        **_versions(spans, last.version),
    )


def _versions(spans: list[Span], fallback: int) -> dict[str, object]:
    """Neighbours of one version as one span; none where there is one version only."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = Span(merged[-1].start, span.end, span.version)
        else:
            merged.append(span)
    oldest = min((span.version for span in merged), default=fallback)
    return {"version": oldest, "spans": tuple(merged) if len(merged) > 1 else ()}


def _extras(parts: list[ModelReply]) -> dict[str, Extra]:
    """Extras that every part has; one that only some have describes no answer."""
    first = parts[0].extras
    return {
        name: Extra(extra.dtype, extra.width, b"".join(part.extras[name].data for part in parts))
        for name, extra in first.items()
        if all(name in part.extras and part.extras[name].width == extra.width for part in parts)
    }
