"""Prefix trees compute common prefixes once, and do not change the loss or its gradients."""

from typing import Any

import numpy as np
import pytest

from rookery.core import Segment, Span, UsageError, floats, ints
from rookery.trainer import TrainConfig
from rookery.training import Batch, compare_prefixes, make_batch, pack, pack_prefix_trees
from rookery.upstreams.embedded import load_builtin_weights
from tests.training.kit import group, rollout

PROMPT = 20


def make_segment(rng: np.random.Generator, tokens: list[int]) -> Segment:
    """Return a segment with a prompt, sampled tokens, a tool result and sampled tokens."""
    mask = [0] * PROMPT + [1] * 8 + [0] * 4 + [1] * (len(tokens) - PROMPT - 12)
    return Segment(
        tokens=ints(tokens),
        mask=bytes(mask),
        logprobs=floats(float(-rng.uniform(0.1, 3)) if on else 0.0 for on in mask),
        versions=(Span(PROMPT, PROMPT + 8, 0), Span(PROMPT + 12, len(tokens), 0)),
        turns=(0,),
    )


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Three groups of four rollouts. In each, one is unrelated to the others after the prompt, two are equal, and
    one is longer than these two."""
    rng = np.random.default_rng(3)
    groups = []
    for number, rewards in enumerate([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.5], [1.0, 1.0, 0.0, 0.0]]):
        prompt = rng.integers(0, 255, PROMPT).tolist()
        first, other, more = (rng.integers(0, 255, count).tolist() for count in (24, 30, 9))
        continuations = [first, first, first + more, other]
        segments = [make_segment(rng, prompt + one) for one in continuations]
        members = [rollout(number, member, reward, [segments[member]]) for member, reward in enumerate(rewards)]
        groups.append(group(number, *members))
    return make_batch(groups)


@pytest.mark.parametrize("length", [1, 120, 4096])
def test_loss_and_gradients_equal_those_of_unshared_rows(batch: Batch, length: int) -> None:
    torch = pytest.importorskip("torch", reason="[probed] this machine has no torch")
    from rookery.trainer import policy_loss, token_logprobs

    model = load_builtin_weights().to_model()

    def compute(rows: Any) -> tuple[float, float, dict[str, Any]]:
        model.zero_grad()
        total = entropies = 0.0
        for row in rows:
            new, entropy, values = token_logprobs(model, row)
            loss, _ = policy_loss(new, values.sampled, values, TrainConfig(steps=1))
            loss.backward()
            total, entropies = total + float(loss.detach()), entropies + float(entropy.sum())
        return total, entropies, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    loss, entropy, gradients = compute(pack(batch, 64))
    shared_loss, shared_entropy, shared_gradients = compute(pack_prefix_trees(batch, length))
    assert shared_loss == pytest.approx(loss, abs=1e-6)
    assert shared_entropy == pytest.approx(entropy, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(shared_gradients[name], gradient, rtol=1e-5, atol=1e-6)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3


def test_every_token_is_trained_once_after_its_own_prefix(batch: Batch) -> None:
    rows = pack_prefix_trees(batch, 120)
    assert len(rows) > 1
    assert sorted(one for row in rows for one in row.segments) == list(range(len(batch.segments)))
    found = []
    for row in rows:
        for at, label, weight in zip(row.trained.positions, row.trained.labels, row.trained.weights, strict=True):
            visible = row.attention_mask[at].nonzero()[0]
            assert row.position_ids[visible].tolist() == list(range(row.position_ids[at] + 1))
            found.append((*row.tokens[visible].tolist(), int(label), float(weight)))
    expected = [
        (*batch.tokens[start : at + 1].tolist(), float(batch.weights[at]))
        for start, end in zip(batch.offsets, batch.offsets[1:], strict=False)
        for at in range(start, end)
        if batch.mask[at]
    ]
    assert sorted(found) == sorted(expected)


def test_common_prefixes_are_computed_once(batch: Batch) -> None:
    (row,) = pack_prefix_trees(batch, 4096)
    assert len(row) == 3 * (PROMPT + 24 + 9 + 30)
    assert len(row) < len(batch) / 2
    assert all(len(row) <= 120 for row in pack_prefix_trees(batch, 120))
    with pytest.raises(UsageError):
        pack_prefix_trees(batch, 0)


def test_tokens_are_compared_with_rollouts_that_have_the_same_prefix(batch: Batch) -> None:
    compared = compare_prefixes(batch)
    expected = [  # at the first sampled token, at the next ones, at token 44, where `more` starts, and after it
        (1 - 1 / 3, 1 - 0, None, None),
        (0 - 2 / 3, 0 - 1 / 2, None, None),
        (0 - 2 / 3, 0 - 1 / 2, 0 - 1 / 2, 0),
        (1 - 1 / 3, 0, 0, 0),
    ]
    for segment, (first, then, at_more, later) in enumerate(expected):
        start, end = batch.offsets[segment : segment + 2]
        found = np.where(compared.mask, compared.advantages, np.nan)[start:end]
        assert found[PROMPT] == pytest.approx(first)
        for part, value in ((found[PROMPT + 1 : 44], then), (found[44:45], at_more), (found[45:], later)):
            if value is not None:
                assert part[~np.isnan(part)] == pytest.approx(value)
    assert not compared.advantages[~compared.mask].any()
    assert len(compare_prefixes(make_batch([]))) == 0


def test_a_batch_without_segments_has_no_rows() -> None:
    assert pack_prefix_trees(make_batch([]), 10) == []
