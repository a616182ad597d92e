"""Runner and shard processes have one BLAS thread each; the user's process is not changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rookery.cli.run import pin_blas_threads
from rookery.core.child_processes import THREAD_VARIABLES, one_blas_thread
from tests.engine.blas_probe import ReportsBlasThreads
from tests.engine.conftest import build_engine
from tests.gateway.shard_kit import run_gateway
from tests.servers import ModelServer

ENV = "tests.engine.blas_probe:ReportsBlasThreads"
USER_VARIABLES = (*THREAD_VARIABLES, "GOTO_NUM_THREADS")


@pytest.fixture(autouse=True)
def unset_thread_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def fresh_process_threads() -> list[int]:
    """Return the number of BLAS threads of a process that Rookery did not start."""
    command = [sys.executable, "-m", "tests.engine.blas_probe"]
    return [int(word) for word in subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split()]


async def threads_in_runner(model: ModelServer, tmp_path: Path, env: object = ENV, runners: int = 1) -> list[int]:
    async with build_engine(model, tmp_path, env=env, runners=runners) as engine:
        (group,) = [group async for group in engine.groups(["question"])]
    (rollout,) = group.valid
    assert (rollout.info["pid"] == os.getpid()) == (runners == 0)
    found: list[int] = rollout.info["blas"]
    return found


def test_every_unset_variable_is_set_to_one() -> None:
    assert one_blas_thread({}) == dict.fromkeys(THREAD_VARIABLES, "1")


@pytest.mark.parametrize("name", THREAD_VARIABLES)
def test_variables_set_by_the_user_are_not_changed(name: str) -> None:
    assert name not in one_blas_thread({name: "4"})


def test_no_added_variable_overrides_one_set_by_the_user() -> None:
    assert one_blas_thread({"OMP_NUM_THREADS": "4"}) == {"VECLIB_MAXIMUM_THREADS": "1"}
    assert "OPENBLAS_NUM_THREADS" not in one_blas_thread({"GOTO_NUM_THREADS": "4"})


async def test_runner_has_one_blas_thread(model: ModelServer, tmp_path: Path) -> None:
    before = dict(os.environ)
    found = await threads_in_runner(model, tmp_path)
    assert found
    assert set(found) == {1}
    assert dict(os.environ) == before


@pytest.mark.long
async def test_thread_count_set_by_the_user_applies_to_runners(
    model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert await threads_in_runner(model, tmp_path) == fresh_process_threads()


async def test_engine_without_runner_processes_does_not_change_blas_threads(
    model: ModelServer, tmp_path: Path
) -> None:
    before = dict(os.environ)
    await threads_in_runner(model, tmp_path, env=ReportsBlasThreads(), runners=0)
    assert dict(os.environ) == before


async def test_a_gateway_shard_is_started_with_one_blas_thread(model: ModelServer) -> None:
    async with run_gateway(model.url) as served:
        environ = Path(f"/proc/{served.pids()[0]}/environ").read_bytes().split(b"\0")
    assert b"OPENBLAS_NUM_THREADS=1" in environ
    assert b"OMP_NUM_THREADS=1" in environ


@pytest.mark.parametrize(("runners", "threads"), [(0, None), (1, "1")])
def test_command_limits_its_own_blas_threads_only_if_it_has_runners(
    runners: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    pin_blas_threads(runners)
    assert os.environ.get("OPENBLAS_NUM_THREADS") == threads
