"""Tests of the benchmark `batches` with small batches. Figures are not judged."""

import numpy as np
import pytest

from benchmarks import batches, bench_names
from benchmarks.batches import list_columns, make_groups
from rookery.training import check_batch, make_batch


def test_list_peer_computes_the_same_columns_as_make_batch() -> None:
    assert "batches" in bench_names()
    for length in (40, 400):
        groups = make_groups(6_000, length)
        batch = make_batch(groups)
        check_batch(batch, groups)
        assert len(batch) >= 5_000
        for name, column in list_columns(groups).items():
            assert np.array_equal(getattr(batch, name), column), name


def test_every_row_has_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "QUICK", batches.Size(tokens=40_000, rounds=1))
    rows = {row.name: row for row in batches.run(True, lambda _: None)}
    assert {"tokens_per_s", "memory_ratio", "packing_efficiency"} <= rows.keys()
    assert all(row.ours is not None for row in rows.values())
    assert rows["tokens_per_s"].theirs is not None
