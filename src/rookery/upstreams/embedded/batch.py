"""Continuous batching: sequences join and leave between steps, and none of them notices.

A step gives every sequence under way its next token, then admits those that wait: their prompts are computed and
their first tokens drawn. It is plain code without a thread, a clock or a loop.

Promises:
- batching changes nothing: a sequence gets the tokens and logprobs it would get alone, to the last bit;
- admission is in the order of arrival, at most `places` at once, and a long queue of prompts does not stand
  before sequences that are under way for longer than `PROMPTS` tokens of them;
- a sequence ends exactly once: at an end id, a stop text, its token limit or the end of the context;
- a batch whose gate is shut begins nothing new, and one that is frozen draws nothing; what it holds goes on where
  it stood when the gate opens, with the weights that are there then;
- what ends or is taken out frees its place in the same step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

import numpy as np

from rookery.upstreams.embedded.cache import BLOCK, Past, Shelf
from rookery.upstreams.embedded.llama import Floats, Ints, Llama
from rookery.upstreams.embedded.sampler import PLAIN, Choice, Draws, draw, tell

PLACES: Final = 64
PROMPTS: Final = 512
"""Tokens of prompts computed in one step, a single longer prompt apart."""
CHUNK: Final = 128
"""Rows computed at once: more would leave the cache of a core."""
BLOCKS: Final = 2048
Gate: TypeAlias = Literal["open", "shut", "frozen"]
"""`shut`: nothing begins; `frozen`: nothing is drawn either."""


class Job:
    """One sequence: what is asked, and what came of it so far."""

    __slots__ = (
        "before",
        "choice",
        "draws",
        "ends",
        "finish",
        "keep",
        "least",
        "logprobs",
        "matched",
        "most",
        "prompt",
        "retracted",
        "reused",
        "scaled",
        "shape",
        "start",
        "stop",
        "text",
        "tokens",
        "told",
        "tops",
        "whole",
    )

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        most: int,
        seed: int,
        choice: Choice = PLAIN,
        ends: frozenset[int] = frozenset(),
        stop: tuple[bytes, ...] = (),
    ) -> None:
        self.prompt = list(prompt)
        self.most = most
        """Tokens to sample at most."""
        self.choice = choice
        self.draws = Draws(seed)
        self.ends = ends
        self.stop = tuple(text for text in stop if text)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish: Literal["", "stop", "length", "abort"] = ""
        self.text = 0
        """How many of the tokens are the answer: without the end id, or the stop text, that ended it."""
        self.reused = 0
        """Tokens of the prompt that did not have to be computed."""
        self.told = 0
        """How many of the tokens are whole: with their logprob, and with the `finish` where there is one. For who
        reads while another thread draws."""
        self.retracted = 0
        """How often it was put back to the queue."""
        self.least = 0
        """Tokens before which neither an end id nor a stop text ends it."""
        self.whole = False
        """Whether the end id or the stop text that ended it counts as a part of the answer."""
        self.matched: int | bytes | None = None
        """What ended it: an id, or a stop text."""
        self.shape: Callable[[Floats, Job], Floats] | None = None
        """The logits to draw from, made of the model's own."""
        self.scaled = 0.0
        """Above 0: logprobs are told of what it is drawn from, at this temperature, before cuts."""
        self.keep = 0
        """How many of the likeliest tokens are kept beside each that is drawn."""
        self.tops: list[list[tuple[int, float]]] = []
        self.start: int | None = None
        """The place in the prompt from which on its tokens' logprobs are wanted."""
        self.before: list[float | None] = []
        """These, once the prompt is computed; the first token of all has none."""

    def take(self, token: int, logprob: float) -> bool:
        """One token more; whether it was the last."""
        self.tokens.append(token)
        if token == self.choice.once:
            self.choice = self.choice._replace(never=token)
        self.logprobs.append(logprob)
        self.text = len(self.tokens)
        early = len(self.tokens) <= self.least
        if token in self.ends and not early:
            self.finish = "stop"
            self.matched = token
            self.text -= 0 if self.whole else 1
        elif self.stop and not early and (cut := self._stopped()):
            self.finish = "stop"
            self.matched = bytes(self.tokens[-cut:])
            self.text -= 0 if self.whole else cut
        elif len(self.tokens) >= self.most:
            self.finish = "length"
        return bool(self.finish)

    def _stopped(self) -> int:
        """The length of the stop text that the sampled bytes end with: every token is a byte."""
        for stop in self.stop:
            tail = self.tokens[-len(stop) :]
            if len(tail) == len(stop) and all(map(int.__eq__, tail, stop)):
                return len(stop)
        return 0


