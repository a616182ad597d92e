"""Turns model calls into turns that store only what is new.

Promises:
- a call extends the longest earlier turn whose messages and answer its history begins with, however old it is;
- a turn shares ids with another only where its prompt begins with the other's ids, exactly; where it should and
  does not, that is counted, and the whole prompt is kept;
- a turn reaches the sink once; one that the sink refuses, or whose arrays do not fit, was never there;
- calls may overlap: what is found before a call can be recorded after any others;
- a recorder made anew from its turns goes on as if it had never stopped.

A recorder belongs to one thread; only the ids of nodes may be read from others.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Literal, Self, TypeAlias

import msgspec

from rookery.core import JournalError, Message, Turn
from rookery.trajectories.histories import Entry, Step, Tree, read
from rookery.trajectories.strands import Agreement, Cut, Node, Strand, begins_with, cuts_of, grown

Kind: TypeAlias = Literal["root", "extends", "forks"]


class Counts(msgspec.Struct):
    """How turns came to be. Each is one of roots, extended, drifted and untold; forks and partial count some of
    them again."""

    turns: int = 0
    roots: int = 0
    """They extend no earlier turn."""
    extended: int = 0
    """Their prompt begins with the ids of the turn that their messages extend."""
    drifted: int = 0
    """Their prompt should begin with an earlier turn's ids, going by the messages, and does not."""
    untold: int = 0
    """They extend a turn by their messages, but there are no ids to compare."""
    forks: int = 0
    """They share messages with an earlier history that goes on in another way."""
    partial: int = 0
    """Their client closed the stream before the answer was complete."""


class Place:
    """Where a call stands among the histories of its role."""

    __slots__ = ("_raws", "_step", "kind", "new", "role", "scope", "turn")

    def __init__(
        self,
        role: str,
        scope: bytes,
        kind: Kind,
        step: Step | None,
        new: tuple[Message, ...],
        raws: Sequence[object],
    ) -> None:
        self.role = role
        self.scope = scope
        self.kind: Kind = kind
        """`root`: it shares no message with an earlier history; `extends`: it begins with the whole of one;
        `forks`: it shares some, and departs from it before its end."""
        self.turn = step.node if step is not None else None
        """The longest earlier turn whose messages and answer it begins with; None at a root."""
        self.new = new
        """The messages after that turn, as they came."""
        self._step = step
        """The place of that turn; None where the tree was not there yet, and for calls without messages."""
        self._raws = raws

    def messages(self) -> tuple[Message, ...]:
        """The whole history. Answers are as they were sampled, also where the client left their reasoning out."""
        known = [step.message for step in self._step.up()] if self._step is not None else []
        return (*reversed(known), *self.new)


