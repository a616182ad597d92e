"""Plays held-out tasks with the model in PyTorch: what a rollout of the environment would do, many at once.

Promises:
- sampled at the temperature that is asked for, from all tokens, and reproducible from the seed;
- budgets and scoring are the environment's own.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from embedded.model import SHAPE, Llama
from embedded.programs import observation
from embedded.teacher import prompt_ids
from rookery.core import Message, Task, derive_seed
from rookery.environments.arithmetic import Arithmetic
from rookery.environments.text import match_answer
from rookery.upstreams.embedded import chat

TOGETHER: Final = 256
MORE: Final = 128
CONTEXT: Final = SHAPE.max_position_embeddings


class Played(NamedTuple):
    """One rollout."""

    task: Task
    ids: list[int]
    passed: bool
    calls: int

    @property
    def text(self) -> str:
        """The transcript, with its ids above the bytes by name."""
        return shown(self.ids)


class _Seat:
    """A rollout under way."""

    def __init__(self, env: Arithmetic, task: Task) -> None:
        self.env = env
        self.task = task
        self.ids = prompt_ids(env, *task.prompt)
        self.forced: list[int] = []
        self.answer: list[int] = []
        self.turns = self.sampled = self.calls = 0
        self.final: str | None = None
        self.over = False

    def take(self, token: int) -> int:
        """The next id: one that is forced, or the sampled one."""
        if self.over:  # it keeps its row until a fifth of the rows are free
            return chat.PAD
        if len(self.ids) + 2 > CONTEXT:
            self.over = True
        if self.forced:
            token = self.forced.pop(0)
            self.ids.append(token)
            return token
        limits = self.env.limits
        self.ids.append(token)
        self.answer.append(token)
        self.sampled += 1
        if token in chat.ENDS:
            self.ended()
        if self.sampled >= (limits.tokens or 1 << 30):
            self.over = True
        return token

    def ended(self) -> None:
        message = chat.answer(self.answer)
        self.answer = []
        self.turns += 1
        if not message.tool_calls:
            self.final = message.text
            self.over = True
            return
        for call in message.tool_calls:
            self.calls += 1
            seen = observation(call.name, call.arguments, self.env.max_result)
            self.forced += chat.message_ids(Message("tool", seen))
        self.forced.append(chat.ASSISTANT)
        if self.turns >= (self.env.limits.turns or 1 << 30):
            self.over = True

    def played(self) -> Played:
        passed = self.final is not None and match_answer(self.final, self.task.data["answer"])
        return Played(self.task, self.ids, passed, self.calls)


def play(
    model: Llama, env: Arithmetic, tasks: Sequence[Task], *, seed: int = 0, temperature: float = 1.0
) -> list[Played]:
    """One rollout of each task, in order. Temperature 0 always takes the most likely id."""
    random = torch.Generator().manual_seed(derive_seed(seed, "play"))
    seats = [_Seat(env, task) for task in tasks]
    order = sorted(seats, key=lambda seat: len(seat.ids))
    with torch.no_grad():
        for first in range(0, len(order), TOGETHER):
            _play(model, order[first : first + TOGETHER], random, temperature)
    return [seat.played() for seat in seats]


def _play(model: Llama, seats: list[_Seat], random: torch.Generator, temperature: float) -> None:
    longest = max(len(seat.ids) for seat in seats)
    ids = torch.tensor([seat.ids + [chat.PAD] * (longest - len(seat.ids)) for seat in seats])
    at = torch.tensor([len(seat.ids) for seat in seats])
    cache = model.cache(len(seats), longest + MORE)
    hidden = model.hidden(ids, cache, torch.zeros_like(at))[torch.arange(len(seats)), at - 1]
    while True:
        logits = model.logits(hidden)
        if temperature > 0:
            # The largest of the logits with Gumbel noise is a sample.
            noise = torch.rand(logits.shape, generator=random).clamp_(1e-20).log_().neg_().log_()
            logits = logits / temperature - noise
        tokens = [seat.take(token) for seat, token in zip(seats, logits.argmax(-1).tolist(), strict=True)]
        left = [place for place, seat in enumerate(seats) if not seat.over]
        if not left:
            return
        if len(left) <= 0.8 * len(seats):
            cache, at = cache[:, :, left], at[left]
            seats, tokens = [seats[place] for place in left], [tokens[place] for place in left]
        if int(at.max()) >= cache.shape[4]:
            cache = functional.pad(cache, (0, 0, 0, MORE))
        hidden = model.hidden(torch.tensor(tokens)[:, None], cache, at)[:, 0]
        at = (at + 1).clamp_(max=CONTEXT - 1)


def shown(ids: Sequence[int]) -> str:
    """Ids as text, those above the bytes by their names."""
    return b"".join(
        bytes([token]) if token < chat.BEGIN else chat.NAMES.get(token, "<?>").encode() for token in ids
    ).decode("utf-8", "replace")
