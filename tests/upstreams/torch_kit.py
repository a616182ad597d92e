"""Small random transformers models for tests of the torch upstream, with a tokenizer of bytes."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tokenizers  # noqa: E402

from rookery.upstreams.torch.batch import Batch, SampledSequence  # noqa: E402
from rookery.upstreams.torch.decoder import Decoder  # noqa: E402

torch.set_num_threads(1)  # the models are so small that more threads only wait for each other

WORDS = 300
END = 256
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": END,
    "bos_token_id": 257,
    "pad_token_id": END,
}
SMOLLM2 = Path(__file__).resolve().parents[2] / ".peers" / "smollm2"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def build_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """Return a random model whose logits differ enough for distinct greedy tokens."""
    torch.manual_seed(seed)
    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config, model = classes[family]
    sizes = {**SIZES, **({"head_dim": 8} if family == "qwen3" else {}), **changes}
    built = model(config(**sizes, attn_implementation="sdpa")).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(6.0)
    return built


def build_tokenizer() -> Any:
    """Return a tokenizer whose first 256 tokens are bytes, with an end token and a begin token."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    by_byte = {letter: number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(by_byte, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<begin>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", bos_token="<begin>", chat_template=TEMPLATE
    )


def save_model(folder: Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    build_model(family, seed=seed, **changes).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def build_batch(model: Any, *, slots: int = 4, context: int = 256, **options: Any) -> Batch:
    return Batch(Decoder(model, slots=slots, context=context), **options)


def run_batch(batch: Batch, *sequences: SampledSequence) -> None:
    """Sample the sequences to their ends."""
    for sequence in sequences:
        batch.add(sequence)
    with torch.inference_mode():
        while batch.busy:
            batch.step()


def rescore(model: Any, prompt: list[int], sampled: list[int]) -> list[float]:
    """Return the log probability of each sampled token, from one forward pass of the transformers model."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    scores = logits.float().log_softmax(-1)
    return [float(scores[at, token]) for at, token in enumerate(sampled)]


def generate(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Return the greedy tokens of transformers' own `generate`, which end tokens do not end."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)  # otherwise transformers masks padding tokens in the prompt
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    return [int(token) for token in whole[0, len(prompt) :]]


def read_ints(data: bytes) -> list[int]:
    return list(array("i", data))


def read_floats(data: bytes) -> list[float]:
    return list(array("f", data))
