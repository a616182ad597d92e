"""Training from scratch by imitation of the teacher.

Promises:
- the same seed, steps and threads give the same weights, bit for bit, on the same machine;
- only problems of the train split are seen;
- every dialogue is seen once.
"""

import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from embedded.model import Llama
from embedded.muon import Muon
from embedded.teacher import Dialogue, Teacher
from rookery.core import derive_seed
from rookery.upstreams.embedded import chat

POOL: Final = 400
"""Dialogues that are sorted by length together, so that a batch has little padding."""
COPYING: Final = 0.15
"""The share of training that begins it with copying exercises."""
CLIMB: Final = 0.15
"""The share of training in which the levels come in, one after the other: copying is learned on short ones."""
WARM_UP: Final = 0.04
IGNORED: Final = -100


class Plan(NamedTuple):
    """How to train."""

    seed: int = 0
    steps: int = 1_900
    seconds: float | None = None
    """Learn by the clock instead of by steps: the schedule ends when they are over."""
    batch: int = 2_500
    """Tokens of a batch, padding included."""
    rate: float = 0.005
    """Of Muon, for the matrices."""
    adam_rate: float = 0.01
    """Of AdamW, for the embeddings and the norms."""
    decay: float = 0.01
    aside: float = 0.02
    """The weight of what the assistant did not say: a little of it teaches the language."""


class Report(NamedTuple):
    """Where training stands."""

    step: int
    steps: int
    tokens: int
    loss: float
    """Of the assistant's tokens, over the steps since the last report."""
    seconds: float
    left: float


class Batch(NamedTuple):
    ids: Tensor
    targets: Tensor
    said: Tensor


def batches(plan: Plan) -> Iterator[Batch]:
    """Without end. Batches of one length each, the lengths in random order."""
    teacher = Teacher(plan.seed)
    rng = Random(derive_seed(plan.seed, "batches"))  # noqa: S311
    made = 0
    while True:
        progress = made / plan.steps
        hardest = min(5, 1 + int((progress - COPYING) / CLIMB * 4))
        drawn = teacher.exercises(POOL) if progress < COPYING else teacher.dialogues(POOL, hardest)
        pool = sorted(drawn, key=lambda one: len(one.ids))
        rows: list[list[Dialogue]] = [[]]
        for one in pool:
            if len(one.ids) * (len(rows[-1]) + 1) > plan.batch and rows[-1]:
                rows.append([])
            rows[-1].append(one)
        rng.shuffle(rows)
        made += len(rows)
        for row in rows:
            yield _batch(row)


def _batch(row: list[Dialogue]) -> Batch:
    longest = max(len(one.ids) for one in row)
    ids = torch.full((len(row), longest), chat.PAD)
    said = torch.zeros((len(row), longest), dtype=torch.bool)
    for place, one in enumerate(row):
        ids[place, : len(one.ids)] = torch.tensor(one.ids)
        said[place, : len(one.ids)] = torch.tensor(one.said)
    targets = ids[:, 1:].masked_fill(ids[:, 1:] == chat.PAD, IGNORED)
    return Batch(ids[:, :-1], targets, said[:, 1:])


def loss_of(model: Llama, batch: Batch, aside: float) -> tuple[Tensor, Tensor]:
    """The loss to descend, and that of the assistant's tokens alone."""
    hidden = model.hidden(batch.ids)
    chosen = batch.targets != IGNORED if aside else batch.said
    targets, said = batch.targets[chosen], batch.said[chosen]
    each = functional.cross_entropy(model.logits(hidden[chosen]), targets, reduction="none")
    spoken = (each * said).sum() / said.sum()
    if not aside:
        return spoken, spoken
    rest = (each * ~said).sum() / said.sum()
    return spoken + aside * rest, spoken


def rate_at(progress: float) -> float:
    """The share of the highest learning rate."""
    return min(progress / WARM_UP, (1.0 - progress) / (1.0 - WARM_UP)) if progress < 1.0 else 0.0


def train(plan: Plan, on_report: Callable[[Report], None], every: int = 50) -> Llama:
    """A model trained as planned; `on_report` is called every so many steps, and at the end."""
    torch.use_deterministic_algorithms(True)
    model = Llama(seed=plan.seed)
    matrices = [value for name, value in model.weights.items() if "_proj" in name]
    others = [value for name, value in model.weights.items() if "_proj" not in name]
    muon = Muon(matrices, rate=plan.rate, decay=plan.decay)
    adam = torch.optim.AdamW(others, lr=plan.adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    began, tokens, losses = time.monotonic(), 0, []

    def progress(step: float) -> float:
        return step / plan.steps if plan.seconds is None else (time.monotonic() - began) / plan.seconds

    for step, batch in enumerate(batches(plan), 1):
        share = rate_at(progress(step - 0.5))
        loss, spoken = loss_of(model, batch, plan.aside)
        for value in model.weights.values():
            value.grad = None
        loss.backward()
        muon.step(share)
        adam.param_groups[0]["lr"] = plan.adam_rate * share
        adam.step()
        tokens += batch.ids.numel()
        losses.append(float(spoken.detach()))
        done = progress(step)
        if step % every == 0 or done >= 1.0:
            spent = time.monotonic() - began
            left = max(0.0, spent / done - spent)
            on_report(Report(step, plan.steps, tokens, sum(losses) / len(losses), spent, left))
            losses.clear()
        if done >= 1.0:
            break
    return model
