"""The recorder against a reference, over histories that branch and overlap; and its sentences one by one."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import JournalError, Message, Turn, ints
from rookery.trajectories import Counts, MessageError, Place, Recorder, message_of, segments, transcript
from tests.trajectories.sessions import answers, played, questions
from tests.trajectories.spelling import Said, spelling


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_the_recorder_agrees_with_the_reference_and_with_the_one_that_restarted(data: st.DataObject) -> None:
    world = played(data)
    counts = world.recorder.counts
    assert counts == world.reference.counts
    assert counts.turns == len(world.turns) == world.recorder.count
    assert counts.turns == counts.roots + counts.extended + counts.drifted + counts.untold
    if world.shadow is not None:
        assert world.shadow.counts == counts
    assert [turn.index for turn in world.turns] == list(range(len(world.turns)))
    for role in ("policy", "judge"):
        made = segments(world.turns, role)
        assert sorted(index for one in made for index in one.turns) == [
            turn.index for turn in world.turns if turn.role == role and turn.sampled
        ]
        for one in made:
            tokens = np.frombuffer(one.tokens, "<i4").tolist()
            for index, span in zip(one.turns, one.versions, strict=True):
                assert tokens[: span.end] == world.reference.tokens[index]
                assert ints(tokens[span.start : span.end]) == world.turns[index].sampled


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_ids_of_a_node_stay_what_they_were_whatever_is_recorded_after_it(data: st.DataObject) -> None:
    world = played(data)
    for trees in world.recorder._trees.values():
        for fan in trees.tree._fans.values():
            for node in (node for step in fan.steps for node in step.nodes):
                known = world.reference.tokens.get(node.index, [])
                turn = world.turns[node.index]
                assert node.tokens() == ints(known)
                assert node.length == len(known)
                assert node.sampled == turn.sampled
                prompt = known[: len(known) - len(turn.sampled) // 4]
                assert [node.tail(n) for n in (1, 2, 99)] == [ints(prompt[-n:]) for n in (1, 2, 99)]
                assert (node.response, node.finish) == (turn.response, turn.finish)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.lists(st.tuples(questions, answers), min_size=1, max_size=6))
def test_noise_never_forks_a_conversation(data: st.DataObject, steps: list[tuple[Said, Said]]) -> None:
    turns: list[Turn] = []
    recorder = Recorder("0.0.1", turns.append)
    said: list[Said] = []
    for n, (question, answer) in enumerate(steps):
        said.append(question)
        place = recorder.find("policy", [data.draw(spelling(one)) for one in said])
        assert place.kind == ("extends" if n else "root")
        node = place.turn
        recorder.record(
            place,
            prompt=(node.tokens() if node else b"") + ints([n]),
            response=answer.message(),
            sampled=ints([7]),
        )
        said.append(msgspec.structs.replace(answer, reasoning=data.draw(st.sampled_from(["", answer.reasoning]))))
    assert recorder.counts == Counts(turns=len(steps), roots=1, extended=len(steps) - 1)
    (segment,) = segments(turns)
    assert segment.turns == tuple(range(len(steps)))
    assert len(transcript(turns)) == 2 * len(steps)


# ---- single sentences


def asked(recorder: Recorder, *texts: str, scope: bytes = b"") -> Place:
    roles = ("user", "assistant")
    return recorder.find("policy", [Message(roles[n % 2], text) for n, text in enumerate(texts)], scope)  # type: ignore[arg-type]


def answered(
    recorder: Recorder, place: Place, text: str, prompt: list[int], sampled: list[int], **rest: Any
) -> Turn:
    return recorder.record(
        place, prompt=ints(prompt), response=Message("assistant", text), sampled=ints(sampled), **rest
    )


def test_equal_answers_with_other_ids_are_told_apart_by_the_prompt_that_follows() -> None:
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    one, two = asked(recorder, "q"), asked(recorder, "q")
    answered(recorder, one, "x", [1], [2, 3])
    answered(recorder, two, "x", [1], [4])
    follow = asked(recorder, "q", "x", "more")
    assert follow.kind == "extends"
    assert answered(recorder, follow, "y", [1, 2, 3, 5], [6]).parent == 0
    assert answered(recorder, follow, "z", [1, 4, 5], [6]).parent == 1
    assert recorder.counts == Counts(turns=4, roots=2, extended=2, forks=2)


def test_drift_is_counted_and_the_whole_prompt_is_kept() -> None:
    recorder = Recorder("a", lambda turn: None)
    answered(recorder, asked(recorder, "q"), "x", [1], [2])
    turn = answered(recorder, asked(recorder, "q", "x", "more"), "y", [1, 9, 3], [4])
    assert (turn.parent, turn.prefix, turn.prompt) == (0, 0, ints([1, 9, 3]))
    assert recorder.counts == Counts(turns=2, roots=1, drifted=1)


def test_where_the_last_answer_drifted_an_earlier_turn_whose_ids_are_exact_is_extended() -> None:
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    answered(recorder, asked(recorder, "q"), "x", [1], [2])
    answered(recorder, asked(recorder, "q", "x", "r"), "y", [1, 2, 3], [4])
    turn = answered(recorder, asked(recorder, "q", "x", "r", "y", "s"), "z", [1, 2, 3, 9, 5], [6])
    assert (turn.parent, turn.prefix, turn.prompt) == (0, 2, ints([3, 9, 5]))
    assert [message.text for message in turn.messages] == ["r", "y", "s"]
    assert [message.text for message in transcript(turns)] == ["q", "x", "r", "y", "s", "z"]
    assert recorder.counts == Counts(turns=3, roots=1, extended=1, drifted=1)
    again = Recorder.restore("a", turns, lambda turn: None)
    assert again.counts == recorder.counts


def test_another_scope_is_another_root_also_after_a_restart() -> None:
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    answered(recorder, asked(recorder, "q", scope=b"one"), "x", [1], [2])
    assert asked(recorder, "q", "x", "m", scope=b"two").kind == "root"
    again = Recorder.restore("a", turns, turns.append)
    assert (turns[0].scope, again.count) == (b"one", 1)
    assert asked(again, "q", "x", "m", scope=b"two").kind == "root"
    place = asked(again, "q", "x", "m", scope=b"one")
    assert place.kind == "extends"
    assert answered(again, place, "y", [1, 2, 3], [4]).scope == b""  # its parent has it


def test_a_turn_that_the_sink_refuses_or_that_does_not_fit_was_never_there() -> None:
    refuse = True

    def sink(turn: Turn) -> None:
        if refuse:
            raise JournalError("disk full")

    recorder = Recorder("a", sink)
    place = asked(recorder, "q")
    with pytest.raises(JournalError):
        answered(recorder, place, "x", [1], [2])
    refuse = False
    with pytest.raises(ValueError, match="logprobs"):
        answered(recorder, place, "x", [1], [2], logprobs=b"abcdefgh")
    assert recorder.counts == Counts()
    assert asked(recorder, "q", "x", "m").kind == "root"
    assert answered(recorder, place, "x", [1], [2]).index == 0


def test_an_entry_that_is_no_message_is_refused_with_its_position_and_leaves_nothing() -> None:
    recorder = Recorder("a", lambda turn: None)
    answered(recorder, asked(recorder, "q"), "x", [1], [2])
    known = [b'{"role":"user","content":"q"}', b'{"role":"assistant","content":"x"}']
    for bad in (b'{"role":"bot"}', msgspec.Raw(b"null")):
        with pytest.raises(MessageError, match="message 2 is no chat message") as caught:
            recorder.find("policy", [*known, bad])
        assert caught.value.position == 2
    assert recorder.find("policy", [*known, b'{"role":"user","content":"y"}']).kind == "extends"


def test_calls_that_are_never_answered_leave_nothing() -> None:
    recorder = Recorder("a", lambda turn: None)
    first = asked(recorder, "q", scope=b"s")
    for n in range(5):
        asked(recorder, "q", str(n), scope=b"%d" % n)
    assert recorder._trees == {}
    other = asked(recorder, "q", scope=b"s")
    answered(recorder, first, "x", [1], [2])
    assert answered(recorder, other, "y", [1], [3]).parent is None
    assert recorder.counts == Counts(turns=2, roots=2, forks=1)
    for n in range(5):
        assert asked(recorder, "q", "x", str(n), scope=b"s").kind == "extends"


def test_added_ids_need_a_turn_with_ids_to_go_after() -> None:
    recorder = Recorder("a", lambda turn: None)
    rest: dict[str, Any] = {"response": Message("assistant", "x"), "sampled": ints([2])}
    with pytest.raises(ValueError, match="`added` ids"):
        recorder.record(asked(recorder, "q"), added=ints([1]), **rest)
    recorder.record(asked(recorder, "q"), prompt=ints([1]), **rest)
    with pytest.raises(ValueError, match="`added` ids"):
        recorder.record(asked(recorder, "q", "x"), added=ints([1]), prompt=ints([1]), **rest)


def test_turns_that_do_not_fit_together_are_not_restored() -> None:
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    answered(recorder, asked(recorder, "q"), "x", [1], [2])
    answered(recorder, asked(recorder, "q", "x", "m"), "y", [1, 2, 3], [4])
    other = msgspec.structs.replace(turns[0], attempt="b")
    assert Recorder.restore("a", [other, *turns], turns.append).count == 2
    for bad, words in (
        (turns[1:], "extends turn 0, which is not there"),
        ([*turns, turns[0]], "has two turns 0"),
        ([turns[0], msgspec.structs.replace(turns[1], prefix=3)], "extends 3 tokens of turn 0, which has 2"),
    ):
        with pytest.raises(JournalError, match=words):
            Recorder.restore("a", bad, turns.append)


def test_a_part_that_python_takes_for_equal_is_an_edit_all_the_same() -> None:
    recorder = Recorder("a", lambda turn: None)
    one, other = (Message("user", ({"type": "x", "n": n},)) for n in (1, True))
    assert one == other
    recorder.record(
        recorder.find("policy", [one]), prompt=ints([1]), response=Message("assistant", "x"), sampled=ints([2])
    )
    assert recorder.find("policy", [other, Message("assistant", "x")]).kind == "root"
    assert recorder.find("policy", [one, Message("assistant", "x")]).kind == "extends"


def test_a_turn_that_came_to_its_end_is_gone_on_from_before_one_that_was_cut() -> None:
    recorder = Recorder("a", lambda turn: None)
    place = asked(recorder, "q")
    answered(recorder, place, "x", [1], [2])
    answered(recorder, place, "x", [1], [3], finish="length")
    answered(recorder, place, "x", [], [])
    node = asked(recorder, "q", "x", "m").turn
    assert node is not None
    assert node.index == 0


def test_a_turn_recorded_while_a_call_was_under_way_is_extended_where_the_call_began_with_it() -> None:
    turns: list[Turn] = []
    recorder = Recorder("a", turns.append)
    early = asked(recorder, "q", "x", "m")  # a client that knew the answer before it was recorded
    assert (early.kind, early.turn) == ("root", None)
    answered(recorder, asked(recorder, "q"), "x", [1], [2])
    turn = answered(recorder, early, "y", [1, 2, 3], [4])
    assert (turn.parent, turn.prefix, turn.prompt) == (0, 2, ints([3]))
    assert [message.text for message in turn.messages] == ["m"]
    assert recorder.counts == Counts(turns=2, roots=1, extended=1)


def test_an_answer_without_its_reasoning_means_whichever_leads_further() -> None:
    recorder = Recorder("a", lambda turn: None)
    question, dropped = b'{"role":"user","content":"q"}', b'{"role":"assistant","content":"x"}'
    more, made = b'{"role":"user","content":"m"}', b'{"role":"assistant","content":"y"}'

    def answer(
        entries: list[bytes], text: str, reasoning: str | None, prompt: list[int], sampled: list[int]
    ) -> int:
        place = recorder.find("policy", entries)
        response = Message("assistant", text, reasoning=reasoning)
        turn = recorder.record(place, prompt=ints(prompt), response=response, sampled=ints(sampled))
        return -1 if turn.parent is None else turn.parent

    assert answer([question], "x", "one", [1], [2]) == -1
    assert answer([question, dropped, more], "y", None, [1, 2, 3], [4]) == 0
    assert answer([question], "x", "two", [1], [5]) == -1
    later = recorder.find("policy", [question, dropped])
    assert later.turn is not None
    assert later.turn.index == 2
    assert answer([question, dropped, more, made, more], "z", None, [1, 2, 3, 4, 3], [6]) == 1
    told = [b'{"role":"assistant","content":"x","reasoning":"%s"}' % word for word in (b"one", b"two", b"three")]
    found = [recorder.find("policy", [question, one, more]) for one in told]
    assert [(place.turn and place.turn.index, place.kind) for place in found] == [
        (0, "forks"),
        (2, "extends"),
        (None, "forks"),
    ]
    assert [message.reasoning for message in found[0].messages()] == [None, "one", None]


def test_a_history_is_not_decoded_again_once_its_spelling_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int | None] = []

    def counting(raw: bytes | msgspec.Raw, position: int | None = None) -> Message:
        read.append(position)
        return message_of(raw, position)

    monkeypatch.setattr("rookery.trajectories.histories.message_of", counting)
    recorder = Recorder("a", lambda turn: None)
    raws: list[bytes] = []
    for n in range(50):
        raws.append(b'{"role": "user", "content": "%d"}' % n)
        read.clear()
        place = recorder.find("policy", [msgspec.Raw(raw) for raw in raws])
        assert read == ([2 * n - 1, 2 * n] if n else [0])  # the answer as this client spells it, and what is new
        recorder.record(place, prompt=b"", response=Message("assistant", str(n)), sampled=b"")
        raws.append(b'{"content": "%d", "role": "assistant"}' % n)
    read.clear()
    raws[10] = b'{"role": "user", "content": "5", "cache_control": {}}'
    assert recorder.find("policy", raws).kind == "extends"
    assert recorder.find("policy", raws).kind == "extends"
    assert read == [10, 99]


def test_many_roots_and_tips_are_all_found() -> None:
    recorder = Recorder("a", lambda turn: None)
    for n in range(40):
        answered(recorder, asked(recorder, f"q{n}"), "x", [n], [2])
    for n in range(40):
        place = asked(recorder, f"q{n}", "x", "m")
        assert place.turn is not None
        assert (place.turn.index, place.kind) == (n, "extends")
        answered(recorder, place, "y", [n, 2, 3], [4])
    assert recorder.counts == Counts(turns=80, roots=40, extended=40)
