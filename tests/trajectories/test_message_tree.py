"""Tests of the recorder, compared with a reference, with branching and overlapping histories."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import JournalError, Message, Turn, ints
from rookery.trajectories import (
    HistoryMatch,
    MessageError,
    Recorder,
    TurnCounts,
    build_segments,
    build_transcript,
    parse_message,
)
from tests.trajectories.message_encodings import CanonicalMessage, encodings
from tests.trajectories.simulated_sessions import answers, questions, simulate_session


@pytest.mark.long
@settings(deadline=None, max_examples=80)
@given(st.data())
def test_recorder_agrees_with_reference_and_with_restored_recorder(data: st.DataObject) -> None:
    session = simulate_session(data)
    counts = session.recorder.counts
    assert counts == session.reference.counts
    assert counts.turns == len(session.turns) == session.recorder.count
    assert counts.turns == counts.roots + counts.extended + counts.drifted + counts.without_tokens
    if session.restored is not None:
        assert session.restored.counts == counts
    assert [turn.index for turn in session.turns] == list(range(len(session.turns)))
    for role in ("policy", "judge"):
        made = build_segments(session.turns, role)
        assert sorted(index for one in made for index in one.turns) == [
            turn.index for turn in session.turns if turn.role == role and turn.sampled
        ]
        for one in made:
            tokens = np.frombuffer(one.tokens, "<i4").tolist()
            for index, span in zip(one.turns, one.versions, strict=True):
                assert tokens[: span.end] == session.reference.tokens[index]
                assert ints(tokens[span.start : span.end]) == session.turns[index].sampled


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_tokens_of_recorded_turns_never_change(data: st.DataObject) -> None:
    session = simulate_session(data)
    for history in session.recorder.histories.values():
        for children in history.tree.children.values():
            for node in (turn for child in children.nodes for turn in child.turns):
                known = session.reference.tokens.get(node.index, [])
                turn = session.turns[node.index]
                assert node.tokens() == ints(known)
                assert node.length == len(known)
                assert node.sampled == turn.sampled
                prompt = known[: len(known) - len(turn.sampled) // 4]
                assert [node.prompt_tail(n) for n in (1, 2, 99)] == [ints(prompt[-n:]) for n in (1, 2, 99)]
                assert (node.response, node.finish) == (turn.response, turn.finish)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.lists(st.tuples(questions, answers), min_size=1, max_size=6))
def test_formatting_differences_never_fork_a_conversation(
    data: st.DataObject, steps: list[tuple[CanonicalMessage, CanonicalMessage]]
) -> None:
    turns: list[Turn] = []
    recorder = Recorder("0.0.1", turns.append)
    messages: list[CanonicalMessage] = []
    for n, (question, answer) in enumerate(steps):
        messages.append(question)
        match = recorder.match_history("policy", [data.draw(encodings(one)) for one in messages])
        assert match.kind == ("extends" if n else "root")
        node = match.turn
        recorder.record(
            match,
            prompt=(node.tokens() if node else b"") + ints([n]),
            response=answer.message(),
            sampled=ints([7]),
        )
        messages.append(
            msgspec.structs.replace(answer, reasoning=data.draw(st.sampled_from(["", answer.reasoning])))
        )
    assert recorder.counts == TurnCounts(turns=len(steps), roots=1, extended=len(steps) - 1)
    (segment,) = build_segments(turns)
    assert segment.turns == tuple(range(len(steps)))
    assert len(build_transcript(turns)) == 2 * len(steps)


# ---- single sentences


def asked(recorder: Recorder, *texts: str, scope: bytes = b"") -> HistoryMatch:
    roles = ("user", "assistant")
    return recorder.match_history("policy", [Message(roles[n % 2], text) for n, text in enumerate(texts)], scope)  # type: ignore[arg-type]


def record_reply(
    recorder: Recorder, match: HistoryMatch, text: str, prompt: list[int], sampled: list[int], **rest: Any
) -> Turn:
    return recorder.record(
        match, prompt=ints(prompt), response=Message("assistant", text), sampled=ints(sampled), **rest
    )


def test_equal_replies_with_different_tokens_are_distinguished_by_the_next_prompt() -> None:
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    one, two = asked(recorder, "q"), asked(recorder, "q")
    record_reply(recorder, one, "x", [1], [2, 3])
    record_reply(recorder, two, "x", [1], [4])
    follow = asked(recorder, "q", "x", "more")
    assert follow.kind == "extends"
    assert record_reply(recorder, follow, "y", [1, 2, 3, 5], [6]).parent == 0
    assert record_reply(recorder, follow, "z", [1, 4, 5], [6]).parent == 1
    assert recorder.counts == TurnCounts(turns=4, roots=2, extended=2, forks=2)


def test_drift_is_counted_and_the_whole_prompt_is_stored() -> None:
    recorder = Recorder("a", lambda turn: None)
    record_reply(recorder, asked(recorder, "q"), "x", [1], [2])
    turn = record_reply(recorder, asked(recorder, "q", "x", "more"), "y", [1, 9, 3], [4])
    assert (turn.parent, turn.prefix, turn.prompt) == (0, 0, ints([1, 9, 3]))
    assert recorder.counts == TurnCounts(turns=2, roots=1, drifted=1)


def test_earlier_turn_with_exact_tokens_is_extended_if_the_last_reply_drifted() -> None:
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    record_reply(recorder, asked(recorder, "q"), "x", [1], [2])
    record_reply(recorder, asked(recorder, "q", "x", "r"), "y", [1, 2, 3], [4])
    turn = record_reply(recorder, asked(recorder, "q", "x", "r", "y", "s"), "z", [1, 2, 3, 9, 5], [6])
    assert (turn.parent, turn.prefix, turn.prompt) == (0, 2, ints([3, 9, 5]))
    assert [message.text for message in turn.messages] == ["r", "y", "s"]
    assert [message.text for message in build_transcript(turns)] == ["q", "x", "r", "y", "s", "z"]
    assert recorder.counts == TurnCounts(turns=3, roots=1, extended=1, drifted=1)
    again = Recorder.restore("a", turns, lambda turn: None)
    assert again.counts == recorder.counts


def test_scopes_share_no_history_also_after_restore() -> None:
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    record_reply(recorder, asked(recorder, "q", scope=b"one"), "x", [1], [2])
    assert asked(recorder, "q", "x", "m", scope=b"two").kind == "root"
    again = Recorder.restore("a", turns, turns.append)
    assert (turns[0].scope, again.count) == (b"one", 1)
    assert asked(again, "q", "x", "m", scope=b"two").kind == "root"
    match = asked(again, "q", "x", "m", scope=b"one")
    assert match.kind == "extends"
    assert record_reply(again, match, "y", [1, 2, 3], [4]).scope == b""  # its parent has it


def test_turn_that_the_sink_rejects_is_not_recorded() -> None:
    refuse = True

    def sink(turn: Turn) -> None:
        if refuse:
            raise JournalError("disk full")

    recorder = Recorder("a", sink)
    match = asked(recorder, "q")
    with pytest.raises(JournalError):
        record_reply(recorder, match, "x", [1], [2])
    refuse = False
    with pytest.raises(ValueError, match="logprobs"):
        record_reply(recorder, match, "x", [1], [2], logprobs=b"abcdefgh")
    assert recorder.counts == TurnCounts()
    assert asked(recorder, "q", "x", "m").kind == "root"
    assert record_reply(recorder, match, "x", [1], [2]).index == 0


def test_invalid_entry_is_rejected_with_its_position_and_leaves_no_trace() -> None:
    recorder = Recorder("a", lambda turn: None)
    record_reply(recorder, asked(recorder, "q"), "x", [1], [2])
    known = [b'{"role":"user","content":"q"}', b'{"role":"assistant","content":"x"}']
    for bad in (b'{"role":"bot"}', msgspec.Raw(b"null")):
        with pytest.raises(MessageError, match=r"\b2\b") as caught:
            recorder.match_history("policy", [*known, bad])
        assert caught.value.position == 2
    assert recorder.match_history("policy", [*known, b'{"role":"user","content":"y"}']).kind == "extends"


def test_calls_without_a_reply_leave_no_trace() -> None:
    recorder = Recorder("a", lambda turn: None)
    first = asked(recorder, "q", scope=b"s")
    for n in range(5):
        asked(recorder, "q", str(n), scope=b"%d" % n)
    assert recorder.histories == {}
    other = asked(recorder, "q", scope=b"s")
    record_reply(recorder, first, "x", [1], [2])
    assert record_reply(recorder, other, "y", [1], [3]).parent is None
    assert recorder.counts == TurnCounts(turns=2, roots=2, forks=1)
    for n in range(5):
        assert asked(recorder, "q", "x", str(n), scope=b"s").kind == "extends"


def test_appended_tokens_need_a_matched_turn_with_tokens() -> None:
    recorder = Recorder("a", lambda turn: None)
    rest: dict[str, Any] = {"response": Message("assistant", "x"), "sampled": ints([2])}
    with pytest.raises(ValueError, match="`appended`"):
        recorder.record(asked(recorder, "q"), appended=ints([1]), **rest)
    recorder.record(asked(recorder, "q"), prompt=ints([1]), **rest)
    with pytest.raises(ValueError, match="`appended`"):
        recorder.record(asked(recorder, "q", "x"), appended=ints([1]), prompt=ints([1]), **rest)


def test_inconsistent_turns_are_not_restored() -> None:
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    record_reply(recorder, asked(recorder, "q"), "x", [1], [2])
    record_reply(recorder, asked(recorder, "q", "x", "m"), "y", [1, 2, 3], [4])
    other = msgspec.structs.replace(turns[0], attempt="b")
    assert Recorder.restore("a", [other, *turns], turns.append).count == 2
    for bad, named in (
        (turns[1:], r"\b1\b.*\b0\b"),
        ([*turns, turns[0]], r"\b0\b"),
        ([turns[0], msgspec.structs.replace(turns[1], prefix=3)], r"\b3\b.*\b0\b.*\b2\b"),
    ):
        with pytest.raises(JournalError, match=named):
            Recorder.restore("a", bad, turns.append)


def test_content_parts_are_not_compared_with_python_equality() -> None:
    recorder = Recorder("a", lambda turn: None)
    one, other = (Message("user", ({"type": "x", "n": n},)) for n in (1, True))
    assert one == other
    recorder.record(
        recorder.match_history("policy", [one]),
        prompt=ints([1]),
        response=Message("assistant", "x"),
        sampled=ints([2]),
    )
    assert recorder.match_history("policy", [other, Message("assistant", "x")]).kind == "root"
    assert recorder.match_history("policy", [one, Message("assistant", "x")]).kind == "extends"


def test_complete_turn_is_preferred_over_truncated_turn() -> None:
    recorder = Recorder("a", lambda turn: None)
    match = asked(recorder, "q")
    record_reply(recorder, match, "x", [1], [2])
    record_reply(recorder, match, "x", [1], [3], finish="length")
    record_reply(recorder, match, "x", [], [])
    node = asked(recorder, "q", "x", "m").turn
    assert node is not None
    assert node.index == 0


def test_turn_recorded_during_a_call_is_extended_by_it() -> None:
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    early = asked(recorder, "q", "x", "m")  # a client that knew the answer before it was recorded
    assert (early.kind, early.turn) == ("root", None)
    record_reply(recorder, asked(recorder, "q"), "x", [1], [2])
    turn = record_reply(recorder, early, "y", [1, 2, 3], [4])
    assert (turn.parent, turn.prefix, turn.prompt) == (0, 2, ints([3]))
    assert [message.text for message in turn.messages] == ["m"]
    assert recorder.counts == TurnCounts(turns=2, roots=1, extended=1)


def test_reply_without_reasoning_matches_the_longest_history() -> None:
    recorder = Recorder("a", lambda turn: None)
    question, dropped = b'{"role":"user","content":"q"}', b'{"role":"assistant","content":"x"}'
    more, made = b'{"role":"user","content":"m"}', b'{"role":"assistant","content":"y"}'

    def answer(
        entries: list[bytes], text: str, reasoning: str | None, prompt: list[int], sampled: list[int]
    ) -> int:
        match = recorder.match_history("policy", entries)
        response = Message("assistant", text, reasoning=reasoning)
        turn = recorder.record(match, prompt=ints(prompt), response=response, sampled=ints(sampled))
        return -1 if turn.parent is None else turn.parent

    assert answer([question], "x", "one", [1], [2]) == -1
    assert answer([question, dropped, more], "y", None, [1, 2, 3], [4]) == 0
    assert answer([question], "x", "two", [1], [5]) == -1
    later = recorder.match_history("policy", [question, dropped])
    assert later.turn is not None
    assert later.turn.index == 2
    assert answer([question, dropped, more, made, more], "z", None, [1, 2, 3, 4, 3], [6]) == 1
    encodings_of_reply = [
        b'{"role":"assistant","content":"x","reasoning":"%s"}' % word for word in (b"one", b"two", b"three")
    ]
    found = [recorder.match_history("policy", [question, one, more]) for one in encodings_of_reply]
    assert [(match.turn and match.turn.index, match.kind) for match in found] == [
        (0, "forks"),
        (2, "extends"),
        (None, "forks"),
    ]
    assert [message.reasoning for message in found[0].messages()] == [None, "one", None]


def test_known_encodings_are_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int | None] = []

    def counting(raw: bytes | msgspec.Raw, position: int | None = None) -> Message:
        read.append(position)
        return parse_message(raw, position)

    monkeypatch.setattr("rookery.trajectories.message_tree.parse_message", counting)
    recorder = Recorder("a", lambda turn: None)
    raws: list[bytes] = []
    for n in range(50):
        raws.append(b'{"role": "user", "content": "%d"}' % n)
        read.clear()
        match = recorder.match_history("policy", [msgspec.Raw(raw) for raw in raws])
        assert read == ([2 * n - 1, 2 * n] if n else [0])  # the answer as this client spells it, and what is new
        recorder.record(match, prompt=b"", response=Message("assistant", str(n)), sampled=b"")
        raws.append(b'{"content": "%d", "role": "assistant"}' % n)
    read.clear()
    raws[10] = b'{"role": "user", "content": "5", "cache_control": {}}'
    assert recorder.match_history("policy", raws).kind == "extends"
    assert recorder.match_history("policy", raws).kind == "extends"
    assert read == [10, 99]


def test_many_roots_and_leaves_are_all_found() -> None:
    recorder = Recorder("a", lambda turn: None)
    for n in range(40):
        record_reply(recorder, asked(recorder, f"q{n}"), "x", [n], [2])
    for n in range(40):
        match = asked(recorder, f"q{n}", "x", "m")
        assert match.turn is not None
        assert (match.turn.index, match.kind) == (n, "extends")
        record_reply(recorder, match, "y", [n, 2, 3], [4])
    assert recorder.counts == TurnCounts(turns=80, roots=40, extended=40)
