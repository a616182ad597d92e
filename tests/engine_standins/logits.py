"""Apply sampling parameters to logits, for both engines: penalties, biases, bans, `min_p`.

Behaviour:
- the order is that of the inference engines: bans and biases, penalties, then (in the sampler) temperature, top-k
  and top-p;
- a request that uses none of these parameters costs nothing.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.llama import Floats


class Shaping(NamedTuple):
    """Sampling parameters that change logits; the defaults change nothing."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    """Of the sampling: `min_p` looks at the chances after it."""
    bias: Mapping[int, float] = {}
    only: frozenset[int] | None = None
    """Ids that alone may be drawn."""
    never: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()
    """Ids that are not sampled before the job's `min_tokens` tokens."""

    def on(self, job: SamplingJob) -> Callable[[Floats, SamplingJob], Floats] | None:
        """Return a function that changes the logits of a job."""
        plain = self._replace(temperature=1.0, ends=frozenset()) == Shaping()
        if plain and not (job.min_tokens and self.ends):
            return None
        return self._shaped

    def _shaped(self, logits: Floats, job: SamplingJob) -> Floats:
        row = logits.copy()
        words = len(row)
        if self.only is not None:
            barred = np.ones(words, dtype=bool)
            barred[[token for token in self.only if 0 <= token < words]] = False
            row[barred] = -np.inf
        for token, bias in self.bias.items():
            if 0 <= token < words:
                row[token] += bias
        never = self.never | self.ends if len(job.tokens) < job.min_tokens else self.never
        if never:
            row[[token for token in never if 0 <= token < words]] = -np.inf
        if self.repetition != 1.0:
            used = list({*job.prompt, *job.tokens})
            row[used] = np.where(row[used] > 0, row[used] / self.repetition, row[used] * self.repetition)
        if self.presence or self.frequency:
            counts = np.bincount(np.asarray(job.tokens, dtype=np.int64), minlength=words)[:words]
            row -= (self.frequency * counts + self.presence * (counts > 0)).astype(np.float32)
        if self.min_p > 0.0 and self.temperature > 0.0:
            scaled = row / np.float32(max(self.temperature, 1e-4))
            row[scaled < scaled.max() + np.log(np.float32(self.min_p))] = -np.inf
        return row
