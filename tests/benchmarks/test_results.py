"""Tests of rows, verdicts, the table and the JSON report of the benchmarks."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import BenchReport, Result, bench_names, describe_machine, find_misses, render, run_bench
from benchmarks.targets import GUARDED, TOLERANCE
from rookery.core import UsageError

KEYS = ["name", "unit", "ours", "peer", "theirs", "ratio", "target", "met"]
figures = st.floats(min_value=1e-6, max_value=1e9)


def row(**fields: object) -> Result:
    return msgspec.convert({"name": "a", "unit": "ms", "ours": 1.0, **fields}, Result)


@given(ours=figures, theirs=figures, lower=st.booleans())
def test_a_ratio_above_one_is_better_whatever_the_unit(ours: float, theirs: float, lower: bool) -> None:
    ratio = row(ours=ours, peer="p", theirs=theirs, lower_is_better=lower).ratio
    assert ratio is not None
    if ours != theirs:
        better = ours < theirs if lower else ours > theirs
        assert (ratio >= 1) if better else (ratio <= 1)


@given(ours=figures, theirs=figures, lower=st.booleans())
def test_swapping_the_sides_inverts_the_ratio(ours: float, theirs: float, lower: bool) -> None:
    one = row(ours=ours, peer="p", theirs=theirs, lower_is_better=lower).ratio
    other = row(ours=theirs, peer="p", theirs=ours, lower_is_better=lower).ratio
    assert one is not None
    assert other is not None
    assert math.isclose(one * other, 1.0)


@given(ours=figures, bound=st.decimals(min_value=0, max_value=10**6, places=3))
def test_a_plain_target_is_about_our_figure(ours: float, bound: object) -> None:
    limit = float(str(bound))
    assert row(ours=ours, target=f"<= {bound}").met is (ours <= limit)
    assert row(ours=ours, target=f">= {bound}").met is (ours >= limit)
    assert row(ours=ours, target=f"< {bound}").met is (ours < limit)
    assert row(ours=ours, target=f"> {bound}").met is (ours > limit)


@given(ours=figures, theirs=figures, times=st.integers(min_value=1, max_value=1000))
def test_target_with_x_applies_to_the_ratio(ours: float, theirs: float, times: int) -> None:
    result = row(ours=ours, peer="p", theirs=theirs, target=f">= {times}x")
    assert result.met is (theirs / ours >= times)


def test_verdict_uses_the_unrounded_figures() -> None:
    assert row(ours=0.4500001, target="<= 0.45").met is False


def test_missing_peer_is_reported_as_missing() -> None:
    written = row(peer="p 1.0", target=">= 20x", note="make it").row()
    assert written["peer"] == "p 1.0"
    assert written["theirs"] is written["ratio"] is written["met"] is None
    assert written["note"] == "make it"


@pytest.mark.parametrize(("ours", "theirs"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 2.0)])
def test_ratio_needs_two_positive_figures(ours: float, theirs: float) -> None:
    result = row(ours=ours, peer="p", theirs=theirs, target=">= 2x")
    assert result.ratio is None
    assert result.met is None


@pytest.mark.parametrize(
    "fields",
    [
        {"ours": math.nan},
        {"ours": math.inf},
        {"theirs": 1.0},
        {"target": "about 3"},
        {"target": "<=0.45"},
        {"target": ">= 20x"},
    ],
)
def test_invalid_row_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError)):
        row(**fields)


def test_duplicate_row_is_refused() -> None:
    twice = (row(target="<= 1"), row(target="<= 1"))
    with pytest.raises(ValueError):
        BenchReport(bench="b", machine={}, results=twice)
    BenchReport(bench="b", machine={}, results=(row(target="<= 1"), row(target="<= 2")))


def test_json_is_one_line_with_documented_keys() -> None:
    rows = (row(target="<= 2"), row(peer="p", theirs=3.0, target=">= 2x"))
    written = BenchReport(bench="b", machine=describe_machine(), results=rows).to_json()
    assert b"\n" not in written
    read = json.loads(written)
    assert list(read) == ["bench", "machine", "results"]
    assert [list(result) for result in read["results"]] == [KEYS, KEYS]
    assert read["results"][0] == {
        "name": "a", "unit": "ms", "ours": 1.0, "peer": None, "theirs": None,
        "ratio": None, "target": "<= 2", "met": True,
    }  # fmt: skip
    assert read["results"][1]["ratio"] == 3.0
    assert read["results"][1]["met"] is True


def test_table_shows_every_row_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    rows = (row(target="<= 2"), row(name="[b]", peer="p", target=">= 2x", note="make [peers]"))
    render(BenchReport(bench="b", machine={"cores": 2}, results=rows))
    shown = capsys.readouterr().out
    for text in ("<= 2", "yes", "[b]", "missing", "make [peers]", "cores 2"):
        assert text in shown


def test_table_fits_into_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    widest = row(
        name="memory_growth_mb", unit="CPU-ms", ours=0.343, peer="verifiers 0.4.0", theirs=8.61, target=">= 20x"
    )
    render(BenchReport(bench="engine", machine={"cores": 2}, results=(widest,)))
    shown = capsys.readouterr().out
    for text in ("memory_growth_mb", "CPU-ms", "0.343", "verifiers", "0.4.0", "8.61", "25.1x", ">= 20x", "met"):
        assert text in shown


def test_listing_finds_benchmarks_and_no_helpers() -> None:
    assert "engine" in bench_names()
    assert not {"instant-model", "peers", "gateway-floor"} & set(bench_names())


def test_unknown_benchmark_is_a_usage_error_that_lists_the_names() -> None:
    with pytest.raises(UsageError, match="engine"):
        run_bench("nothing", quick=True, progress=print)


@pytest.mark.parametrize("form", ["def", "async def"])
def test_benchmark_is_a_module_with_name_and_run(
    form: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "from benchmarks import Result\nNAME = 'made'\n"
        f"{form} run(quick, progress):\n    progress('here')\n"
        "    return [Result(name='a', unit='ms', ours=1.0)]\n"
    )
    (tmp_path / "made_bench.py").write_text(source)  # type: ignore[operator]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "made_bench", raising=False)
    monkeypatch.setattr("benchmarks.find_modules", lambda: {"made": "made_bench"})
    messages: list[str] = []
    report = run_bench("made", quick=True, progress=messages.append)
    assert messages == ["here"]
    assert [result.name for result in report.results] == ["a"]


def test_guard_fails_only_for_targets_missed_by_more_than_its_tolerance() -> None:
    assert TOLERANCE == 0.15
    rows = [
        row(name="met", target=">= 1"),
        row(name="near", ours=0.86, target=">= 1"),
        row(name="above", ours=11.6, target="<= 10"),
        row(name="below", peer="p", theirs=2.5, target=">= 3x"),
        row(name="absent", peer="p", target=">= 3x"),
    ]
    report = BenchReport(bench="all", machine={}, results=tuple(rows))
    assert [result.name for result in find_misses(report)] == ["above", "below"]
    assert find_misses(BenchReport(bench="sandbox", machine={}, results=tuple(rows))) == []


def test_guard_names_existing_benchmarks() -> None:
    assert GUARDED.keys() <= set(bench_names())
