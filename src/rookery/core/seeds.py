"""Seeds derived from one root, so that a run, a resume and a checkpoint draw the same."""

from hashlib import blake2b


def derive_seed(root: int, *parts: str | int) -> int:
    """A 63-bit seed that depends on the root and every part, and on nothing else."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (root, *parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
