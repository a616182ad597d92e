"""Find a tokenizer on this machine, or download it from the Hugging Face hub into a cache directory.

Guarantees:
- a tokenizer is downloaded once per cache directory, by one process while other processes wait;
- a cached directory is always complete: it is filled under a temporary name and then renamed;
- `resolve_tokenizer` returns a local directory, which can be passed to other processes of the machine.
"""

import fcntl
import hashlib
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

from rookery.core import UsageError, wrap_errors

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
"""The files of a tokenizer. Only tokenizer.json is required."""
ORIGIN_FILE: Final = "rookery-origin.json"
GGUF_SUFFIX: Final = ".gguf"
LOCK_TIMEOUT: Final = 600.0
"""Seconds that a process waits for another process to download the same tokenizer."""

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")

Fetch: TypeAlias = Callable[[str, str, Path], None]
"""Downloads a tokenizer. Called with its hub name, its revision and the directory for its files."""


class Origin(msgspec.Struct, frozen=True):
    """Hugging Face hub name and revision of a cached tokenizer, stored in its directory."""

    name: str
    revision: str


def get_cache_directory() -> Path:
    """Return Rookery's cache directory: `$ROOKERY_CACHE`, or `rookery` in the user's cache directory."""
    override = os.environ.get("ROOKERY_CACHE")
    if override:
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rookery"


def resolve_tokenizer(tokenizer: str, fetch: Fetch | None = None) -> str:
    """Return the absolute path of a tokenizer's directory.

    `tokenizer` is a directory, a GGUF file, whose tokenizer is written to the cache, or a name on the Hugging Face
    hub (`org/model`, `org/model@revision`), which is downloaded with `fetch` if it is not cached. Raises
    `UsageError` if there is no such tokenizer.
    """
    if not tokenizer:
        raise UsageError(
            "no tokenizer is configured: pass a directory with a tokenizer.json or a hub name (org/model)"
        )
    path = Path(tokenizer).expanduser()
    if path.name == TOKENIZER_FILES[0] and path.is_file():
        return str(path.absolute().parent)
    if path.suffix == GGUF_SUFFIX and path.is_file():
        found = path.stat()
        identity = f"{path.absolute()} {found.st_size} {found.st_mtime_ns}"
        name = f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        return str(_get_cached(name, "gguf", lambda _name, _revision, folder: save_gguf_tokenizer(path, folder)))
    if path.is_dir():
        if (path / TOKENIZER_FILES[0]).is_file():
            return str(path.absolute())
        names = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise UsageError(f"there is no tokenizer.json in {path.absolute()}; it contains: {names}")
    if not _HUB_NAME.fullmatch(tokenizer):
        raise UsageError(
            f"there is no tokenizer at {tokenizer!r}: it is neither a directory with a tokenizer.json "
            "nor a hub name (org/model)"
        )
    name, _, revision = tokenizer.partition("@")
    return str(_get_cached(name, revision or "main", fetch or download_from_hub))


def read_origin(folder: Path) -> str:
    """Return the hub name of the tokenizer in a cached directory; empty if the directory is not from the cache."""
    try:
        return msgspec.json.decode((folder / ORIGIN_FILE).read_bytes(), type=Origin).name
    except (OSError, msgspec.MsgspecError):
        return ""


def _get_cached(name: str, revision: str, fetch: Fetch) -> Path:
    cache = get_cache_directory() / "tokenizers"
    target = cache / f"{name}@{revision}".replace("/", "--")
    if (target / ORIGIN_FILE).is_file():
        return target
    with wrap_errors(UsageError, f"the cache directory {cache} cannot be used", OSError):
        cache.mkdir(parents=True, exist_ok=True)
        with _lock_file(cache / f"{target.name}.lock", name):
            if not (target / ORIGIN_FILE).is_file():
                _download(target, name, revision, fetch)
    return target


def _download(target: Path, name: str, revision: str, fetch: Fetch) -> None:
    staging = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    try:
        what = (
            f"the tokenizer {name!r} is not cached on this machine and could not be downloaded; "
            "pass a directory with its tokenizer.json, or run once with access to the hub"
        )
        with wrap_errors(UsageError, what, Exception):
            fetch(name, revision, staging)
        if not (staging / TOKENIZER_FILES[0]).is_file():
            raise UsageError(f"{name!r} at {revision!r} has no tokenizer.json, so its tokenizer is not supported")
        (staging / ORIGIN_FILE).write_bytes(msgspec.json.encode(Origin(name, revision)))
        staging.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _lock_file(path: Path, name: str) -> Iterator[None]:
    """Context manager that holds an exclusive lock on a file. The kernel releases it if the process dies.

    Raises `UsageError` if another process holds the lock for more than `LOCK_TIMEOUT`. `name` is the tokenizer.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT
    with path.open("ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"another process has been downloading {name!r} for {LOCK_TIMEOUT:.0f} s: {path} is locked"
                    ) from None
                time.sleep(0.05)
        yield


def save_gguf_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file to a directory, with its chat template."""
    from rookery.upstreams.torch.loading import load_tokenizer

    load_tokenizer(path).save_pretrained(folder)


def download_from_hub(name: str, revision: str, folder: Path) -> None:
    """Download the files of a tokenizer from the configured Hugging Face hub into a directory."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UsageError(
            "downloading a tokenizer needs an optional dependency: pip install 'rookery-rl[renderers]'"
        ) from error
    snapshot_download(name, revision=revision, allow_patterns=[*TOKENIZER_FILES, "config.json"], local_dir=folder)