class Batch:
    """The sequences of one model."""

    def __init__(self, llama: Llama, *, places: int = PLACES, blocks: int = BLOCKS) -> None:
        self.llama = llama
        self.past = Past(blocks)
        self.waiting: deque[Job] = deque()
        self.gate: Gate = "open"
        self._places = places
        self._shelves: dict[int, Shelf[Job]] = {}
        self._causal: dict[int, Floats] = {}

    @property
    def running(self) -> int:
        return sum(len(shelf.held) for shelf in self._shelves.values())

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def busy(self) -> bool:
        """Whether a step would draw anything."""
        if self.gate == "frozen":
            return False
        return self.running > 0 or (self.gate == "open" and bool(self.waiting))

    def add(self, job: Job) -> None:
        """At the end of the queue. Its prompt and at least one token fit the context, or `ValueError`."""
        if not 0 < len(job.prompt) < self.llama.context:
            raise ValueError(f"a prompt of {len(job.prompt)} tokens in a context of {self.llama.context}")
        if not all(0 <= token < self.llama.shape.vocab_size for token in job.prompt):
            raise ValueError(f"a prompt with ids outside of 0 to {self.llama.shape.vocab_size - 1}")
        job.most = max(1, min(job.most, self.llama.context - len(job.prompt)))
        self.waiting.append(job)

    def discard(self, job: Job) -> bool:
        """Takes a sequence out wherever it is; whether it was there."""
        if job in self.waiting:
            self.waiting.remove(job)
            return True
        for shelf in self._shelves.values():
            if job in shelf.held:
                shelf.remove(shelf.held.index(job))
                return True
        return False

    def replace(self, llama: Llama) -> None:
        """Other weights of the same shape, in place: what is under way goes on with them, on the keys and values
        that it has. Those of the past are forgotten."""
        if llama.shape != self.llama.shape:
            raise ValueError("weights that replace others in place have their shape")
        self.llama = llama
        self.forget()

    def forget(self) -> None:
        """Nothing of the past is found again."""
        self.past = Past(self.past.most)

    def retract(self) -> int:
        """Puts what is under way back to the front of the queue: it goes on from its tokens, whose keys and values
        are computed anew. How many there were."""
        held = [job for shelf in self._shelves.values() for job in shelf.held]
        for job in held:
            self.discard(job)
            job.retracted += 1
        self.waiting.extendleft(reversed(held))
        return len(held)

    def step(self) -> list[Job]:
        """One token for everybody; the sequences that got one, in no order. Those with a `finish` are out."""
        if self.gate == "frozen":
            return []
        drawn: list[Job] = []
        logits: list[Floats] = []
        if shelves := [shelf for shelf in self._shelves.values() if shelf.held]:
            shelves = self._roomy(shelves)
            drawn += [job for shelf in shelves for job in shelf.held]
            logits.append(self._next(shelves, drawn))
        for job in self._admitted():
            drawn.append(job)
            logits.append(self._begin(job))
        if drawn:
            self._draw(drawn, logits[0] if len(logits) == 1 else np.concatenate(logits))
        return drawn

    # ------------------------------------------------------------------------------------------- a step

    def _roomy(self, shelves: list[Shelf[Job]]) -> list[Shelf[Job]]:
        """Moves the sequences that have outgrown their shelf."""
        for shelf in shelves:
            for row in range(len(shelf.held) - 1, -1, -1):
                if shelf.positions[row] >= shelf.span:
                    shelf.move(row, self._shelf(self.llama.span(shelf.span + 1)))
        return [shelf for shelf in self._shelves.values() if shelf.held]

    def _next(self, shelves: list[Shelf[Job]], jobs: list[Job]) -> Floats:
        """The logits after the last token of every sequence."""
        llama = self.llama
        tokens = [job.tokens[-1] for job in jobs]
        parts: list[tuple[Shelf[Job], slice, Ints, Ints]] = []
        at = 0
        for shelf in shelves:
            rows = len(shelf.held)
            positions = shelf.positions[:rows]
            parts.append((shelf, slice(at, at + rows), np.arange(rows), positions.copy()))
            shelf.mask[parts[-1][2], 0, 0, positions] = 0.0
            positions += 1
            at += rows

        def attend(layer: int, queries: Floats, keys: Floats, values: Floats) -> Floats:
            mixed: list[Floats] = []
            for shelf, span, rows, positions in parts:
                old_keys, old_values = shelf.keys[layer, : len(rows)], shelf.values[layer, : len(rows)]
                old_keys[rows, :, :, positions] = keys[span]
                old_values[rows, :, positions] = values[span]
                mixed.append(llama.look(queries[span], old_keys, old_values, shelf.mask[: len(rows)]))
            return mixed[0] if len(mixed) == 1 else np.concatenate(mixed)

        places = parts[0][3] if len(parts) == 1 else np.concatenate([part[3] for part in parts])
        return llama.rows(tokens, places, attend)

    def _admitted(self) -> list[Job]:
        jobs: list[Job] = []
        if self.gate != "open":
            return jobs
        free, prompts = self._places - self.running, PROMPTS
        while self.waiting and len(jobs) < free and (not jobs or len(self.waiting[0].prompt) <= prompts):
            jobs.append(self.waiting.popleft())
            prompts -= len(jobs[-1].prompt)
        return jobs

    def _begin(self, job: Job) -> Floats:
        """Computes a prompt, as far as the past does not have it; the logits after its last token."""
        llama = self.llama
        ids = [*job.prompt, *job.tokens] if job.tokens else job.prompt
        shelf = self._shelf(llama.span(len(ids) + 1))
        row = shelf.add(job)
        known = self.past.find(ids) if job.start is None else []
        for number, block in enumerate(known):
            at = slice(number * BLOCK, (number + 1) * BLOCK)
            shelf.keys[:, row, ..., at], shelf.values[:, row, :, at] = block.keys, block.values
        job.reused = BLOCK * len(known)
        logits: Floats | None = None
        for first in range(job.reused, len(ids), CHUNK):
            logits = self._chunk(shelf, row, ids[first : first + CHUNK], first, whole=job.start is not None)
            if job.start is not None and not job.tokens:
                self._look_back(job, first, logits)
            logits = logits[-1:]
        assert logits is not None
        shelf.extend(row, len(ids))
        self.past.keep(ids, shelf, row)
        return logits

    def _look_back(self, job: Job, first: int, logits: Floats) -> None:
        """The logprobs of the prompt's tokens behind the rows of a chunk that begins at `first`."""
        start = job.start or 0
        if not first and not start:
            job.before.append(None)
        for row in range(max(0, start - 1 - first), min(len(logits), len(job.prompt) - 1 - first)):
            job.before.append(tell(logits[row], job.prompt[first + row + 1], 0, []))

    def _chunk(self, shelf: Shelf[Job], row: int, tokens: list[int], first: int, *, whole: bool) -> Floats:
        """The logits after the last of the tokens, or with `whole` after each."""
        llama = self.llama
        last = first + len(tokens)
        # Each row looks over the span that its own position has, as it would if it were computed alone.
        pieces: list[tuple[int, int, int]] = []
        at = first
        while at < last:
            span = llama.span(at + 1)
            pieces.append((span, at, min(last, span)))
            at = pieces[-1][2]

        def attend(layer: int, queries: Floats, keys: Floats, values: Floats) -> Floats:
            old_keys, old_values = shelf.keys[layer, row], shelf.values[layer, row]
            old_keys[..., first:last] = keys.transpose(1, 2, 0)
            old_values[:, first:last] = values.swapaxes(0, 1)
            mixed = [
                llama.look(
                    queries[begin - first : end - first],
                    old_keys[None, ..., :span],
                    old_values[None, :, :span],
                    self._mask(span)[begin:end, None, None],
                )
                for span, begin, end in pieces
            ]
            return mixed[0] if len(mixed) == 1 else np.concatenate(mixed)

        wanted = slice(None) if whole else slice(len(tokens) - 1, None)
        return llama.rows(tokens, np.arange(first, last), attend, wanted)

    def _draw(self, jobs: list[Job], logits: Floats) -> None:
        numbers = [job.draws.next() for job in jobs]
        drawn_from = logits
        if any(job.shape is not None for job in jobs):
            drawn_from = logits.copy()
            for row, job in enumerate(jobs):
                if job.shape is not None:
                    drawn_from[row] = job.shape(logits[row], job)
        tokens, logprobs = draw(drawn_from, [job.choice for job in jobs], numbers)
        for row, job in enumerate(jobs):
            if job.shape is not None or job.scaled or job.keep:
                told = drawn_from[row] / np.float32(job.scaled) if job.scaled else logits[row]
                logprobs[row] = tell(told, tokens[row], job.keep, job.tops)
        ended = {
            job for job, token, logprob in zip(jobs, tokens, logprobs, strict=True) if job.take(token, logprob)
        }
        if not ended:
            return
        for shelf in self._shelves.values():
            for row in range(len(shelf.held) - 1, -1, -1):
                if (job := shelf.held[row]) in ended:
                    # The last token was drawn, not computed: it has no position.
                    self.past.keep([*job.prompt, *job.tokens[:-1]], shelf, row)
                    shelf.remove(row)

    def _shelf(self, span: int) -> Shelf[Job]:
        shelf = self._shelves.get(span)
        if shelf is None:
            shelf = self._shelves[span] = Shelf(self.llama, span)
        return shelf

    def _mask(self, span: int) -> Floats:
        """For each position of a span: what it may look at."""
        mask = self._causal.get(span)
        if mask is None:
            mask = np.triu(np.full((span, span), -np.inf, dtype=np.float32), 1)
            self._causal[span] = mask
        return mask
