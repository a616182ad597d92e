"""Seeds derived from one root, so that a run, a resume and a checkpoint draw the same."""

from hashlib import blake2b


def derive_seed(root: int, *parts: str | int) -> int:
    """A 63-bit seed that depends on the root and every part, and on nothing else."""
    # A tuple's repr quotes and escapes, so no name of a stream can be made to look like another stream's parts.
    return int.from_bytes(blake2b(repr((root, *parts)).encode(), digest_size=8).digest(), "big") >> 1
