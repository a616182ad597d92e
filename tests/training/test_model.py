"""Packed and unpacked log-probabilities of a real small model agree, and so do their gradients.

No token may attend to another document. transformers detects packed documents in `position_ids` only without an
`attention_mask`; with a mask of ones it silently attends across them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rookery.core import Segment, Span, floats, ints
from rookery.training import (
    Batch,
    BatchConfig,
    PackedRow,
    make_attention_mask,
    make_batch,
    make_targets,
    pack,
    pad_batch,
    split_batch,
)
from tests.training.kit import group, rollout

torch = pytest.importorskip("torch", reason="[probed] this machine has no torch")
transformers = pytest.importorskip("transformers", reason="[probed] this machine has no transformers")

ROW = 64


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation=request.param,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    return made.double() if request.param == "sdpa" else made  # eager computes its weights in float32 at any rate


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(3)

    def part(turn: int) -> Segment:
        mask, spans = [], []
        for _ in range(int(rng.integers(1, 3))):
            mask += [0] * int(rng.integers(1, 9))
            start = len(mask)
            mask += [1] * int(rng.integers(1, 12))
            spans.append(Span(start, len(mask), 1))
        n = len(mask)
        return Segment(
            tokens=ints(rng.integers(0, 97, n).tolist()),
            mask=bytes(mask),
            logprobs=floats((-rng.random(n) * np.array(mask)).tolist()),
            versions=tuple(spans),
            turns=(turn,),
        )

    groups = [
        group(g, *(rollout(g, m, float(rng.integers(2)), [part(n) for n in range(1 + m % 2)]) for m in range(4)))
        for g in range(3)
    ]
    return make_batch(groups, BatchConfig(normalise="seq-mean-token-mean", segments="all"))


def logprobs(logits: Any, form: Any) -> Any:
    """Return the log probability of each position's target; 0 if it has none."""
    aim = make_targets(form)
    labels = torch.from_numpy(aim.labels).clamp(min=0)
    found = torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]
    return found * torch.from_numpy(aim.mask)


def tensor(array: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array))


def of_padded(model: Any, batch: Batch, side: Any = "right") -> Any:
    """Return the log probabilities of trained tokens in the order of the batch."""
    form = pad_batch(batch, side=side)
    logits = model(
        input_ids=tensor(form.tokens).long(),
        attention_mask=tensor(form.attention_mask).long(),
        position_ids=tensor(form.position_ids),
        use_cache=False,
    ).logits
    return logprobs(logits, form)[tensor(make_targets(form).mask)]


def positions_alone(row: PackedRow) -> dict[str, Any]:
    return {"position_ids": tensor(row.position_ids)[None]}


def explicit_mask(row: PackedRow) -> dict[str, Any]:
    """Return a mask that is added to the scores, because eager attention would add True as 1."""
    seen = tensor(make_attention_mask(row.seq_idx))[None, None]
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return {"position_ids": tensor(row.position_ids)[None], "attention_mask": bias}


def of_packed(model: Any, batch: Batch, how: Callable[[PackedRow], dict[str, Any]], pad: int | None) -> Any:
    packed = pack(batch, ROW, pad=pad)
    assert len(packed) > 1
    assert max(len(row.segments) for row in packed) > 1
    found: dict[int, Any] = {}
    for row in packed:
        given = {"input_ids": tensor(row.tokens).long()[None], "use_cache": False, **how(row)}
        if given.get("attention_mask") is not None and given["attention_mask"].is_floating_point():
            given["attention_mask"] = given["attention_mask"].to(model.dtype)
        values = logprobs(model(**given).logits[0], row)
        mask = tensor(make_targets(row).mask)
        for document, one in enumerate(row.segments.tolist()):
            place = slice(int(row.cu_seqlens[document]), int(row.cu_seqlens[document + 1]))
            found[one] = values[place][mask[place]]
    return torch.cat([found[one] for one in sorted(found)])


@pytest.mark.parametrize("how", [positions_alone, explicit_mask])
@pytest.mark.parametrize("pad", [None, 0])
def test_packed_and_unpacked_log_probabilities_agree(model: Any, batch: Batch, how: Any, pad: int | None) -> None:
    with torch.no_grad():
        expected = of_padded(model, batch)
        found = of_packed(model, batch, how, pad)
    assert len(expected) == batch.mask.sum()
    close(found, expected)


def test_padding_side_does_not_change_logprobs(model: Any, batch: Batch) -> None:
    with torch.no_grad():
        close(of_padded(model, batch, "left"), of_padded(model, batch))


def a_mask_of_ones(row: PackedRow) -> dict[str, Any]:
    return positions_alone(row) | {"attention_mask": torch.ones(1, len(row), dtype=torch.long)}


def a_cache(row: PackedRow) -> dict[str, Any]:
    return positions_alone(row) | {"use_cache": True}


@pytest.mark.parametrize("how", [a_mask_of_ones, a_cache])
def test_documented_pitfalls_leak_attention_between_sequences(model: Any, batch: Batch, how: Any) -> None:
    """If this test fails, the warning in docs/guides/training.md can be removed."""
    with torch.no_grad():
        off = (of_packed(model, batch, how, None) - of_padded(model, batch)).abs().max()
    assert off > 1e-3


def test_gradient_is_the_same_packed_padded_and_over_ranks(model: Any, batch: Batch) -> None:
    def gradient(forms: list[Any]) -> Any:
        model.zero_grad()
        for form in forms:
            aim = make_targets(form)
            one = form.tokens.ndim == 1
            given = {"input_ids": tensor(form.tokens).long(), "position_ids": tensor(form.position_ids)}
            given = {name: value[None] if one else value for name, value in given.items()}
            if not one:
                given["attention_mask"] = tensor(form.attention_mask).long()
            logits = model(**given, use_cache=False).logits
            values = logprobs(logits[0] if one else logits, form)
            loss = -(tensor(aim.weights) * tensor(aim.advantages) * values).sum()
            loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    expected = gradient([pad_batch(batch)])
    assert expected.abs().max() > 1e-4
    rows = list(pack(batch, ROW))
    by_rank = [row for part in pack(batch, ROW, pad=0).split(2) for row in part]
    alone = [row for part in split_batch(batch, 3) for row in pack(part, ROW)]
    for forms in (rows, by_rank, alone):
        close(gradient(forms), expected)
