"""The columns of token data, which all forms of a batch share: flat, packed, padded and shifted to the logits.

Guarantees:
- Each form has every column, and all columns have the same positions.
- Positions without a token have values that do not train.
"""

from collections.abc import Callable
from typing import Any, Final, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]
Float32: TypeAlias = npt.NDArray[np.float32]
Bool: TypeAlias = npt.NDArray[np.bool_]
Array: TypeAlias = npt.NDArray[Any]

CONTEXT: Final = -1
"""The policy version of tokens that do not train."""
EMPTY: Final[dict[str, Any]] = {
    "mask": False,
    "logprobs": 0.0,
    "versions": CONTEXT,
    "advantages": 0.0,
    "weights": 0.0,
}
"""Values of positions that do not train or hold no token."""
DTYPES: Final[dict[str, Any]] = {
    "tokens": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "advantages": np.float32,
    "weights": np.float32,
}


class Columns(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Columns with one value per token."""

    tokens: Int32
    mask: Bool
    """The loss mask: True for tokens that train."""
    logprobs: Float32
    """Log probabilities of the sampling policy; 0 where the mask is False."""
    versions: Int32
    """The policy version that sampled the token; -1 where the mask is False."""
    advantages: Float32
    """Advantage of the token's rollout; 0 where the mask is False."""
    weights: Float32
    """The loss is the sum of weight times loss per token; 0 where the mask is False."""
    extras: dict[str, Array]
    """Arrays by name, with one more axis than the columns."""

    def map_columns(self, change: Callable[[str, Array], Array]) -> dict[str, Any]:
        """Apply a function to all columns and extras. Extras are passed with an empty name, which cannot clash
        with a column."""
        columns: dict[str, Any] = {name: change(name, getattr(self, name)) for name in DTYPES}
        columns["extras"] = {name: change("", extra) for name, extra in self.extras.items()}
        return columns

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        columns: list[Array] = [getattr(self, name) for name in DTYPES]
        return sum(column.nbytes for column in [*columns, *self.extras.values()])

    def replace_columns(self, **columns: Any) -> Self:
        """Return a copy with other columns, for example with a trainer's own advantages."""
        return msgspec.structs.replace(self, **columns)
