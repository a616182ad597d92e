"""Fixtures: a home for sandboxes. Every test must leave no process, directory or descriptor behind."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rookery.sandbox_runtime import processes
from rookery.sandboxes import ProviderHome
from rookery.sandboxes.subprocess_provider import SubprocessProvider


def find_marked_processes(run: str) -> list[int]:
    """Return every process with the marker of one of the run's sandboxes."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [
        pid
        for pid in pids
        if (processes.read_variable(pid, processes.SANDBOX_VARIABLE) or "").startswith(f"{run}/")
    ]


def find_orphans(folder: Path) -> list[int]:
    """Return processes that wiped their environment but still run in a directory of the home."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.readlink(f"/proc/{name}/cwd").startswith(str(folder)):
                found.append(int(name))
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def one_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one keeper, as on a machine with few cores: tests look at the children of that process."""
    monkeypatch.setattr("rookery.sandboxes.local.keeper_group.count_keepers", lambda: 1)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[ProviderHome]:
    run = f"run-{os.getpid()}-{tmp_path.name}"
    folder = tmp_path / "sandboxes"
    folder.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    yield ProviderHome(folder=folder, run=run)
    assert find_marked_processes(run) == []
    assert find_orphans(folder) == []
    assert [path for path in folder.rglob("*") if path != folder / "leases"] == []
    # The event loop is closed by now. A few descriptors of the test runner itself may come and go.
    assert len(os.listdir("/proc/self/fd")) <= before + 3


@pytest.fixture
async def provider(home: ProviderHome) -> AsyncIterator[SubprocessProvider]:
    made = SubprocessProvider(home)
    yield made
    await made.close()
