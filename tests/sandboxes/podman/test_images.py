"""Podman's service is given the images that it does not have, as Docker's engine is."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rookery.sandboxes.docker.client import BlockingEngineClient
from rookery.sandboxes.images.engine_images import EngineImages
from rookery.sandboxes.images.store import ImageStore
from tests.sandboxes.docker.test_images import (
    docker,
    packed,
    system,
    test_a_key_goes_to_the_registry_and_into_no_word_of_ours,
    test_a_name_of_the_store_is_given_with_what_its_layers_say_together,
    test_a_registry_that_does_not_answer_is_nobodys_fault,
    test_an_image_is_given_once_however_many_ask_and_its_bytes_are_told,
    test_an_image_that_cannot_be_had_is_the_tasks_fault_with_its_name_and_what_to_do,
    test_an_image_that_went_since_is_given_again,
    test_files_become_an_image_of_the_engine,
    test_who_gives_up_leaves_the_giving_to_others_and_closing_ends_it,
    top,
)
from tests.sandboxes.images_store import test_engine as stored
from tests.sandboxes.podman.service import PrivatePodman

__all__ = [
    "docker",
    "packed",
    "system",
    "test_a_key_goes_to_the_registry_and_into_no_word_of_ours",
    "test_a_name_of_the_store_is_given_with_what_its_layers_say_together",
    "test_a_registry_that_does_not_answer_is_nobodys_fault",
    "test_an_image_is_given_once_however_many_ask_and_its_bytes_are_told",
    "test_an_image_that_cannot_be_had_is_the_tasks_fault_with_its_name_and_what_to_do",
    "test_an_image_that_went_since_is_given_again",
    "test_files_become_an_image_of_the_engine",
    "test_who_gives_up_leaves_the_giving_to_others_and_closing_ends_it",
    "top",
]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROOKERY_IMAGES", str(tmp_path / "store"))
        yield ImageStore(tmp_path / "store")


@pytest.mark.parametrize(
    "proof",
    [
        stored.test_an_image_of_the_engine_is_found_by_name_and_again_when_it_changed,
        stored.test_a_dockerfile_is_built_once_where_a_builder_is_present,
        stored.test_the_engine_is_given_what_it_does_not_have,
    ],
    ids=lambda proof: proof.__name__.removeprefix("test_"),
)
async def test_the_store_takes_from_the_service_and_gives_to_it(
    proof: Callable[..., None],
    engine: PrivatePodman,
    store: ImageStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    await asyncio.to_thread(proof, EngineImages(BlockingEngineClient(engine.socket)), store, tmp_path)
