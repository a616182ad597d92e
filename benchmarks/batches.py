"""The `batches` bench: how fast groups in memory become a batch, and what it takes beyond the batch itself.

The groups are those of an agent: eight rollouts each, several turns in a segment, a few rollouts of two segments,
versions that change in the middle of an answer. The reference is what one writes first: lists of Python numbers,
made into arrays at the end, on the same groups in the same run; it does less, and checks nothing.

Promises:
- the time is from groups in memory to a batch that can train, everything checked that the maker checks;
- every figure is a median of rounds that take turns; the first of each is a warm-up;
- both come to the same arrays, or the bench fails;
- memory is the peak of what was allocated while the batch was made, by tracemalloc, which NumPy tells its arrays:
  the groups themselves are not in it, the batch is.
"""

import struct
import time
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks import Progress, Result
from rookery.core import Completed, Failed, Group, Rollout, Segment, Span, Task, UsageError
from rookery.training import Batch, check_batch, compute_advantages, make_batch, pack

NAME = "batches"
K = 8
ROW = 32_768


class Size(NamedTuple):
    """How much is measured, and how often."""

    tokens: int
    rounds: int


FULL = Size(tokens=1_000_000, rounds=9)
QUICK = Size(tokens=1_000_000, rounds=3)


def run(quick: bool, progress: Progress) -> list[Result]:
    size = QUICK if quick else FULL
    progress(f"making groups of {size.tokens:,} tokens")
    long, short = groups_of(size.tokens, 2_000), groups_of(size.tokens, 150)
    progress("batches and lists, by turns")
    ours, theirs = _by_turns([lambda: make_batch(long), lambda: naive(long)], size.rounds)
    batch, lists = make_batch(long), naive(long)
    _same(batch, lists)
    many, checked, packed = _by_turns(
        [lambda: make_batch(short), lambda: check_batch(batch), lambda: list(pack(batch, ROW))], size.rounds
    )
    progress("memory")
    peak, list_peak = _peak(lambda: make_batch(long)), _peak(lambda: naive(long))
    tokens = len(batch)
    about = f"{tokens:,} tokens in {len(batch.segments):,} segments of {len(batch.rollouts):,} rollouts"
    return [
        Result(
            name="tokens_per_s",
            unit="tokens/s",
            ours=tokens / ours,
            peer="lists of numbers",
            theirs=tokens / theirs,
            target=">= 1000000",
            lower_is_better=False,
            note=f"{about}; the reference computes the columns alone",
        ),
        Result(name="seconds_1m", unit="s", ours=ours * 1e6 / tokens, target="<= 1", note="for 1 M tokens"),
        Result(
            name="memory_ratio",
            unit="x arrays",
            ours=peak / batch.nbytes,
            peer="lists of numbers",
            theirs=list_peak / batch.nbytes,
            target="<= 3",
            note=f"peak allocated while it is made, the batch's {batch.nbytes / 1e6:.1f} MB of arrays included",
        ),
        Result(
            name="tokens_per_s_short",
            unit="tokens/s",
            ours=len(make_batch(short)) / many,
            lower_is_better=False,
            note="the same number of tokens in segments of 150",
        ),
        Result(
            name="check_tokens_per_s",
            unit="tokens/s",
            ours=tokens / checked,
            lower_is_better=False,
            note="check(batch), every rule and every digest",
        ),
        Result(
            name="pack_tokens_per_s",
            unit="tokens/s",
            ours=tokens / packed,
            lower_is_better=False,
            note=f"planned and made, rows of {ROW:,}",
        ),
        Result(
            name="packing_efficiency",
            unit="share",
            ours=pack(batch, ROW).efficiency,
            lower_is_better=False,
            note=f"of rows of {ROW:,} tokens that hold tokens",
        ),
    ]


