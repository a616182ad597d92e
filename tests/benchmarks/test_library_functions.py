"""The rows of the benchmark `libraries` that compare functions."""

import pytest

from benchmarks.library_functions import TARGET, compare_functions

DECIDED_BY_SPEED = ("Prometheus, count a call", "Kubernetes client, import")


@pytest.mark.long
def test_only_figures_that_decided_for_own_code_have_a_target() -> None:
    rows = compare_functions(1, 100, lambda _: None)
    assert {row.name: row.target for row in rows if row.target} == dict.fromkeys(DECIDED_BY_SPEED, TARGET)
    assert any(row.name.startswith("seccomp") for row in rows)
    assert any(row.name.startswith("file lock") for row in rows)
