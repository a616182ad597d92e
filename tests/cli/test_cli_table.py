"""The summary table: its rows, outcomes that add up, and its width."""

import re
from math import sqrt
from pathlib import Path

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.cli import terminal
from rookery.cli.summary import LEVELS_PER_LINE, MAX_CAUSES, format_summary
from rookery.core import Attempt, Cancelled, Completed, Failed, Outcome, Rollout, Truncated, Usage
from rookery.core.prices import Price, PriceTable, find_models
from rookery.view.stats import MAX_LEVELS, MAX_SPANS, BusyTime, Stats
from rookery.view.summary import Summary, Throughput


def record(
    number: int,
    outcome: Outcome,
    reward: float | None = None,
    *,
    level: float | None = None,
    span: tuple[float, float] = (100.0, 104.0),
) -> Rollout:
    return Rollout(
        id=f"{number}.0",
        group=number,
        member=0,
        task=f"t{number}",
        outcome=outcome,
        reward=reward,
        metrics={} if level is None else {"level": level},
        usage=Usage(turns=2, prompt_tokens=1_000, sampled_tokens=250),
        attempts=(Attempt(id=f"{number}.0.0", number=0, outcome=outcome, started=span[0], ended=span[1]),),
    )


def summary(*records: Rollout, groups: int = 0, solved: int = 0) -> Summary:
    stats = Stats()
    for one in records:
        stats.add(one)
    return Summary(
        path=Path("runs/x"),
        status="finished",
        environment="env",
        model="model",
        created=0.0,
        tasks=len(records),
        quarantined=0,
        planned=len(records),
        stats=stats,
        groups=groups,
        solved=solved,
    )


def rows(whole: Summary, session: Throughput | None = None) -> dict[str, list[str]]:
    """Parse the table by row name; rows without a name belong to the one above."""
    named: dict[str, list[str]] = {}
    name = ""
    for one in format_summary(whole, session)[1:]:
        found = re.fullmatch(r"  (\S+(?: \S+)*)?\s{2,}(.*)", click.unstyle(one))
        assert found, one
        name = found[1] or name
        named.setdefault(name, []).append(" ".join(found[2].split()))
    return named


def numbers(row: list[str]) -> list[str]:
    """Return the numbers of a row, in order."""
    (text,) = row
    return re.findall(r"\d[\d,.]*\d%?|\d%?", text)


MIXED = (
    *(record(n, Completed(), 1.0) for n in range(6)),
    *(record(n, Completed(), 0.0) for n in range(6, 9)),
    record(9, Truncated("turns"), 0.0),
    record(10, Truncated("turns"), 0.0),
    record(11, Truncated("time"), 0.0),
    record(12, Failed("bug", "bug.scoring", "ValueError: " + "boom " * 60)),
    record(13, Failed("bug", "bug.scoring", "ValueError: boom")),
    record(14, Failed("infra", "sandbox.lost", "gone")),
    record(15, Cancelled("shutdown")),
)


def test_every_number_has_its_own_row() -> None:
    found = rows(summary(*MIXED, groups=8, solved=5))
    assert numbers(found["tasks"]) == ["16", "5"]
    assert numbers(found["rollouts"]) == ["16", "12", "3", "1"]
    assert numbers(found["pass rate"]) == ["50.0%", "95%", "25.4%", "74.6%", "12"]
    assert numbers(found["mean reward"]) == ["0.500", "0.15"]
    assert numbers(found["tokens"]) == ["4,000", "32", "16,000"]
    assert numbers(found["tokens/s"]) == ["1,000"]
    assert numbers(found["rollouts/s"]) == ["4.0", "16", "4.0"]


def test_outcomes_are_listed_by_reason_and_cause_and_add_up() -> None:
    found = summary(*MIXED)
    outcomes = rows(found)["outcomes"]
    assert [one.split()[:2] for one in outcomes] == [
        ["9", "completed"],
        ["2", "truncated.turns"],
        ["1", "truncated.time"],
        ["1", "cancelled.shutdown"],
        ["2", "bug.scoring"],
        ["1", "sandbox.lost"],
    ]
    assert re.search(r"\bbug\b.*\b12\.0: ValueError: boom", outcomes[4])
    assert sum(int(one.split()[0]) for one in outcomes) == found.stats.rollouts
    plain = found.plain()
    assert sum(plain["outcomes"].values()) == plain["rollouts"] == 16
    assert (plain["completed"], plain["cancelled"], plain["failed"]) == (9, 1, 3)


