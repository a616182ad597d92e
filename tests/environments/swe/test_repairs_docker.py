"""The taskset `repairs` in containers, in both formats."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from rookery.core import SandboxSpec
from rookery.environments.swe import repairs, sandbox_for
from rookery.sandboxes import ProviderHome
from rookery.sandboxes.docker.client import BlockingEngineClient
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.images.engine_images import EngineImages
from rookery.sandboxes.images.engine_loader import load_image
from rookery.sandboxes.images.references import parse_reference
from rookery.tasks import load_tasks
from rookery.tasks.swe import get_swe_task
from tests.environments.swe.system_image import system_at
from tests.environments.swe.test_repairs import NAMES, check_wrong_repair, prepare_task, task_cache  # noqa: F401  (a fixture)
from tests.environments.swe.wrong_repairs import WRONG
from tests.sandboxes.docker import engine as engines
from tests.sandboxes.docker.conftest import engine, image_archives  # noqa: F401  (fixtures)

IMAGE = "rookery-repairs:latest"
BASE = "debian:bookworm-slim"
SPEC = SandboxSpec(provider="docker", image=IMAGE, wall=600.0)
pytestmark = [
    pytest.mark.long,
    pytest.mark.needs("docker"),
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def engine_with_image(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> engines.PrivateEngine:
    """Return an engine that has the image, also under the name of the base image of Harbor tasks."""
    found: engines.PrivateEngine = request.getfixturevalue("engine")
    tar = system_at(tmp_path_factory.mktemp("image") / "repairs.tar")
    found.load(tar, IMAGE)
    found.tag(IMAGE, BASE)
    tar.unlink()
    return found


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def docker(
    engine_with_image: engines.PrivateEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[DockerProvider]:
    home = ProviderHome(folder=tmp_path_factory.mktemp("home") / "sandboxes", run=f"repairs-{os.getpid()}")
    provider = DockerProvider(home, image=IMAGE, engine=engine_with_image.socket)
    try:
        yield provider
    finally:
        await provider.close()


@pytest.mark.parametrize("name", NAMES)
async def test_repairs_grade_in_containers(docker: DockerProvider, name: str) -> None:
    task = get_swe_task(next(task for task in repairs.repairs() if task.id == name))
    async with prepare_task(docker, task, SPEC) as prepared:
        right = await prepared.grade(solved=True)
        assert (right.reward, right.weaker) == (1.0, ""), right
        assert (await prepared.grade()).reward == 0.0
        await check_wrong_repair(task, prepared, next(iter(WRONG[name])))


@pytest.mark.parametrize("name", ["cache-expiry", "ring-buffer", "option-order"])
async def test_repairs_grade_in_images_that_harbor_builds(
    docker: DockerProvider,
    engine_with_image: engines.PrivateEngine,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine_with_image.socket}")
    monkeypatch.setenv("ROOKERY_IMAGES", str(tmp_path / "images"))
    task = get_swe_task(next(task for task in load_tasks("repairs-harbor") if task.id == name))
    assert task.image is not None
    image = await asyncio.to_thread(
        load_image, parse_reference(task.image), EngineImages(BlockingEngineClient(engine_with_image.socket))
    )
    spec = msgspec.structs.replace(sandbox_for(task, SPEC), image=image)
    async with prepare_task(docker, task, spec) as prepared:
        right = await prepared.grade(solved=True)
        assert (right.reward, right.mode) == (1.0, "shared"), right
        assert (await prepared.grade()).reward == 0.0
