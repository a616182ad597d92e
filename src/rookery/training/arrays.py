"""Convert the recorded bytes of segments to NumPy arrays. Each array needs one copy of its data.

Guarantees:
- Extras (additional per-token arrays) have the same dtype and width in all segments of a batch; otherwise
  `BatchError` is raised. Missing data is never filled with zeros.
- Each trained token has the policy version that its segment recorded for it.
"""

import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rookery.core import Extra, Segment
from rookery.core.errors import BatchError
from rookery.training.advantages import Float64
from rookery.training.columns import CONTEXT, Array, Bool, Float32, Int32, Int64

MAX_LOGPROB = 1e-3
"""Largest value that is accepted as a log probability. Values up to it that are above 0 are rounding errors."""
MAX_VERSION = 2**31 - 1
Digests: TypeAlias = npt.NDArray[np.uint32]


def get_offsets(lengths: Int64) -> Int64:
    """Return the start offset of each sequence in their concatenation, and the end of the last one."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def concatenate_ranges(first: Int64, lengths: Int64) -> Int64:
    """Return `range(first[i], first[i] + lengths[i])` for all i, concatenated."""
    indexes = np.arange(int(lengths.sum()), dtype=np.int64)
    return indexes + np.repeat(first - get_offsets(lengths)[:-1], lengths)


def is_usable_logprob(logprobs: Float32) -> Bool:
    """Return a mask that is True where a log probability is finite and at most 0, up to a rounding error."""
    return np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB)


def join_buffers(parts: Sequence[bytes], dtype: Any) -> Array:
    """Return the concatenation of byte strings as a writable array of the given dtype."""
    # Joining into a bytearray gives writable memory with a single copy.
    data = bytearray().join(parts)
    return np.frombuffer(data, dtype=dtype) if data else np.zeros(0, dtype=dtype)


def get_token_versions(segments: Sequence[Segment], mask: Bool) -> Int32:
    """Return the policy version of each token in `mask`, and -1 for all other tokens.

    `mask` is the concatenated loss mask of the segments. The spans in `Segment.versions` must cover exactly its
    tokens.
    """
    spans = [span for segment in segments for span in segment.versions]
    named: Int64 = np.array([span.version for span in spans], dtype=np.int64)
    if len(named) and not (named.min() >= 0 and named.max() <= MAX_VERSION):
        raise BatchError(
            f"policy versions are numbers from 0 to {MAX_VERSION}, not {named.min()} to {named.max()}"
        )
    lengths = np.array([span.end - span.start for span in spans], dtype=np.int64)
    versions = np.full(len(mask), CONTEXT, dtype=np.int32)
    versions[mask] = np.repeat(named.astype(np.int32), lengths)
    return versions


def join_extras(
    segments: Sequence[Segment], ids: Sequence[str], wanted: tuple[str, ...] | None
) -> dict[str, Array]:
    """Return the extras (additional per-token arrays) of all segments, concatenated and by name.

    `ids` are the rollout IDs of the segments, for messages. `wanted` are the names to include; None means those of
    the first segment. Raise `BatchError` if a segment lacks one of them or has it with another dtype or width.
    """
    if not segments:
        return {}
    names = tuple(segments[0].extras) if wanted is None else wanted
    joined: dict[str, Array] = {}
    for segment, rollout in zip(segments, ids, strict=True):
        if wanted is None and segment.extras.keys() != set(names):
            raise BatchError(
                f"a segment of rollout {rollout} has the extras {sorted(segment.extras)}, the first one "
                f"of the batch has {sorted(names)}: name those to include in BatchConfig(extras=(…))"
            )
    for name in names:
        layout: Extra | None = None
        for segment, rollout in zip(segments, ids, strict=True):
            extra = segment.extras.get(name)
            if extra is None:
                raise BatchError(
                    f"a segment of rollout {rollout} has no extra {name!r}: remove that name from "
                    "BatchConfig(extras=(…))"
                )
            layout = layout or extra
            if (extra.dtype, extra.width) != (layout.dtype, layout.width):
                raise BatchError(
                    f"extra {name!r} of rollout {rollout} is {extra.dtype} of {extra.width} bytes per token, "
                    f"in other segments {layout.dtype} of {layout.width}"
                )
        assert layout is not None
        dtype, tokens = _dtype(name, layout), sum(len(segment) for segment in segments)
        parts = [segment.extras[name].data for segment in segments]
        joined[name] = join_buffers(parts, dtype).reshape(tokens, layout.width // dtype.itemsize)
    return joined


def _dtype(name: str, extra: Extra) -> "np.dtype[Any]":
    try:
        dtype = np.dtype(extra.dtype).newbyteorder("<")
    except TypeError:
        raise BatchError(
            f"extra {name!r} has the dtype {extra.dtype!r}, which NumPy does not know: leave it out "
            "with BatchConfig(extras=(…))"
        ) from None
    if dtype.hasobject or not dtype.itemsize or extra.width % dtype.itemsize:
        raise BatchError(
            f"extra {name!r} has {extra.width} bytes per token, which is no multiple of the size of {extra.dtype}"
        )
    return dtype


def spread_over_tokens(values: Float64, lengths: Int64, mask: Bool) -> Float32:
    """Return a column that has the value of each segment at its trained tokens, and 0 at all other tokens.

    `values` and `lengths` have one entry per segment; `mask` is the concatenated loss mask.
    """
    spread: Float32 = np.repeat(values.astype(np.float32), lengths)
    spread *= mask
    spread += 0.0  # turn -0.0 into 0.0
    return spread


def count_trained_tokens(mask: Bool, offsets: Int64) -> Int64:
    """Return the number of trained tokens of each segment. `offsets` are the bounds of the segments in `mask`."""
    if len(offsets) == 1:
        return np.zeros(0, dtype=np.int64)
    return np.add.reduceat(mask, offsets[:-1], dtype=np.int64)


def _as_bytes(column: Array) -> memoryview:
    return np.ascontiguousarray(column).view(np.uint8).data


def compute_digests(tokens: Int32, mask: Bool, logprobs: Float32, versions: Int32, offsets: Int64) -> Digests:
    """Return, for each segment, a CRC-32 of its part of the four columns.

    `offsets` are the bounds of the segments.
    """
    digests = np.zeros(len(offsets) - 1, dtype=np.uint32)
    if not len(tokens):
        return digests
    bounds = offsets.tolist()
    columns = [_as_bytes(one) for one in (tokens, mask, logprobs, versions)]
    sizes = [column.nbytes // len(tokens) for column in columns]
    for at in range(len(digests)):
        crc = 0
        for column, size in zip(columns, sizes, strict=True):
            crc = zlib.crc32(column[size * bounds[at] : size * bounds[at + 1]], crc)
        digests[at] = crc
    return digests
