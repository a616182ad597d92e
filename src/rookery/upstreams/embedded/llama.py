"""A Llama in numpy: what each layer computes, for rows of tokens that know nothing of each other.

Promises:
- a token's logits depend on the tokens before it and on nothing else, to the last bit: not on which other rows
  are computed with it, nor on whether its past was computed one by one, in chunks, or came out of a cache.

Why that takes care: BLAS rounds differently for matrices of different heights, so every product of a weight
matrix is made of tiles of `TILE` rows, one call of the same shape for each; attention is one call per row whose
shape depends on that row's position alone; and everything else works along rows. On one core, tiles of 8 rows
cost the same as one product of 64.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rookery.upstreams.embedded.weights import Weights

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Attend = Callable[[int, Floats, Floats, Floats], Floats]
"""(layer, queries, keys, values of the new rows) → what attention gives for each row."""

TILE: Final = 8
LANES: Final = 64
"""Widths of products are multiples of this: at others, the last columns go through a kernel of their own, which
rounds by the row's place in its tile."""
SPAN: Final = 128
"""Attention looks over a stretch of positions that is a multiple of this."""


class _Layer(NamedTuple):
    qkv: Floats
    out: Floats
    gate_up: Floats
    down: Floats


class Llama:
    """Prepared for one purpose, speed: norms, scales and rotations are folded into the matrices."""

    def __init__(self, weights: Weights) -> None:
        shape = self.shape = weights.shape
        self.version = weights.version
        self.heads, self.kv, self.dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.per_kv = self.heads // self.kv
        self.context = shape.max_position_embeddings
        self.embedding = weights.tensors["model.embed_tokens.weight"]
        self._eps = np.float32(shape.rms_norm_eps * shape.hidden_size)
        self._turned = (self.heads + self.kv) * self.dim
        self._layers = [self._layer(weights.tensors, number) for number in range(shape.num_hidden_layers)]
        head = weights.tensors["lm_head.weight"] if not shape.tie_word_embeddings else self.embedding
        self._head = self._matrix(head, weights.tensors["model.norm.weight"])
        self._rotation = _rotation(self.context, self.dim, shape.rope_theta)
        self.tile = self._tile()

    def rows(self, tokens: npt.ArrayLike, positions: Ints, attend: Attend, wanted: slice = slice(None)) -> Floats:
        """Logits of the `wanted` rows. `attend` keeps the new keys and values and looks back over the old ones."""
        with np.errstate(
            over="ignore"
        ):  # a gate far below zero: exp gives inf, and the gate is shut, as it should
            return self._rows(np.asarray(tokens, dtype=np.int64), positions, attend, wanted)

    def _rows(self, given: Ints, positions: Ints, attend: Attend, wanted: slice) -> Floats:
        count = len(given)
        padded = count + -count % TILE
        x = np.zeros((padded, self.shape.hidden_size), dtype=np.float32)
        x[:count] = self.embedding[given]
        rotation = self._rotation[positions][:, None, :]
        inner = self.shape.intermediate_size
        mixed = np.zeros((padded, self.heads * self.dim), dtype=np.float32)
        for number, layer in enumerate(self._layers):
            qkv = self._product(self._normed(x), layer.qkv)[:count]
            pairs = qkv[:, : self._turned].view(np.complex64).reshape(count, -1, self.dim // 2) * rotation
            turned: Floats = pairs.view(np.float32)
            values = qkv[:, self._turned : self._turned + self.kv * self.dim].reshape(count, self.kv, self.dim)
            queries = turned[:, : self.heads].reshape(count, self.kv, self.per_kv, self.dim)
            mixed[:count] = attend(number, queries, turned[:, self.heads :], values).reshape(count, -1)
            x += self._product(mixed, layer.out)[:, : x.shape[1]]
            both = self._product(self._normed(x), layer.gate_up)
            gate, up = both[:, :inner], both[:, inner : 2 * inner]
            silu = np.exp(-gate)
            silu += 1.0
            np.divide(gate, silu, out=silu)
            silu *= up
            x += self._product(silu, layer.down)[:, : x.shape[1]]
        chosen = x[:count][wanted]
        last = np.zeros((len(chosen) + -len(chosen) % TILE, x.shape[1]), dtype=np.float32)
        last[: len(chosen)] = chosen
        return self._product(self._normed(last), self._head)[: len(chosen), : self.shape.vocab_size]

    def look(self, queries: Floats, keys: Floats, values: Floats, mask: Floats) -> Floats:
        """Attention of each row over its own stretch of positions; `mask` is 0 where it may look, else -inf.

        Keys come with their positions last: that product is two to four times as fast as the other way round.
        """
        scores = np.matmul(queries, keys)
        scores += mask
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        mixed: Floats = np.matmul(scores, values)
        mixed /= total
        return mixed

    def span(self, length: int) -> int:
        """How many positions a row looks over whose own is the `length`-th."""
        return length + -length % SPAN

    # ------------------------------------------------------------------------------------------ pieces

    def _normed(self, x: Floats) -> Floats:
        squares = np.einsum("ij,ij->i", x, x)
        squares += self._eps
        np.sqrt(squares, out=squares)
        normed: Floats = x / squares[:, None]
        return normed

    def _product(self, x: Floats, matrix: Floats) -> Floats:
        product: Floats = np.matmul(x.reshape(-1, self.tile, x.shape[1]), matrix)
        return product.reshape(-1, matrix.shape[1])

    def _matrix(self, weight: Floats, gain: Floats | None = None) -> Floats:
        """A weight to multiply by from the right, with the norm before it folded in, of a width that suits."""
        wide: Any = weight.astype(np.float64)
        if gain is not None:
            wide = wide * gain.astype(np.float64) * np.sqrt(np.float64(len(gain)))
        matrix = np.zeros((weight.shape[1], len(weight) + -len(weight) % LANES), dtype=np.float32)
        matrix[:, : len(weight)] = wide.T
        return matrix

    def _layer(self, tensors: dict[str, Floats], number: int) -> _Layer:
        at = f"model.layers.{number}."
        query, key, value, out = (tensors[f"{at}self_attn.{name}_proj.weight"] for name in "qkvo")
        query = (query / np.sqrt(np.float64(self.dim))).astype(np.float32)
        before, after = (tensors[f"{at}{name}_layernorm.weight"] for name in ("input", "post_attention"))
        gate, up, down = (tensors[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return _Layer(
            qkv=self._matrix(np.concatenate([self._paired(query), self._paired(key), value]), before),
            out=self._matrix(out),
            gate_up=self._matrix(np.concatenate([gate, up]), after),
            down=self._matrix(down),
        )

    def _paired(self, weight: Floats) -> Floats:
        """Rows in the order that makes the two halves of each rotation neighbours: one complex number."""
        halves = weight.reshape(-1, 2, self.dim // 2, weight.shape[1])
        return halves.swapaxes(1, 2).reshape(weight.shape)

    def _tile(self) -> int:
        """`TILE`, where this BLAS computes the rows of a tile alike wherever they stand in it; else row by row."""
        rng = np.random.default_rng(0)
        for matrix in (*self._layers[0], self._head):
            rows = rng.standard_normal((TILE, len(matrix)), dtype=np.float32)
            straight = np.matmul(rows, matrix)
            for shift in range(1, TILE):
                if not np.array_equal(np.roll(np.matmul(np.roll(rows, shift, 0), matrix), -shift, 0), straight):
                    return 1
        return TILE


def _rotation(context: int, dim: int, theta: float) -> npt.NDArray[np.complex64]:
    # Float32 where LlamaForCausalLM has float32: at position 1000 the difference is visible in a logprob.
    inverse = (1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)).astype(np.float32)
    angles = np.arange(context, dtype=np.float32)[:, None] * inverse[None, :]
    return (np.cos(angles.astype(np.float64)) + 1j * np.sin(angles.astype(np.float64))).astype(np.complex64)
