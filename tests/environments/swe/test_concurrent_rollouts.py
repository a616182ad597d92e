"""Many rollouts at once, of agents that repair, give up, loop and break things: each gets what it earned."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery import Engine
from rookery.core import Limits, SandboxSpec
from rookery.environments.swe import SweEnvironment
from tests.environments.swe.scripted_agents import DISK, QUICK, TURNS, Cast
from tests.servers import ModelServer

pytestmark = pytest.mark.needs("mount")


@pytest.fixture(autouse=True)
def own_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other programs of the machine have theirs elsewhere; nothing may be left in ours."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert os.listdir(folder) == []


async def _all_get_what_they_earned(tmp_path: Path, count: int, only: tuple[str, ...] = ()) -> None:
    cast = Cast(tmp_path / "tasks", count, only)
    files = len(os.listdir("/proc/self/fd"))
    spec = SandboxSpec(provider="local", disk=DISK, memory=512 << 20, pids=128)
    wrong: list[str] = []
    done = 0
    async with ModelServer(cast.play) as server:  # noqa: SIM117  (the address is known inside)
        async with Engine(
            SweEnvironment(),
            policy=server.url,
            out=tmp_path / "runs",
            runners=0,
            sandbox=spec,
            concurrency=count,
            limits=Limits(turns=TURNS, run=1800.0, score=1800.0, setup=900.0, call=120.0),
        ) as engine:
            async for group in engine.groups(cast.tasks):
                (rollout,) = group.rollouts
                done += 1
                agent = cast.expected[rollout.task]
                if (rollout.outcome, rollout.reward) != (agent.outcome, float(agent.paid)):
                    wrong.append(f"{rollout.task}: {rollout.outcome} {rollout.reward} {rollout.info}"[:1500])
                if len(rollout.attempts) != 1:
                    wrong.append(f"{rollout.task}: {len(rollout.attempts)} attempts")
    assert not wrong, "\n".join(wrong)
    assert done == count
    assert not list((tmp_path / "runs").glob("*/sandboxes/b*"))
    assert len(os.listdir("/proc/self/fd")) <= files + 5


@pytest.mark.long
async def test_every_agent_gets_the_right_outcome_and_reward(tmp_path: Path) -> None:
    await _all_get_what_they_earned(tmp_path, 24, QUICK)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_two_hundred_at_once_get_the_right_outcome_and_reward(tmp_path: Path) -> None:
    await _all_get_what_they_earned(tmp_path, 200)
