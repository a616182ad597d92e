"""Extracting code from text, and rendering cells as text."""

from hypothesis import example, given
from hypothesis import strategies as st

from rookery.environments.code_environment.tags import (
    extract_code,
    extract_submission,
    is_closed,
    render_cell,
    render_observation,
)
from rookery.workers import Cell

words = st.lists(
    st.sampled_from(["<code>", "</code>", "<result>", "</result>", "x = 1", "\n", "```", "```python\n", " ", "é"]),
    max_size=12,
).map("".join)


@given(words, words)
@example("think\n", "\nx = 1\nx\n")
def test_first_code_tag_is_the_cell_with_or_without_its_end_tag(before: str, code: str) -> None:
    before, code = before.replace("<code>", ""), code.replace("</code>", "")
    if "<code>" in before + "<code>"[:-1]:
        return
    whole, stopped = f"{before}<code>{code}</code> more <code>other</code>", f"{before}<code>{code}"
    assert extract_code(whole) == extract_code(stopped) == code.removeprefix("\n").rstrip()
    assert is_closed(whole)
    assert not is_closed(stopped)
    assert extract_code(before) is None


@given(words, words, words)
def test_observation_has_exactly_one_result_tag(stdout: str, value: str, notice: str) -> None:
    for status in ("ok", "time_limit"):
        text = render_observation(Cell(number=1, status=status, stdout=stdout, value=value, notice=notice), 4096)
        assert text.startswith("<result>")
        assert text.endswith("</result>")
        assert text.count("<result>") == text.count("</result>") == 1
        assert "<code>" not in text


def test_result_of_one_line_is_rendered_on_one_line() -> None:
    assert render_observation(Cell(number=1, status="ok", value="42"), 100) == "<result>42</result>"
    assert render_observation(Cell(number=1, status="ok"), 100) == "<result>(no output)</result>"
    both = Cell(number=1, status="ok", stdout="a\nb\n", value="42")
    assert render_observation(both, 100) == "<result>\na\nb\n42\n</result>"


def test_ending_of_a_cell_is_rendered() -> None:
    timed_out = Cell(
        number=1, status="time_limit", stdout="so far\n", recovered="kept", notice="It took too long."
    )
    assert render_cell(timed_out, 100) == "so far\n[time_limit: It took too long.]"
    wrong = Cell(number=1, status="runtime", error="Traceback …\nValueError: no")
    assert render_cell(wrong, 100) == "Traceback …\nValueError: no"
    drawn = Cell(number=1, status="ok", figures=("figure-1.png",))
    assert render_cell(drawn, 100) == "[figures: figure-1.png]"
    long = Cell(number=1, status="ok", stdout="x" * 1000, stdout_dropped=5)
    assert "905 bytes cut" in render_cell(long, 100)


def test_submission_is_the_last_fenced_block_or_answer_tag_or_cell() -> None:
    fenced = "First:\n```python\nold\n```\nthen\n```\ndef f():\n    return 1\n```\ndone"
    assert extract_submission(fenced, ["cell"]) == "def f():\n    return 1\n"
    assert extract_submission("<answer>\nx = 1\n</answer>", ["cell"]) == "x = 1"
    assert extract_submission("I am done.", ["first", "last"]) == "last"
    assert extract_submission("I am done.", []) == ""
    nested = "````md\n```python\ninner\n```\n````"
    assert extract_submission(nested, []) == "```python\ninner\n```\n"
