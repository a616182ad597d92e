"""Continuous batching for a torch model: sequences join and leave the batch between steps.

A step samples the next token of every running sequence, then computes a part of the prompts of new sequences.
This module is plain code without threads, clock or event loop.

- Sequences start in order of arrival, and at most as many run at a time as the KV cache has slots.
- A long prompt is computed in chunks, so that running sequences wait for one chunk at most. Prompts of similar
  length are computed together.
- A sequence depends on the others in the batch only through rounding, because products of matrices of different
  sizes may round differently. The same prompt, seed and weights give the same tokens up to that.
- Weights may change between two steps. Running sequences continue with their cached keys and values, every
  token carries the policy version that sampled it, and no later sequence reuses keys and values of the old
  weights.
- A sequence that ends or is discarded frees its slot in the same step.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch

from rookery.upstreams.torch.decode_graphs import BucketedDecode
from rookery.upstreams.torch.decoder import Decoder
from rookery.upstreams.torch.slots import SlotTable
from rookery.upstreams.torch.token_sampling import PLAIN, BatchChoices, TokenChoice, random_numbers, sample_tokens

_MAX_SCORES: Final = 1 << 25
"""Limit on the size of an attention mask: queries times cached positions."""


class SampledSequence:
    """One sequence: its prompt and sampling parameters, and the tokens sampled so far."""

    __slots__ = (
        "alternatives",
        "choice",
        "computed",
        "ends",
        "find_stop",
        "finish",
        "logprobs",
        "max_tokens",
        "prompt",
        "reused",
        "seed",
        "slot",
        "tokens",
        "tops",
        "versions",
    )

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        seed: int,
        choice: TokenChoice = PLAIN,
        ends: frozenset[int] = frozenset(),
        find_stop: Callable[[list[int]], bool] | None = None,
        alternatives: int = 0,
    ) -> None:
        self.prompt = list(prompt)
        self.max_tokens = max_tokens
        self.choice = choice
        self.seed = seed & (2**64 - 1)
        self.ends = ends
        """Token IDs that end the sequence."""
        self.find_stop = find_stop
        """Return True if the sampled tokens end with a stop string; None for a sequence without stop strings."""
        self.alternatives = alternatives
        """Number of most likely alternatives to record for each token."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[list[tuple[int, float]]] = []
        self.versions: list[tuple[int, int]] = []
        """Pairs of a token index and the policy version that sampled the tokens from there on."""
        self.finish: Literal["", "stop", "length", "abort"] = ""
        self.slot = -1
        """Slot in the KV cache; -1 while the sequence waits."""
        self.computed = 0
        """Number of tokens whose keys and values are in the cache."""
        self.reused = 0
        """Number of prompt tokens that the prefix cache had."""

    def take(self, token: int, logprob: float, version: int) -> bool:
        """Append a sampled token. Return True if it ends the sequence, and set `finish` then."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.ends or (self.find_stop is not None and self.find_stop(self.tokens)):
            self.finish = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish = "length"
        return bool(self.finish)


class Batch:
    """The running and waiting sequences of one model."""

    def __init__(self, decoder: Decoder, *, version: int = 0, bucketed: bool | None = None) -> None:
        on_gpu = decoder.device.type == "cuda"
        self.decoder = decoder
        self.version = version
        """The policy version of the weights."""
        self.waiting: deque[SampledSequence] = deque()
        self.running: list[SampledSequence] = []
        self.chunk = 1024 if on_gpu else 256
        """Maximum number of tokens of one prompt that a step computes."""
        self.prompt_budget = 16_384 if on_gpu else 1024
        """Maximum number of prompt tokens that a step computes, of all sequences together."""
        self.prompt_tokens = self.reused_tokens = self.sampled_tokens = self.steps = 0
        self._choices = BatchChoices([PLAIN], decoder.device)
        self._slots = SlotTable(decoder.slots, decoder.context)
        bucketed = on_gpu if bucketed is None else bucketed
        self._buckets = BucketedDecode(decoder) if bucketed else None

    @property
    def busy(self) -> bool:
        """True if a step would compute something."""
        return bool(self.waiting or self.running)

    def add(self, sequence: SampledSequence) -> None:
        """Queue a sequence. Its token limit is reduced to what fits the context.

        Raises `ValueError` if its prompt is empty, has invalid token IDs or fills the whole context.
        """
        decoder = self.decoder
        if not 0 < len(sequence.prompt) < decoder.context:
            raise ValueError(
                f"the prompt has {len(sequence.prompt)} tokens; 1 to {decoder.context - 1} fit the context"
            )
        if not all(0 <= token < decoder.vocabulary for token in sequence.prompt):
            raise ValueError(f"the prompt has token IDs outside 0 to {decoder.vocabulary - 1}")
        sequence.max_tokens = max(1, min(sequence.max_tokens, decoder.context - len(sequence.prompt)))
        self.waiting.append(sequence)

    def discard(self, sequence: SampledSequence) -> bool:
        """Remove a running or waiting sequence. Return False if it is neither."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self._slots.release(sequence.slot)
        else:
            return False
        return True

    def load(self, state: Mapping[str, Any], version: int) -> None:
        """Replace the weights by those of a `state_dict` of the transformers model.

        Raises `WeightsError` and changes nothing if they do not fit.
        """
        self.decoder.load(state)
        self.version = version
        self.clear_prefix_cache()

    def clear_prefix_cache(self) -> None:
        """Let no later sequence reuse the keys and values in the cache. Running sequences keep theirs."""
        self._slots.invalidate()

    def step(self) -> list[SampledSequence]:
        """Sample one token for every running sequence, and compute a part of the prompts of the others.

        Return the sequences that got a token; those whose `finish` is set have left the batch.
        """
        self.steps += 1
        ready = [sequence for sequence in self.running if sequence.tokens]
        sampled = self._decode(ready) if ready else []
        self._admit()
        if group := self._next_prompts():
            sampled += self._prefill(*group)
        return sampled

    # ---- a step

    def _admit(self) -> None:
        while self.waiting and self._slots.free:
            sequence = self.waiting.popleft()
            slot, reused, source = self._slots.assign(sequence.prompt)
            if source is not None:
                self.decoder.copy_prefix(source, slot, reused)
            sequence.slot = slot
            sequence.computed = sequence.reused = reused
            self.reused_tokens += reused
            self.running.append(sequence)

    def _decode(self, sequences: list[SampledSequence]) -> list[SampledSequence]:
        """Compute the last token of each sequence and sample the next one."""
        slots = [sequence.slot for sequence in sequences]
        positions = [sequence.computed for sequence in sequences]
        tokens = [sequence.tokens[-1] for sequence in sequences]
        span = self.decoder.span(max(positions) + 1)
        if self._buckets is not None:
            logits = self._buckets.run(slots, positions, tokens, span)
        else:
            columns = self._to_device([[token] for token in tokens], [[position] for position in positions])
            in_order = slots == list(range(len(slots)))
            rows, last = self._to_device(slots, [0] * len(slots))
            logits = self.decoder.forward(
                columns[0], columns[1], columns[1], last, None if in_order else rows, span
            )
        for sequence in sequences:
            sequence.computed += 1
        self._slots.extend(slots, positions, tokens)
        return self._sample(sequences, logits)

    def _next_prompts(self) -> tuple[list[SampledSequence], int] | None:
        """Return the sequences whose prompts are computed in this step, and the most tokens of one of them."""
        unfinished = [sequence for sequence in self.running if not sequence.tokens]
        if not unfinished:
            return None
        sizes = {sequence: min(self.chunk, len(sequence.prompt) - sequence.computed) for sequence in unfinished}
        size = 1 << (sizes[unfinished[0]] - 1).bit_length()
        group: list[SampledSequence] = []
        span = 0
        for sequence in unfinished:
            if not size // 2 < sizes[sequence] <= size and sequence is not unfinished[0]:
                continue
            span = max(span, self.decoder.span(sequence.computed + sizes[sequence]))
            count = len(group) + 1
            if group and (count * size > self.prompt_budget or count * size * span > _MAX_SCORES):
                break
            group.append(sequence)
        return group, max(sizes[sequence] for sequence in group)

    def _prefill(self, sequences: list[SampledSequence], width: int) -> list[SampledSequence]:
        """Compute up to `width` tokens of the prompt of each sequence.

        Sample the first token of the sequences whose prompt is complete, and return those.
        """
        decoder = self.decoder
        tokens, positions, writes, ends = [], [], [], []
        for sequence in sequences:
            part = sequence.prompt[sequence.computed : sequence.computed + width]
            padding = [0] * (width - len(part))
            end = sequence.computed + len(part)
            tokens.append(part + padding)
            positions.append([*range(sequence.computed, end), *padding])
            writes.append([*range(sequence.computed, end), *(decoder.context for _ in padding)])
            ends.append(end)
            self.prompt_tokens += len(part)
        inputs = self._to_device(tokens, positions, writes)
        slots = [sequence.slot for sequence in sequences]
        last = [end - 1 - sequence.computed for end, sequence in zip(ends, sequences, strict=True)]
        rows, last_tokens = self._to_device(slots, last)
        logits = decoder.forward(inputs[0], inputs[1], inputs[2], last_tokens, rows, decoder.span(max(ends)))
        for end, sequence in zip(ends, sequences, strict=True):
            sequence.computed = end
        self._slots.set_lengths(slots, ends)
        complete = [row for row, sequence in enumerate(sequences) if sequence.computed == len(sequence.prompt)]
        if not complete:
            return []
        return self._sample([sequences[row] for row in complete], logits[complete])

    def _sample(self, sequences: list[SampledSequence], logits: torch.Tensor) -> list[SampledSequence]:
        choices = [sequence.choice for sequence in sequences]
        if choices != self._choices.choices:  # the same from step to step, until a sequence joins or leaves
            self._choices = BatchChoices(choices, logits.device)
        result = sample_tokens(
            logits,
            self._choices,
            random_numbers(
                [sequence.seed for sequence in sequences], [len(sequence.tokens) for sequence in sequences]
            ),
            max(sequence.alternatives for sequence in sequences),
        )
        ended = False
        for row, (sequence, token, logprob) in enumerate(
            zip(sequences, result.tokens, result.logprobs, strict=True)
        ):
            if sequence.alternatives:
                sequence.tops.append(result.tops[row][: sequence.alternatives])
            if sequence.take(token, logprob, self.version):
                self._slots.release(sequence.slot)
                ended = True
        if ended:
            self.running = [sequence for sequence in self.running if not sequence.finish]
        self.sampled_tokens += len(sequences)
        return sequences

    def _to_device(self, *rows: Any) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64).to(self.decoder.device)
