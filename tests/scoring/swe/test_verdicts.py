"""Rewards that graders leave, and those that are none."""

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import CAUSES, ScoringError
from rookery.scoring.swe.refereeing import End, Referee
from rookery.scoring.swe.verdicts import found, score_of


def cause(source: Any, data: bytes) -> str:
    with pytest.raises(ScoringError) as caught:
        score_of(source, data, 0.0, 1.0)
    assert caught.value.fault == "task"
    assert caught.value.code in CAUSES
    return caught.value.code


@given(st.floats(0, 1))
def test_a_number_in_its_range_is_a_reward(number: float) -> None:
    assert score_of("reward.txt", f" {number!r}\n".encode(), 0, 1).reward == number
    assert score_of("reward.json", repr(number).encode(), 0, 1).reward == number
    named = score_of("reward.json", b'{"reward": %s, "style": 7}' % repr(number).encode(), 0, 1)
    assert (named.reward, named.parts) == (number, {"reward": number, "style": 7.0})


def test_parts_without_a_reward_of_their_own_make_their_mean() -> None:
    assert score_of("reward.json", b'{"a": 1, "b": 0.5}', 0, 1).reward == 0.75


@pytest.mark.parametrize(
    ("source", "data", "code"),
    [
        ("reward.txt", b"", "empty"),
        ("reward.txt", b" \n", "empty"),
        ("reward.json", b"", "empty"),
        ("reward.txt", b"nan", "infinite"),
        ("reward.txt", b"-Infinity\n", "infinite"),
        ("reward.txt", b"1e999", "infinite"),
        ("reward.json", b"NaN", "infinite"),
        ("reward.json", b'{"reward": 1, "x": Infinity}', "infinite"),
        ("reward.txt", b"1.5", "range"),
        ("reward.txt", b"-1", "range"),
        ("reward.json", b'{"reward": 2}', "range"),
        ("reward.txt", b"1 1", "unparsable"),
        ("reward.txt", b"1_0", "unparsable"),
        ("reward.txt", b"0x1", "unparsable"),
        ("reward.txt", b"\xff", "unparsable"),
        ("reward.txt", b"passed", "unparsable"),
        ("reward.json", b"true", "unparsable"),
        ("reward.json", b'"1"', "unparsable"),
        ("reward.json", b"[1]", "unparsable"),
        ("reward.json", b"{}", "unparsable"),
        ("reward.json", b'{"reward": {"a": 1}}', "unparsable"),
        ("reward.json", b"[" * 60_000, "unparsable"),
    ],
)
def test_what_is_no_reward_is_a_fault_of_its_own_kind(source: str, data: bytes, code: str) -> None:
    assert cause(source, data) == f"scoring.{code}"


@given(st.binary(max_size=60), st.sampled_from(["reward.txt", "reward.json"]))
def test_whatever_was_written_is_a_reward_or_a_fault(data: bytes, source: Any) -> None:
    try:
        score = score_of(source, data, 0.0, 1.0)
    except ScoringError:
        return
    else:
        assert math.isfinite(score.reward)
        assert 0 <= score.reward <= 1


class _Files:
    def __init__(self, files: dict[str, bytes | OSError]) -> None:
        self.files = files

    async def read(self, path: str, *, limit: int, timeout: float) -> bytes:
        held = self.files.get(path.rpartition("/")[2], FileNotFoundError(2, "none"))
        assert limit <= 1 << 16
        assert timeout
        if isinstance(held, OSError):
            raise held
        return held


def test_json_counts_before_text_and_links_are_not_believed() -> None:
    def ask(**files: bytes | OSError) -> Any:
        box: Any = _Files({f"reward.{name}": value for name, value in files.items()})
        return asyncio.run(found(box, timeout=1.0))

    assert ask(json=b"1", txt=b"0") == ("reward.json", b"1")
    assert ask(txt=b"0") == ("reward.txt", b"0")
    assert ask() is None
    for error in (OSError(40, "a link"), OSError(22, "not a plain file"), OSError(27, "too large")):
        with pytest.raises(ScoringError) as caught:
            ask(json=error, txt=b"1")
        assert caught.value.code == "scoring.unparsable"


# ---- whose doing it is

ENDS: tuple[End, ...] = ("reward", "time", "memory", "crash", "invalid", "lost")


def test_a_script_that_fails_twice_is_the_submissions_unless_the_solution_fails_too() -> None:
    for end in ("time", "memory", "crash"):
        alone = Referee(has_solution=False)
        assert [alone.submission(end), alone.submission(end)] == ["again", "minimum"]
        both = Referee(has_solution=True)
        assert [both.submission(end), both.submission(end)] == ["again", "solution"]
        assert both.solution("reward") == "minimum"
        assert both.solution("crash") == "task"


def test_a_verdict_that_is_none_is_the_tasks_only_where_no_submission_is_needed_for_it() -> None:
    alone = Referee(has_solution=False)
    assert alone.submission("invalid") == "untouched"
    assert alone.untouched("invalid") == "invalid"
    assert alone.untouched("reward") == alone.untouched("crash") == "minimum"
    weak = Referee(has_solution=True)
    assert weak.submission("invalid") == "solution"
    assert weak.solution("reward") == "minimum"
    assert weak.solution("invalid") == "invalid"


@given(st.lists(st.sampled_from(ENDS), min_size=6, max_size=6), st.booleans())
def test_every_grading_comes_to_an_end_within_five_runs(ends: list[End], solution: bool) -> None:
    referee = Referee(has_solution=solution)
    for count, end in enumerate(ends, 1):
        said = referee.submission(end)
        assert (said == "score") == (end == "reward")
        if said != "again":
            assert count <= 4
            assert (said == "infra") == (end == "lost")
            return
    raise AssertionError("it went on")
