"""Tests of the benchmark `sandbox` with real sandboxes. Figures are not judged."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks import Result, docker_engine
from benchmarks.sandbox_peers import (
    BARE,
    TimedOperation,
    bare_python,
    bwrap_python,
    measure_alternately,
    per_second,
    spawn_ms,
)
from benchmarks.sandbox_workloads import SandboxWorkloads, open_workloads, pss_mb, python_command, require_success
from rookery.core import ExecResult
from rookery.sandbox_runtime import processes
from rookery.sandboxes import Command


@pytest.fixture
async def workloads() -> AsyncIterator[SandboxWorkloads]:
    async with open_workloads() as made:
        yield made
    assert processes.read_stat(made.keeper) is None


async def rest() -> None:
    pass


async def test_operations_are_measured_alternately(workloads: SandboxWorkloads) -> None:
    plain = python_command(warm=False)
    result = await measure_alternately(
        [TimedOperation("ours", lambda: workloads.cold_start_ms(plain)), bare_python()],
        1,
        workloads.wait_idle,
        print,
    )
    assert {name: len(times) for name, (times, _) in result.items()} == {"ours": 5, BARE: 5}
    assert all(time > 0 for times, _ in result.values() for time in times)


async def test_missing_or_failing_operation_yields_a_note() -> None:
    async def broken() -> float:
        return await spawn_ms(("false",))

    turns = [TimedOperation("missing", None, note="it is not there"), TimedOperation("broken", broken)]
    result = await measure_alternately(turns, 3, rest, lambda _: None)
    assert result["missing"] == ((), "it is not there")
    assert result["broken"].times == ()
    assert "1" in result["broken"].note


async def test_missing_bwrap_yields_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    missing = bwrap_python()
    assert missing.once is None
    assert "make peers" in missing.note


async def test_missing_docker_engine_yields_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    async with docker_engine.open_engine() as result:
        assert isinstance(result, str)
        assert all(one.once is None for one in docker_engine.timed_operations(result, every=1))


async def test_unreachable_docker_engine_yields_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docker").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    for host in (f"unix://{tmp_path}/none.sock", "tcp://127.0.0.1:1"):
        monkeypatch.setenv("DOCKER_HOST", host)
        async with docker_engine.open_engine() as result:
            assert isinstance(result, str)


def test_failed_command_fails_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="exited"):
        require_success(ExecResult(status="exited", exit_code=1))


async def test_fork_bombs_end_with_close_and_with_the_time_limit(workloads: SandboxWorkloads) -> None:
    assert await workloads.close_bomb_ms() > 0
    assert await workloads.stop_bomb_ms() > 0


async def test_memory_of_live_sandboxes_is_measured(workloads: SandboxWorkloads) -> None:
    result = await workloads.open_many(5)
    assert result.seconds >= result.created > 0
    assert result.pss_mb is None or result.pss_mb > 0
    assert workloads.provider.open_sandboxes == set()
    if os.geteuid() == 0:
        assert (pss_mb(workloads.keeper) or 0) > 0


async def test_snapshots_have_times_or_a_reason(workloads: SandboxWorkloads) -> None:
    taken, forked, missing = await workloads.snapshots(2)
    assert len(taken) == len(forked) == (0 if missing else 2)


async def test_rate_counts_completions_within_its_time() -> None:
    done = 0

    async def once() -> None:
        nonlocal done
        done += 1
        await asyncio.sleep(0)

    assert 0 < await per_second(once, 4, 0.01) <= done / 0.01


async def test_command_in_a_live_sandbox_is_measured(workloads: SandboxWorkloads) -> None:
    sandbox = await workloads.create()
    assert await workloads.exec_ms(sandbox) > 0
    assert (await sandbox.exec(Command(argv=("true",)))).ok
    await sandbox.close()


def test_own_figure_can_be_missing() -> None:
    row = Result(name="a", unit="ms", ours=None, peer="p", theirs=1.0, target=">= 2x", note="why")
    assert (row.ratio, row.met, row.row()["ours"]) == (None, None, None)
    assert Result(name="a", unit="ms", ours=None, target="<= 2").met is None
