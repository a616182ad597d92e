"""Create, lock and find run directories.

Every run gets a new directory, whose name contains only safe characters, whatever the environment and the model
are called. A lock file (`flock`) ensures that one process at a time writes to a run; the kernel releases the lock
when that process dies. The symbolic link `latest` to the newest run is replaced atomically. On a file system
without symbolic links, the run works without that link.
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
from rookery.core.lifetimes import ClosesOnExit
from rookery.journal.schema import FILE, LOCK, TOKENS

LATEST = "latest"
TRAINING_SETTINGS = "train.json"
TRAINING_ROLLOUTS = "rollouts"
"""A training run is a directory with the settings `train.json`. The runs in its directory `rollouts` hold the
journals of its rollouts."""
_SLUG = 24
_NEAR = 5


def slug(name: str) -> str:
    """Return the last component of a name, path or URL as a short lower-case name that is safe in a file name."""
    last = name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".py").lower()
    return re.sub(r"[^a-z0-9._]+", "-", last).strip("-._")[:_SLUG].rstrip("-._") or "x"


def create_run(root: Path, env: str, model: str, *, now: datetime) -> Path:
    """Create the run directory `<UTC time>-<env>-<model>-<random suffix>` in `root` and return its path.

    The symbolic link `latest` in `root` then points to it.
    """
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
            f"cannot create a run directory in {root}: {error.strerror}; choose another directory with -o"
        ) from error
    _point_latest(root, folder.name)
    return folder


def _point_latest(root: Path, name: str) -> None:
    link = root / f".{LATEST}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        link.symlink_to(name)
        link.replace(root / LATEST)
    except OSError:
        # The file system has no links, or there is a directory named `latest`. The run works without the link.
        with suppress(OSError):
            link.unlink()


def find_run(spec: str, root: Path) -> Path:
    """Return the directory of a run.

    `spec` is a path, the name of a run in `root`, `latest`, or a unique prefix or suffix of such a name. Raise
    `UsageError` if no run or several runs match.
    """
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
        raise UsageError(f"{spec!r} matches {len(found)} runs: {_list_some(found)}; type more of the name")
    from difflib import get_close_matches

    if not names:
        raise UsageError(f"no run {spec!r} in {root}, which has no runs")
    near = [name for name in names if spec in name] or get_close_matches(spec, [LATEST, *names], _NEAR, 0.4)
    hint = f"similar names: {_list_some(near)}" if near else f"newest runs: {_list_some(names)}"
    raise UsageError(f"no run {spec!r} in {root}; {hint}")


def find_journal(spec: str, root: Path) -> Path:
    """Return the directory of a run, as `find_run` does, or of the newest journal of a training run.

    `latest` is the newest of both kinds. Use this to read a run; a training run cannot be resumed by its journal.
    """
    for path in (Path(spec), root / spec):
        if spec != LATEST and (journals := training_journals(path)):
            return journals[0]
    training = [name for name in training_names(root) if training_journals(root / name)]
    if spec == LATEST:
        newest = max(training, default="")
        linked = (root / LATEST).resolve().name if (root / LATEST / FILE).is_file() else ""
        found = [newest] if newest > max([linked, *run_names(root)[:1]]) else []
    elif any(name.startswith(spec) or name.endswith(spec) for name in run_names(root)):
        found = []
    else:
        found = [name for name in training if name.startswith(spec) or name.endswith(spec)]
    return training_journals(root / found[0])[0] if len(found) == 1 else find_run(spec, root)


def training_names(root: Path) -> list[str]:
    """Return the names of the training runs in `root`, newest first."""
    return sorted((path.parent.name for path in root.glob(f"*/{TRAINING_SETTINGS}")), reverse=True)


def training_journals(path: Path) -> list[Path]:
    """Return the directories with the journals of a training run, newest first; none if it is no training run."""
    if not (path / TRAINING_SETTINGS).is_file():
        return []
    rollouts = (path / TRAINING_ROLLOUTS).resolve()
    return [rollouts / name for name in run_names(rollouts)]


def run_names(root: Path) -> list[str]:
    """Return the names of the runs in `root`, newest first. A name starts with the time of the run's creation."""
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


def _list_some(names: list[str]) -> str:
    shown = ", ".join(names[:_NEAR])
    return f"{shown}, …" if len(names) > _NEAR else shown


class RunLock(ClosesOnExit):
    """Exclusive lock that allows one process to write to a run.

    It is held until `close` or the end of the process.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd: int | None = fd
        self.path = path

    def close(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def open_lock(folder: Path, *, timeout: float = 0.5) -> RunLock:
    """Acquire the lock for writing to the run in `folder`.

    If another process still holds the lock after `timeout` seconds, raise `UsageError` with its PID and host. The
    timeout is not 0 because `is_locked`, called in another process, also holds the lock for an instant.
    """
    path = folder / LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise JournalError(f"cannot open {path}: {error.strerror}") from error
    try:
        end = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise UsageError(
                        f"{folder.name} is in use by {_holder(fd)}: wait for it to end, or stop it first"
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
    """Return whether a live process has the run open for writing."""
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
