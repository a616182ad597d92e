"""User cache for what the make targets download: tokenizers, container engines, peers and guest kernels.

Each entry is a directory named after the peer and a digest of its version. The checkout's `.peers/NAME` is a
symbolic link to the entry. A second checkout on the same machine therefore downloads nothing, and two checkouts
that want different versions do not disturb each other.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PEERS: Final = Path(__file__).resolve().parent.parent / ".peers"


def cache_root() -> Path:
    """Return `rookery/peers` in `$XDG_CACHE_HOME`, `/var/cache` (root) or `~/.cache` (other users).

    Root's own cache is not used: tests of rootless engines start these programs as another user, who cannot enter
    root's home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME") or ("/var/cache" if os.geteuid() == 0 else "~/.cache")
    return Path(base).expanduser().absolute() / "rookery" / "peers"


@contextlib.contextmanager
def cache_entry(name: str, version: str, peers: Path = PEERS) -> Iterator[Path]:
    """Lock the cache directory of this version, link `peers/name` to it, and yield its real path.

    The lock is held until the block ends, so that two checkouts never fill the same entry at once.
    """
    digest = hashlib.sha256(version.encode()).hexdigest()[:12]
    entry = cache_root() / f"{name}-{digest}"
    entry.mkdir(parents=True, exist_ok=True)
    peers.mkdir(parents=True, exist_ok=True)
    with (entry.parent / f"{entry.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _link(peers / name, entry)
        yield entry


def _link(link: Path, entry: Path) -> None:
    if link.is_symlink() and link.readlink() == entry:
        return
    if link.is_symlink():
        link.unlink()
    elif link.is_dir():  # made by an older version, which kept the files in the checkout
        shutil.rmtree(link)
    link.symlink_to(entry)
