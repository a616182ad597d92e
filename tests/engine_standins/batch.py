"""The embedded policy's batch, extended by what vLLM and SGLang can do: pauses, penalties, new weights."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np

from rookery.upstreams.embedded.batch import CHUNK, Batch, SamplingJob
from rookery.upstreams.embedded.inference_thread import InferenceThread
from rookery.upstreams.embedded.kv_cache import PrefixCache
from rookery.upstreams.embedded.llama import Floats, Llama
from rookery.upstreams.embedded.sampler import draw

Gate: TypeAlias = Literal["open", "shut", "frozen"]
"""The operations that a step may do. `open`: everything. `shut`: no waiting sequence is admitted. `frozen`: no
token is sampled either."""


class StandinJob(SamplingJob):
    """A sequence with the sampling parameters of vLLM and SGLang."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reported = 0
        """Number of tokens that other threads may read: they have a log probability, and `finish` is set if
        they are the last."""
        self.retracted = 0
        """Number of times that `StandinBatch.retract` put the sequence back into the queue."""
        self.min_tokens = 0
        """Minimum number of sampled tokens. An end token or stop string within them does not end the sequence."""
        self.include_stop = False
        """True if the end token or stop string belongs to the text of the reply."""
        self.matched: int | bytes | None = None
        """The end token or stop string that ended the sequence; None if neither did."""
        self.logits_processor: Callable[[Floats, StandinJob], Floats] | None = None
        """A function that takes the logits and this job, and returns the logits to sample from."""
        self.logprob_temperature = 0.0
        """If above 0, log probabilities are computed at this temperature, after the logits processor."""
        self.top_count = 0
        """Number of most likely alternatives to record for each token."""
        self.tops: list[list[tuple[int, float]]] = []
        self.logprob_start: int | None = None
        """Index of the first prompt token whose log probability is requested, or None."""
        self.prompt_logprobs: list[float | None] = []
        """Log probabilities of the prompt tokens from `logprob_start` on. The entry of the prompt's first token is
        None."""

    def take(self, token: int, logprob: float) -> bool:
        if len(self.tokens) < self.min_tokens:
            ends, stop, self.ends, self.stop = self.ends, self.stop, frozenset(), ()
            super().take(token, logprob)
            self.ends, self.stop = ends, stop
        elif super().take(token, logprob) and self.finish == "stop":
            cut = len(self.tokens) - self.text_tokens
            self.matched = token if token in self.ends else bytes(self.tokens[-cut:])
            if self.include_stop:
                self.text_tokens = len(self.tokens)
        return bool(self.finish)


class StandinBatch(Batch):
    """A batch that can be paused, and whose weights can be replaced while sequences run.

    Running sequences continue when the gate opens, with the weights that the batch has then.
    """

    gate: Gate = "open"

    @property
    def busy(self) -> bool:
        if self.gate == "frozen":
            return False
        return self.running > 0 or (self.gate == "open" and bool(self.waiting))

    def step(self) -> list[SamplingJob]:
        jobs = [] if self.gate == "frozen" else super().step()
        for job in jobs:
            if isinstance(job, StandinJob):
                job.reported = len(job.tokens)
        return jobs

    def replace(self, llama: Llama) -> None:
        """Replace the weights. Running sequences keep their KV cache; the prefix cache is cleared.

        Raises `ValueError` if the hyperparameters differ.
        """
        if llama.shape != self.llama.shape:
            raise ValueError("the new weights have other hyperparameters than the current ones")
        self.llama = llama
        self.forget()

    def forget(self) -> None:
        """Clear the prefix cache."""
        self.prefix_cache = PrefixCache(self.prefix_cache.max_blocks)

    def retract(self) -> int:
        """Put running sequences back to the front of the queue, and return their number.

        When they are admitted again, the keys and values of their prompts and sampled tokens are computed again,
        and sampling continues after those tokens.
        """
        running = [job for bucket in self._buckets.values() for job in bucket.sequences]
        for job in running:
            self.discard(job)
            if isinstance(job, StandinJob):
                job.retracted += 1
        self.waiting.extendleft(reversed(running))
        return len(running)

    def _admitted(self) -> list[SamplingJob]:
        return super()._admitted() if self.gate == "open" else []

    def _begin(self, job: SamplingJob) -> Floats:
        if not isinstance(job, StandinJob) or job.logprob_start is None:
            return super()._begin(job)
        ids = [*job.prompt, *job.tokens]
        bucket = self._bucket(self.llama.span(len(ids) + 1))
        row = bucket.add(job)
        for first in range(0, len(ids), CHUNK):
            logits = self._chunk(bucket, row, ids[first : first + CHUNK], first, slice(None))
            if not job.tokens:
                _record_prompt_logprobs(job, job.logprob_start, first, logits)
        bucket.extend(row, len(ids))
        self.prefix_cache.store(ids, bucket, row)
        return logits[-1:]

    def choose_tokens(self, jobs: list[SamplingJob], logits: Floats) -> tuple[list[int], list[float]]:
        numbers = [job.random.next() for job in jobs]
        rows = [(row, job) for row, job in enumerate(jobs) if isinstance(job, StandinJob)]
        drawn_from = logits
        if any(job.logits_processor is not None for _, job in rows):
            drawn_from = logits.copy()
            for row, job in rows:
                if job.logits_processor is not None:
                    drawn_from[row] = job.logits_processor(logits[row], job)
        tokens, logprobs = draw(drawn_from, [job.choice for job in jobs], numbers)
        for row, job in rows:
            if job.logits_processor is not None or job.logprob_temperature or job.top_count:
                at = job.logprob_temperature
                reported = drawn_from[row] / np.float32(at) if at else logits[row]
                logprobs[row] = token_logprob(reported, tokens[row], job.top_count, job.tops)
        return tokens, logprobs


def _record_prompt_logprobs(job: StandinJob, start: int, first: int, logits: Floats) -> None:
    """Record log probabilities of prompt tokens, from the logits of a chunk that starts at position `first`."""
    if not first and not start:
        job.prompt_logprobs.append(None)
    for row in range(max(0, start - 1 - first), min(len(logits), len(job.prompt) - 1 - first)):
        job.prompt_logprobs.append(token_logprob(logits[row], job.prompt[first + row + 1], 0, []))


def token_logprob(logits: Floats, token: int, keep: int, tops: list[list[tuple[int, float]]]) -> float:
    """Return the log probability of a token. If `keep` is above 0, append the list of the `keep` most likely
    tokens, with their log probabilities, to `tops`."""
    low = logits - logits.max()
    logs = low - np.log(np.exp(low).sum())
    if keep:
        best = np.argsort(-logs, kind="stable")[:keep].tolist()
        tops.append([(int(other), float(logs[other])) for other in best])
    return float(logs[token])


class StandinThread(InferenceThread):
    """The inference thread with batches of the stand-ins."""

    def new_batch(self, llama: Llama) -> Batch:
        return StandinBatch(llama, slots=self._slots)

    @property
    def standin_batch(self) -> StandinBatch:
        """The batch of new sequences."""
        assert isinstance(self.batch, StandinBatch)
        return self.batch
