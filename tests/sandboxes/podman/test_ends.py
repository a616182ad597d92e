"""Podman's services and owners that die, and containers that are made ahead or many at once: nothing is left."""

from pathlib import Path

import pytest

from rookery.sandboxes import ProviderHome
from tests.sandboxes.docker import test_ends as ends
from tests.sandboxes.docker.test_burst import test_a_burst_is_made_by_a_real_engine as burst
from tests.sandboxes.docker.test_ends import (
    again,
    test_a_container_that_could_not_be_removed_is_removed_later,
    test_a_dead_engine_loses_its_containers_and_the_next_creation_waits_for_it,
)
from tests.sandboxes.docker.test_pooling import (
    test_a_run_over_two_images_gets_warm_containers_and_leaves_none,
    test_a_warm_container_is_the_attempts_own_from_the_moment_it_is_handed_out,
    test_nothing_is_left_of_a_run_that_was_killed_with_warm_containers,
)
from tests.sandboxes.podman.service import PrivatePodman

__all__ = [
    "again",
    "test_a_container_that_could_not_be_removed_is_removed_later",
    "test_a_dead_engine_loses_its_containers_and_the_next_creation_waits_for_it",
    "test_a_run_over_two_images_gets_warm_containers_and_leaves_none",
    "test_a_warm_container_is_the_attempts_own_from_the_moment_it_is_handed_out",
    "test_nothing_is_left_of_a_run_that_was_killed_with_warm_containers",
]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long]


async def test_rollouts_of_a_killed_service_end_as_infra_and_the_run_goes_on_when_it_is_back(
    again: PrivatePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ends.test_rollouts_of_a_killed_engine_end_as_infra_and_the_run_goes_on_when_it_is_back(
        again, tmp_path, monkeypatch, 16
    )


async def test_the_next_start_removes_what_a_killed_owner_left(
    home: ProviderHome, engine: PrivatePodman, tmp_path: Path
) -> None:
    await ends.test_the_next_start_removes_what_a_killed_owner_left(home, engine, tmp_path, 12)


async def test_a_burst_is_made(home: ProviderHome, engine: PrivatePodman) -> None:
    await burst(home, engine, 50)
