"""Fixtures of the container tests, with Podman's service as the engine."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery.sandbox_runtime import processes
from tests.sandboxes.docker.conftest import docker, image_archives
from tests.sandboxes.podman.service import PrivatePodman

__all__ = ["docker", "image_archives"]


@pytest.fixture(scope="session")
def engine(image_archives: dict[str, Path]) -> Iterator[PrivatePodman]:
    folder = tempfile.mkdtemp(prefix="rookery-podman-")
    made = PrivatePodman(Path(folder))
    try:
        made.start()
        for name, tar in image_archives.items():
            made.load(tar, name)
        yield made
    finally:
        made.stop()
        processes.remove_tree(folder)
