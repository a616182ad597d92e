"""The per-token columns that all layouts of a batch share: flat, packed, padded, and shifted to align with logits.

Guarantees:
- Each layout has every column, and all columns of a layout have the same positions.
- At positions without a token (padding), the mask is False and all weights are 0, so they do not train.
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
"""The value in the column `versions` for tokens that do not train, such as prompt tokens."""
EMPTY: Final[dict[str, Any]] = {
    "mask": False,
    "logprobs": 0.0,
    "versions": CONTEXT,
    "advantages": 0.0,
    "weights": 0.0,
}
"""Values of the columns at positions that do not train, and at positions without a token."""
DTYPES: Final[dict[str, Any]] = {
    "tokens": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "advantages": np.float32,
    "weights": np.float32,
}


class Columns(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Arrays with one value per token. In padded layouts, they also have values for the padding."""

    tokens: Int32
    mask: Bool
    """The loss mask: True for tokens that train."""
    logprobs: Float32
    """Log probability of the token under the policy that sampled it; 0 where the mask is False."""
    versions: Int32
    """The policy version that sampled the token; -1 where the mask is False."""
    advantages: Float32
    """Advantage of the token's rollout; 0 where the mask is False."""
    weights: Float32
    """Weight of the token in the loss, which is the sum of weight times loss per token; 0 where the mask is
    False."""
    extras: dict[str, Array]
    """Additional per-token arrays by name, such as routed experts. They have one more axis than the columns,
    for the values of one token."""

    def map_columns(self, change: Callable[[str, Array], Array]) -> dict[str, Any]:
        """Return all columns and extras after applying `change(name, array)` to each.

        For extras, `change` receives an empty name, because an extra may have the same name as a column.
        """
        columns: dict[str, Any] = {name: change(name, getattr(self, name)) for name in DTYPES}
        columns["extras"] = {name: change("", extra) for name, extra in self.extras.items()}
        return columns

    @property
    def nbytes(self) -> int:
        """Total size of all columns and extras in bytes."""
        columns: list[Array] = [getattr(self, name) for name in DTYPES]
        return sum(column.nbytes for column in [*columns, *self.extras.values()])

    def replace_columns(self, **columns: Any) -> Self:
        """Return a shallow copy in which the given columns are replaced, for example by a trainer's own
        advantages.
        """
        return msgspec.structs.replace(self, **columns)


class TrainedTokens(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The trained tokens of a row, one value per token."""

    positions: Int64
    """Position in the row whose logits predict the token."""
    labels: Int64
    """ID of the token."""
    logprobs: Float32
    advantages: Float32
    weights: Float32
