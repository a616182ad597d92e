"""Images that Podman does not have are loaded into it."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rookery.sandboxes.docker.client import BlockingEngineClient
from rookery.sandboxes.images.engine_images import EngineImages
from rookery.sandboxes.images.store import ImageStore
from tests.sandboxes.docker.test_images import (
    docker,
    image_home,
    system_directory,
    system_tar,
    test_cancelled_request_does_not_cancel_the_load_but_close_does,
    test_credentials_reach_the_registry_and_no_log,
    test_image_files_are_loaded_into_the_engine,
    test_image_is_pulled_once_with_progress,
    test_image_of_the_store_is_loaded_with_all_layers,
    test_removed_image_is_loaded_again,
    test_unavailable_image_is_a_task_fault_with_advice,
    test_unreachable_registry_is_an_infra_fault,
)
from tests.sandboxes.images_store import test_engine as engine_tests
from tests.sandboxes.podman.service import PrivatePodman

__all__ = [
    "docker",
    "image_home",
    "system_directory",
    "system_tar",
    "test_cancelled_request_does_not_cancel_the_load_but_close_does",
    "test_credentials_reach_the_registry_and_no_log",
    "test_image_files_are_loaded_into_the_engine",
    "test_image_is_pulled_once_with_progress",
    "test_image_of_the_store_is_loaded_with_all_layers",
    "test_removed_image_is_loaded_again",
    "test_unavailable_image_is_a_task_fault_with_advice",
    "test_unreachable_registry_is_an_infra_fault",
]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROOKERY_IMAGES", str(tmp_path / "store"))
        yield ImageStore(tmp_path / "store")


@pytest.mark.parametrize(
    "check",
    [
        engine_tests.test_engine_image_is_found_by_name_and_refreshed,
        engine_tests.test_dockerfile_is_built_once,
        engine_tests.test_missing_images_are_loaded_into_the_engine,
    ],
    ids=lambda check: check.__name__.removeprefix("test_"),
)
async def test_store_exchanges_images_with_the_service(
    check: Callable[..., None],
    engine: PrivatePodman,
    store: ImageStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    await asyncio.to_thread(check, EngineImages(BlockingEngineClient(engine.socket)), store, tmp_path)