def test_causes_beyond_those_shown_are_counted() -> None:
    found = summary(*(record(n, Failed("infra", f"some.cause{n:02}", "x")) for n in range(MAX_CAUSES + 3)))
    outcomes = rows(found)["outcomes"]
    assert numbers(outcomes[-1:]) == ["3", "3"]
    assert sum(int(one.split()[0]) for one in outcomes) == MAX_CAUSES + 3


def test_no_row_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    levels = [record(n, Completed(), 1.0, level=n) for n in range(MAX_LEVELS)]
    found = summary(*MIXED, *levels, *GROUPED, groups=8, solved=5)
    found.planned += 1_000
    lines = format_summary(found)
    assert max(len(click.unstyle(one)) for one in lines) == 80  # the long detail is truncated


def test_rewards_between_0_and_1_have_a_mean_and_no_pass_rate() -> None:
    found = rows(summary(record(0, Completed(), 0.25, level=1), record(1, Completed(), 0.5, level=2)))
    assert "pass rate" not in found
    assert numbers(found["mean reward"]) == ["0.375", "0.12", "2"]
    assert found["by level"] == ["1: 0.25 2: 0.5"]


def test_levels_have_a_rate_each_over_valid_rollouts() -> None:
    records = [record(n, Completed(), float(n % 4 == 0), level=1 + n % 2) for n in range(8)]
    lost = record(8, Failed("infra", "sandbox.lost", "gone"), level=2)
    found = summary(*records, lost)
    assert rows(found)["by level"] == ["1: 50% 2: 0%"]
    assert found.plain()["levels"] == [
        {"level": 1, "valid": 4, "mean": 0.5},
        {"level": 2, "valid": 4, "mean": 0.0},
    ]


def test_many_levels_take_several_rows_and_too_many_are_none() -> None:
    records = [record(n, Completed(), 1.0, level=n) for n in range(MAX_LEVELS + 1)]
    assert len(rows(summary(*records[:MAX_LEVELS]))["by level"]) == MAX_LEVELS // LEVELS_PER_LINE
    assert "by level" not in rows(summary(*records))
    assert "by level" not in rows(summary(records[0]))
    assert "levels" not in summary(record(0, Completed(), 1.0)).plain()


def test_speed_is_that_of_this_process_or_of_the_busy_time() -> None:
    early = [record(n, Completed(), 1.0, span=(100.0, 102.0)) for n in range(4)]
    late = [record(n, Completed(), 1.0, span=(9_000.0, 9_002.0)) for n in range(4, 8)]  # resumed much later
    found = summary(*late, *early)
    assert numbers(rows(found)["rollouts/s"]) == ["2.0", "8", "4.0"]
    assert found.plain()["seconds"] == 4.0
    resumed = Throughput(seconds=2.0, rollouts=4, sampled_tokens=1_000)
    assert numbers(rows(found, resumed)["rollouts/s"]) == ["2.0", "4", "2.0"]
    assert numbers(rows(found, resumed)["tokens/s"]) == ["500"]
    assert found.plain(resumed)["rollouts_per_second"] == 2.0


def test_a_run_without_records_has_no_rates() -> None:
    assert set(rows(summary())) == {"tasks", "rollouts"}
    assert "seconds" not in summary().plain()


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=40))
def test_overlapping_busy_time_counts_once_in_any_order(spans: list[tuple[int, int]]) -> None:
    busy = BusyTime()
    for start, length in spans:
        busy.add(start, start + length)
    assert busy.seconds == len({at for start, length in spans for at in range(start, start + length)})


def test_spans_are_bounded_by_closing_the_smallest_gap() -> None:
    busy = BusyTime()
    for at in range(MAX_SPANS):
        busy.add(1 + 100.0 * at, 2 + 100.0 * at)
    busy.add(5.0, 6.0)
    assert busy.seconds == MAX_SPANS + 1 + 3.0
    busy.add(0.0, 50.0)  # an attempt that never started has no time
    assert busy.seconds == MAX_SPANS + 1 + 3.0


def test_program_name_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bin folder" / "rookery"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(script)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert terminal.program_name() == f"'{script}'"
    monkeypatch.setenv("PATH", str(script.parent))
    assert terminal.program_name() == "rookery"
    monkeypatch.setattr("sys.argv", ["/somewhere/rookery/cli/__main__.py"])
    assert terminal.program_name() == "rookery"


def members(task: str, *rewards: float | None) -> list[Rollout]:
    lost = Failed("infra", "sandbox.lost", "gone")
    return [
        Rollout(
            id=f"{task}.{member}",
            group=int(task),
            member=member,
            task=task,
            outcome=lost if reward is None else Completed(),
            reward=reward,
        )
        for member, reward in enumerate(rewards)
    ]


