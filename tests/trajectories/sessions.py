"""Sessions as they happen to be, and a reference that compares meanings one by one.

The calls of a session are edited, compacted, branched, sampled several times, made by sub-agents with tools of
their own, spelled anew each time, and answered in any order; tokenisation drifts; the process restarts.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from rookery.core import Message, Turn, ints
from rookery.trajectories import HistoryMatch, MessageInput, Recorder, TurnCounts
from tests.trajectories.spelling import Said, spelled


@dataclass(eq=False)
class Spot:
    """A message at its place: what the reference keeps of a history."""

    said: Said | None
    above: "Spot | None" = None
    below: "list[Spot]" = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    @property
    def path(self) -> list["Spot"]:
        return [] if self.above is None else [*self.above.path, self]


class Reference:
    """The same rules as the recorder's, the plain way: everything is compared with everything, at every call."""

    def __init__(self) -> None:
        self.tops: dict[tuple[str, bytes], Spot] = {}
        self.tokens: dict[int, list[int]] = {}
        """Prompt and sampled ids of each turn that has any."""
        self.counts = TurnCounts()
        self.spots: dict[int, Spot] = {}

    def find(self, role: str, scope: bytes, said: list[Said]) -> tuple[list[Spot], str, Spot]:
        """The deepest answers that the history begins with, the kind of the place, and the latest of them."""
        top = self.tops.setdefault((role, scope), Spot(None))
        level, reached = [top], [top]
        answers: list[Spot] = []
        for one in said:
            level = [spot for before in level for spot in before.below if spot.said and one.same(spot.said)]
            if not level:
                break
            reached = level
            answers = [spot for spot in level if spot.turns] or answers
        if not answers:
            return [], "root" if reached == [top] else "forks", top
        latest = max(answers, key=lambda spot: spot.turns[-1])
        kind = "extends" if latest in reached and not latest.below else "forks"
        return answers, kind, latest

    def record(self, turn: Turn, start: Spot, new: list[Said], response: Said, prompt: list[int]) -> None:
        """Checks a turn that was made for `new` messages after `start`, and keeps it."""
        at, made = start, False
        for one in new:
            found = [spot for spot in at.below if spot.said and one.same(spot.said)]
            if not found:
                break
            at = max(found, key=lambda spot: spot.said is not None and spot.said.reasoning == one.reasoning)
        shared = at
        for one in new[len(at.path) - len(start.path) :]:
            made = True
            at.below.append(Spot(one, at))
            at = at.below[-1]
        told = [spot for spot in (shared if made else at).path if any(n in self.tokens for n in spot.turns)]
        exact = [
            (len(spot.path), len(self.tokens[n]), n)
            for spot in told
            for n in spot.turns
            if n in self.tokens and prompt and self.tokens[n] == prompt[: len(self.tokens[n])]
        ]
        whole = [spot.said for spot in at.path]
        if exact:
            deepest = max(exact)[:2]
            assert turn.parent in {n for *rest, n in exact if tuple(rest) == deepest}
            assert turn.prefix == deepest[1]
        else:
            assert turn.prefix == 0
            assert turn.parent is None if not start.turns else turn.parent in start.turns
        known = [] if turn.parent is None else [spot.said for spot in self.spots[turn.parent].path]
        assert [said_of(message) for message in turn.messages] == reasoned(whole[len(known) :], turn.messages)
        counts = self.counts
        counts.turns += 1
        counts.forks += shared.above is not None and bool(shared.below) and (shared is at or len(shared.below) > 1)
        if turn.parent is None:
            counts.roots += 1
        elif prompt and told and (not exact or max(exact)[0] < len(told[-1].path)):
            counts.drifted += 1
        elif exact:
            counts.extended += 1
        else:
            counts.without_tokens += 1
        same = [spot for spot in at.below if spot.said == response]
        if not same:
            at.below.append(Spot(response, at))
            same = at.below[-1:]
        same[0].turns.append(turn.index)
        self.spots[turn.index] = same[0]


