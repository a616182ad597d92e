"""Tests of partial turns: continued from any position that their client had read, also after a restart."""

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rookery.core import Message, Turn, floats, ints
from rookery.trajectories import CutPoint, Recorder, build_segments, build_transcript

QUESTION = Message("user", "q")


def letters(text: str) -> bytes:
    return ints([ord(one) for one in text])


def prompt_of(messages: list[Message]) -> bytes:
    return letters("".join(f"<{one.role[0]}{one.text}>" for one in messages) + "<a")


def partial(text: str, cuts: list[int]) -> dict[str, Any]:
    positions = [number for count in cuts for number in CutPoint(count, 0, 0, count)]
    return {
        "response": Message("assistant", text[: cuts[-1]]),
        "sampled": letters(text),
        "logprobs": floats([-1.0] * len(text)),
        "partial": True,
        "finish": "abort",
        "sampled_tokens": len(text),
        "cuts": ints(positions),
    }


def whole(text: str) -> dict[str, Any]:
    return {
        "response": Message("assistant", text),
        "sampled": letters(text + ">"),
        "logprobs": floats([-1.0] * (len(text) + 1)),
        "sampled_tokens": len(text) + 1,
    }


@settings(deadline=None)
@given(
    st.integers(1, 6).flatmap(lambda n: st.lists(st.integers(1, n), unique=True, min_size=1).map(sorted)),
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=5),
    st.booleans(),
)
@example([1, 2], [(1, False), (1, True)], True)
def test_each_token_that_a_client_continued_from_is_trained_exactly_once(
    cuts: list[int], reads: list[tuple[int, bool]], restarts: bool
) -> None:
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    recorder.record(
        recorder.match_history("policy", [QUESTION]), prompt=prompt_of([QUESTION]), **partial("abcdef", cuts)
    )
    reached: set[int] = set()
    for number, (read, exact) in enumerate(reads):
        if restarts:
            recorder = Recorder.restore("a", turns, turns.append)
        messages = [QUESTION, Message("assistant", "abcdef"[:read]), Message("user", f"more {number}")]
        match = recorder.match_history("policy", messages)
        prompt = prompt_of(messages) if exact else letters("#") + prompt_of(messages)
        turn = recorder.record(match, prompt=prompt, **whole(f"answer {number}"))
        continues = exact and read in cuts
        assert (turn.parent == 0 and turn.prefix > 0) == continues
        assert [one.text for one in build_transcript(turns)] == [
            *(one.text for one in messages),
            f"answer {number}",
        ]
        if continues:
            reached.add(read)
    again = Recorder.restore("a", turns, turns.append).counts
    for name in ("turns", "roots", "extended", "drifted", "without_tokens", "partial"):
        assert getattr(again, name) == getattr(recorder.counts, name)
    assert recorder.counts.partial == 1
    trained: list[int] = []
    for segment in build_segments(turns):
        tokens = memoryview(segment.tokens).cast("i").tolist()
        trained += [token for token, on in zip(tokens, segment.mask, strict=True) if on]
    expected = "abcdef"[: max(reached, default=0)]
    expected += "".join(f"answer {number}>" for number in range(len(reads)))
    assert sorted(trained) == sorted(map(ord, expected))
