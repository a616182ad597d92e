"""Tests of `rookery.view.comparison`, `.index`, `.series`, `.plot`, and of the commands that use them."""

import json
from pathlib import Path

import pytest

from rookery.core import UsageError
from rookery.core.estimates import t_quantile_975
from rookery.journal import Journal, RunReader, find_journal, find_run, list_training_runs
from rookery.view.comparison import Comparison, compare_runs
from rookery.view.index import RunIndex
from rookery.view.series import build_series, running_mean
from rookery.view.summary import read_summary
from rookery.view.text_curves import draw_curve
from tests.cli.helpers import rookery
from tests.view.view_kit import Reward, decode_columns, make_run

A: dict[str, list[Reward]] = {
    "t0": [0, 0],
    "t1": [1, 1],
    "t2": [1, 0],
    "t3": [0, 0],
    "only-a": [1],
    "failed": [None],
}
B: dict[str, list[Reward]] = {
    "t0": [1, 1],
    "t1": [0, 0],
    "t2": [1, 1],
    "t3": [0, None],
    "only-b": [1],
    "failed": [1],
}


def compare(tmp_path: Path) -> Comparison:
    make_run(tmp_path / "a", A, config={"seed": 1, "k": 2})
    make_run(tmp_path / "b", B, config={"seed": 2, "k": 2, "sampling": {"temperature": 0.5}})
    with RunReader(tmp_path / "a") as a, RunReader(tmp_path / "b") as b:
        return compare_runs(a, b)


def test_comparison_pairs_tasks_and_ignores_failed_rollouts(tmp_path: Path) -> None:
    found = compare(tmp_path)
    assert {pair.task: (pair.a, pair.b, pair.a_valid, pair.b_valid, pair.change) for pair in found.pairs} == {
        "t0": (0, 1, 2, 2, "gained"),
        "t1": (1, 0, 2, 2, "lost"),
        "t2": (0.5, 1, 2, 2, "gained"),
        "t3": (0, 0, 2, 1, "same"),
    }
    assert (found.only_a, found.only_b) == (1, 2)
    assert found.binary
    assert found.settings == {"seed": ("1", "2"), "temperature": (None, "0.5")}
    assert found.changed_tasks == ()


def test_interval_of_the_difference_is_over_tasks(tmp_path: Path) -> None:
    found = compare(tmp_path)
    differences = [1, -1, 0.5, 0]
    mean = sum(differences) / 4
    error = (sum((one - mean) ** 2 for one in differences) / 3 / 4) ** 0.5
    assert found.difference == pytest.approx(mean)
    assert found.standard_error == pytest.approx(error)
    assert found.interval95 == pytest.approx((mean - t_quantile_975(3) * error, mean + t_quantile_975(3) * error))


def test_comparison_without_common_tasks_has_no_difference(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {"x": [1]})
    make_run(tmp_path / "b", {"y": [1]}, data={"answer": 1})
    with RunReader(tmp_path / "a") as a, RunReader(tmp_path / "b") as b:
        found = compare_runs(a, b)
    assert (found.difference, found.interval95, found.only_a, found.only_b) == (None, None, 1, 1)


def test_tasks_whose_content_changed_are_reported(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {"x": [0.2], "y": [0.1]}, data={"answer": 1})
    make_run(tmp_path / "b", {"x": [0.3], "y": [0.1]}, data={"answer": 2})
    with RunReader(tmp_path / "a") as a, RunReader(tmp_path / "b") as b:
        found = compare_runs(a, b)
    assert found.changed_tasks == ("x", "y")
    assert not found.binary
    assert {pair.task: pair.change for pair in found.pairs} == {"x": "improved", "y": "same"}


def test_text_curve_shows_its_range_and_gaps() -> None:
    curve = draw_curve("x", [0.0, None, 0.5, 1.0])
    assert curve is not None
    assert (curve.low, curve.high, curve.last, curve.line) == (0.0, 1.0, 1.0, "▁ ▅█")
    flat = draw_curve("x", [2.0] * 200, width=10)
    assert flat is not None
    assert flat.line == "▁" * 10
    assert draw_curve("x", [None, float("nan")]) is None


