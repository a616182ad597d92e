"""Weights: saving and loading, conversion to and from `LlamaForCausalLM`, and refused files."""

import errno
import json
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import UsageError
from rookery.upstreams.embedded.upstream import load_builtin_weights
from rookery.upstreams.embedded.weights import LlamaShape, Weights
from tests.upstreams.embedded_reference import SMALL, models


def same(one: Weights, other: Weights) -> bool:
    return one.shape == other.shape and all(
        np.array_equal(value, other.tensors[name]) for name, value in one.tensors.items()
    )


@given(models(), st.integers(0, 10**12))
@settings(max_examples=15, deadline=None)
def test_saved_weights_load_again(weights: Weights, version: int) -> None:
    weights.version = version
    again = Weights.from_bytes(weights.to_bytes())
    assert same(again, weights)
    assert again.version == version


def test_saved_weights_load_with_transformers_and_vice_versa(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    for tied in (True, False):
        shape = LlamaShape(
            **{**{f: getattr(SMALL, f) for f in SMALL.__struct_fields__}, "tie_word_embeddings": tied}
        )
        weights = Weights.random(shape, seed=4)
        weights.save(tmp_path / f"ours-{tied}")
        model = LlamaForCausalLM.from_pretrained(tmp_path / f"ours-{tied}")
        assert same(Weights.from_model(model, version=3), weights)
        model.save_pretrained(tmp_path / f"theirs-{tied}")
        assert same(Weights.load(tmp_path / f"theirs-{tied}"), weights)
        assert same(Weights.from_model(weights.to_model()), weights)


def test_half_precision_is_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weights = Weights.random(SMALL, seed=4)
    for kind in (torch.bfloat16, torch.float16, torch.float64):
        tensors = {name: torch.from_numpy(value).to(kind) for name, value in weights.tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(SMALL.config()))
        read = Weights.load(tmp_path)
        for name, value in tensors.items():
            assert np.array_equal(read.tensors[name], value.float().numpy())


def test_weights_file_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "policy.safetensors"
    Weights.random(SMALL, seed=1, version=1).save(target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    before = target.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space") as caught:
        Weights.random(SMALL, seed=2, version=2).save(target)
    assert caught.value.errno == errno.ENOSPC
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_broken_file_is_refused(data: st.DataObject) -> None:
    whole = Weights.random(SMALL, seed=1).to_bytes()
    head = int.from_bytes(whole[:8], "little") + 8
    how = data.draw(st.sampled_from(["cut", "flip", "noise"]))
    if how == "cut":
        broken = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif how == "flip":
        at = data.draw(st.integers(0, head - 1))
        broken = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    else:
        broken = data.draw(st.binary(max_size=200))
    try:
        read = Weights.from_bytes(broken)
    except UsageError:
        return
    assert how == "flip", "only one byte of the header is wrong"
    assert all(np.isfinite(value).all() for value in read.tensors.values())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen2"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_scaling"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "head_dim"),
    ],
)
def test_other_architectures_are_refused_by_name(change: dict[str, object], named: str) -> None:
    config = json.dumps({**SMALL.config(), **change}).encode()
    with pytest.raises(UsageError, match=named):
        Weights.from_bytes(Weights.random(SMALL).to_bytes(), config)


def test_tensors_that_are_missing_misshapen_or_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = Weights.random(SMALL).tensors
    name = "model.layers.1.mlp.up_proj.weight"
    for value in (None, tensors[name].T, tensors[name] * np.inf):
        broken = {**tensors, name: value}
        if value is None:
            del broken[name]
        with pytest.raises(UsageError, match=re.escape(name)):
            Weights(SMALL, broken)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nowhere"):
        Weights.load(tmp_path / "nowhere")


def test_builtin_policy_is_small() -> None:
    weights = load_builtin_weights()
    assert 0.5e6 < weights.shape.parameters < 0.7e6
    assert len(weights.to_bytes("F16")) <= 2_000_000
