"""The same image gives the same result on `local` and in podman's containers; where not, it is written down."""

from pathlib import Path

import pytest

from tests.sandboxes.docker import test_same as same
from tests.sandboxes.docker.test_same import (
    Pair,
    Program,
    image,
    pair,
    test_the_differences_are_those_that_are_written_down,
)

__all__ = ["image", "pair", "test_the_differences_are_those_that_are_written_down"]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
GROUPS = "control groups"
OF_ITS_OWN = Path("/sys/fs/cgroup/cgroup.controllers").exists()
"""Whether a container has a namespace of control groups: podman gives it none on version 1."""


@pytest.mark.parametrize("program", same.PROGRAMS, ids=lambda program: program.name.replace(" ", "-"))
async def test_a_program_gives_the_same_result_in_a_box_and_in_a_container(pair: Pair, program: Program) -> None:
    local, docker = await pair.run(program)
    if program.name == GROUPS and not OF_ITS_OWN:
        assert b"libpod" in docker.stdout
    else:
        assert same.told(docker) == same.told(local)