def test_index_follows_new_and_replaced_records(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", A)
    index = RunIndex()
    with RunReader(run) as reader:
        assert index.update(reader)
        table = decode_columns(index.encode_columns())
        assert (table["tasks"], table["count"]) == (list(A), 10)
        assert table["numbers"]["reward"].count(None) == 1
        assert decode_columns(index.encode_columns(10))["task"] == []
        before = index.generation
        record = reader.rollout("5.0")
        assert record is not None
        with Journal.open(run) as journal:
            journal.replace_rollout(record, "again")
        assert index.update(reader)
        assert len(index) == 10
        assert index.generation == before + 1
        assert index.stats.reward() == read_summary(reader).stats.reward()
        with Journal.open(run) as journal:
            journal.discard("0.1", "damaged")
        assert index.update(reader)
        assert len(index) == 9


def test_index_stops_when_its_time_is_over_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookery.view.index.PAGE", 4)
    with RunReader(make_run(tmp_path / "a", A)) as reader:
        index, parts = RunIndex(), []
        while not index.update(reader, seconds=0):
            parts.append(len(index))
        assert (parts, len(index)) == ([4, 8, 10], 10)
        assert decode_columns(index.encode_columns(4))["first_task"] == 1 + max(
            decode_columns(index.encode_columns())["task"][:4]
        )


def test_series_counts_every_rollout_once(tmp_path: Path) -> None:
    index = RunIndex()
    with RunReader(make_run(tmp_path / "a", A)) as reader:
        index.update(reader)
    series = build_series(index, 7)
    assert (sum(series["ended"]), sum(series["valid"])) == (10, 9)
    assert {cause: sum(counts) for cause, counts in series["failed"].items()} == {"sandbox.lost": 1}
    assert running_mean(series)[-1] == pytest.approx(4 / 9)
    assert series["stages"]["run"][-1] == pytest.approx(1.0)
    assert build_series(RunIndex())["ended"] == []


def make_training_run(root: Path, name: str) -> Path:
    """Create a training run with one journal."""
    folder = root / name
    make_run(folder / "rollouts" / "20260102T000000Z-sums-scripted-0001", {"t0": [1, 0]})
    (folder / "train.json").write_text("{}")
    rows = [{"step": 0, "eval_reward": 0.25, "eval_interval95": [0.1, 0.4]}, {"step": 1, "reward": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_training_runs_are_found_for_reading_but_not_for_resuming(tmp_path: Path) -> None:
    run = make_run(tmp_path / "20260101T000000Z-sums-scripted-0000", {"t0": [1]})
    (tmp_path / "latest").symlink_to(run.name)
    assert find_journal("latest", tmp_path) == run
    training = make_training_run(tmp_path, "20260102T000000Z-train-sums-x")
    inner = next((training / "rollouts").iterdir())
    assert [(one.name, one.kind) for one in list_training_runs(tmp_path)] == [(training.name, "training")]
    assert list_training_runs(tmp_path)[0].rollouts == 2
    for spec in ("latest", training.name, str(training), "20260102", "sums-x"):
        assert find_journal(spec, tmp_path) == inner
    with pytest.raises(UsageError):
        find_run("20260102", tmp_path)
    assert find_journal("20260101", tmp_path) == run


async def test_compare_prints_json_and_refuses_unknown_runs(tmp_path: Path) -> None:
    compare(tmp_path)
    done = await rookery("compare", "a", "b", "--runs", ".", "--json", cwd=tmp_path)
    assert done.code == 0
    found = json.loads(done.out)
    assert (found["tasks"], found["counts"]["gained"], found["counts"]["lost"]) == (4, 2, 1)
    assert found["difference"] == pytest.approx(0.125)
    text = await rookery("compare", "a", "b", "--runs", ".", cwd=tmp_path)
    assert text.code == 0
    assert "t1" in text.out
    (await rookery("compare", "a", "zzz", "--runs", ".", cwd=tmp_path)).assert_refused("zzz")


@pytest.mark.long
async def test_plot_draws_runs_and_training_runs_but_not_together(tmp_path: Path) -> None:
    compare(tmp_path)
    make_training_run(tmp_path, "t")
    done = await rookery("plot", "a", "b", "--runs", ".", "-o", "two", cwd=tmp_path)
    assert done.code == 0, done.err
    for suffix in ("png", "svg"):
        assert (tmp_path / f"two.{suffix}").stat().st_size > 10_000
    assert (await rookery("plot", "t", "--runs", ".", cwd=tmp_path)).code == 0
    assert (tmp_path / "t" / "learning.svg").is_file()
    for name, curve in (("a", "reward so far"), ("t", "eval_reward")):
        text = await rookery("plot", name, "--text", "--runs", ".", cwd=tmp_path)
        assert text.code == 0
        assert curve in text.out
    (await rookery("plot", "a", "--text", "-o", "x", "--runs", ".", cwd=tmp_path)).assert_refused()
    assert (await rookery("compare", "a", "b", "-o", "both", "--runs", ".", cwd=tmp_path)).code == 0
    for suffix in ("png", "svg"):
        assert (tmp_path / f"both.{suffix}").stat().st_size > 10_000
    (await rookery("plot", "a", "t", "--runs", ".", cwd=tmp_path)).assert_refused()
