"""Hostile programs in containers of Podman."""

import pytest

from tests.sandboxes.docker.test_hostile import (
    shared_sandbox,
    test_container_with_a_too_deep_tree_is_removed,
    test_guard_killed_by_oom_is_a_memory_limit,
    test_hostile_program_is_contained,
    test_kill_all_works_at_the_containers_process_limit,
)
from tests.sandboxes.hostile.conftest import bait

__all__ = [
    "bait",
    "shared_sandbox",
    "test_container_with_a_too_deep_tree_is_removed",
    "test_guard_killed_by_oom_is_a_memory_limit",
    "test_hostile_program_is_contained",
    "test_kill_all_works_at_the_containers_process_limit",
]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