def said_of(message: Message) -> Said:
    calls = tuple(
        (call.id, call.name, json.dumps(json.loads(call.arguments), separators=(",", ":"), sort_keys=True))
        for call in message.tool_calls
    )
    return Said(message.role, message.text, calls, message.tool_call_id, message.reasoning or "")


def reasoned(known: list[Said | None], came: tuple[Message, ...]) -> list[Said]:
    """The messages as they came, which may leave out reasoning that is known."""
    assert len(known) == len(came)
    return [
        msgspec.structs.replace(said, reasoning=message.reasoning or "")
        for said, message in zip(known, came, strict=True)
        if said is not None
    ]


questions = st.builds(Said, st.sampled_from(["user", "system"]), st.sampled_from(["a", "b"]))
results = st.builds(Said, st.just("tool"), st.sampled_from(["", "5"]), st.just(()), st.just("c1"))
CALLS = ((), (), (("c1", "f", '{"x":1,"y":[2]}'),), (("c1", "f", '{"x":1.0,"y":[2]}'),))
answers = st.builds(
    Said,
    st.just("assistant"),
    st.sampled_from(["", "b"]),
    st.sampled_from(CALLS),
    st.none(),
    st.sampled_from(["", "", "r", "s"]),
)
some = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@dataclass
class Asked:
    """A call that waits for its answer."""

    said: list[Said]
    start: Spot
    place: HistoryMatch
    shadow: HistoryMatch | None
    prompt: list[int]
    added: list[int] | None


