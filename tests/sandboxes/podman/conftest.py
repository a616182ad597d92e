"""The fixtures of the tests of containers, with podman's service in the engine's place."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery.sandbox_runtime import processes
from tests.sandboxes.docker.conftest import docker, tars
from tests.sandboxes.podman.service import PrivatePodman

__all__ = ["docker", "tars"]


@pytest.fixture(scope="session")
def engine(tars: dict[str, Path]) -> Iterator[PrivatePodman]:
    folder = tempfile.mkdtemp(prefix="rookery-podman-")
    made = PrivatePodman(Path(folder))
    try:
        made.start()
        for name, tar in tars.items():
            made.load(tar, name)
        yield made
    finally:
        made.stop()
        processes.remove_tree(folder)
