"""Load models for the torch upstream: folders, GGUF files, and everything that does not fit."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rookery.upstreams import UpstreamConfig, open_upstream
from rookery.upstreams.torch import ModelLoadError, load_model
from rookery.upstreams.torch.batch import SampledSequence
from rookery.upstreams.torch.loading import check_model, find_end_tokens
from rookery.upstreams.torch.text import TextDecoder
from rookery.upstreams.torch.token_sampling import TokenChoice
from tests.upstreams.torch_kit import (
    SMOLLM2,
    build_batch,
    build_model,
    build_tokenizer,
    change_config,
    generate,
    run_batch,
    save_model,
)

GGUF = SMOLLM2 / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("torch") / "small")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(path, **options)
    return caught.value.reason


def test_folder_is_loaded_with_its_tokenizer(saved: Path) -> None:
    import torch

    model, tokenizer = load_model(saved)
    assert model.dtype == torch.float32
    assert not model.training
    assert find_end_tokens(model, tokenizer) == {256}
    assert load_model(saved, dtype="bfloat16").model.dtype == torch.bfloat16


def test_missing_or_broken_models_are_refused(folder: Path, tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere") == "not_found"
    assert refusal(folder, dtype="int8") == "invalid"
    assert refusal(folder, dtype="nonsense") == "invalid"
    (tmp_path / "text.gguf").write_text("hello")
    assert refusal(tmp_path / "text.gguf") == "invalid"
    change_config(folder, num_hidden_layers=4)
    assert refusal(folder) == "invalid", "the weights have three layers"
    (folder / "model.safetensors").write_bytes(b"broken")
    assert refusal(folder) == "invalid"
    (folder / "config.json").write_text("{")
    assert refusal(folder) == "invalid"


@pytest.mark.parametrize("family", ["gpt2", None])
def test_other_architectures_are_refused_before_the_weights_are_read(folder: Path, family: str | None) -> None:
    (folder / "model.safetensors").unlink()
    change_config(folder, model_type=family)
    assert refusal(folder) == "unsupported"
    with pytest.raises(ModelLoadError):
        open_upstream(UpstreamConfig(urls=(f"hf:{folder}",)))


def test_parts_that_the_sampler_lacks_are_refused() -> None:
    for model in (
        build_model("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0),
        build_model(hidden_act="gelu"),
        build_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    ):
        with pytest.raises(ModelLoadError) as caught:
            check_model(model)
        assert caught.value.reason == "unsupported"


@pytest.mark.parametrize("vocabulary", [200, 1000])
def test_tokenizer_of_another_model_is_refused(tmp_path: Path, vocabulary: int) -> None:
    folder = save_model(tmp_path, vocab_size=vocabulary, eos_token_id=1, bos_token_id=1, pad_token_id=1)
    assert refusal(folder) == "mismatch"


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_missing_package_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(saved) == "missing_package"


@pytest.mark.parametrize("package", ["accelerate", "gguf"])
def test_missing_package_for_gguf_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(tmp_path / "model.gguf") == "missing_package"


def test_upstream_is_opened_without_torch(saved: Path) -> None:
    code = (
        "import sys\n"
        "from rookery.upstreams import UpstreamConfig, open_upstream\n"
        f"open_upstream(UpstreamConfig(urls=('hf:{saved}',)))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_gguf_file_is_dequantised_into_trainable_weights() -> None:
    if not (SMOLLM2 / "complete").exists():  # written when both forms of the model are there
        pytest.skip("[probed] this machine has no SmolLM2 (make engines)")
    pytest.importorskip("gguf")
    model, tokenizer = load_model(GGUF)
    assert (type(model).__name__, len(tokenizer), tokenizer.eos_token_id) == ("LlamaForCausalLM", 49152, 2)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer.chat_template
    other = load_model(SMOLLM2 / "hf").model
    weight, same = (one.model.layers[3].mlp.up_proj.weight.detach() for one in (model, other))
    assert float((weight - same).abs().max()) < 0.02, "the folder holds the same weights in bfloat16"
    prompt = tokenizer.encode("<|im_start|>user\nCount to five.<|im_end|>\n<|im_start|>assistant\n")
    sequence = SampledSequence(prompt, max_tokens=16, seed=0, choice=TokenChoice(temperature=0.0))
    run_batch(build_batch(model), sequence)
    assert sequence.tokens == generate(model, prompt, 16)


# ------------------------------------------------------------------------------------------------------------ text


def test_text_in_pieces_is_the_text_as_a_whole() -> None:
    tokenizer = build_tokenizer()
    text = "Größe: 12 € 🙂 done"
    tokens = tokenizer.encode(text)
    decoder = TextDecoder(tokenizer)
    pieces = [decoder.feed(tokens[:count]) for count in range(1, len(tokens) + 1)]
    pieces.append(decoder.feed(tokens, final=True))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert TextDecoder(tokenizer).feed(tokens, final=True) == text
    assert TextDecoder(tokenizer).feed([*tokens, 256], final=True) == text, "special tokens have no text"


def test_incomplete_character_is_delivered_at_the_end() -> None:
    tokenizer = build_tokenizer()
    tokens = tokenizer.encode("a🙂")[:-1]
    decoder = TextDecoder(tokenizer)
    assert [decoder.feed(tokens[:count]) for count in range(1, len(tokens) + 1)] == ["a", "", "", ""]
    assert decoder.feed(tokens, final=True) == "\ufffd"


def test_only_a_possible_stop_string_is_withheld() -> None:
    tokenizer = build_tokenizer()
    tokens = tokenizer.encode("one ENOUGH two END three")
    decoder = TextDecoder(tokenizer, ("END", "###"))
    pieces = []
    for count in range(1, len(tokens) + 1):
        pieces.append(decoder.feed(tokens[:count]))
        if decoder.stopped:
            break
    assert "".join(pieces) == "one ENOUGH two "
    assert count == len("one ENOUGH two END")
    assert pieces[:7] == ["o", "n", "e", " ", "", "", "ENO"]


def test_package_is_importable_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    for module in ("loading", "shared_sampler", "text", "slots", "upstream"):
        monkeypatch.delitem(sys.modules, f"rookery.upstreams.torch.{module}", raising=False)
        importlib.import_module(f"rookery.upstreams.torch.{module}")