class World:
    """One session, the reference beside it, and after a restart also the one that was restored."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.turns: list[Turn] = []
        self.recorder = Recorder("0.0.1", self.turns.append)
        self.shadow: Recorder | None = None
        self.mirrored: list[Turn] = []
        self.reference = Reference()
        self.asked: list[Asked] = []
        self.whole: list[tuple[str, bytes, list[Said]]] = []

    def history(self) -> tuple[str, bytes, list[Said]]:
        """A new conversation, or an earlier one that goes on, goes back, leaves something out, or changes."""
        draw = self.draw
        role = draw(st.sampled_from(["policy", "policy", "judge"]))
        scope = draw(st.sampled_from([b"", b"", b"tools"]))
        if not self.whole or draw(st.integers(0, 5)) == 0:
            return role, scope, draw(st.lists(questions | answers, min_size=1, max_size=3))
        role, scope, said = self.whole[-1] if draw(st.booleans()) else draw(st.sampled_from(self.whole))
        said = list(said)
        match draw(st.sampled_from(["on", "on", "on", "on", "back", "compact", "edit", "tools"])):
            case "back":
                said = said[: draw(st.integers(1, len(said)))]
            case "compact":
                keep = draw(st.integers(0, len(said)))
                said = [*said[:keep], *said[draw(st.integers(keep, len(said))) :]]
            case "edit":
                said[draw(st.integers(0, len(said) - 1))] = draw(questions | answers)
            case "tools":
                scope = draw(st.sampled_from([b"", b"tools"]))
        said = [
            msgspec.structs.replace(one, reasoning="") if one.reasoning and draw(st.integers(0, 2)) == 0 else one
            for one in said
        ]
        return role, scope, [*said, *draw(st.lists(questions | results, min_size=0 if said else 1, max_size=2))]

    def entries(self, said: list[Said]) -> list[MessageInput]:
        found: list[MessageInput] = []
        kind = self.draw(st.sampled_from(["messages", "raw", "raw", "bytes", "mixed"]))
        random = Random(self.draw(st.integers(0, 9)))  # few seeds, so that spellings come again
        for one in said:
            match kind if kind != "mixed" else random.choice(["messages", "raw", "bytes"]):
                case "messages":
                    found.append(one.message())
                case "raw":
                    found.append(msgspec.Raw(spelled(random, one)))
                case _:
                    found.append(spelled(random, one))
        return found

    def ask(self) -> None:
        draw = self.draw
        role, scope, said = self.history()
        entries = self.entries(said)
        place = self.recorder.match_history(role, entries, scope)
        found, kind, start = self.reference.find(role, scope, said)
        depth = len(start.path)
        assert (place.kind, place.role, len(place.new_messages)) == (kind, role, len(said) - depth)
        assert (place.turn is None) == (not found)
        if place.turn is not None:
            assert place.turn.index in start.turns
        assert all(one.same(said_of(message)) for one, message in zip(said, place.messages(), strict=True))
        assert [said_of(message).reasoning for message in place.new_messages] == [
            one.reasoning for one in said[depth:]
        ]
        shadow = None
        if self.shadow is not None:
            shadow = self.shadow.match_history(role, entries, scope)
            assert (shadow.kind, shadow.new_messages and shadow.new_messages[-1].role) == (
                kind,
                place.new_messages and place.new_messages[-1].role,
            )
            assert (shadow.turn and shadow.turn.index) == (place.turn and place.turn.index)
            assert [said_of(message) for message in shadow.messages()] == [
                said_of(message) for message in place.messages()
            ]
        added: list[int] | None = None
        node = place.turn
        if node is not None and node.length and draw(st.integers(0, 3)):
            more = draw(st.lists(st.integers(0, 2), max_size=2))
            prompt = np.frombuffer(node.tokens(), "<i4").tolist() + more
            added = more if draw(st.booleans()) else None
        else:
            prompt = draw(st.just([]) | some | st.just([9, 8, 7]))  # nothing told, or rendered anew
            if (
                node is not None and node.length and draw(st.booleans())
            ):  # the template changed its mind further on
                known = np.frombuffer(node.tokens(), "<i4").tolist()
                prompt = [*known[: draw(st.integers(0, len(known)))], *prompt]
        self.asked.append(Asked(said, start, place, shadow, prompt, added))

    def answer(self, n: int) -> None:
        draw = self.draw
        asked = self.asked.pop(n)
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):  # several answers to one question
            response = draw(answers)
            sampled = draw(some if asked.prompt else st.just([]))
            if draw(st.integers(0, 9)) == 0:
                sampled = []
            ids: dict[str, Any] = {"prompt": ints(asked.prompt)}
            if asked.added is not None:
                ids = {"appended": ints(asked.added)}
            rest: dict[str, Any] = {"response": response.message(), "sampled": ints(sampled), "version": 3}
            rest["finish"] = draw(st.sampled_from(["stop", "length"]))
            turn = self.recorder.record(asked.place, **ids, **rest)
            assert turn is self.turns[-1]
            if asked.added is None:
                new = asked.said[len(asked.start.path) :]
                self.reference.record(turn, asked.start, new, response, asked.prompt)
            else:
                assert asked.place.turn is not None
                assert (turn.parent, turn.prefix) == (asked.place.turn.index, asked.place.turn.length)
                self.reference.record(
                    turn, asked.start, asked.said[len(asked.start.path) :], response, asked.prompt
                )
            if sampled:
                self.reference.tokens[turn.index] = asked.prompt + sampled
            if asked.shadow is not None and self.shadow is not None:
                assert self.shadow.record(asked.shadow, **ids, **rest) == turn
                assert self.mirrored.pop() == turn
            self.whole.append((turn.role, asked.place.scope, [*asked.said, response]))

    def restart(self) -> None:
        """Calls under way are lost with the process."""
        self.asked.clear()
        stored = [msgspec.msgpack.decode(msgspec.msgpack.encode(turn), type=Turn) for turn in self.turns]
        self.shadow = Recorder.restore("0.0.1", self.draw(st.permutations(stored)), self.mirrored.append)
        assert self.mirrored == []


def played(data: st.DataObject) -> World:
    draw: Callable[[st.SearchStrategy[Any]], Any] = data.draw
    world = World(draw)
    for _ in range(draw(st.integers(1, 14))):
        world.ask()
        while world.asked and draw(st.integers(0, 3)):
            world.answer(draw(st.integers(0, len(world.asked) - 1)))
        if draw(st.integers(0, 7)) == 0:
            world.restart()
    while world.asked:
        world.answer(0)
    return world
