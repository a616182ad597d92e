"""Derive seeds from one root, so that a resumed run and a restored checkpoint use the same seeds."""

from hashlib import blake2b


def derive_seed(root: int, *parts: str | int) -> int:
    """Return a 63-bit seed that depends only on the root and the parts."""
    # The repr of a tuple quotes its parts, so that the name of a stream cannot imitate other parts.
    return int.from_bytes(blake2b(repr((root, *parts)).encode(), digest_size=8).digest(), "big") >> 1
