"""The run's folder: its name, its lock, the `latest` link, and finding one again.

Promises:
- a run's folder is made new, never reused, and its name is safe whatever the environment and model are called;
- one writer at a time: a second one is refused, told which process holds the run;
- the lock is gone the moment its holder is, however it died;
- `latest` is replaced in one step, and a run does not fail because a link cannot be made.
"""

import fcntl
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from rookery.core import JournalError, UsageError
from rookery.core.closing import Closing
from rookery.journal.schema import FILE, LOCK, TOKENS

LATEST = "latest"
_SLUG = 24
_NEAR = 5


def slug(name: str) -> str:
    """A short name that is safe in a path, from the last part of a name, path or URL."""
    last = name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".py").lower()
    return re.sub(r"[^a-z0-9._]+", "-", last).strip("-._")[:_SLUG].rstrip("-._") or "x"


def create_run(root: Path, env: str, model: str, *, now: datetime) -> Path:
    """A new folder `<utc>-<env>-<model>-<id>` under `root`, with `latest` pointing at it."""
    stem = f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{slug(env)}-{slug(model)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for _ in range(100):
            folder = root / f"{stem}-{secrets.token_hex(2)}"
            with suppress(FileExistsError):
                folder.mkdir()
                break
        else:
            raise UsageError(f"{root} already holds too many runs named {stem}")
        (folder / TOKENS).mkdir()
    except OSError as error:
        raise UsageError(
            f"cannot make a run's folder in {root}: {error.strerror}; choose another with -o"
        ) from error
    _point_latest(root, folder.name)
    return folder


def _point_latest(root: Path, name: str) -> None:
    link = root / f".{LATEST}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        link.symlink_to(name)
        link.replace(root / LATEST)
    except OSError:
        # A file system without links, or a folder named `latest`: the run itself is fine without it.
        with suppress(OSError):
            link.unlink()


def find_run(spec: str, root: Path) -> Path:
    """The run meant by a path, a folder's name, `latest`, or a beginning or an end that only one has."""
    for path in (Path(spec), root / spec):
        if (path / FILE).is_file():
            return path.resolve()
    if spec == LATEST:
        raise UsageError(f"there is no run in {root} yet: start one with `rookery run`")
    if "/" in spec:
        raise UsageError(f"{spec} is not a run: it holds no {FILE}")
    names = run_names(root)
    found = [name for name in names if name.startswith(spec) or name.endswith(spec)]
    if len(found) == 1:
        return (root / found[0]).resolve()
    if found:
        raise UsageError(f"{spec!r} fits {len(found)} runs: {_some(found)}; write more of the name")
    from difflib import get_close_matches

    near = [name for name in names if spec in name] or get_close_matches(spec, names, _NEAR, 0.4) or names
    hint = f"there are: {_some(near)}" if near else f"{root} holds none"
    raise UsageError(f"no run {spec!r} in {root}; {hint}")


def run_names(root: Path) -> list[str]:
    """Names of the runs in `root`, newest first. Names begin with the time, so their order is the runs' order."""
    try:
        with os.scandir(root) as entries:
            names = [
                entry.name for entry in entries if not entry.is_symlink() and (root / entry.name / FILE).is_file()
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"cannot read {root}: {error.strerror}") from error
    return sorted(names, reverse=True)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NEAR])
    return f"{shown}, …" if len(names) > _NEAR else shown


class RunLock(Closing):
    """The right to write a run; held until closed or until the process is gone."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd: int | None = fd
        self.path = path

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def open_lock(folder: Path, *, patience: float = 0.5) -> RunLock:
    """Take the run's lock, or refuse with the holder's pid.

    `patience`: seconds to try. A reader that asks whether the run is live holds the lock for an instant,
    and that must not look like a second writer.
    """
    path = folder / LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise JournalError(f"cannot open {path}: {error.strerror}") from error
    try:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise UsageError(
                        f"{folder.name} is being written by {_holder(fd)}: wait for it, or stop it first"
                    ) from None
                time.sleep(0.01)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        os.close(fd)
        raise JournalError(f"cannot lock {path}: {error.strerror}") from error
    except BaseException:
        os.close(fd)
        raise
    return RunLock(fd, path)


def _holder(fd: int) -> str:
    text = os.pread(fd, 200, 0).decode(errors="replace").strip()
    return text or "another process"


def is_locked(folder: Path) -> bool:
    """Whether a writer holds the run."""
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
