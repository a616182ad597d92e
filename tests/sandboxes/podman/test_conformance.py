"""Conformance checks of the `docker` provider with Podman."""

import pytest

from rookery.sandboxes.conformance import Check, files
from rookery.sandboxes.docker.provider import DockerProvider
from tests.sandboxes.docker.test_archive_transfer import unprivileged
from tests.sandboxes.docker.test_conformance import test_docker_conforms

__all__ = ["test_docker_conforms", "unprivileged"]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize("check", files.CHECKS, ids=lambda check: check.__name__)
async def test_file_checks_pass_through_the_service(check: Check, unprivileged: DockerProvider) -> None:
    await check(unprivileged)