class _Trees:
    """What one role and scope said: its histories, and its calls that had only ids."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.bare: dict[Strand, list[Node]] = {}
        """Turns without messages, by the strand that they lie on, in order of length."""

    def longest(self, agreement: Agreement) -> Node | None:
        """The longest turn without messages that a prompt begins with."""
        best: Node | None = None
        for strand, nodes in self.bare.items():
            agreed = agreement.with_strand(strand)
            node = next((found for one in reversed(nodes) if (found := _within(one, agreed)) is not None), None)
            if node is not None and (best is None or (node.end, node.index) > (best.end, best.index)):
                best = node
        return best


class Recorder:
    """Makes the turns of one attempt and hands each to `sink` once."""

    def __init__(self, attempt: str, sink: Callable[[Turn], None]) -> None:
        self._attempt = attempt
        self._sink = sink
        self._trees: dict[tuple[str, bytes], _Trees] = {}
        self.count = 0
        """The index of the next turn."""
        self.counts = Counts()

    @classmethod
    def restore(cls, attempt: str, turns: Iterable[Turn], sink: Callable[[Turn], None]) -> Self:
        """A recorder that goes on after `turns`, which are on disk already; other attempts' are left out."""
        recorder = cls(attempt, sink)
        ends: dict[int, _End] = {}
        for turn in sorted((turn for turn in turns if turn.attempt == attempt), key=lambda turn: turn.index):
            if turn.index in ends:
                raise JournalError(f"attempt {attempt} has two turns {turn.index}")
            recorder._replay(turn, ends)
        return recorder

    def adopt(self, turns: Sequence[Turn]) -> list[Turn]:
        """Takes over the turns of another recorder of the same attempt, under numbers that are free here.

        Those whose parent is not among them cannot be placed: that is a `JournalError`, and nothing is taken.
        """
        other = Recorder.restore(self._attempt, turns, _nowhere)
        ordered = sorted(turns, key=lambda turn: turn.index)
        places = {turn.index: self.count + at for at, turn in enumerate(ordered)}
        moved = [
            msgspec.structs.replace(
                turn, index=places[turn.index], parent=None if turn.parent is None else places[turn.parent]
            )
            for turn in ordered
        ]
        for turn in moved:
            self._sink(turn)
            self.count = turn.index + 1
        for name in Counts.__struct_fields__:
            setattr(self.counts, name, getattr(self.counts, name) + getattr(other.counts, name))
        return moved

    # ---- finding

    def find(self, role: str, entries: Sequence[Entry], scope: bytes = b"") -> Place:
        """Where a call with these messages stands; without messages it is a call with token ids in.

        `scope` is a digest of whatever else shapes the prompt, as tools do: histories share nothing across scopes.
        """
        trees = self._trees.get((role, scope))
        if (
            trees is None or not entries
        ):  # a scope is remembered with its first turn: calls that fail leave nothing
            return Place(role, scope, "root", None, read(entries), entries)
        found = trees.tree.find(entries)
        kind: Kind = "root" if not found.shared else "extends" if found.ends else "forks"
        return Place(role, scope, kind, found.step, found.new, found.raws)

    def _of(self, role: str, scope: bytes) -> _Trees:
        trees = self._trees.get((role, scope))
        if trees is None:
            trees = self._trees[role, scope] = _Trees()
        return trees

    # ---- recording

    def record(
        self,
        place: Place,
        *,
        prompt: bytes | None = None,
        added: bytes | None = None,
        response: Message,
        sampled: bytes,
        **rest: Any,
    ) -> Turn:
        """Commits one turn.

        `prompt` are all ids that went in. A caller that made them out of `place.turn.tokens()` gives those `added`
        to them instead: then nothing is compared, and the cost does not depend on the history.
        """
        step, trees = place._step, self._of(place.role, place.scope)
        if step is None and place.new:
            step = trees.tree.top
        there = trees.tree.follow(step, place.new) if step is not None else []
        messages = place.new
        if added is not None:
            if prompt is not None or place.turn is None or place.turn.strand is None:
                raise ValueError("`added` ids go after those of the place's turn, and come without a `prompt`")
            exact: Node | None = place.turn
            parent, new = exact, added
        else:
            new = prompt or b""
            parent = place.turn
            if (
                parent is not None
                and step is not None
                and not there
                and len(step.nodes) == 1
                and begins_with(new, parent)
            ):
                exact = parent
            else:
                exact, at = _exact(trees, step, there, new)
                if exact is not None and step is not None and at is not None:
                    messages = _between(at, step, place.new)
            if exact is not None:
                parent, new = exact, new[exact.end :]
            elif parent is not None and parent.short and step is not None:
                # The client read less of a partial answer than it was sent, and the prompt does not begin with
                # those tokens: it continues from an earlier turn, and what it read is a message of its own.
                at = next((one for one in step.up() if any(not node.short for node in one.nodes)), trees.tree.top)
                parent = max((one for one in at.nodes if not one.short), key=_index, default=None)
                messages = _between(at, step, place.new)
        turn = Turn(
            attempt=self._attempt,
            index=self.count,
            role=place.role,
            parent=None if parent is None else parent.index,
            scope=place.scope if parent is None else b"",
            messages=messages,
            response=response,
            prefix=0 if exact is None else exact.length,
            prompt=new,
            sampled=sampled,
            **rest,
        )
        drifted = (there != [] or exact is not place.turn) and _drifts(turn, exact, step, there)
        self._sink(turn)
        self._commit(turn, exact, drifted, trees, step, there, place.new, place._raws)
        return turn

    def _commit(
        self,
        turn: Turn,
        exact: Node | None,
        drifted: bool,
        trees: _Trees,
        step: Step | None,
        there: list[Step],
        messages: Sequence[Message],
        raws: Sequence[object],
    ) -> "_End":
        ids: tuple[Strand | None, int, int] = (None, 0, 0)
        if turn.sampled:  # without, nobody knows what the prompt was followed by
            ids = grown(exact, turn.prompt, turn.sampled)
        cuts: list[Cut] = []
        if turn.partial and ids[0] is not None:
            cuts = cuts_of(turn.cuts)
            # Of what was sampled, only what the client was sent can be continued.
            ids = (ids[0], ids[1], ids[1] + 4 * cuts[-1].tokens) if cuts else (None, 0, 0)
        node = Node(turn.index, turn.response, turn.finish, *ids, cuts)
        counts = self.counts
        if step is not None:
            shared = there[-1] if there else step
            counts.forks += shared.depth > 0 and trees.tree.goes_on(shared)
            step = trees.tree.add(step, there, messages, raws, node)
        elif node.strand is not None:
            trees.bare.setdefault(node.strand, []).append(node)
        if turn.parent is None:
            counts.roots += 1
        elif drifted:
            counts.drifted += 1
        elif turn.prefix:
            counts.extended += 1
        else:
            counts.untold += 1
        counts.turns += 1
        counts.partial += turn.partial
        self.count = turn.index + 1
        return _End(trees, step, node)

    def _replay(self, turn: Turn, ends: "dict[int, _End]") -> None:
        if turn.parent is None:
            trees = self._of(turn.role, turn.scope)
            step, exact = (trees.tree.top if turn.messages else None), None
        else:
            end = ends.get(turn.parent)
            if end is None:
                raise JournalError(
                    f"turn {turn.index} of attempt {turn.attempt} extends turn {turn.parent}, which is not there"
                )
            trees, step = end.trees, end.step
            exact = end.node if turn.prefix else None
            if exact is not None and exact.cuts and exact.length != turn.prefix:
                tokens = turn.prefix - exact.prompt_end // 4
                cut = next((cut for cut in exact.cuts if cut.tokens == tokens), None)
                if cut is not None:
                    exact = exact.upto(cut)
                    if step is not None:
                        step, exact = trees.tree.shorten(step, exact)
            if exact is not None and exact.length != turn.prefix:
                raise JournalError(
                    f"turn {turn.index} of attempt {turn.attempt} extends {turn.prefix} tokens of turn "
                    f"{turn.parent}, which has {exact.length}"
                )
        there = trees.tree.follow(step, turn.messages) if step is not None else []
        drifted = _drifts(turn, exact, step, there)
        ends[turn.index] = self._commit(turn, exact, drifted, trees, step, there, turn.messages, ())


