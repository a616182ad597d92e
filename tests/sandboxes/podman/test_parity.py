"""The same image gives the same result on `local` and in podman's containers; where not, it is written down."""

from pathlib import Path

import pytest

from tests.sandboxes.docker import test_parity as parity
from tests.sandboxes.docker.test_parity import (
    Pair,
    Program,
    image,
    pair,
    test_known_differences_between_providers,
)

__all__ = ["image", "pair", "test_known_differences_between_providers"]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
GROUPS = "control groups"
OF_ITS_OWN = Path("/sys/fs/cgroup/cgroup.controllers").exists()
"""Whether a container has a namespace of control groups: podman gives it none on version 1."""


@pytest.mark.parametrize("program", parity.PROGRAMS, ids=lambda program: program.name.replace(" ", "-"))
async def test_program_gives_the_same_result_in_both_providers(pair: Pair, program: Program) -> None:
    local, docker = await pair.run(program)
    if program.name == GROUPS and not OF_ITS_OWN:
        assert b"libpod" in docker.stdout
    else:
        assert parity.told(docker) == parity.told(local)