def groups_of(tokens: int, length: int, seed: int = 0) -> list[Group]:
    """Groups with about so many tokens in all, in segments of about `length`; one rollout in twenty failed."""
    rng = np.random.default_rng(seed)
    groups: list[Group] = []
    made = 0
    while made < tokens:
        index, rollouts = len(groups), []
        for member in range(K):
            name = f"{index}.{member}"
            if rng.random() < 0.05:
                outcome = Failed("infra", "sandbox.lost", "the sandbox is gone")
                rollouts.append(Rollout(id=name, group=index, member=member, task=f"t{index}", outcome=outcome))
                continue
            parts = []
            for number in range(1 + (rng.random() < 0.1)):
                parts.append(_segment(rng, max(8, int(rng.gamma(4.0, length / 4))), 10 * number))
                made += len(parts[-1])
            rollouts.append(
                Rollout(
                    id=name,
                    group=index,
                    member=member,
                    task=f"t{index}",
                    outcome=Completed(),
                    reward=float(rng.integers(2)),
                    segments=parts,
                )
            )
        groups.append(Group(index=index, task=Task(id=f"t{index}"), rollouts=tuple(rollouts)))
    return groups


def _segment(rng: np.random.Generator, n: int, turn: int) -> Segment:
    """A prompt, then turns: a third of the tokens are sampled."""
    mask = np.zeros(n, dtype=np.uint8)
    spans: list[Span] = []
    turns = max(1, min(8, n // 64))
    step = n // turns
    for number in range(turns):
        start, end = number * step + 2 * step // 3, (number + 1) * step
        mask[start:end] = 1
        middle = (start + end) // 2
        spans += [Span(start, middle, 6), Span(middle, end, 7)] if middle > start else [Span(start, end, 7)]
    return Segment(
        tokens=rng.integers(0, 150_000, n).astype("<i4").tobytes(),
        mask=mask.tobytes(),
        logprobs=(-rng.random(n, dtype=np.float32) * mask).astype("<f4").tobytes(),
        versions=tuple(spans),
        turns=tuple(range(turn, turn + turns)),
    )


def naive(groups: list[Group]) -> dict[str, Any]:
    """The columns of a batch as one writes it first. Part of the bench, never for use."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    scores: list[float] = []
    for group in groups:
        for rollout, score in zip(group.rollouts, compute_advantages(group.rewards).tolist(), strict=True):
            for segment in rollout.segments:
                n = len(segment)
                tokens += struct.unpack(f"<{n}i", segment.tokens)
                mask += segment.mask
                logprobs += struct.unpack(f"<{n}f", segment.logprobs)
                own = [-1] * n
                for span in segment.versions:
                    own[span.start : span.end] = [span.version] * (span.end - span.start)
                versions += own
                scores += [score if on else 0.0 for on in segment.mask]
    total = sum(mask)
    return {
        "tokens": np.array(tokens, dtype=np.int32),
        "mask": np.array(mask, dtype=np.bool_),
        "logprobs": np.array(logprobs, dtype=np.float32),
        "versions": np.array(versions, dtype=np.int32),
        "advantages": np.array(scores, dtype=np.float32),
        "weights": np.array([1 / total if on else 0.0 for on in mask], dtype=np.float32),
    }


def _same(batch: Batch, lists: dict[str, Any]) -> None:
    for name, column in lists.items():
        if not np.array_equal(getattr(batch, name), column):
            raise UsageError(f"the batch and the lists differ in {name}: no figure from a broken run")


def _by_turns(contenders: list[Callable[[], object]], rounds: int) -> list[float]:
    """The median seconds of each."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for number in range(rounds + 1):
        for contender, own in zip(contenders, seconds, strict=True):
            began = time.perf_counter()
            contender()
            if number:
                own.append(time.perf_counter() - began)
    return [median(own) for own in seconds]


def _peak(make: Callable[[], object]) -> int:
    """Bytes at the worst moment, of what was allocated meanwhile."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        kept = make()
        _, peak = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return peak - before