def _index(node: Node) -> int:
    return node.index


def _within(node: Node, end: int) -> Node | None:
    """The node, or as much of a partial turn as lies before `end`; None where nothing does."""
    if node.end <= end:
        return node
    cut = next((cut for cut in reversed(node.cuts) if node.prompt_end + 4 * cut.tokens <= end), None)
    return node.upto(cut) if cut is not None else None


def _nowhere(turn: Turn) -> None:
    """For a recorder that only reads."""


class _End(msgspec.Struct, frozen=True):
    """Where a recorded turn lies."""

    trees: _Trees
    step: Step | None
    node: Node


def _exact(trees: _Trees, step: Step | None, there: list[Step], prompt: bytes) -> tuple[Node | None, Step | None]:
    """The turn whose ids the prompt begins with, and its step: the deepest in the history, there the longest."""
    if not prompt:
        return None, None
    agreement = Agreement(prompt)
    if step is None:
        return trees.longest(agreement), None
    for one in chain(reversed(there), step.up()):
        exact = [node for node in one.nodes if agreement.with_node(node)]
        if exact:
            return max(exact, key=lambda node: (node.end, node.index)), one
    return None, None


def _between(parent: Step, step: Step, new: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages after `parent`, where `new` are those after `step`, on the same way."""
    if parent.depth >= step.depth:
        return new[parent.depth - step.depth :]
    known = [one.message for one in step.up() if one.depth > parent.depth]
    return (*reversed(known), *new)


def _drifts(turn: Turn, exact: Node | None, step: Step | None, there: list[Step]) -> bool:
    """Whether a turn with ids lies further on the way than the one whose ids the prompt begins with."""
    if step is None or not (turn.prompt or turn.prefix):
        return False
    for one in chain(reversed(there), step.up()):
        if exact is not None and exact in one.nodes:
            return False
        if one.told:
            return True
    return False
