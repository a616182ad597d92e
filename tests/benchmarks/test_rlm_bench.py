"""The `rlm` bench: what its upstream says, and that a broken rollout gives no figure."""

import pytest

from benchmarks import bench_names, rlm
from benchmarks.instant_model import instant_model
from benchmarks.rlm_upstream import CELL, reply_to


def test_the_upstream_is_a_root_that_runs_its_tasks_cell_and_a_sub_model_to_all_others() -> None:
    assert "rlm" in bench_names()
    asked = [{"role": "system", "content": "…"}, {"role": "user", "content": f"{CELL}answer(1)"}]
    assert reply_to(asked) == "<code>answer(1)"
    assert (
        reply_to([*asked, {"role": "assistant", "content": "x"}, {"role": "user", "content": "<result>"}])
        == "done"
    )
    assert reply_to([{"role": "user", "content": "question 7"}]) is None


@pytest.mark.needs("mount")
async def test_a_broken_rollout_gives_no_figure() -> None:
    async with instant_model("benchmarks.rlm_upstream") as model:
        found, setups = await rlm._played(model.tokens_url, rlm.LLM.format(count=3), 1)
        assert (len(found), len(setups)) == (3, 1)
        with pytest.raises(RuntimeError, match="a rollout ended as"):
            await rlm._played(model.tokens_url, "1 / 0", 1)
