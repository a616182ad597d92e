"""Continuous batching: sequences join and leave the batch between steps.

A step samples the next token of every running sequence, then admits waiting sequences: it computes their prompts
and samples their first tokens. This module is plain code without threads, clock or event loop.

- Batching does not change results: a sequence gets the same tokens and log probabilities as if it were alone, bit
  for bit.
- Sequences are admitted in order of arrival, and at most `slots` run at a time. A step computes at most `PROMPTS`
  prompt tokens, or one longer prompt, so that running sequences do not wait longer for it.
- A sequence ends exactly once: at an end token, a stop string, its token limit or the end of the context.
- A sequence that ends or is discarded frees its slot in the same step.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from rookery.upstreams.embedded.kv_cache import BLOCK, CacheBucket, PrefixCache
from rookery.upstreams.embedded.llama import Floats, Ints, Llama
from rookery.upstreams.embedded.sampler import PLAIN, RandomStream, TokenChoice, draw, find_most_likely

SLOTS: Final = 64
PROMPTS: Final = 512
"""Maximum number of prompt tokens that one step computes. A single prompt that is longer is computed in one step,
too."""
CHUNK: Final = 128
"""Maximum number of prompt tokens per forward pass. More would not fit into the CPU cache."""
BLOCKS: Final = 2048


class SamplingJob:
    """One sequence: its prompt and sampling parameters, and the tokens sampled so far."""

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        seed: int,
        choice: TokenChoice = PLAIN,
        ends: frozenset[int] = frozenset(),
        stop: tuple[bytes, ...] = (),
        alternatives: int = 0,
    ) -> None:
        self.prompt = list(prompt)
        self.max_tokens = max_tokens
        """Maximum number of tokens to sample."""
        self.choice = choice
        self.random = RandomStream(seed)
        self.ends = ends
        self.stop = tuple(text for text in stop if text)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.alternatives = alternatives
        """Number of most likely tokens to report for each sampled token."""
        self.tops: list[tuple[tuple[int, float], ...]] = []
        """The most likely tokens at each position, with their log probabilities, if they are reported."""
        self.finish: Literal["", "stop", "length", "abort"] = ""
        self.text_tokens = 0
        """Number of sampled tokens that are text of the reply: without the end token or stop string."""
        self.reused = 0
        """Number of prompt tokens whose keys and values were found in the prefix cache."""

    def take(self, token: int, logprob: float) -> bool:
        """Append a sampled token. Return True if it ends the sequence, and set `finish` then."""
        self.tokens.append(token)
        if token == self.choice.single_use_id:
            self.choice = self.choice._replace(banned_id=token)
        self.logprobs.append(logprob)
        self.text_tokens = len(self.tokens)
        if token in self.ends:
            self.finish = "stop"
            self.text_tokens -= 1
        elif self.stop and (cut := self.stop_length()):
            self.finish = "stop"
            self.text_tokens -= cut
        elif len(self.tokens) >= self.max_tokens:
            self.finish = "length"
        return bool(self.finish)

    def stop_length(self) -> int:
        """Return the length of the stop string at the end of the sampled tokens, or 0. Every token is a byte."""
        for stop in self.stop:
            tail = self.tokens[-len(stop) :]
            if len(tail) == len(stop) and all(map(int.__eq__, tail, stop)):
                return len(stop)
        return 0


class Batch:
    """The running and waiting sequences of one model. `slots` limits the running ones, `blocks` the prefix
    cache."""

    def __init__(self, llama: Llama, *, slots: int = SLOTS, blocks: int = BLOCKS) -> None:
        self.llama = llama
        self.prefix_cache = PrefixCache(blocks)
        self.waiting: deque[SamplingJob] = deque()
        self._slots = slots
        self._buckets: dict[int, CacheBucket[SamplingJob]] = {}
        self._causal: dict[int, Floats] = {}

    @property
    def running(self) -> int:
        return sum(len(bucket.sequences) for bucket in self._buckets.values())

    @property
    def busy(self) -> bool:
        """True if a step would sample a token."""
        return bool(self.waiting) or self.running > 0

    def add(self, job: SamplingJob) -> None:
        """Queue a sequence. Raise `ValueError` if its prompt has invalid token IDs or fills the whole context.

        The token limit of the job is reduced to what fits the context.
        """
        if not 0 < len(job.prompt) < self.llama.context:
            raise ValueError(
                f"the prompt has {len(job.prompt)} tokens; 1 to {self.llama.context - 1} fit the context"
            )
        if not all(0 <= token < self.llama.shape.vocab_size for token in job.prompt):
            raise ValueError(f"the prompt has token IDs outside 0 to {self.llama.shape.vocab_size - 1}")
        job.max_tokens = max(1, min(job.max_tokens, self.llama.context - len(job.prompt)))
        self.waiting.append(job)

    def discard(self, job: SamplingJob) -> bool:
        """Remove a running or waiting sequence. Return False if it is neither."""
        if job in self.waiting:
            self.waiting.remove(job)
            return True
        for bucket in self._buckets.values():
            if job in bucket.sequences:
                bucket.remove(bucket.sequences.index(job))
                return True
        return False

    def step(self) -> list[SamplingJob]:
        """Sample one token for every running sequence and for the waiting sequences that are admitted now.

        Return the sequences that got a token; those whose `finish` is set have left the batch.
        """
        drawn: list[SamplingJob] = []
        logits: list[Floats] = []
        if buckets := [bucket for bucket in self._buckets.values() if bucket.sequences]:
            buckets = self._move_full_rows(buckets)
            drawn += [job for bucket in buckets for job in bucket.sequences]
            logits.append(self._next(buckets, drawn))
        for job in self._admitted():
            drawn.append(job)
            logits.append(self._begin(job))
        if drawn:
            self._draw(drawn, logits[0] if len(logits) == 1 else np.concatenate(logits))
        return drawn

    # ------------------------------------------------------------------------------------------- a step

    def _move_full_rows(self, buckets: list[CacheBucket[SamplingJob]]) -> list[CacheBucket[SamplingJob]]:
        """Move sequences that fill their row of the KV cache to a bucket with longer rows. Return the non-empty
        buckets."""
        for bucket in buckets:
            for row in range(len(bucket.sequences) - 1, -1, -1):
                if bucket.positions[row] >= bucket.span:
                    bucket.move(row, self._bucket(self.llama.span(bucket.span + 1)))
        return [bucket for bucket in self._buckets.values() if bucket.sequences]

    def _next(self, buckets: list[CacheBucket[SamplingJob]], jobs: list[SamplingJob]) -> Floats:
        """Return the logits after the last token of every running sequence."""
        llama = self.llama
        tokens = [job.tokens[-1] for job in jobs]
        parts: list[tuple[CacheBucket[SamplingJob], slice, Ints, Ints]] = []
        at = 0
        for bucket in buckets:
            rows = len(bucket.sequences)
            positions = bucket.positions[:rows]
            parts.append((bucket, slice(at, at + rows), np.arange(rows), positions.copy()))
            bucket.mask[parts[-1][2], 0, 0, positions] = 0.0
            positions += 1
            at += rows

        def attend(layer: int, queries: Floats, keys: Floats, values: Floats) -> Floats:
            mixed: list[Floats] = []
            for bucket, span, rows, positions in parts:
                old_keys, old_values = bucket.keys[layer, : len(rows)], bucket.values[layer, : len(rows)]
                old_keys[rows, :, :, positions] = keys[span]
                old_values[rows, :, positions] = values[span]
                mixed.append(llama.attend(queries[span], old_keys, old_values, bucket.mask[: len(rows)]))
            return mixed[0] if len(mixed) == 1 else np.concatenate(mixed)

        positions = parts[0][3] if len(parts) == 1 else np.concatenate([part[3] for part in parts])
        return llama.rows(tokens, positions, attend)

    def _admitted(self) -> list[SamplingJob]:
        jobs: list[SamplingJob] = []
        free, prompts = self._slots - self.running, PROMPTS
        while self.waiting and len(jobs) < free and (not jobs or len(self.waiting[0].prompt) <= prompts):
            jobs.append(self.waiting.popleft())
            prompts -= len(jobs[-1].prompt)
        return jobs

    def _begin(self, job: SamplingJob) -> Floats:
        """Start a sequence: compute the part of its prompt that the prefix cache does not have.

        Return the logits after the last token of the prompt.
        """
        llama = self.llama
        ids = [*job.prompt, *job.tokens] if job.tokens else job.prompt
        bucket = self._bucket(llama.span(len(ids) + 1))
        row = bucket.add(job)
        known = self.prefix_cache.find(ids)
        for number, block in enumerate(known):
            at = slice(number * BLOCK, (number + 1) * BLOCK)
            bucket.keys[:, row, ..., at], bucket.values[:, row, :, at] = block.keys, block.values
        job.reused = BLOCK * len(known)
        logits: Floats | None = None
        for first in range(job.reused, len(ids), CHUNK):
            logits = self._chunk(bucket, row, ids[first : first + CHUNK], first)
        assert logits is not None
        bucket.extend(row, len(ids))
        self.prefix_cache.store(ids, bucket, row)
        return logits

    def _chunk(
        self,
        bucket: CacheBucket[SamplingJob],
        row: int,
        tokens: list[int],
        first: int,
        wanted: slice = slice(-1, None),
    ) -> Floats:
        """Compute the keys and values of a chunk of a prompt, which starts at position `first`, and store them in
        `row`. Return the logits after the `wanted` tokens of the chunk."""
        llama = self.llama
        last = first + len(tokens)
        # Each row attends over the span of its own position, as it would if it were computed alone.
        pieces: list[tuple[int, int, int]] = []
        at = first
        while at < last:
            span = llama.span(at + 1)
            pieces.append((span, at, min(last, span)))
            at = pieces[-1][2]

        def attend(layer: int, queries: Floats, keys: Floats, values: Floats) -> Floats:
            old_keys, old_values = bucket.keys[layer, row], bucket.values[layer, row]
            old_keys[..., first:last] = keys.transpose(1, 2, 0)
            old_values[:, first:last] = values.swapaxes(0, 1)
            mixed = [
                llama.attend(
                    queries[begin - first : end - first],
                    old_keys[None, ..., :span],
                    old_values[None, :, :span],
                    self._mask(span)[begin:end, None, None],
                )
                for span, begin, end in pieces
            ]
            return mixed[0] if len(mixed) == 1 else np.concatenate(mixed)

        return llama.rows(tokens, np.arange(first, last), attend, wanted)

    def _draw(self, jobs: list[SamplingJob], logits: Floats) -> None:
        tokens, logprobs = self.choose_tokens(jobs, logits)
        for row, job in enumerate(jobs):
            if job.alternatives:
                job.tops.append(find_most_likely(logits[row], job.alternatives))
        ended = {
            job for job, token, logprob in zip(jobs, tokens, logprobs, strict=True) if job.take(token, logprob)
        }
        if not ended:
            return
        for bucket in self._buckets.values():
            for row in range(len(bucket.sequences) - 1, -1, -1):
                if (job := bucket.sequences[row]) in ended:
                    # The last token was sampled but not computed, so it has no keys and values.
                    self.prefix_cache.store([*job.prompt, *job.tokens[:-1]], bucket, row)
                    bucket.remove(row)

    def choose_tokens(self, jobs: list[SamplingJob], logits: Floats) -> tuple[list[int], list[float]]:
        """Return the next token of each sequence and its log probability."""
        return draw(logits, [job.choice for job in jobs], [job.random.next() for job in jobs])

    def _bucket(self, span: int) -> CacheBucket[SamplingJob]:
        bucket = self._buckets.get(span)
        if bucket is None:
            bucket = self._buckets[span] = CacheBucket(self.llama, span)
        return bucket

    def _mask(self, span: int) -> Floats:
        """Return the causal attention mask for `span` positions."""
        mask = self._causal.get(span)
        if mask is None:
            mask = np.triu(np.full((span, span), -np.inf, dtype=np.float32), 1)
            self._causal[span] = mask
        return mask
