"""Evaluates the PyTorch model on held-out tasks: many rollouts at once, as the environment would run them.

Guarantees:
- tokens are sampled from the whole vocabulary at the requested temperature, reproducibly from the seed;
- budgets and scoring are those of the environment.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from embedded.model import SHAPE, Llama
from embedded.programs import run_tool_call
from embedded.teacher import prompt_ids
from rookery.core import Message, Task, derive_seed
from rookery.environments.arithmetic import Arithmetic
from rookery.scoring.answers import match_answer
from rookery.upstreams.embedded import chat

BATCH: Final = 256
CACHE_STEP: Final = 128
CONTEXT: Final = SHAPE.max_position_embeddings


class EvaluatedRollout(NamedTuple):
    """A finished rollout."""

    task: Task
    ids: list[int]
    passed: bool
    calls: int

    @property
    def text(self) -> str:
        """The transcript as text, with special tokens by name."""
        return render_ids(self.ids)


class _Rollout:
    """A running rollout."""

    def __init__(self, env: Arithmetic, task: Task) -> None:
        self.env = env
        self.task = task
        self.ids = prompt_ids(env, *task.prompt)
        self.forced: list[int] = []
        self.answer: list[int] = []
        self.turns = self.sampled = self.calls = 0
        self.final: str | None = None
        self.done = False

    def next_id(self, token: int) -> int:
        """Return the next ID of the sequence: a forced one, or the sampled one."""
        if self.done:  # a finished rollout keeps its row until a fifth of all rows are free
            return chat.PAD
        if len(self.ids) + 2 > CONTEXT:
            self.done = True
        if self.forced:
            token = self.forced.pop(0)
            self.ids.append(token)
            return token
        limits = self.env.limits
        self.ids.append(token)
        self.answer.append(token)
        self.sampled += 1
        if token in chat.ENDS:
            self.finish_turn()
        if self.sampled >= (limits.tokens or 1 << 30):
            self.done = True
        return token

    def finish_turn(self) -> None:
        message = chat.answer(self.answer)
        self.answer = []
        self.turns += 1
        if not message.tool_calls:
            self.final = message.text
            self.done = True
            return
        for call in message.tool_calls:
            self.calls += 1
            result = run_tool_call(call.name, call.arguments, self.env.max_result)
            self.forced += chat.message_ids(Message("tool", result))
        self.forced.append(chat.ASSISTANT)
        if self.turns >= (self.env.limits.turns or 1 << 30):
            self.done = True

    def result(self) -> EvaluatedRollout:
        passed = self.final is not None and match_answer(self.final, self.task.data["answer"])
        return EvaluatedRollout(self.task, self.ids, passed, self.calls)


def evaluate(
    model: Llama, env: Arithmetic, tasks: Sequence[Task], *, seed: int = 0, temperature: float = 1.0
) -> list[EvaluatedRollout]:
    """Run one rollout per task, in order. Temperature 0 always takes the most likely token."""
    random = torch.Generator().manual_seed(derive_seed(seed, "play"))
    rollouts = [_Rollout(env, task) for task in tasks]
    order = sorted(rollouts, key=lambda rollout: len(rollout.ids))
    with torch.no_grad():
        for first in range(0, len(order), BATCH):
            _run_batch(model, order[first : first + BATCH], random, temperature)
    return [rollout.result() for rollout in rollouts]


def _run_batch(model: Llama, rollouts: list[_Rollout], random: torch.Generator, temperature: float) -> None:
    longest = max(len(rollout.ids) for rollout in rollouts)
    ids = torch.tensor([rollout.ids + [chat.PAD] * (longest - len(rollout.ids)) for rollout in rollouts])
    at = torch.tensor([len(rollout.ids) for rollout in rollouts])
    cache = model.cache(len(rollouts), longest + CACHE_STEP)
    hidden = model.hidden(ids, cache, torch.zeros_like(at))[torch.arange(len(rollouts)), at - 1]
    while True:
        logits = model.logits(hidden)
        if temperature > 0:
            # The argmax of the logits with Gumbel noise is a sample of the distribution.
            noise = torch.rand(logits.shape, generator=random).clamp_(1e-20).log_().neg_().log_()
            logits = logits / temperature - noise
        tokens = [
            rollout.next_id(token) for rollout, token in zip(rollouts, logits.argmax(-1).tolist(), strict=True)
        ]
        unfinished = [row for row, rollout in enumerate(rollouts) if not rollout.done]
        if not unfinished:
            return
        if len(unfinished) <= 0.8 * len(rollouts):
            cache, at = cache[:, :, unfinished], at[unfinished]
            rollouts, tokens = [rollouts[row] for row in unfinished], [tokens[row] for row in unfinished]
        if int(at.max()) >= cache.shape[4]:
            cache = functional.pad(cache, (0, 0, 0, CACHE_STEP))
        hidden = model.hidden(torch.tensor(tokens)[:, None], cache, at)[:, 0]
        at = (at + 1).clamp_(max=CONTEXT - 1)


def render_ids(ids: Sequence[int]) -> str:
    """Return IDs as text, with special tokens by name."""
    return b"".join(
        bytes([token]) if token < chat.BEGIN else chat.NAMES.get(token, "<?>").encode() for token in ids
    ).decode("utf-8", "replace")
