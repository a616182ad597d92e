"""Record model calls as turns. A turn stores only what is new since the earlier turn that it extends.

Runs in the runner or the gateway shard. The sink of a recorder is a callback that stores each turn.

Guarantees:
- a call extends the longest earlier turn whose messages and reply are the start of its message history, however
  long ago that turn was;
- a turn shares tokens with an earlier turn only if its prompt starts with exactly the tokens of that turn. If the
  messages match and the tokens do not, the turn is counted as drifted;
- a turn is passed to the sink once; if the sink raises, or the lengths of the token arrays contradict each other,
  the turn is not recorded;
- calls may overlap: a `HistoryMatch` stays valid while other calls are recorded;
- a recorder restored from its turns continues as if it had never stopped.

A recorder belongs to one thread. Only the tokens of recorded turns may be read from other threads.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Self

import msgspec

from rookery.core import JournalError, Message, ToolSchema, Turn
from rookery.trajectories.branches import (
    CutPoint,
    PrefixMatcher,
    RecordedTurn,
    TokenBranch,
    append_tokens,
    extends_branch,
    unpack_cuts,
)
from rookery.trajectories.message_tree import (
    HistoryMatch,
    MessageInput,
    MessageNode,
    MessageTree,
    parse_messages,
)


class TurnCounts(msgspec.Struct):
    """Counts of recorded turns by how they relate to earlier turns.

    Each turn is counted in exactly one of `roots`, `extended`, `drifted` and `without_tokens`. `forks` and
    `partial` count some of the same turns again.
    """

    turns: int = 0
    roots: int = 0
    """Turns that extend no earlier turn."""
    extended: int = 0
    """Turns whose prompt starts with the tokens of the turn that their messages extend."""
    drifted: int = 0
    """Turns whose messages extend an earlier turn, but whose prompt does not start with the tokens of that
    turn."""
    without_tokens: int = 0
    """Turns whose messages extend an earlier turn, if the token IDs of one of the two are unknown."""
    forks: int = 0
    """Turns whose first messages belong to an earlier history that continues differently."""
    partial: int = 0
    """Turns whose client closed the stream before the reply was complete."""


class _ScopeHistory:
    """The recorded calls of one model role and scope: a tree of those with messages, and those with only token
    IDs."""

    def __init__(self, role: str, scope: bytes) -> None:
        self.tree = MessageTree(role, scope)
        self.token_calls: dict[TokenBranch, list[RecordedTurn]] = {}
        """Turns of calls without messages, by the branch that holds their tokens, in order of length."""

    def find_longest(self, matcher: PrefixMatcher) -> RecordedTurn | None:
        """Return the longest turn of a call without messages whose tokens are the start of the prompt; None if
        there is none."""
        best: RecordedTurn | None = None
        for branch, turns in self.token_calls.items():
            length = matcher.common_length(branch)
            turn = next((fit for one in reversed(turns) if (fit := _truncate_to(one, length)) is not None), None)
            if turn is not None and (best is None or (turn.end, turn.index) > (best.end, best.index)):
                best = turn
        return best


class _RecordedPosition(msgspec.Struct, frozen=True):
    """The position of a recorded turn in the recorder."""

    history: _ScopeHistory
    node: MessageNode | None
    turn: RecordedTurn


class Recorder:
    """Record the model calls of one attempt as turns, and pass each turn to `sink` once."""

    def __init__(self, attempt: str, sink: Callable[[Turn], None]) -> None:
        self._attempt = attempt
        self._sink = sink
        self.histories: dict[tuple[str, bytes], _ScopeHistory] = {}
        self.count = 0
        """The index of the next turn."""
        self.counts = TurnCounts()

    @classmethod
    def restore(cls, attempt: str, turns: Iterable[Turn], sink: Callable[[Turn], None]) -> Self:
        """Return a recorder that continues after `turns`, which are stored already and not passed to `sink` again.

        Turns of other attempts are ignored. Raises `JournalError` if the turns contradict each other.
        """
        recorder = cls(attempt, sink)
        positions: dict[int, _RecordedPosition] = {}
        for turn in sorted((turn for turn in turns if turn.attempt == attempt), key=lambda turn: turn.index):
            if turn.index in positions:
                raise JournalError(f"attempt {attempt} has two turns with index {turn.index}")
            recorder._replay(turn, positions)
        return recorder

    def adopt(self, turns: Sequence[Turn]) -> list[Turn]:
        """Append the turns of another recorder of the same attempt, with new indices after those of this recorder.

        The turns are passed to the sink and returned, but later calls do not extend them. Raises `JournalError`,
        and appends nothing, if the parent of a turn is missing.
        """
        other = Recorder.restore(self._attempt, turns, lambda _: None)
        ordered = sorted(turns, key=lambda turn: turn.index)
        indices = {turn.index: self.count + n for n, turn in enumerate(ordered)}
        renumbered = [
            msgspec.structs.replace(
                turn, index=indices[turn.index], parent=None if turn.parent is None else indices[turn.parent]
            )
            for turn in ordered
        ]
        for turn in renumbered:
            self._sink(turn)
            self.count = turn.index + 1
        for name in TurnCounts.__struct_fields__:
            setattr(self.counts, name, getattr(self.counts, name) + getattr(other.counts, name))
        return renumbered

    # ---- lookup

    def match_history(self, role: str, entries: Sequence[MessageInput], scope: bytes = b"") -> HistoryMatch:
        """Find the earlier turn that a call continues, by its messages.

        `entries` is empty for a call whose prompt is token IDs; `record` finds the earlier turn of such a call.
        `scope` is a digest of what else shapes the prompt, such as the tools. Calls of different scopes share no
        history. Raises `MessageError` if a message is invalid.
        """
        history = self.histories.get((role, scope))
        if history is None or not entries:  # only a recorded turn creates a scope: failed calls leave nothing
            return HistoryMatch(role, scope, "root", None, None, parse_messages(entries), entries)
        return history.tree.find(entries)

    def _get_history(self, role: str, scope: bytes) -> _ScopeHistory:
        history = self.histories.get((role, scope))
        if history is None:
            history = self.histories[role, scope] = _ScopeHistory(role, scope)
        return history

    # ---- recording

    def record(
        self,
        match: HistoryMatch,
        *,
        prompt: bytes | None = None,
        appended: bytes | None = None,
        response: Message,
        sampled: bytes,
        tools: tuple[ToolSchema, ...] = (),
        **fields: Any,
    ) -> Turn:
        """Record one completed call as a turn, pass the turn to the sink, and return it.

        `match` is the result of `match_history` for the call. `prompt` holds all token IDs of the prompt (int32
        bytes). A caller that built the prompt by appending to `match.turn.tokens()` passes only the IDs that it
        appended, as `appended`; then no tokens are compared, and the cost does not depend on the length of the
        history. `tools` are recorded once for each role and scope. `fields` are further fields of `Turn`.
        """
        is_first = (match.role, match.scope) not in self.histories
        node, history = match.node, self._get_history(match.role, match.scope)
        if node is None and match.new_messages:
            node = history.tree.root
        existing = history.tree.find_existing(node, match.new_messages) if node is not None else []
        messages = match.new_messages
        if appended is not None:
            if prompt is not None or match.turn is None or match.turn.branch is None:
                raise ValueError("`appended` needs a matched turn with token IDs, and excludes `prompt`")
            prefix_turn: RecordedTurn | None = match.turn
            parent, new_tokens = prefix_turn, appended
        else:
            new_tokens = prompt or b""
            parent = match.turn
            if (
                parent is not None
                and node is not None
                and not existing
                and len(node.turns) == 1
                and extends_branch(new_tokens, parent)
            ):
                prefix_turn = parent
            else:
                prefix_turn, prefix_node = _find_prefix_turn(history, node, existing, new_tokens)
                if prefix_turn is not None and node is not None and prefix_node is not None:
                    messages = _messages_after(prefix_node, node, match.new_messages)
            if prefix_turn is not None:
                parent, new_tokens = prefix_turn, new_tokens[prefix_turn.end :]
            elif parent is not None and parent.truncated and node is not None:
                # The client read less of a partial reply than it was sent, and the prompt does not start with
                # those tokens. The turn extends an earlier turn, and what the client read becomes one of its
                # messages.
                ancestor = next(
                    (one for one in node.path_to_root() if any(not turn.truncated for turn in one.turns)),
                    history.tree.root,
                )
                full = (turn for turn in ancestor.turns if not turn.truncated)
                parent = max(full, key=lambda turn: turn.index, default=None)
                messages = _messages_after(ancestor, node, match.new_messages)
        turn = Turn(
            attempt=self._attempt,
            index=self.count,
            role=match.role,
            parent=None if parent is None else parent.index,
            scope=match.scope if parent is None else b"",
            tools=tools if is_first else (),
            messages=messages,
            response=response,
            prefix=0 if prefix_turn is None else prefix_turn.length,
            prompt=new_tokens,
            sampled=sampled,
            **fields,
        )
        drifted = (existing != [] or prefix_turn is not match.turn) and _is_drifted(
            turn, prefix_turn, node, existing
        )
        self._sink(turn)
        self._commit(turn, prefix_turn, drifted, history, node, existing, match.new_messages, match.entries)
        return turn

    def _commit(
        self,
        turn: Turn,
        prefix_turn: RecordedTurn | None,
        drifted: bool,
        history: _ScopeHistory,
        node: MessageNode | None,
        existing: list[MessageNode],
        messages: Sequence[Message],
        entries: Sequence[object],
    ) -> _RecordedPosition:
        location: tuple[TokenBranch | None, int, int] = (None, 0, 0)
        if turn.sampled:  # a later prompt can only be compared with prompt and sampled tokens together
            location = append_tokens(prefix_turn, turn.prompt, turn.sampled)
        cuts: list[CutPoint] = []
        if turn.partial and location[0] is not None:
            cuts = unpack_cuts(turn.cuts)
            # Only the sampled tokens that the client received can be continued.
            location = (location[0], location[1], location[1] + 4 * cuts[-1].tokens) if cuts else (None, 0, 0)
        recorded = RecordedTurn(turn.index, turn.response, turn.finish, *location, cuts)
        counts = self.counts
        if node is not None:
            shared = existing[-1] if existing else node
            counts.forks += shared.depth > 0 and history.tree.has_children(shared)
            node = history.tree.add(node, existing, messages, entries, recorded)
        elif recorded.branch is not None:
            history.token_calls.setdefault(recorded.branch, []).append(recorded)
        if turn.parent is None:
            counts.roots += 1
        elif drifted:
            counts.drifted += 1
        elif turn.prefix:
            counts.extended += 1
        else:
            counts.without_tokens += 1
        counts.turns += 1
        counts.partial += turn.partial
        self.count = turn.index + 1
        return _RecordedPosition(history, node, recorded)

    def _replay(self, turn: Turn, positions: dict[int, _RecordedPosition]) -> None:
        if turn.parent is None:
            history = self._get_history(turn.role, turn.scope)
            node, prefix_turn = (history.tree.root if turn.messages else None), None
        else:
            position = positions.get(turn.parent)
            if position is None:
                raise JournalError(
                    f"turn {turn.index} of attempt {turn.attempt} extends turn {turn.parent}, which is missing"
                )
            history, node = position.history, position.node
            prefix_turn = position.turn if turn.prefix else None
            if prefix_turn is not None and prefix_turn.cuts and prefix_turn.length != turn.prefix:
                tokens = turn.prefix - prefix_turn.prompt_end // 4
                cut = next((cut for cut in prefix_turn.cuts if cut.tokens == tokens), None)
                if cut is not None:
                    prefix_turn = prefix_turn.truncate_at(cut)
                    if node is not None:
                        node, prefix_turn = history.tree.add_truncated(node, prefix_turn)
            if prefix_turn is not None and prefix_turn.length != turn.prefix:
                raise JournalError(
                    f"turn {turn.index} of attempt {turn.attempt} extends {turn.prefix} tokens of turn "
                    f"{turn.parent}, which has {prefix_turn.length}"
                )
        existing = history.tree.find_existing(node, turn.messages) if node is not None else []
        drifted = _is_drifted(turn, prefix_turn, node, existing)
        positions[turn.index] = self._commit(
            turn, prefix_turn, drifted, history, node, existing, turn.messages, ()
        )


def _truncate_to(turn: RecordedTurn, end: int) -> RecordedTurn | None:
    """Return the turn if its tokens end at or before offset `end`.

    Otherwise return the longest truncated version of it that does, if it is a partial turn, or None.
    """
    if turn.end <= end:
        return turn
    cut = next((cut for cut in reversed(turn.cuts) if turn.prompt_end + 4 * cut.tokens <= end), None)
    return turn.truncate_at(cut) if cut is not None else None


def _find_prefix_turn(
    history: _ScopeHistory, node: MessageNode | None, existing: list[MessageNode], prompt: bytes
) -> tuple[RecordedTurn | None, MessageNode | None]:
    """Find the turn whose tokens are the start of the prompt, and its tree node.

    Of several, return the one deepest in the message history, and of those the longest. For a call without
    messages (`node` is None), search the calls without messages.
    """
    if not prompt:
        return None, None
    matcher = PrefixMatcher(prompt)
    if node is None:
        return history.find_longest(matcher), None
    for candidate in chain(reversed(existing), node.path_to_root()):
        turns = [turn for turn in candidate.turns if matcher.starts_with(turn)]
        if turns:
            return max(turns, key=lambda turn: (turn.end, turn.index)), candidate
    return None, None


def _messages_after(
    ancestor: MessageNode, node: MessageNode, new_messages: tuple[Message, ...]
) -> tuple[Message, ...]:
    """Return the messages after `ancestor` on the path that leads through `node` and continues with
    `new_messages`.

    `ancestor` may also be below `node`; then only the rest of `new_messages` is returned.
    """
    if ancestor.depth >= node.depth:
        return new_messages[ancestor.depth - node.depth :]
    between = [one.message for one in node.path_to_root() if one.depth > ancestor.depth]
    return (*reversed(between), *new_messages)


def _is_drifted(
    turn: Turn, prefix_turn: RecordedTurn | None, node: MessageNode | None, existing: list[MessageNode]
) -> bool:
    """Return True if the prompt of `turn` fails to extend the tokens of the latest turn in its message history.

    `prefix_turn` is the turn whose tokens the prompt extends; None if there is none.
    """
    if node is None or not (turn.prompt or turn.prefix):
        return False
    for candidate in chain(reversed(existing), node.path_to_root()):
        if prefix_turn is not None and prefix_turn in candidate.turns:
            return False
        if candidate.has_tokens:
            return True
    return False
