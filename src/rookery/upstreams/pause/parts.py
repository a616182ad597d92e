"""Join the parts of a reply that was interrupted by a weight update, and build the request for its next part.

Runs in runner processes and gateway shards. Pure functions: no socket, no clock.

Guarantees:
- the joined parts have their token IDs, logprobs and alternatives in order, and one span per policy version;
- a part is requested as if the parts before it were the end of the prompt: with what is left of `max_tokens`, the
  same stop strings, and its own seed, so that no random number is drawn twice;
- a stop string that begins in one part and ends in the next is never missed: tokens at the end of a part that may
  be the beginning of a stop string are discarded and sampled again;
- a call with an option whose effect depends on the tokens sampled so far (a grammar, a thinking budget) is not
  continued.
"""

from typing import Final

import msgspec

from rookery.core import Extra, Message, Sampling, Span
from rookery.core.seeds import derive_seed
from rookery.upstreams.format import join_json_lists
from rookery.upstreams.protocol import Delta, ModelReply, ModelRequest

_STATELESS_OPTIONS: Final = frozenset(
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
"""Options in `sampling.extra` that have the same effect on the rest of a reply as on its beginning."""


def can_continue(request: ModelRequest) -> bool:
    """Return True if an interrupted reply can be continued by a request whose prompt ends with the tokens so far.

    This needs a request with token IDs in and out, without options whose effect depends on earlier sampled tokens.
    """
    return bool(request.tokens) and request.want_tokens and _STATELESS_OPTIONS.issuperset(request.sampling.extra)


def max_stop_prefix(sampling: Sampling) -> int:
    """Return the maximum number of tokens at the end of a part that may be the beginning of a stop string.

    This is the length of the longest stop string in bytes, less one, because a token is at least one byte.
    """
    return max((len(text.encode("utf-8", "replace")) - 1 for text in sampling.stop), default=0)


def next_part_request(request: ModelRequest, sampled: bytes, part: int) -> ModelRequest:
    """Return the request for the rest of the reply to `request`.

    `sampled` holds the token IDs of the earlier parts (int32). `part` is the number of the new part; it makes the
    request ID unique. It comes first, because SGLang aborts every call whose ID begins with the ID in an abort
    request.
    """
    if not sampled:
        return request if not request.id else msgspec.structs.replace(request, id=f"{part}+{request.id}")
    sampling = request.sampling
    count = len(sampled) // 4
    return msgspec.structs.replace(
        request,
        tokens=request.tokens + sampled,
        sampling=msgspec.structs.replace(
            sampling,
            max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - count,
            seed=None if sampling.seed is None else derive_seed(sampling.seed, "part", count),
        ),
        seed=None if request.seed is None else derive_seed(request.seed, "part", count),
        id=f"{part}+{request.id}" if request.id else "",
    )


def reply_from_deltas(deltas: list[Delta], *, prompt: bytes, version: int) -> ModelReply:
    """Join the pieces that the caller received of an interrupted part to a reply with the finish reason
    `abort`."""
    sampled = b"".join(delta.sampled for delta in deltas)
    logprob_lists = [delta.logprob_content for delta in deltas if delta.logprob_content is not None]
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
        logprob_content=join_json_lists(logprob_lists) if logprob_lists else None,
    )


def add_spans(reply: ModelReply, marks: list[tuple[int, int]]) -> ModelReply:
    """Return the reply with `spans` that say which policy version sampled which tokens.

    Each mark is a token index and the version from that token on. Tokens before the first mark have the version of
    the reply.
    """
    count = len(reply.sampled) // 4
    spans: list[Span] = []
    start, version = 0, reply.version
    for mark, next_version in [*marks, (count, reply.version)]:
        if (end := min(mark, count)) > start:
            spans.append(Span(start, end, version))
            start = end
        version = next_version
    return msgspec.structs.replace(reply, **_version_fields(spans, reply.version))


def join_parts(parts: list[ModelReply], *, queued: float) -> ModelReply:
    """Join the parts of one reply, in order. The finish reason is that of the last part.

    `queued` is the total time that the call waited, in seconds.
    """
    last = parts[-1]
    if len(parts) == 1:
        return last if last.queued == queued else msgspec.structs.replace(last, queued=queued)
    spans: list[Span] = []
    offset = 0
    for part in parts:
        count = len(part.sampled) // 4
        own = part.spans or ((Span(0, count, part.version),) if count else ())
        spans += (Span(offset + span.start, offset + span.end, span.version) for span in own)
        offset += count
    logprob_lists = [part.logprob_content for part in parts if part.logprob_content is not None]
    messages = [part.message for part in parts]
    tool_calls = tuple(call for message in messages for call in message.tool_calls)
    reasoning = "".join(message.reasoning or "" for message in messages)
    text = "".join(message.text for message in messages)
    return msgspec.structs.replace(
        last,
        message=Message("assistant", text, tool_calls, reasoning=reasoning or None),
        prompt=parts[0].prompt,
        prompt_tokens=parts[0].prompt_tokens,
        sampled=b"".join(part.sampled for part in parts),
        logprobs=b"".join(part.logprobs for part in parts),
        sampled_tokens=sum(part.sampled_tokens for part in parts),
        queued=queued,
        tops=tuple(top for part in parts for top in part.tops),
        logprob_content=join_json_lists(logprob_lists) if logprob_lists else None,
        extras=_join_extras(parts),
        **_version_fields(spans, last.version),
    )


def _version_fields(spans: list[Span], fallback: int) -> dict[str, object]:
    """Return the fields `version` and `spans` of a reply. Adjacent spans of the same version are merged."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = Span(merged[-1].start, span.end, span.version)
        else:
            merged.append(span)
    oldest = min((span.version for span in merged), default=fallback)
    return {"version": oldest, "spans": tuple(merged) if len(merged) > 1 else ()}


def _join_extras(parts: list[ModelReply]) -> dict[str, Extra]:
    """Join the per-token extras that every part has; the others do not cover the reply."""
    return {
        name: Extra(extra.dtype, extra.width, b"".join(part.extras[name].data for part in parts))
        for name, extra in parts[0].extras.items()
        if all(name in part.extras and part.extras[name].width == extra.width for part in parts)
    }
