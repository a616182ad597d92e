"""Seeds derived from one root, so that a run, a resume and a checkpoint draw the same."""

from hashlib import blake2b


def derive_seed(root: int, *parts: str | int) -> int:
    """A 63-bit seed that depends on the root and every part, and on nothing else."""
    # Type and length go in, so that no name of a stream can be made to look like another stream's parts.
    text = "".join(f"{type(part).__name__}:{len(str(part))}:{part};" for part in (root, *parts))
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1
