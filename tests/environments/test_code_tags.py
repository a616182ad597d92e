"""Code in a text, and observations as text."""

from hypothesis import example, given
from hypothesis import strategies as st

from rookery.environments.code.tags import closed, code_of, described, observation, submission_of
from rookery.workers import Cell

words = st.lists(
    st.sampled_from(["<code>", "</code>", "<result>", "</result>", "x = 1", "\n", "```", "```python\n", " ", "é"]),
    max_size=12,
).map("".join)


@given(words, words)
@example("think\n", "\nx = 1\nx\n")
def test_the_first_code_is_the_cell_and_a_stop_string_ends_it(before: str, code: str) -> None:
    before, code = before.replace("<code>", ""), code.replace("</code>", "")
    if "<code>" in before + "<code>"[:-1]:
        return
    whole, stopped = f"{before}<code>{code}</code> more <code>other</code>", f"{before}<code>{code}"
    assert code_of(whole) == code_of(stopped) == code.removeprefix("\n").rstrip()
    assert closed(whole)
    assert not closed(stopped)
    assert code_of(before) is None


@given(words, words, words)
def test_an_observation_has_one_beginning_and_one_end(stdout: str, value: str, notice: str) -> None:
    for status in ("ok", "time_limit"):
        text = observation(Cell(number=1, status=status, stdout=stdout, value=value, notice=notice), 4096)
        assert text.startswith("<result>")
        assert text.endswith("</result>")
        assert text.count("<result>") == text.count("</result>") == 1
        assert "<code>" not in text


def test_what_is_one_line_is_on_one_line() -> None:
    assert observation(Cell(number=1, status="ok", value="42"), 100) == "<result>42</result>"
    assert observation(Cell(number=1, status="ok"), 100) == "<result>(no output)</result>"
    both = Cell(number=1, status="ok", stdout="a\nb\n", value="42")
    assert observation(both, 100) == "<result>\na\nb\n42\n</result>"


def test_how_a_cell_ended_is_said() -> None:
    late = Cell(number=1, status="time_limit", stdout="so far\n", recovered="kept", notice="It took too long.")
    assert described(late, 100) == "so far\n[time_limit: It took too long.]"
    wrong = Cell(number=1, status="runtime", error="Traceback …\nValueError: no")
    assert described(wrong, 100) == "Traceback …\nValueError: no"
    drawn = Cell(number=1, status="ok", figures=("figure-1.png",))
    assert described(drawn, 100) == "[figures: figure-1.png]"
    long = Cell(number=1, status="ok", stdout="x" * 1000, stdout_dropped=5)
    assert "905 bytes cut" in described(long, 100)


def test_a_submission_is_the_last_fenced_program_then_the_answer_tag_then_the_last_cell() -> None:
    fenced = "First:\n```python\nold\n```\nthen\n```\ndef f():\n    return 1\n```\ndone"
    assert submission_of(fenced, ["cell"]) == "def f():\n    return 1\n"
    assert submission_of("<answer>\nx = 1\n</answer>", ["cell"]) == "x = 1"
    assert submission_of("I am done.", ["first", "last"]) == "last"
    assert submission_of("I am done.", []) == ""
    nested = "````md\n```python\ninner\n```\n````"
    assert submission_of(nested, []) == "```python\ninner\n```\n"
