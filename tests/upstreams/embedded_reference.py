"""Reference implementation of a Llama in float64, to compare the fast one with."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from rookery.upstreams.embedded.weights import LlamaShape, Weights


def logprobs(weights: Weights, tokens: Sequence[int]) -> np.ndarray:
    """Return the logprobs of all possible next tokens after each of `tokens`."""
    shape = weights.shape
    tensors = {name: value.astype(np.float64) for name, value in weights.tensors.items()}
    heads, kv, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    x = tensors["model.embed_tokens.weight"][list(tokens)]
    count = len(tokens)
    angles = np.arange(count)[:, None] / shape.rope_theta ** (np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(np.tile(angles, 2)), np.sin(np.tile(angles, 2))

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + shape.rms_norm_eps) * gain

    def turned(x: np.ndarray) -> np.ndarray:
        left, right = x[..., : dim // 2], x[..., dim // 2 :]
        return x * cos + np.concatenate([-right, left], -1) * sin

    for number in range(shape.num_hidden_layers):
        at = f"model.layers.{number}."
        h = norm(x, tensors[f"{at}input_layernorm.weight"])
        q, k, v = (h @ tensors[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = np.zeros((count, heads * dim))
        for head in range(heads):
            group = head // (heads // kv)
            query = turned(q[:, head * dim : (head + 1) * dim])
            key = turned(k[:, group * dim : (group + 1) * dim])
            scores = query @ key.T / np.sqrt(dim)
            scores[np.triu_indices(count, 1)] = -np.inf
            chances = np.exp(scores - scores.max(-1, keepdims=True))
            chances /= chances.sum(-1, keepdims=True)
            mixed[:, head * dim : (head + 1) * dim] = chances @ v[:, group * dim : (group + 1) * dim]
        x = x + mixed @ tensors[f"{at}self_attn.o_proj.weight"].T
        h = norm(x, tensors[f"{at}post_attention_layernorm.weight"])
        gate, up = (h @ tensors[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{at}mlp.down_proj.weight"].T
    head = tensors["model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"]
    logits = norm(x, tensors["model.norm.weight"]) @ head.T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@st.composite
def shapes(draw: st.DrawFn) -> LlamaShape:
    kv = draw(st.integers(1, 3))
    return LlamaShape(
        vocab_size=draw(st.sampled_from([272, 273, 320])),
        hidden_size=draw(st.sampled_from([8, 24, 64, 130])),
        intermediate_size=draw(st.sampled_from([8, 40, 96])),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=kv * draw(st.integers(1, 3)),
        num_key_value_heads=kv,
        head_dim=draw(st.sampled_from([2, 6, 16, 32])),
        max_position_embeddings=draw(st.sampled_from([40, 300, 520])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        rope_theta=draw(st.sampled_from([100.0, 10_000.0, 500_000.0])),
        tie_word_embeddings=draw(st.booleans()),
    )


@st.composite
def models(draw: st.DrawFn) -> Weights:
    """Generate random weights of a random shape, from nearly uniform to confident predictions."""
    shape = draw(shapes())
    made = Weights.random(shape, seed=draw(st.integers(0, 2**32)), scale=draw(st.sampled_from([0.02, 0.05, 0.1])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    for value in made.tensors.values():
        if value.ndim == 1:
            value[:] = rng.uniform(0.3, 2.0, value.shape)
    return made


SMALL = LlamaShape(
    vocab_size=272,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=400,
)
