"""Forward pass of a Llama in NumPy, with results that do not depend on the batch.

The logits of a token depend only on the tokens before it, bit for bit: not on the other rows of the batch, and not
on whether its prefix was computed token by token, in chunks, or found in the cache. BLAS rounds differently for
matrices of different heights. Therefore every product with a weight matrix is split into tiles of `TILE` rows,
attention is computed per row, with a shape that depends only on the position of that row, and everything else
works row by row. On one core, tiles of 8 rows cost the same as one product of 64 rows.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rookery.upstreams.embedded.weights import Weights

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Attend = Callable[[int, Floats, Floats, Floats], Floats]
"""A function that stores the keys and values of new rows (tokens) and returns the attention output of each row.

Its arguments are the number of the layer, and the queries, keys and values of the rows.
"""

TILE: Final = 8
COLUMN_MULTIPLE: Final = 64
"""Widths of matrices are padded to a multiple of this. Otherwise BLAS computes the last columns with another
kernel, whose rounding depends on the position of a row in its tile."""
SPAN: Final = 128
"""The attention span, which is the number of positions that a row attends over, is a multiple of this number."""


class _Layer(NamedTuple):
    qkv: Floats
    out: Floats
    gate_up: Floats
    down: Floats


class Llama:
    """A Llama prepared for fast inference: norms, scales and rotary embeddings are folded into the weight
    matrices.
    """

    def __init__(self, weights: Weights) -> None:
        shape = self.shape = weights.shape
        self.version = weights.version
        self.heads, self.kv, self.dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.per_kv = self.heads // self.kv
        self.context = shape.max_position_embeddings
        self.embedding = weights.tensors["model.embed_tokens.weight"]
        self._eps = np.float32(shape.rms_norm_eps * shape.hidden_size)
        self._rotary_width = (self.heads + self.kv) * self.dim
        self._layers = [self._layer(weights.tensors, number) for number in range(shape.num_hidden_layers)]
        head = weights.tensors["lm_head.weight"] if not shape.tie_word_embeddings else self.embedding
        self._head = self._matrix(head, weights.tensors["model.norm.weight"])
        self._rotation = _rotation(self.context, self.dim, shape.rope_theta)
        self.tile = self._tile()

    def rows(self, tokens: npt.ArrayLike, positions: Ints, attend: Attend, wanted: slice = slice(None)) -> Floats:
        """Compute one forward pass, and return the logits of the `wanted` rows.

        Each row is one token with its position; rows may belong to different sequences. `attend` stores the keys
        and values of the rows and computes attention.
        """
        # exp overflows to inf for a very negative gate, which correctly gives a SiLU of zero.
        with np.errstate(over="ignore"):
            return self._rows(np.asarray(tokens, dtype=np.int64), positions, attend, wanted)

    def _rows(self, tokens: Ints, positions: Ints, attend: Attend, wanted: slice) -> Floats:
        count = len(tokens)
        padded = count + -count % TILE
        x = np.zeros((padded, self.shape.hidden_size), dtype=np.float32)
        x[:count] = self.embedding[tokens]
        rotation = self._rotation[positions][:, None, :]
        inner = self.shape.intermediate_size
        mixed = np.zeros((padded, self.heads * self.dim), dtype=np.float32)
        for number, layer in enumerate(self._layers):
            qkv = self._product(self._normalize(x), layer.qkv)[:count]
            pairs = qkv[:, : self._rotary_width].view(np.complex64).reshape(count, -1, self.dim // 2) * rotation
            turned: Floats = pairs.view(np.float32)
            values = qkv[:, self._rotary_width : self._rotary_width + self.kv * self.dim].reshape(
                count, self.kv, self.dim
            )
            queries = turned[:, : self.heads].reshape(count, self.kv, self.per_kv, self.dim)
            mixed[:count] = attend(number, queries, turned[:, self.heads :], values).reshape(count, -1)
            x += self._product(mixed, layer.out)[:, : x.shape[1]]
            both = self._product(self._normalize(x), layer.gate_up)
            gate, up = both[:, :inner], both[:, inner : 2 * inner]
            silu = np.exp(-gate)
            silu += 1.0
            np.divide(gate, silu, out=silu)
            silu *= up
            x += self._product(silu, layer.down)[:, : x.shape[1]]
        chosen = x[:count][wanted]
        last = np.zeros((len(chosen) + -len(chosen) % TILE, x.shape[1]), dtype=np.float32)
        last[: len(chosen)] = chosen
        return self._product(self._normalize(last), self._head)[: len(chosen), : self.shape.vocab_size]

    def attend(self, queries: Floats, keys: Floats, values: Floats, mask: Floats) -> Floats:
        """Compute the attention of each row over its span of positions. `mask` is 0 for visible positions, else
        -inf.

        The last axis of `keys` is the position, which makes the product two to four times as fast.
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
        """Return the attention span of a row that attends over `length` positions: rounded up to a multiple of
        `SPAN`."""
        return length + -length % SPAN

    # ------------------------------------------------------------------------------------------ pieces

    def _normalize(self, x: Floats) -> Floats:
        squares = np.einsum("ij,ij->i", x, x)
        squares += self._eps
        np.sqrt(squares, out=squares)
        normed: Floats = x / squares[:, None]
        return normed

    def _product(self, x: Floats, matrix: Floats) -> Floats:
        product: Floats = np.matmul(x.reshape(-1, self.tile, x.shape[1]), matrix)
        return product.reshape(-1, matrix.shape[1])

    def _matrix(self, weight: Floats, gain: Floats | None = None) -> Floats:
        """Return a weight matrix, transposed, scaled by the gain of the preceding RMS norm, and padded to
        `COLUMN_MULTIPLE`."""
        wide: Any = weight.astype(np.float64)
        if gain is not None:
            wide = wide * gain.astype(np.float64) * np.sqrt(np.float64(len(gain)))
        matrix = np.zeros((weight.shape[1], len(weight) + -len(weight) % COLUMN_MULTIPLE), dtype=np.float32)
        matrix[:, : len(weight)] = wide.T
        return matrix

    def _layer(self, tensors: dict[str, Floats], number: int) -> _Layer:
        at = f"model.layers.{number}."
        query, key, value, out = (tensors[f"{at}self_attn.{name}_proj.weight"] for name in "qkvo")
        query = (query / np.sqrt(np.float64(self.dim))).astype(np.float32)
        before, after = (tensors[f"{at}{name}_layernorm.weight"] for name in ("input", "post_attention"))
        gate, up, down = (tensors[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return _Layer(
            qkv=self._matrix(
                np.concatenate([self._interleave_pairs(query), self._interleave_pairs(key), value]), before
            ),
            out=self._matrix(out),
            gate_up=self._matrix(np.concatenate([gate, up]), after),
            down=self._matrix(down),
        )

    def _interleave_pairs(self, weight: Floats) -> Floats:
        """Reorder rows so that the two halves of each rotary pair are adjacent and form one complex number."""
        halves = weight.reshape(-1, 2, self.dim // 2, weight.shape[1])
        return halves.swapaxes(1, 2).reshape(weight.shape)

    def _tile(self) -> int:
        """Return `TILE` if this BLAS computes a row identically at every position in a tile, else 1."""
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
