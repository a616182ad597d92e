"""Random sessions of a recorder, and a reference implementation that compares all messages one by one.

Calls of a session are edited, compacted, branched, sampled several times, made by sub-agents with their own tools,
encoded differently each time, and answered in any order. Tokenisation drifts, and the process restarts.
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
from tests.trajectories.message_encodings import CanonicalMessage, encode_like_a_client


@dataclass(eq=False)
class ReferenceNode:
    """A message of the reference's message tree."""

    message: CanonicalMessage | None
    parent: "ReferenceNode | None" = None
    children: "list[ReferenceNode]" = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    @property
    def path(self) -> list["ReferenceNode"]:
        return [] if self.parent is None else [*self.parent.path, self]


class Reference:
    """The rules of the recorder in the simplest form: every call compares all messages."""

    def __init__(self) -> None:
        self.roots: dict[tuple[str, bytes], ReferenceNode] = {}
        self.tokens: dict[int, list[int]] = {}
        """Prompt and sampled token IDs of each turn that has any."""
        self.counts = TurnCounts()
        self.node_of_turn: dict[int, ReferenceNode] = {}

    def find(
        self, role: str, scope: bytes, history: list[CanonicalMessage]
    ) -> tuple[list[ReferenceNode], str, ReferenceNode]:
        """Return the deepest replies that the history starts with, the kind of match, and the latest reply."""
        top = self.roots.setdefault((role, scope), ReferenceNode(None))
        frontier, reached = [top], [top]
        answers: list[ReferenceNode] = []
        for one in history:
            frontier = [
                node
                for before in frontier
                for node in before.children
                if node.message and one.matches(node.message)
            ]
            if not frontier:
                break
            reached = frontier
            answers = [node for node in frontier if node.turns] or answers
        if not answers:
            return [], "root" if reached == [top] else "forks", top
        latest = max(answers, key=lambda node: node.turns[-1])
        kind = "extends" if latest in reached and not latest.children else "forks"
        return answers, kind, latest

    def record(
        self,
        turn: Turn,
        start: ReferenceNode,
        new: list[CanonicalMessage],
        response: CanonicalMessage,
        prompt: list[int],
    ) -> None:
        """Check a turn that was recorded for `new` messages after `start`, and store it."""
        at, created = start, False
        for one in new:
            found = [node for node in at.children if node.message and one.matches(node.message)]
            if not found:
                break
            at = max(found, key=lambda node: node.message is not None and node.message.reasoning == one.reasoning)
        shared = at
        for one in new[len(at.path) - len(start.path) :]:
            created = True
            at.children.append(ReferenceNode(one, at))
            at = at.children[-1]
        with_tokens = [
            node for node in (shared if created else at).path if any(n in self.tokens for n in node.turns)
        ]
        exact = [
            (len(node.path), len(self.tokens[n]), n)
            for node in with_tokens
            for n in node.turns
            if n in self.tokens and prompt and self.tokens[n] == prompt[: len(self.tokens[n])]
        ]
        history = [node.message for node in at.path]
        if exact:
            deepest = max(exact)[:2]
            assert turn.parent in {n for *rest, n in exact if tuple(rest) == deepest}
            assert turn.prefix == deepest[1]
        else:
            assert turn.prefix == 0
            assert turn.parent is None if not start.turns else turn.parent in start.turns
        known = [] if turn.parent is None else [node.message for node in self.node_of_turn[turn.parent].path]
        assert [canonicalize(message) for message in turn.messages] == with_client_reasoning(
            history[len(known) :], turn.messages
        )
        counts = self.counts
        counts.turns += 1
        counts.forks += (
            shared.parent is not None and bool(shared.children) and (shared is at or len(shared.children) > 1)
        )
        if turn.parent is None:
            counts.roots += 1
        elif prompt and with_tokens and (not exact or max(exact)[0] < len(with_tokens[-1].path)):
            counts.drifted += 1
        elif exact:
            counts.extended += 1
        else:
            counts.without_tokens += 1
        same = [node for node in at.children if node.message == response]
        if not same:
            at.children.append(ReferenceNode(response, at))
            same = at.children[-1:]
        same[0].turns.append(turn.index)
        self.node_of_turn[turn.index] = same[0]


