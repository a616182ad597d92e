"""The workers bench, on a real worker; figures are not judged here."""

from pathlib import Path

import pytest

from benchmarks.workers_cells import cells_of_our_own, ipykernel_ms


async def test_everything_that_is_timed_is_right() -> None:
    async with cells_of_our_own(1) as worker:
        times, saves = await worker.cells(3)
        assert len(times) == len(saves) == 3
        assert min(times) > 0
        assert await worker.recover_ms(2) > 0
        assert await worker.notice_ms() > 0
        before = worker.count
        await worker.worker.run("def print(*_): pass")
        with pytest.raises(RuntimeError, match="a cell ended as"):
            await worker.cells(1)
        assert worker.count == before + 1


async def test_without_the_peer_there_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROOKERY_PEERS", str(tmp_path))
    answer = await ipykernel_ms(1, 1)
    assert isinstance(answer, str)
    assert "make peers" in answer
