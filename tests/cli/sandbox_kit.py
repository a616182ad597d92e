"""The command line with real boxes: with input, as an ordinary user, and where nothing isolates."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rookery.sandbox_runtime import cgroups
from tests.cli.helpers import COMMAND, Ended, environ

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
# Each user namespace has settings of its own: in this one, nobody can make another.
WALLESS = (
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    *('echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"),
)


def called(*args: str | Path, cwd: Path, stdin: bytes = b"", before: tuple[str, ...] = (), **env: str) -> Ended:
    """The command, to its end; `before` is put before it."""
    done = subprocess.run(
        [*before, *COMMAND, *map(str, args)],
        cwd=cwd,
        env=environ(**env),
        input=stdin,
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


@functools.cache
def boxes_work() -> str:
    """Why no box can be made here, or nothing."""
    from rookery.sandboxes.local import machine_checks

    return machine_checks.find_problem()


@pytest.fixture
def boxes() -> None:
    if why := boxes_work():
        pytest.skip(f"[probed] {why}")


@functools.cache
def _can_lose_walls() -> bool:
    return subprocess.run([*WALLESS, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def walless() -> tuple[str, ...]:
    """What to put before a command so that nothing isolates for it, for real."""
    if not _can_lose_walls():
        pytest.skip("[probed] no user namespace can be made here to take them away in")
    return WALLESS


@pytest.fixture
def own_folder() -> Iterator[tuple[Path, int]]:
    """An ordinary user, and a folder of their own: pytest's are closed to others."""
    user = os.geteuid() or 65534
    folder = Path(tempfile.mkdtemp(prefix="rookery-user-", dir="/tmp"))
    os.chown(folder, user, -1)
    yield folder, user
    shutil.rmtree(folder)


@functools.cache
def python_for(user: int) -> str:
    """A Python of this version that the user may execute: ours may lie in a folder that only root can enter."""
    named = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/local/bin:/usr/bin")
    for found in (sys.executable, named):
        try:
            subprocess.run([found or "none", "-c", ""], user=user, check=True, capture_output=True, cwd="/")
        except (OSError, subprocess.CalledProcessError):
            continue
        assert found is not None
        return found
    return pytest.skip("[probed] no Python of this version that an ordinary user may execute")


def called_as(user: int, *args: str | Path, cwd: Path, stdin: bytes = b"") -> Ended:
    """The command as an ordinary user."""
    python = python_for(user)
    site = Path(click.__file__).parents[1]
    done = subprocess.run(
        [python, "-m", "rookery.cli", *map(str, args)],
        cwd=cwd,
        env=environ(HOME=str(cwd), PYTHONPATH=f"{ROOT / 'src'}:{site}", PYTHONDONTWRITEBYTECODE="1"),
        input=stdin,
        capture_output=True,
        timeout=SECONDS,
        check=False,
        **({"user": user, "group": user, "extra_groups": []} if os.geteuid() == 0 else {}),
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def groups_of(pid: int) -> list[Path]:
    """The control groups of boxes whose owner this is or was."""
    manager = cgroups.find_cgroups()
    places = {manager.unified, *manager.v1.values()} - {""}
    found = [group for place in places for group in Path(place).iterdir() if group.name.startswith(f"{pid}-")]
    manager.close()
    return found
