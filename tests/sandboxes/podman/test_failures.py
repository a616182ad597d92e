"""Deaths of Podman's service and of owners, warm containers and bursts: nothing is left."""

from pathlib import Path

import pytest

from rookery.sandboxes import ProviderHome
from tests.sandboxes.docker import test_failures as failures
from tests.sandboxes.docker.test_burst import test_real_engine_creates_a_burst as burst
from tests.sandboxes.docker.test_failures import (
    restartable_engine,
    test_dead_engine_loses_containers_and_creations_wait_for_it,
    test_failed_removal_is_retried_later,
)
from tests.sandboxes.docker.test_pooling import (
    test_killed_run_leaves_no_warm_containers,
    test_lease_of_a_warm_container_names_its_attempt,
    test_run_over_two_images_uses_warm_containers,
)
from tests.sandboxes.podman.service import PrivatePodman

__all__ = [
    "restartable_engine",
    "test_dead_engine_loses_containers_and_creations_wait_for_it",
    "test_failed_removal_is_retried_later",
    "test_killed_run_leaves_no_warm_containers",
    "test_lease_of_a_warm_container_names_its_attempt",
    "test_run_over_two_images_uses_warm_containers",
]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long]


async def test_attempts_of_a_killed_service_are_retried(
    restartable_engine: PrivatePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failures.test_attempts_of_a_killed_engine_are_retried(restartable_engine, tmp_path, monkeypatch, 16)


async def test_next_provider_removes_containers_of_a_killed_owner(
    home: ProviderHome, engine: PrivatePodman, tmp_path: Path
) -> None:
    await failures.test_next_provider_removes_containers_of_a_killed_owner(home, engine, tmp_path, 12)


async def test_service_creates_a_burst(home: ProviderHome, engine: PrivatePodman) -> None:
    await burst(home, engine, 50)
