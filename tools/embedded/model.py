"""PyTorch model of the embedded policy: a Llama with fewer and larger operations.

Guarantees:
- its logits are those of `LlamaForCausalLM` with the same weights;
- the same seed gives the same initial weights.
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
    """A Llama model. `weights` are named as in `LlamaForCausalLM`."""

    def __init__(self, shape: LlamaShape = SHAPE, seed: int = 0) -> None:
        self.shape = shape
        random = torch.Generator().manual_seed(seed)
        depth_scale = (2 * shape.num_hidden_layers) ** -0.5
        self.weights: dict[str, Tensor] = {}
        for name, size in shape.tensors().items():
            if len(size) == 1:
                value = torch.ones(size)
            else:
                scale = 0.02 if "embed" in name else 0.7 * size[1] ** -0.5
                ends_residual_branch = "o_proj" in name or "down_proj" in name
                value = (
                    torch.randn(size, generator=random) * scale * (depth_scale if ends_residual_branch else 1.0)
                )
            self.weights[name] = value.requires_grad_()
        half = shape.head_dim // 2
        angle = torch.outer(
            torch.arange(shape.max_position_embeddings).double(),
            shape.rope_theta ** -(torch.arange(half).double() / half),
        )
        # The two halves of a head rotate in opposite directions; see `hidden`.
        self.cos = torch.cat([angle.cos(), angle.cos()], -1).float()
        self.sin = torch.cat([-angle.sin(), angle.sin()], -1).float()

    def to(self, device: str) -> "Llama":
        """Move the model to a device, and return it. Earlier references to its weights become invalid."""
        self.weights = {name: value.detach().to(device).requires_grad_() for name, value in self.weights.items()}
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)
        return self

    def get(self, name: str) -> Tensor:
        return self.weights[f"model.{name}.weight"]

    def cache(self, batch: int, max_length: int) -> Tensor:
        """Allocate the keys and values of a batch of sequences with up to `max_length` tokens."""
        shape = self.shape
        return torch.zeros(
            shape.num_hidden_layers, 2, batch, shape.num_key_value_heads, max_length, shape.head_dim
        )

    def hidden(self, ids: Tensor, cache: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """Return the normalized output of the last layer. With a cache, `ids` continue each sequence at `at`."""
        shape, (batch, length) = self.shape, ids.shape
        heads, kv, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        mask = None
        if at is None:
            cos, sin = self.cos[:length, None], self.sin[:length, None]
        else:
            positions = at[:, None] + torch.arange(length)
            cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
            assert cache is not None
            mask = torch.arange(cache.shape[4]) <= positions[:, None, :, None]
        x = functional.embedding(ids, self.get("embed_tokens"))
        for number in range(shape.num_hidden_layers):
            layer = f"layers.{number}"
            attn = f"{layer}.self_attn"
            joint_weight = torch.cat([self.get(f"{attn}.{part}_proj") for part in "qkv"])
            projected = functional.linear(self._norm(x, f"{layer}.input_layernorm"), joint_weight)
            projected = projected.view(batch, length, heads + 2 * kv, size)
            rotated_part, v = projected[:, :, : heads + kv], projected[:, :, heads + kv :]
            half = size // 2
            half_swapped = torch.cat([rotated_part[..., half:], rotated_part[..., :half]], -1)
            rotated = (rotated_part * cos + half_swapped * sin).transpose(1, 2)
            q, k, v = rotated[:, :heads], rotated[:, heads:], v.transpose(1, 2)
            if cache is not None and at is not None:
                keys, values = cache[number]
                rows = torch.arange(batch)[:, None]
                keys[rows, :, positions] = k.transpose(1, 2)
                values[rows, :, positions] = v.transpose(1, 2)
                k, v = keys, values
            attended = functional.scaled_dot_product_attention(
                q, self._expand_heads(k), self._expand_heads(v), attn_mask=mask, is_causal=mask is None
            )
            x = x + functional.linear(attended.transpose(1, 2).flatten(2), self.get(f"{attn}.o_proj"))
            joint_weight = torch.cat([self.get(f"{layer}.mlp.{part}_proj") for part in ("gate", "up")])
            gate, up = functional.linear(self._norm(x, f"{layer}.post_attention_layernorm"), joint_weight).chunk(
                2, -1
            )
            x = x + functional.linear(functional.silu(gate) * up, self.get(f"{layer}.mlp.down_proj"))
        return self._norm(x, "norm")

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.get("embed_tokens"))

    def _expand_heads(self, part: Tensor) -> Tensor:
        """Expand keys or values to all heads that share them, without a copy if all do."""
        heads, kv = self.shape.num_attention_heads, self.shape.num_key_value_heads
        return part.repeat_interleave(heads // kv, 1) if kv > 1 else part.expand(-1, heads, -1, -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.get(name), self.shape.rms_norm_eps)

    # -------------------------------------------------------------------------------------------- weights

    def export(self) -> Weights:
        """Return the weights, rounded as they are stored."""
        rounded = {name: value.detach().cpu().half().float().numpy() for name, value in self.weights.items()}
        return Weights(self.shape, rounded)

    def load(self, weights: Weights) -> None:
        """Replace the weights."""
        for name, value in weights.tensors.items():
            self.weights[name] = torch.from_numpy(value.copy()).requires_grad_()
