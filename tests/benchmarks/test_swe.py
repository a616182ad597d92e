"""The swe bench, on real boxes; figures are not judged here."""

from pathlib import Path

import pytest

from benchmarks.swe_rollout import BASH, EDITS, Rollouts, calls, commands_ms, upload_rows

pytestmark = pytest.mark.needs("mount")


def test_the_sequence_is_what_is_promised() -> None:
    names = [name for name, _ in calls()]
    assert (names.count("bash"), names.count("edit"), names[-1]) == (BASH, EDITS, "submit")


async def test_everything_that_is_timed_is_right(tmp_path: Path) -> None:
    async with Rollouts(tmp_path) as rollouts:
        wall, model = await rollouts.one()
    assert wall > model > 0
    assert commands_ms(tmp_path, 1) >= 0
    transfers, took = await upload_rows(tmp_path, 1)
    assert transfers.ours == 1
    assert took.ours is not None
    assert took.ours > 0


async def test_a_rollout_that_is_not_paid_fails_the_bench(tmp_path: Path) -> None:
    async with Rollouts(tmp_path) as rollouts:
        (tmp_path / "task" / "tests" / "test.sh").write_text("exit 1\n")
        with pytest.raises(RuntimeError, match="with reward 0"):
            await rollouts.one()
