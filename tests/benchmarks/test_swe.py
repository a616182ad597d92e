"""Tests of the benchmark `swe` with real sandboxes. Figures are not judged."""

from pathlib import Path

import pytest

from benchmarks.swe_rollout import BASH, EDITS, Rollouts, commands_ms, tool_calls, upload_rows

pytestmark = pytest.mark.needs("mount")


def test_sequence_has_the_documented_calls() -> None:
    names = [name for name, _ in tool_calls()]
    assert (names.count("bash"), names.count("edit"), names[-1]) == (BASH, EDITS, "submit")


@pytest.mark.long
async def test_rollout_commands_and_uploads_are_measured(tmp_path: Path) -> None:
    async with Rollouts(tmp_path) as rollouts:
        wall, model = await rollouts.one()
    assert wall > model > 0
    assert commands_ms(tmp_path, 1) >= 0
    transfers, took = await upload_rows(tmp_path, 1)
    assert transfers.ours == 1
    assert took.ours is not None
    assert took.ours > 0


async def test_rollout_without_full_reward_fails_the_benchmark(tmp_path: Path) -> None:
    async with Rollouts(tmp_path) as rollouts:
        (tmp_path / "task" / "tests" / "test.sh").write_text("exit 1\n")
        with pytest.raises(RuntimeError, match=r"\b0\b"):
            await rollouts.one()
