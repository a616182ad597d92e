"""An image gives the same results with `local` and Podman, except for documented differences."""

from pathlib import Path

import pytest

from tests.sandboxes.docker import test_parity as parity
from tests.sandboxes.docker.test_parity import (
    Program,
    ProviderPair,
    image,
    pair,
    test_known_differences_between_providers,
)

__all__ = ["image", "pair", "test_known_differences_between_providers"]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
CGROUP_PROGRAM = "control groups"
HAS_CGROUP_NAMESPACE = Path("/sys/fs/cgroup/cgroup.controllers").exists()
"""True if containers have a cgroup namespace: Podman creates none with cgroup v1."""


@pytest.mark.parametrize("program", parity.PROGRAMS, ids=lambda program: program.name.replace(" ", "-"))
async def test_program_gives_the_same_result_in_both_providers(pair: ProviderPair, program: Program) -> None:
    local, docker = await pair.run(program)
    if program.name == CGROUP_PROGRAM and not HAS_CGROUP_NAMESPACE:
        assert b"libpod" in docker.stdout
    else:
        assert parity.comparable(docker) == parity.comparable(local)
