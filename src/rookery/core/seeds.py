"""Derive random seeds from one root seed, so that a resumed run and a restored checkpoint use the same seeds."""

from hashlib import blake2b


def derive_seed(root: int, *parts: str | int) -> int:
    """Return a 63-bit random seed: a hash of the root seed and the parts, which is the same on every machine."""
    # The repr of a tuple quotes its parts, so that the name of a stream cannot imitate other parts.
    return int.from_bytes(blake2b(repr((root, *parts)).encode(), digest_size=8).digest(), "big") >> 1
