"""Where a tokenizer lies on this machine: a folder, or a hub's name that was fetched into one.

Promises:
- a name is fetched once for a machine, by one process while the others wait for it, and never again after that;
- a folder in the cache is whole: it was filled under another name and then renamed;
- who is given a folder makes no call to the network: `settled` is called once, and what it returns travels;
- what is not there is said in words: what was looked for, where, and what to do.
"""

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from rookery.core import UsageError, boundary

FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
"""What a tokenizer is made of; only the first must be there."""
ORIGIN: Final = "rookery-origin.json"
WAIT: Final = 600.0
"""Seconds that a process waits for another one's fetch."""

_HUB: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")

Fetch: TypeAlias = Callable[[str, str, Path], None]
"""Puts the files of a name, at a revision, into a folder."""


class Origin(msgspec.Struct, frozen=True):
    """What a folder of the cache holds."""

    name: str
    revision: str


def cache_folder() -> Path:
    """`$ROOKERY_CACHE`, or `rookery` in the user's cache folder."""
    own = os.environ.get("ROOKERY_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rookery"


def settled(tokenizer: str, fetch: Fetch | None = None) -> str:
    """The folder of a tokenizer, absolute, by its path or its name on the hub (`org/model`, `org/model@rev`)."""
    if not tokenizer:
        raise UsageError("no tokenizer is named: give a folder with a tokenizer.json, or a hub's name (org/model)")
    path = Path(tokenizer).expanduser()
    if path.name == FILES[0] and path.is_file():
        return str(path.absolute().parent)
    if path.is_dir():
        if (path / FILES[0]).is_file():
            return str(path.absolute())
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise UsageError(f"there is no tokenizer.json in {path.absolute()}; there is: {found}")
    if not _HUB.fullmatch(tokenizer):
        raise UsageError(
            f"there is no tokenizer at {tokenizer!r}: it is neither a folder with a tokenizer.json "
            "nor a hub's name (org/model)"
        )
    name, _, revision = tokenizer.partition("@")
    return str(_cached(name, revision or "main", fetch or from_hub))


def origin(folder: Path) -> str:
    """The hub's name of a cached folder; empty where it has none."""
    try:
        return msgspec.json.decode((folder / ORIGIN).read_bytes(), type=Origin).name
    except (OSError, msgspec.MsgspecError):
        return ""


def _cached(name: str, revision: str, fetch: Fetch) -> Path:
    shelf = cache_folder() / "tokenizers"
    target = shelf / f"{name}@{revision}".replace("/", "--")
    if (target / ORIGIN).is_file():
        return target
    with boundary(UsageError, f"the cache folder {shelf} cannot be used", OSError):
        shelf.mkdir(parents=True, exist_ok=True)
        with _locked(shelf / f"{target.name}.lock", name):
            if not (target / ORIGIN).is_file():
                _fill(target, name, revision, fetch)
    return target


def _fill(target: Path, name: str, revision: str, fetch: Fetch) -> None:
    fresh = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    try:
        what = (
            f"the tokenizer {name!r} is not on this machine and could not be fetched; "
            "give a folder with its tokenizer.json, or run once where the hub can be reached"
        )
        with boundary(UsageError, what, Exception):
            fetch(name, revision, fresh)
        if not (fresh / FILES[0]).is_file():
            raise UsageError(f"{name!r} at {revision!r} has no tokenizer.json: its tokenizer cannot be used here")
        (fresh / ORIGIN).write_bytes(msgspec.json.encode(Origin(name, revision)))
        fresh.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Alone on this machine: the lock goes with its process, however it ends."""
    until = time.monotonic() + WAIT
    with path.open("ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UsageError(
                        f"another process has been fetching {name!r} for {WAIT:.0f} s: {path} is locked"
                    ) from None
                time.sleep(0.05)
        yield


def from_hub(name: str, revision: str, folder: Path) -> None:
    """Fetches from the hub that huggingface_hub is set to."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UsageError("fetching a tokenizer by name needs: pip install 'rookery-rl[renderers]'") from error
    snapshot_download(name, revision=revision, allow_patterns=[*FILES, "config.json"], local_dir=folder)
