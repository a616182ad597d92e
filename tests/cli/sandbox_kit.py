"""Run the command with real sandboxes: with input, as an unprivileged user, or without isolation."""

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
from tests.cli.helpers import COMMAND, CommandResult, environ

ROOT = Path(__file__).parents[2]
SECONDS = 240.0
# In this user namespace no further user namespace can be created, so no provider isolates.
WITHOUT_ISOLATION = (
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    *('echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"),
)


def run_cli(
    *args: str | Path, cwd: Path, stdin: bytes = b"", before: tuple[str, ...] = (), **env: str
) -> CommandResult:
    """Run the command to its end, with `before` as a prefix such as `unshare …`."""
    done = subprocess.run(
        [*before, *COMMAND, *map(str, args)],
        cwd=cwd,
        env=environ(**env),
        input=stdin,
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    return CommandResult(done.returncode, done.stdout.decode(), done.stderr.decode())


@functools.cache
def find_sandbox_problem() -> str:
    """Return why no local sandbox can be created on this machine; empty if one can."""
    from rookery.sandboxes.local import machine_checks

    return machine_checks.find_problem()


@pytest.fixture
def local_sandboxes() -> None:
    """Skip the test if this machine cannot create local sandboxes."""
    if why := find_sandbox_problem():
        pytest.skip(f"[probed] {why}")


@functools.cache
def _can_disable_isolation() -> bool:
    return subprocess.run([*WITHOUT_ISOLATION, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def without_isolation() -> tuple[str, ...]:
    """Return a command prefix under which no sandbox provider can isolate."""
    if not _can_disable_isolation():
        pytest.skip("[probed] this machine cannot create the user namespace that disables isolation")
    return WITHOUT_ISOLATION


@pytest.fixture
def own_folder() -> Iterator[tuple[Path, int]]:
    """Yield a directory of an unprivileged user, and the user ID. Directories of pytest are private."""
    user = os.geteuid() or 65534
    folder = Path(tempfile.mkdtemp(prefix="rookery-user-", dir="/tmp"))
    os.chown(folder, user, -1)
    yield folder, user
    shutil.rmtree(folder)


@functools.cache
def python_for(user: int) -> str:
    """Return a Python of this version with which the user can import Rookery.

    The tests' own Python may be in a directory of root. If this clone is in one, the test is skipped.
    """
    named = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/local/bin:/usr/bin")
    for found in (sys.executable, named):
        try:
            subprocess.run(
                [found or "none", "-c", "import rookery.cli"],
                user=user,
                check=True,
                capture_output=True,
                cwd="/",
                env=_import_environment(),
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        assert found is not None
        return found
    return pytest.skip("[probed] no Python of this version with which an unprivileged user can import Rookery")


def _import_environment(**variables: str) -> dict[str, str]:
    """Return an environment in which any Python of this version finds Rookery and its dependencies."""
    site = Path(click.__file__).parents[1]
    return environ(PYTHONPATH=f"{ROOT / 'src'}:{site}", PYTHONDONTWRITEBYTECODE="1", **variables)


def run_cli_as(user: int, *args: str | Path, cwd: Path, stdin: bytes = b"") -> CommandResult:
    """Run the command to its end as an unprivileged user."""
    python = python_for(user)
    done = subprocess.run(
        [python, "-m", "rookery.cli", *map(str, args)],
        cwd=cwd,
        env=_import_environment(HOME=str(cwd)),
        input=stdin,
        capture_output=True,
        timeout=SECONDS,
        check=False,
        **({"user": user, "group": user, "extra_groups": []} if os.geteuid() == 0 else {}),
    )
    return CommandResult(done.returncode, done.stdout.decode(), done.stderr.decode())


def cgroups_of(pid: int) -> list[Path]:
    """Return the cgroups of the sandboxes of a process, which may be dead."""
    manager = cgroups.find_cgroups()
    roots = {manager.unified, *manager.v1.values()} - {""}
    found = [group for root in roots for group in Path(root).iterdir() if group.name.startswith(f"{pid}-")]
    manager.close()
    return found