GROUPED = (
    *members("0", 1.0, 1.0, 1.0, 1.0),
    *members("1", 0.0, 0.0, 0.0, 0.0),
    *members("2", 1.0, 0.0, None, None),
    *members("3", None, None, None, None),
)


def test_standard_error_is_clustered_by_task_in_table_and_json() -> None:
    found = summary(*GROUPED)
    reward = found.plain()["reward"]
    assert (reward["valid"], reward["tasks"]) == (10, 3)
    assert reward["standard_error"] == pytest.approx(sqrt(3 / 2 * (2**2 + 2**2 + 0**2)) / 10)
    low, high = reward["interval95"]
    assert low < 0.2
    assert high > 0.8
    assert f"{reward['standard_error']:.2f}" in rows(found)["mean reward"][0]


def test_pass_at_k_leaves_out_tasks_with_too_few_valid_rollouts_and_says_so() -> None:
    found = summary(*GROUPED)
    reward = found.plain()["reward"]
    assert reward["pass@2"] == pytest.approx((1 + 0 + 1) / 3)
    assert reward["pass@4"] == pytest.approx(0.5)
    assert reward["avg@4"] == pytest.approx(0.5)
    assert [reward["per_task"][name]["tasks_left_out"] for name in ("avg@4", "pass@2", "pass@4")] == [1, 1, 2]
    assert {"avg@4", "pass@2", "pass@4"} <= rows(found).keys()


def test_best_of_k_of_rewards_between_0_and_1() -> None:
    found = summary(*members("0", 0.25, 0.5), *members("1", 0.0, 1.0), *members("2", 0.75, None))
    reward = found.plain()["reward"]
    assert reward["best@2"] == pytest.approx((0.5 + 1.0) / 2)
    assert reward["per_task"]["best@2"]["tasks_left_out"] == 1
    assert {"avg@2", "best@2"} <= rows(found).keys()
    assert not any(name.startswith("best@") for name in rows(summary(*GROUPED)))


def test_metrics_are_averaged_over_valid_rollouts_that_have_them() -> None:
    values = ({"length": 10.0, "level": 1.0}, {"length": 30.0}, {}, {"length": 1000.0})
    outcomes = (Completed(), Completed(), Completed(), Failed("infra", "sandbox.lost", "gone"))
    pairs = zip(outcomes, values, strict=True)
    records = [
        msgspec.structs.replace(record(n, outcome, None if isinstance(outcome, Failed) else 1.0), metrics=metrics)
        for n, (outcome, metrics) in enumerate(pairs)
    ]
    found = summary(*records)
    assert found.plain()["metrics"]["length"] == {"mean": 20.0, "standard_error": 10.0, "valid": 2}
    assert "length" in str(rows(found)["metrics"])


def test_cost_needs_a_price_for_every_model_that_was_called() -> None:
    prices = {"m": Price(prompt=2.0, sampled=8.0), "j": Price(sampled=1.0)}
    models = find_models({"upstreams": {"policy": {"model": "m"}, "judge": {"model": "j"}, "user": {}}})
    stats = Stats(PriceTable(prices, models))
    stats.add(record(0, Completed(), 1.0))
    assert stats.cost == pytest.approx((1000 * 2.0 + 250 * 8.0) / 1e6)
    judged = Usage(others={"judge": 1000}, other_prompts={"judge": 500})
    stats.add(msgspec.structs.replace(record(1, Completed(), 1.0), usage=judged))
    assert stats.cost == pytest.approx(0.005)
    stats.add(msgspec.structs.replace(record(2, Completed(), 1.0), usage=Usage(others={"user": 1})))
    assert stats.cost is None  # the price of the simulated user's model is unknown
    assert Stats().cost is None
    with pytest.raises(ValueError, match="-1"):
        Price(prompt=-1)


def test_one_rollout_per_task_has_no_pass_at_k() -> None:
    assert not {name for name in rows(summary(*MIXED)) if "@" in name}


def test_single_task_has_no_standard_error_and_no_interval() -> None:
    reward = summary(*members("0", 1.0, 0.0, 1.0, 1.0)).plain()["reward"]
    assert reward["standard_error"] is None
    assert reward["interval95"] is None
    assert reward["pass@2"] == 1.0


def test_unfinished_run_is_marked_as_a_biased_sample() -> None:
    found = summary(*GROUPED)
    assert found.plain()["biased_sample"] is False
    assert "unfinished" not in rows(found)
    found.planned += 4
    assert found.plain()["biased_sample"] is True
    assert found.plain()["unfinished"] == 4
    assert numbers(rows(found)["unfinished"]) == ["4"]
