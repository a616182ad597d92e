"""Forward pass of a Llama-like transformer over a KV cache with a fixed number of slots.

The weights are copies of those of a transformers model. Matrices that read the same input are stored as one
(query, key and value; gate and up), because fewer and larger products are faster. `load` copies new weights
into the same memory, so that CUDA graphs that were captured before stay valid.

The KV cache has `slots` rows of `context` positions, and one more position per row, to which padding is
written.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

MIN_SPAN: Final = 64
"""Attention reads a number of cached positions that is a power of two, and at least this."""


class WeightsError(ValueError):
    """New weights do not fit the model: a tensor is missing, unknown, or has another shape."""


class DecoderLayer:
    """Weights of one layer. Biases, and norms of queries and keys, are None in models without them."""

    qkv: Any
    qkv_bias: Any
    out: Any
    out_bias: Any
    gate_up: Any
    gate_up_bias: Any
    down: Any
    down_bias: Any
    input_norm: Any
    post_norm: Any
    query_norm: Any
    key_norm: Any


class Decoder:
    """A transformer with its KV cache. It is used by one thread at a time, within `torch.inference_mode`."""

    def __init__(self, model: Any, *, slots: int, context: int) -> None:
        config = model.config
        self.slots = slots
        self.context = context
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self.epsilon: float = config.rms_norm_eps
        self.tied: bool = bool(config.tie_word_embeddings)
        reference = model.get_input_embeddings().weight
        self.device, self.dtype = reference.device, reference.dtype
        self._targets: dict[str, Tensor] = {}
        """For each tensor of the transformers model, by name, the memory that holds it here."""
        state = model.state_dict()
        self.embedding = self._allocate(state, "model.embed_tokens.weight")
        self.layers = [self._build_layer(state, number) for number in range(config.num_hidden_layers)]
        self.norm = self._allocate(state, "model.norm.weight")
        self.head = self.embedding if self.tied else self._allocate(state, "lm_head.weight")
        self.load(state)
        cos, sin = _rotations(model.model.rotary_emb, context + 1, self.device)
        self._cos, self._sin = cos.to(self.dtype)[:, None], sin.to(self.dtype)[:, None]
        shape = (len(self.layers), slots, self.kv_heads, context + 1, self.head_size)
        self.keys = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.values = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._numbers = torch.arange(max(slots, context + 1), device=self.device)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights that one step reads."""
        return sum(target.numel() * target.element_size() for target in self._targets.values())

    # ---- weights

    def _allocate(self, state: Mapping[str, Tensor], *names: str) -> Any:
        """Return a tensor that holds the named ones below each other; None if the model has none of them."""
        found = [state[name] for name in names if name in state]
        if not found:
            return None
        rows = [tensor.shape[0] for tensor in found]
        memory = torch.empty((sum(rows), *found[0].shape[1:]), dtype=self.dtype, device=self.device)
        self._targets |= zip(names, memory.split(rows), strict=True)
        return memory

    def _build_layer(self, state: Mapping[str, Tensor], number: int) -> DecoderLayer:
        prefix = f"model.layers.{number}."
        layer = DecoderLayer()
        for field, names in (
            ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("out", ("self_attn.o_proj",)),
            ("gate_up", ("mlp.gate_proj", "mlp.up_proj")),
            ("down", ("mlp.down_proj",)),
        ):
            setattr(layer, field, self._allocate(state, *(f"{prefix}{name}.weight" for name in names)))
            setattr(layer, f"{field}_bias", self._allocate(state, *(f"{prefix}{name}.bias" for name in names)))
        for field, name in (
            ("input_norm", "input_layernorm"),
            ("post_norm", "post_attention_layernorm"),
            ("query_norm", "self_attn.q_norm"),
            ("key_norm", "self_attn.k_norm"),
        ):
            setattr(layer, field, self._allocate(state, f"{prefix}{name}.weight"))
        return layer

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy the weights of a `state_dict` of the transformers model. Raises `WeightsError` and changes nothing
        if they do not fit."""
        given = dict(state)
        if self.tied:
            given.pop("lm_head.weight", None)
        strange = sorted(given.keys() ^ self._targets.keys())
        if strange:
            what = "are missing" if strange[0] in self._targets else "are unknown"
            raise WeightsError(
                f"weights do not fit the model: {len(strange)} tensors {what}, such as {strange[0]}"
            )
        for name, target in self._targets.items():
            if given[name].shape != target.shape:
                raise WeightsError(
                    f"weights do not fit the model: {name} has the shape {tuple(given[name].shape)}, not "
                    f"{tuple(target.shape)}"
                )
        with torch.no_grad():
            for name, target in self._targets.items():
                target.copy_(given[name])

    # ---- forward pass

    def span(self, positions: int) -> int:
        """Return how many cached positions attention reads for a sequence of `positions` tokens."""
        return min(self.context, max(MIN_SPAN, 1 << (positions - 1).bit_length()))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy keys and values of the first `length` positions from one slot to another."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def forward(
        self, tokens: Tensor, positions: Tensor, writes: Tensor, last: Tensor, slots: Tensor | None, span: int
    ) -> Tensor:
        """Compute `tokens`, store their keys and values, and return the logits after one token of each row.

        `tokens`, `positions` and `writes` have one row per sequence. A token has its position in the sequence, and
        its keys and values are stored at the position in `writes`: the same one, or `context` for padding. `last`
        is the index of the token whose logits are returned. `slots` are the slots of the rows; None for the first
        ones in order, which needs no copy of their keys and values. No position may be `span` or higher.
        """
        rows, width = tokens.shape
        group = self.heads // self.kv_heads
        where = self._numbers[:rows] if slots is None else slots
        cos, sin = self._cos[positions], self._sin[positions]
        # A token attends to the positions up to its own. The queries of a group of heads share keys and values, so
        # they are treated as further queries of one head.
        future = self._numbers[:span] > positions[..., None]
        mask = torch.zeros(future.shape, dtype=self.dtype, device=self.device).masked_fill_(future, float("-inf"))
        mask = mask[:, None, None].expand(rows, 1, group, width, span).reshape(rows, 1, group * width, span)
        hidden = self.embedding[tokens.flatten()]
        for number, layer in enumerate(self.layers):
            normed = self._normalise(hidden, layer.input_norm)
            mixed = functional.linear(normed, layer.qkv, layer.qkv_bias).view(rows, width, -1, self.head_size)
            query, key, value = mixed.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            if layer.query_norm is None:
                rotated = mixed[:, :, : self.heads + self.kv_heads]
            else:
                normed_heads = self._normalise(query, layer.query_norm), self._normalise(key, layer.key_norm)
                rotated = torch.cat(normed_heads, dim=2)
            rotated = torch.addcmul(rotated * cos, rotated.roll(self.head_size // 2, -1), sin)
            query, key = rotated.split((self.heads, self.kv_heads), dim=2)
            keys, values = self.keys[number], self.values[number]
            keys[where[:, None], :, writes] = key
            values[where[:, None], :, writes] = value
            if slots is None:
                keys, values = keys[:rows, :, :span], values[:rows, :, :span]
            else:
                keys, values = keys[slots, :, :span], values[slots, :, :span]
            query = query.view(rows, width, self.kv_heads, group, self.head_size).permute(0, 2, 3, 1, 4)
            query = query.reshape(rows, self.kv_heads, group * width, self.head_size)
            attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            attended = attended.view(rows, self.kv_heads, group, width, self.head_size).permute(0, 3, 1, 2, 4)
            _add_product(hidden, attended.reshape(rows * width, -1), layer.out, layer.out_bias)
            normed = self._normalise(hidden, layer.post_norm)
            gate, up = functional.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            _add_product(hidden, functional.silu(gate) * up, layer.down, layer.down_bias)
        final = self._normalise(hidden.view(rows, width, -1)[self._numbers[:rows], last], self.norm)
        return functional.linear(final, self.head)

    def _normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.epsilon)


def _add_product(hidden: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Add the output of a linear layer to `hidden` in place, in one operation if it has no bias."""
    if bias is not None:
        hidden += bias
    hidden.addmm_(inputs, weight.t())


def _rotations(rotary: Any, length: int, device: Any) -> tuple[Tensor, Tensor]:
    """Return the factors of the rotary position embedding for positions up to `length`.

    A head `x` becomes `x * cos + swapped * sin`, where `swapped` is `x` with its halves swapped. The first half of
    `sin` is negative.
    """
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = positions[:, None] * rotary.inv_freq.to(device=device, dtype=torch.float32)
    cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
