"""What the journal's tests share: run folders, and real small and read-only disks."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_kit import Mount


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "20260101T000000Z-env-model-0000"
    folder.mkdir()
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Mount]:
    """`disk(kib)` mounts a real file system of that size."""
    made: list[Path] = []

    def mount(kib: int) -> Path:
        folder = tmp_path / f"disk{len(made)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"this machine cannot mount: {done.stderr.decode().strip()}")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", "-l", str(folder)], check=True)
