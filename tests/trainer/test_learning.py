"""The embedded policy gets better at `arithmetic` within two minutes on two free cores, with sandboxed tools."""

from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from rookery.core.estimates import Z95
from rookery.trainer import TrainConfig, read_metrics

pytest.importorskip("torch", reason="[probed] this machine has no torch")


def standard_error(row: dict[str, Any]) -> float:
    low, high = row["eval_pass_rate_interval95"]
    return float((high - low) / (2 * Z95))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_held_out_pass_rate_rises_by_ten_points(tmp_path: Path) -> None:
    from rookery.trainer import Trainer

    config = TrainConfig(steps=10, groups=12, eval_tasks=150, eval_per_task=2, eval_every=0, warmup=2, decay=0)
    trainer = Trainer("arithmetic", config=config, out=tmp_path, arguments={"levels": [2, 3]}, concurrency=32)
    result = trainer.train()
    before, after = (row for row in read_metrics(result.folder) if "eval_pass_rate" in row)
    assert result.eval_before is not None
    assert result.eval_after is not None
    gain = result.eval_after - result.eval_before
    assert gain >= 0.1
    assert gain / sqrt(standard_error(before) ** 2 + standard_error(after) ** 2) > 2.33  # p < 0.01, one-sided
