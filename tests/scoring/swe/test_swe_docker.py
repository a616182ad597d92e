"""The same grading in containers: every cheat, both modes."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rookery.core import SandboxSpec
from rookery.sandboxes import ProviderHome, Sandbox
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.scoring.swe.cheats import CHEATS
from tests.environments.swe.system_image import system_at
from tests.sandboxes.docker import engine as engines
from tests.sandboxes.docker.conftest import engine, image_archives  # noqa: F401  (fixtures)
from tests.scoring.swe.small_task import REPAIR, STRONG, WEAK, Open, attempt, small_task
from tests.scoring.swe.test_cheats import refused

IMAGE = "rookery-swe:latest"
SPEC = SandboxSpec(provider="docker", image=IMAGE, memory=512 << 20, pids=128)
ROOT = SandboxSpec(provider="docker", image=IMAGE, memory=512 << 20, pids=128, user="root")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.needs("docker"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def in_docker(
    engine: engines.PrivateEngine,  # noqa: F811  (the fixture)
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Open]:
    engine.load(system_at(tmp_path_factory.mktemp("image") / "system.tar"), IMAGE)
    folder = tmp_path_factory.mktemp("home") / "sandboxes"
    home = ProviderHome(folder=folder, run=f"swe-docker-{os.getpid()}-{folder.parent.name}")
    provider = DockerProvider(home, image=IMAGE, engine=engine.socket)

    async def opened(spec: SandboxSpec) -> Sandbox:
        return await provider.create(spec, attempt="test")

    try:
        yield opened
    finally:
        await provider.close()
    assert engine.containers() == []
    assert engine.snapshots() == []


@pytest.mark.parametrize("spec", [SPEC, ROOT], ids=["user", "root"])
@pytest.mark.parametrize("script", [STRONG, WEAK], ids=["strong", "weak"])
@pytest.mark.parametrize("mode", ["fresh", "shared"])
async def test_repair_gets_the_full_reward_and_no_change_gets_none(
    in_docker: Open, tmp_path: Path, mode: str, script: str, spec: SandboxSpec
) -> None:
    task = small_task(tmp_path, script=script, mode=mode, history=True)
    for what, reward in (("", 0.0), (REPAIR, 1.0)):
        grade = await attempt(in_docker, task, what, spec=spec)
        assert (grade.reward, grade.mode) == (reward, mode), grade


@pytest.mark.parametrize(("spec", "mode"), [(SPEC, "fresh"), (ROOT, "shared")], ids=["user", "root"])
async def test_every_cheat_gets_no_reward(in_docker: Open, tmp_path: Path, spec: SandboxSpec, mode: str) -> None:
    """Local sandboxes are tested with the other two combinations as well."""
    await refused(in_docker, tmp_path, list(CHEATS), at_once=2, spec=spec, modes=(mode,))


async def test_system_files_changed_by_root_are_restored(in_docker: Open, tmp_path: Path) -> None:
    looks = """
    # ROOKERY_RUN
    cat /etc/ld.so.preload /root/.bashrc 2>/dev/null; head -c 4 /bin/sort | sed 's/[^ELF]//'
    ls /usr/local/bin; cat /etc/mine; ls /bin/tr; echo 1 > /logs/verifier/reward.txt
    """
    does = """
    echo evil > /etc/ld.so.preload; echo evil > /root/.bashrc; echo evil > /bin/sort
    echo mine > /etc/mine; rm /bin/tr; mkdir -p /usr/local/bin
    echo new > /usr/local/bin/new; echo evil > /usr/local/bin/cat; chmod 755 /usr/local/bin/*
    """
    for always in (False, True):
        task = small_task(tmp_path, script=looks, mode="shared")
        grade = await attempt(in_docker, task, does, spec=ROOT, fresh_always=always)
        assert (grade.reward, grade.mode) == (1.0, "fresh" if always else "shared"), grade
        assert grade.stdout.split("\n") == ["ELFnew", "mine", "/bin/tr", ""], grade
