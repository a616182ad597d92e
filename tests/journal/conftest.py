"""Fixtures of the journal tests: run directories and small file systems."""

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
    """Return a function that mounts a file system of the given size in KiB."""
    mounted: list[Path] = []

    def mount(kib: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        process = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], capture_output=True, check=False
        )
        if process.returncode:
            pytest.skip(f"this machine cannot mount: {process.stderr.decode().strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
