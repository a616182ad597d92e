"""Every hostile program that makes sense in a container ends contained in one of podman's too."""

import pytest

from tests.sandboxes.docker.test_hostile import (
    shared,
    test_a_guard_killed_for_want_of_memory_is_the_commands_memory_limit,
    test_a_hostile_program_ends_contained,
    test_a_tree_that_an_engine_cannot_remove_does_not_keep_its_container,
    test_all_processes_of_a_container_can_be_killed_when_a_program_took_every_one,
)
from tests.sandboxes.hostile.conftest import bait

__all__ = [
    "bait",
    "shared",
    "test_a_guard_killed_for_want_of_memory_is_the_commands_memory_limit",
    "test_a_hostile_program_ends_contained",
    "test_a_tree_that_an_engine_cannot_remove_does_not_keep_its_container",
    "test_all_processes_of_a_container_can_be_killed_when_a_program_took_every_one",
]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
