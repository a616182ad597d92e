"""Tests of the benchmark `workers` with a real worker. Figures are not judged."""

from pathlib import Path

import pytest

from benchmarks.worker_cells import ipykernel_ms, open_cell_timer


async def test_cells_savepoints_and_recovery_are_measured() -> None:
    async with open_cell_timer(1) as worker:
        times, saves = await worker.cells(3)
        assert len(times) == len(saves) == 3
        assert min(times) > 0
        assert await worker.recover_ms(2) > 0
        assert await worker.crash_ms() > 0
        before = worker.count
        await worker.worker.run("def print(*_): pass")
        with pytest.raises(RuntimeError):
            await worker.cells(1)
        assert worker.count == before + 1


async def test_missing_ipykernel_yields_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    answer = await ipykernel_ms(1, 1)
    assert isinstance(answer, str)
    assert "make peers" in answer
