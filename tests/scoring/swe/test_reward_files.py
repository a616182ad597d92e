"""Reward files of test scripts, valid and invalid."""

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import CAUSES, ScoringError
from rookery.scoring.swe.reward_files import parse_reward, read_reward_file


def cause(source: Any, data: bytes) -> str:
    with pytest.raises(ScoringError) as caught:
        parse_reward(source, data, 0.0, 1.0)
    assert caught.value.fault == "task"
    assert caught.value.code in CAUSES
    return caught.value.code


@given(st.floats(0, 1))
def test_number_in_range_is_a_reward(number: float) -> None:
    assert parse_reward("reward.txt", f" {number!r}\n".encode(), 0, 1).reward == number
    assert parse_reward("reward.json", repr(number).encode(), 0, 1).reward == number
    named = parse_reward("reward.json", b'{"reward": %s, "style": 7}' % repr(number).encode(), 0, 1)
    assert (named.reward, named.parts) == (number, {"reward": number, "style": 7.0})


def test_parts_without_a_reward_give_their_mean() -> None:
    assert parse_reward("reward.json", b'{"a": 1, "b": 0.5}', 0, 1).reward == 0.75


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
def test_each_kind_of_invalid_reward_has_its_own_cause(source: str, data: bytes, code: str) -> None:
    assert cause(source, data) == f"scoring.{code}"


@given(st.binary(max_size=60), st.sampled_from(["reward.txt", "reward.json"]))
def test_any_file_content_gives_a_reward_or_a_fault(data: bytes, source: Any) -> None:
    try:
        score = parse_reward(source, data, 0.0, 1.0)
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


def test_reward_json_takes_precedence_and_links_are_refused() -> None:
    def ask(**files: bytes | OSError) -> Any:
        sandbox: Any = _Files({f"reward.{name}": value for name, value in files.items()})
        return asyncio.run(read_reward_file(sandbox, timeout=1.0))

    assert ask(json=b"1", txt=b"0") == ("reward.json", b"1")
    assert ask(txt=b"0") == ("reward.txt", b"0")
    assert ask() is None
    for error in (OSError(40, "a link"), OSError(22, "not a plain file"), OSError(27, "too large")):
        with pytest.raises(ScoringError) as caught:
            ask(json=error, txt=b"1")
        assert caught.value.code == "scoring.unparsable"
