"""No cheat script gets a reward, in either grading mode, as root or not."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from rookery.core import SandboxSpec
from rookery.sandboxes import Command
from rookery.scoring.swe import prepare
from rookery.scoring.swe.cheats import BY_NAME, CHEATS, Cheat
from tests.scoring.swe.conftest import LOCAL
from tests.scoring.swe.small_task import WEAK, Open, act, attempt, sh, small_task

in_module = pytest.mark.asyncio(loop_scope="module")
MODES = ("fresh", "shared")


def test_every_kind_of_cheat_exists() -> None:
    assert len(CHEATS) >= 20
    assert len(BY_NAME) == len(CHEATS)
    assert sum(cheat.inside for cheat in CHEATS) >= 8
    assert all(cheat.description and cheat.script for cheat in CHEATS)


def test_docs_name_every_cheat() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "swe-grading.md").read_text()
    for cheat in CHEATS:
        assert f"| `{cheat.name}`{' *inside*' if cheat.inside else ''} | {cheat.description} |" in page


@in_module
@pytest.mark.long
async def test_embedded_python_of_cheats_compiles(open_sandbox: Open, tmp_path: Path) -> None:
    task = small_task(tmp_path)
    for cheat in CHEATS:
        if cheat.inside:
            sandbox = await open_sandbox(LOCAL)
            await prepare(sandbox, task, timeout=60.0)
            await act(sandbox, cheat)
            await sh(sandbox, 'python3 -c \'compile(open("calc.py").read(), "calc.py", "exec")\' && sh -n run.sh')
            await sandbox.close()


async def refused(
    open_sandbox: Open,
    folder: Path,
    cheats: list[Cheat],
    *,
    at_once: int,
    spec: SandboxSpec = LOCAL,
    modes: tuple[str, ...] = MODES,
    **settings: str,
) -> None:
    gate = asyncio.Semaphore(at_once)

    async def one(cheat: Cheat, mode: str) -> tuple[str, str, float]:
        async with gate:
            task = small_task(folder / f"{cheat.name}-{mode}", mode=mode, history=True, **settings)
            grade = await attempt(open_sandbox, task, cheat, spec=spec)
            return cheat.name, mode, grade.reward

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(cheat, mode)) for cheat in cheats for mode in modes]
    paid = [task.result() for task in tasks if task.result()[2] != 0.0]
    assert paid == []


@in_module
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("user", ["user", "root"])
async def test_every_cheat_gets_no_reward_in_both_modes(open_sandbox: Open, tmp_path: Path, user: str) -> None:
    await refused(open_sandbox, tmp_path, list(CHEATS), at_once=3, spec=msgspec.structs.replace(LOCAL, user=user))


@in_module
@pytest.mark.long
@pytest.mark.timeout(600)
async def test_every_planted_cheat_gets_no_reward_from_weak_scripts(open_sandbox: Open, tmp_path: Path) -> None:
    outside = [cheat for cheat in CHEATS if not cheat.inside]
    await refused(open_sandbox, tmp_path, outside, at_once=3, script=WEAK)


PYTEST_LIKE = """#!/bin/bash
python3 -c 'import sys; sys.path.insert(0, "."); from calc import add; assert add(3, 4) == 7' || exit 1
echo 1 > /logs/verifier/reward.txt
"""


@in_module
@pytest.mark.long
async def test_careless_grader_rewards_many_cheats(open_sandbox: Open, tmp_path: Path) -> None:
    """The cheats must be real: a grader without protection rewards many of them."""
    paid = set()
    for cheat in CHEATS:
        sandbox = await open_sandbox(LOCAL)
        await prepare(sandbox, small_task(tmp_path), timeout=60.0)
        await act(sandbox, cheat)
        await sandbox.write("/work/test.sh", PYTEST_LIKE.encode())
        await sandbox.exec(Command(argv=("bash", "-l", "/work/test.sh"), cwd="/workspace", wall=60.0))
        found = await sandbox.exec(
            Command(argv=("timeout", "5", "sh", "-c", "cat /logs/verifier/reward.*"), cwd="/", wall=60.0)
        )
        if b"1" in found.stdout:
            paid.add(cheat.name)
        await sandbox.close()
    named = {"planted-reward", "reward-links", "reward-daemon", "early-exit", "equal-to-everything"}
    assert named <= paid, paid
    assert len(paid) >= 12, sorted(paid)