def canonicalize(message: Message) -> CanonicalMessage:
    calls = tuple(
        (call.id, call.name, json.dumps(json.loads(call.arguments), separators=(",", ":"), sort_keys=True))
        for call in message.tool_calls
    )
    return CanonicalMessage(message.role, message.text, calls, message.tool_call_id, message.reasoning or "")


def with_client_reasoning(
    known: list[CanonicalMessage | None], received: tuple[Message, ...]
) -> list[CanonicalMessage]:
    """Return the messages as received; a client may leave out known reasoning."""
    assert len(known) == len(received)
    return [
        msgspec.structs.replace(history, reasoning=message.reasoning or "")
        for history, message in zip(known, received, strict=True)
        if history is not None
    ]


questions = st.builds(CanonicalMessage, st.sampled_from(["user", "system"]), st.sampled_from(["a", "b"]))
results = st.builds(CanonicalMessage, st.just("tool"), st.sampled_from(["", "5"]), st.just(()), st.just("c1"))
CALLS = ((), (), (("c1", "f", '{"x":1,"y":[2]}'),), (("c1", "f", '{"x":1.0,"y":[2]}'),))
answers = st.builds(
    CanonicalMessage,
    st.just("assistant"),
    st.sampled_from(["", "b"]),
    st.sampled_from(CALLS),
    st.none(),
    st.sampled_from(["", "", "r", "s"]),
)
token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@dataclass
class PendingCall:
    """A call that has no reply yet."""

    history: list[CanonicalMessage]
    start: ReferenceNode
    match: HistoryMatch
    restored: HistoryMatch | None
    prompt: list[int]
    added: list[int] | None


