"""User cache for what the make targets download: tokenizers, container engines, peers and guest kernels.

Each entry is a directory named after the peer and a digest of its version. The checkout's `.peers/NAME` is a
symbolic link to the complete entry. A second checkout on the same machine therefore downloads nothing, and two
checkouts that want different versions do not disturb each other.
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
    """Lock the cache directory of this version, yield its real path, and link `peers/name` to it afterwards.

    The lock is held until the block ends, so that two processes never fill the same entry at once. The link exists
    only after a block without an exception: who finds `peers/name` finds a complete entry.
    """
    digest = hashlib.sha256(version.encode()).hexdigest()[:12]
    entry, link = cache_root() / f"{name}-{digest}", peers / name
    if link.is_symlink() and not (link.readlink() == entry and entry.exists()):
        link.unlink()
    entry.mkdir(parents=True, exist_ok=True)
    peers.mkdir(parents=True, exist_ok=True)
    with (entry.parent / f"{entry.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield entry
        if link.is_symlink():
            return
        if link.is_dir():  # made by an older version, which kept the files in the checkout
            shutil.rmtree(link)
        link.symlink_to(entry)
