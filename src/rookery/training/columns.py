"""The columns of token data, in whichever form: flat, packed into a row, padded, shifted to the logits.

Promises:
- a form has every column of the batch, each with the same places;
- places that hold no token have the value that trains nothing.
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
"""The version of a token that does not train."""
EMPTY: Final[dict[str, Any]] = {
    "mask": False,
    "logprobs": 0.0,
    "versions": CONTEXT,
    "advantages": 0.0,
    "weights": 0.0,
}
"""What stands where a token does not train, or where there is none."""
DTYPES: Final[dict[str, Any]] = {
    "tokens": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "advantages": np.float32,
    "weights": np.float32,
}


class Columns(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One value for each token in each column."""

    tokens: Int32
    mask: Bool
    """True where the token trains."""
    logprobs: Float32
    """Of the sampler, at the time; 0 where the mask is False."""
    versions: Int32
    """The policy version that sampled the token; -1 where the mask is False."""
    advantages: Float32
    """Of the token's rollout; 0 where the mask is False."""
    weights: Float32
    """The loss is the sum of weight times the token's loss; 0 where the mask is False."""
    extras: dict[str, Array]
    """By name: an array with one more axis than the columns."""

    def each(self, change: Callable[[str, Array], Array]) -> dict[str, Any]:
        """All columns and extras, changed. The name of an extra is not told: it could be that of a column."""
        found: dict[str, Any] = {name: change(name, getattr(self, name)) for name in DTYPES}
        found["extras"] = {name: change("", extra) for name, extra in self.extras.items()}
        return found

    @property
    def nbytes(self) -> int:
        """Of the arrays."""
        columns: list[Array] = [getattr(self, name) for name in DTYPES]
        return sum(column.nbytes for column in [*columns, *self.extras.values()])

    def changed(self, **columns: Any) -> Self:
        """The same with other columns: a trainer's own advantages, say."""
        return msgspec.structs.replace(self, **columns)
