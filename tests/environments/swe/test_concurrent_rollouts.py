"""Many concurrent rollouts of scripted agents each get the right outcome and reward."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery import Engine
from rookery.core import Limits, SandboxSpec
from rookery.environments.swe import SweEnvironment
from tests.environments.swe.scripted_agents import DISK, TURNS, AgentTasks
from tests.servers import ModelServer

pytestmark = pytest.mark.needs("mount")
COUNT = 200


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a separate temporary directory and check that nothing is left in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert os.listdir(folder) == []


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_two_hundred_concurrent_agents_get_the_right_outcome_and_reward(tmp_path: Path) -> None:
    agents = AgentTasks(tmp_path / "tasks", COUNT)
    open_files = len(os.listdir("/proc/self/fd"))
    spec = SandboxSpec(provider="local", disk=DISK, memory=512 << 20, pids=128)
    wrong: list[str] = []
    done = 0
    async with ModelServer(agents.reply) as server:  # noqa: SIM117  (the address is known inside)
        async with Engine(
            SweEnvironment(),
            policy=server.url,
            out=tmp_path / "runs",
            runners=0,
            sandbox=spec,
            concurrency=COUNT,
            limits=Limits(turns=TURNS, run=1800.0, score=1800.0, setup=900.0, call=120.0),
        ) as engine:
            async for group in engine.groups(agents.tasks):
                (rollout,) = group.rollouts
                done += 1
                agent = agents.expected[rollout.task]
                if (rollout.outcome, rollout.reward) != (agent.outcome, float(agent.rewarded)):
                    wrong.append(f"{rollout.task}: {rollout.outcome} {rollout.reward} {rollout.info}"[:1500])
                if len(rollout.attempts) != 1:
                    wrong.append(f"{rollout.task}: {len(rollout.attempts)} attempts")
    assert not wrong, "\n".join(wrong)
    assert done == COUNT
    assert not list((tmp_path / "runs").glob("*/sandboxes/b*"))
    assert len(os.listdir("/proc/self/fd")) <= open_files + 5
