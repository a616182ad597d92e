"""Conformance checks of the `docker` provider."""

import pytest

from rookery.sandboxes.conformance import CHECKS, Check
from rookery.sandboxes.docker.provider import DockerProvider

pytestmark = [pytest.mark.needs("docker"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_docker_conforms(check: Check, docker: DockerProvider) -> None:
    await check(docker)
