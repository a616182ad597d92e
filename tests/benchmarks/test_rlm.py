"""Tests of the benchmark `rlm`: its upstream, and that a failed rollout yields no figure."""

import pytest

from benchmarks import rlm
from benchmarks.instant_model import instant_model
from benchmarks.rlm_upstream import CELL, root_reply


def test_root_model_runs_the_cell_of_its_task_and_then_ends() -> None:
    messages = [{"role": "system", "content": "…"}, {"role": "user", "content": f"{CELL}answer(1)"}]
    assert root_reply(messages) == "<code>answer(1)"
    assert (
        root_reply([*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "<result>"}])
        == "done"
    )
    assert root_reply([{"role": "user", "content": "question 7"}]) is None


@pytest.mark.needs("mount")
async def test_failed_rollout_fails_the_benchmark() -> None:
    async with instant_model("benchmarks.rlm_upstream") as model:
        times, setups = await rlm.run_cell(model.tokens_url, rlm.LLM.format(count=3), 1)
        assert (len(times), len(setups)) == (3, 1)
        with pytest.raises(RuntimeError, match="Completed"):
            await rlm.run_cell(model.tokens_url, "1 / 0", 1)
