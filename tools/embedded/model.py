"""The embedded policy's model in PyTorch: a plain Llama with fewer and larger operations.

Promises:
- its logits are those of `LlamaForCausalLM` with the same weights;
- the same seed begins with the same weights.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.weights import LlamaShape, Weights

SHAPE: Final = LlamaShape(
    vocab_size=chat.VOCAB,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=1024,
)


class Llama:
    """A model whose `weights` are named as `LlamaForCausalLM` names them."""

    def __init__(self, shape: LlamaShape = SHAPE, seed: int = 0) -> None:
        self.shape = shape
        random = torch.Generator().manual_seed(seed)
        deep = (2 * shape.num_hidden_layers) ** -0.5
        self.weights: dict[str, Tensor] = {}
        for name, size in shape.tensors().items():
            if len(size) == 1:
                value = torch.ones(size)
            else:
                scale = 0.02 if "embed" in name else 0.7 * size[1] ** -0.5
                ends_a_branch = "o_proj" in name or "down_proj" in name
                value = torch.randn(size, generator=random) * scale * (deep if ends_a_branch else 1.0)
            self.weights[name] = value.requires_grad_()
        half = shape.head_dim // 2
        angle = torch.outer(
            torch.arange(shape.max_position_embeddings).double(),
            shape.rope_theta ** -(torch.arange(half).double() / half),
        )
        # The halves of a head turn against each other: see `hidden`.
        self.cos = torch.cat([angle.cos(), angle.cos()], -1).float()
        self.sin = torch.cat([-angle.sin(), angle.sin()], -1).float()

    def get(self, name: str) -> Tensor:
        return self.weights[f"model.{name}.weight"]

    def cache(self, batch: int, most: int) -> Tensor:
        """Room for the keys and values of a batch of sequences of up to `most` ids."""
        shape = self.shape
        return torch.zeros(shape.num_hidden_layers, 2, batch, shape.num_key_value_heads, most, shape.head_dim)

    def hidden(self, ids: Tensor, cache: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """The last layer's output, normed. With a cache: `ids` continue each sequence at its own place `at`."""
        shape, (batch, length) = self.shape, ids.shape
        heads, kv, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        mask = None
        if at is None:
            cos, sin = self.cos[:length, None], self.sin[:length, None]
        else:
            places = at[:, None] + torch.arange(length)
            cos, sin = self.cos[places][:, :, None], self.sin[places][:, :, None]
            assert cache is not None
            mask = torch.arange(cache.shape[4]) <= places[:, None, :, None]
        x = functional.embedding(ids, self.get("embed_tokens"))
        for number in range(shape.num_hidden_layers):
            layer = f"layers.{number}"
            attn = f"{layer}.self_attn"
            joined = torch.cat([self.get(f"{attn}.{part}_proj") for part in "qkv"])
            mixed = functional.linear(self._norm(x, f"{layer}.input_layernorm"), joined)
            mixed = mixed.view(batch, length, heads + 2 * kv, size)
            turning, v = mixed[:, :, : heads + kv], mixed[:, :, heads + kv :]
            half = size // 2
            swapped = torch.cat([turning[..., half:], turning[..., :half]], -1)
            turned = (turning * cos + swapped * sin).transpose(1, 2)
            q, k, v = turned[:, :heads], turned[:, heads:], v.transpose(1, 2)
            if cache is not None and at is not None:
                keys, values = cache[number]
                rows = torch.arange(batch)[:, None]
                keys[rows, :, places] = k.transpose(1, 2)
                values[rows, :, places] = v.transpose(1, 2)
                k, v = keys, values
            seen = functional.scaled_dot_product_attention(
                q, self._spread(k), self._spread(v), attn_mask=mask, is_causal=mask is None
            )
            x = x + functional.linear(seen.transpose(1, 2).flatten(2), self.get(f"{attn}.o_proj"))
            joined = torch.cat([self.get(f"{layer}.mlp.{part}_proj") for part in ("gate", "up")])
            gate, up = functional.linear(self._norm(x, f"{layer}.post_attention_layernorm"), joined).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, self.get(f"{layer}.mlp.down_proj"))
        return self._norm(x, "norm")

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.get("embed_tokens"))

    def _spread(self, part: Tensor) -> Tensor:
        """Keys or values for every head that shares them; one for all is not copied."""
        heads, kv = self.shape.num_attention_heads, self.shape.num_key_value_heads
        return part.repeat_interleave(heads // kv, 1) if kv > 1 else part.expand(-1, heads, -1, -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.get(name), self.shape.rms_norm_eps)

    # -------------------------------------------------------------------------------------------- files

    def export(self) -> Weights:
        """The weights, rounded as they are stored."""
        rounded = {name: value.detach().half().float().numpy() for name, value in self.weights.items()}
        return Weights(self.shape, rounded)

    def take(self, weights: Weights) -> None:
        """Uses other weights from here on."""
        for name, value in weights.tensors.items():
            self.weights[name] = torch.from_numpy(value.copy()).requires_grad_()
