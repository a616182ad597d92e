"""Benchmark `batches`: how fast groups in memory become a batch, and how much memory it takes, beside plain lists.

The groups are those of agents: eight rollouts each, several turns in a segment, some rollouts with two segments,
and versions that change within an answer. The peer is the obvious implementation: lists of Python numbers,
converted to arrays at the end, on the same groups in the same run. It does less and checks nothing.

Method:
- the time is from groups in memory to a batch ready for training, including all checks of `make_batch`;
- figures are medians of alternating rounds; the first round is a warm-up;
- both produce the same arrays, or the benchmark fails;
- memory is the peak of allocations while the batch is made, by tracemalloc, which includes NumPy arrays: it
  contains the batch but not the groups.
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
    """Amount of data to measure, and numbers of repetitions."""

    tokens: int
    rounds: int


FULL = Size(tokens=1_000_000, rounds=9)
QUICK = Size(tokens=1_000_000, rounds=3)


def run(quick: bool, progress: Progress) -> list[Result]:
    size = QUICK if quick else FULL
    progress(f"creating groups of {size.tokens:,} tokens")
    long, short = make_groups(size.tokens, 2_000), make_groups(size.tokens, 150)
    progress("batches and lists, alternately")
    ours, theirs = _measure_alternately([lambda: make_batch(long), lambda: list_columns(long)], size.rounds)
    batch, lists = make_batch(long), list_columns(long)
    _require_equal(batch, lists)
    many, checked, packed = _measure_alternately(
        [lambda: make_batch(short), lambda: check_batch(batch), lambda: list(pack(batch, ROW))], size.rounds
    )
    progress("memory")
    peak, list_peak = _peak_bytes(lambda: make_batch(long)), _peak_bytes(lambda: list_columns(long))
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
            note=f"{about}; the peer computes only the columns",
        ),
        Result(name="seconds_1m", unit="s", ours=ours * 1e6 / tokens, target="<= 1", note="for 1 M tokens"),
        Result(
            name="memory_ratio",
            unit="x arrays",
            ours=peak / batch.nbytes,
            peer="lists of numbers",
            theirs=list_peak / batch.nbytes,
            target="<= 3",
            note=f"peak of allocations, including the {batch.nbytes / 1e6:.1f} MB of the batch",
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
            note="check_batch: every rule and every digest",
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
            note=f"share of rows of {ROW:,} tokens that hold tokens",
        ),
    ]


def make_groups(tokens: int, length: int, seed: int = 0) -> list[Group]:
    """Create groups with about `tokens` tokens in segments of about `length`; one rollout in twenty failed."""
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
    """Create a segment of a prompt and turns, with a third of the tokens sampled."""
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


def list_columns(groups: list[Group]) -> dict[str, Any]:
    """Compute the columns of a batch with plain lists. Only for comparison."""
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
                times = [-1] * n
                for span in segment.versions:
                    times[span.start : span.end] = [span.version] * (span.end - span.start)
                versions += times
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


def _require_equal(batch: Batch, lists: dict[str, Any]) -> None:
    for name, column in lists.items():
        if not np.array_equal(getattr(batch, name), column):
            raise UsageError(f"the batch and the lists differ in {name}: the comparison is invalid")


def _measure_alternately(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median seconds of each function."""
    seconds: list[list[float]] = [[] for _ in functions]
    for number in range(rounds + 1):
        for function, times in zip(functions, seconds, strict=True):
            began = time.perf_counter()
            function()
            if number:
                times.append(time.perf_counter() - began)
    return [median(times) for times in seconds]


def _peak_bytes(make: Callable[[], object]) -> int:
    """Return the peak of bytes allocated by a function."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        result = make()
        _, peak = tracemalloc.get_traced_memory()
        del result
    finally:
        tracemalloc.stop()
    return peak - before