class SimulatedSession:
    """A session with the reference and, after a restart, a restored recorder beside it."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.turns: list[Turn] = []
        self.recorder = Recorder("0.0.1", self.turns.append)
        self.restored: Recorder | None = None
        self.restored_turns: list[Turn] = []
        self.reference = Reference()
        self.pending: list[PendingCall] = []
        self.conversations: list[tuple[str, bytes, list[CanonicalMessage]]] = []

    def draw_history(self) -> tuple[str, bytes, list[CanonicalMessage]]:
        """Draw a new conversation, or an earlier one that is continued, rewound, compacted or edited."""
        draw = self.draw
        role = draw(st.sampled_from(["policy", "policy", "judge"]))
        scope = draw(st.sampled_from([b"", b"", b"tools"]))
        if not self.conversations or draw(st.integers(0, 5)) == 0:
            return role, scope, draw(st.lists(questions | answers, min_size=1, max_size=3))
        role, scope, history = (
            self.conversations[-1] if draw(st.booleans()) else draw(st.sampled_from(self.conversations))
        )
        history = list(history)
        match draw(st.sampled_from(["on", "on", "on", "on", "back", "compact", "edit", "tools"])):
            case "back":
                history = history[: draw(st.integers(1, len(history)))]
            case "compact":
                keep = draw(st.integers(0, len(history)))
                history = [*history[:keep], *history[draw(st.integers(keep, len(history))) :]]
            case "edit":
                history[draw(st.integers(0, len(history) - 1))] = draw(questions | answers)
            case "tools":
                scope = draw(st.sampled_from([b"", b"tools"]))
        history = [
            msgspec.structs.replace(one, reasoning="") if one.reasoning and draw(st.integers(0, 2)) == 0 else one
            for one in history
        ]
        return (
            role,
            scope,
            [*history, *draw(st.lists(questions | results, min_size=0 if history else 1, max_size=2))],
        )

    def entries(self, history: list[CanonicalMessage]) -> list[MessageInput]:
        found: list[MessageInput] = []
        kind = self.draw(st.sampled_from(["messages", "raw", "raw", "bytes", "mixed"]))
        random = Random(self.draw(st.integers(0, 9)))  # few seeds, so that encodings repeat
        for one in history:
            match kind if kind != "mixed" else random.choice(["messages", "raw", "bytes"]):
                case "messages":
                    found.append(one.message())
                case "raw":
                    found.append(msgspec.Raw(encode_like_a_client(random, one)))
                case _:
                    found.append(encode_like_a_client(random, one))
        return found

    def ask(self) -> None:
        draw = self.draw
        role, scope, history = self.draw_history()
        entries = self.entries(history)
        match = self.recorder.match_history(role, entries, scope)
        found, kind, start = self.reference.find(role, scope, history)
        depth = len(start.path)
        assert (match.kind, match.role, len(match.new_messages)) == (kind, role, len(history) - depth)
        assert (match.turn is None) == (not found)
        if match.turn is not None:
            assert match.turn.index in start.turns
        assert all(
            one.matches(canonicalize(message)) for one, message in zip(history, match.messages(), strict=True)
        )
        assert [canonicalize(message).reasoning for message in match.new_messages] == [
            one.reasoning for one in history[depth:]
        ]
        restored = None
        if self.restored is not None:
            restored = self.restored.match_history(role, entries, scope)
            assert (restored.kind, restored.new_messages and restored.new_messages[-1].role) == (
                kind,
                match.new_messages and match.new_messages[-1].role,
            )
            assert (restored.turn and restored.turn.index) == (match.turn and match.turn.index)
            assert [canonicalize(message) for message in restored.messages()] == [
                canonicalize(message) for message in match.messages()
            ]
        added: list[int] | None = None
        node = match.turn
        if node is not None and node.length and draw(st.integers(0, 3)):
            more = draw(st.lists(st.integers(0, 2), max_size=2))
            prompt = np.frombuffer(node.tokens(), "<i4").tolist() + more
            added = more if draw(st.booleans()) else None
        else:
            prompt = draw(st.just([]) | token_lists | st.just([9, 8, 7]))  # no token IDs, or a new rendering
            if (
                node is not None and node.length and draw(st.booleans())
            ):  # the template renders an earlier message differently
                known = np.frombuffer(node.tokens(), "<i4").tolist()
                prompt = [*known[: draw(st.integers(0, len(known)))], *prompt]
        self.pending.append(PendingCall(history, start, match, restored, prompt, added))

    def answer(self, n: int) -> None:
        draw = self.draw
        pending = self.pending.pop(n)
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):  # several answers to one question
            response = draw(answers)
            sampled = draw(token_lists if pending.prompt else st.just([]))
            if draw(st.integers(0, 9)) == 0:
                sampled = []
            ids: dict[str, Any] = {"prompt": ints(pending.prompt)}
            if pending.added is not None:
                ids = {"appended": ints(pending.added)}
            rest: dict[str, Any] = {"response": response.message(), "sampled": ints(sampled), "version": 3}
            rest["finish"] = draw(st.sampled_from(["stop", "length"]))
            turn = self.recorder.record(pending.match, **ids, **rest)
            assert turn is self.turns[-1]
            if pending.added is None:
                new = pending.history[len(pending.start.path) :]
                self.reference.record(turn, pending.start, new, response, pending.prompt)
            else:
                assert pending.match.turn is not None
                assert (turn.parent, turn.prefix) == (pending.match.turn.index, pending.match.turn.length)
                self.reference.record(
                    turn, pending.start, pending.history[len(pending.start.path) :], response, pending.prompt
                )
            if sampled:
                self.reference.tokens[turn.index] = pending.prompt + sampled
            if pending.restored is not None and self.restored is not None:
                assert self.restored.record(pending.restored, **ids, **rest) == turn
                assert self.restored_turns.pop() == turn
            self.conversations.append((turn.role, pending.match.scope, [*pending.history, response]))

    def restart(self) -> None:
        """Restart the recorder; pending calls are lost with the process."""
        self.pending.clear()
        stored = [msgspec.msgpack.decode(msgspec.msgpack.encode(turn), type=Turn) for turn in self.turns]
        self.restored = Recorder.restore("0.0.1", self.draw(st.permutations(stored)), self.restored_turns.append)
        assert self.restored_turns == []


def simulate_session(data: st.DataObject) -> SimulatedSession:
    draw: Callable[[st.SearchStrategy[Any]], Any] = data.draw
    session = SimulatedSession(draw)
    for _ in range(draw(st.integers(1, 14))):
        session.ask()
        while session.pending and draw(st.integers(0, 3)):
            session.answer(draw(st.integers(0, len(session.pending) - 1)))
        if draw(st.integers(0, 7)) == 0:
            session.restart()
    while session.pending:
        session.answer(0)
    return session
