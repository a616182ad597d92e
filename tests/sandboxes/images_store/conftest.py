"""Fixtures: a private image store, no engine, and a layer with a root file system."""

import io
import tarfile
from pathlib import Path

import pytest

from rookery.sandboxes.images.store import ImageStore
from tests.sandboxes.root_filesystems import build_root_filesystem


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("ROOKERY_IMAGES", str(tmp_path / "store"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-config"))
    return ImageStore(tmp_path / "store")


@pytest.fixture(scope="session")
def system_layer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a layer with a few programs."""
    top = build_root_filesystem(tmp_path_factory.mktemp("system_layer") / "root")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        file.add(top, arcname=".")
    return out.getvalue()
