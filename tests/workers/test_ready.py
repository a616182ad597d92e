"""A worker that tells how often its state was lost: who keeps something in it puts it there again."""

import pytest

from rookery.workers import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_ready_counts_state_losses(worker: Worker) -> None:
    assert await worker.ready() == 0
    assert (await worker.savepoint()).made
    assert (await worker.run("import os; os._exit(1)")).recovered == "kept"
    assert await worker.ready() == 0, "going back to a savepoint loses nothing"
    assert worker._process is not None
    await worker._process.kill()
    assert await worker.ready() == 1
    cell = await worker.run("1 + 1")
    assert (cell.value, worker.losses) == ("2", 1)
    assert "The state was reset" in cell.notice
