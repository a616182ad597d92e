"""Build training segments and transcripts from recorded turns. Runs in the supervisor, the runner or the trainer.

Guarantees:
- every sampled token of the role is trained exactly once, after the prompt that it was sampled from, but tokens of
  a reply from a cache never train;
- the segments have the fewest tokens in total with which that is possible: turns whose token IDs have a common
  prefix share it, also if one was not recorded as the parent of the other. Only turns whose extras (additional
  per-token arrays) differ in names or types share no segment;
- token IDs, mask, logprobs, version spans and extras of a segment describe the same tokens;
- a partial turn, whose client closed the stream, trains exactly the tokens that a later turn continues from, and
  nothing if no turn does;
- the result does not depend on the order in which the turns are passed.

The time is proportional to the size of the turns and of the segments, plus a sort of the turns.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from rookery.core import Extra, Message, Segment, Span, Turn
from rookery.core.turns import REPLY_CACHE
from rookery.trajectories.branches import common_prefix_length, truncate_response, unpack_cuts

NO_LOGPROB = b"\x00\x00\xc0\x7f"
"""float32 NaN: marks a sampled token without a logprob from the inference engine, so that it cannot be trained on
by accident.
"""


def build_segments(turns: Sequence[Turn], role: str = "policy") -> list[Segment]:
    """Build the segments that train every sampled token of a role once, with the fewest tokens in total.

    The segments are ordered by the index of their last turn. Raises `ValueError` if the parent of a turn is
    missing.
    """
    role_turns = [turn for turn in trim_partial_turns(turns) if turn.role == role and turn.sampled]
    role_turns.sort(key=lambda turn: turn.index)
    tree = _PrefixTree(role_turns)
    chains = [chain for group in _group_by_extras(role_turns) for chain in _chain_turns(tree, group)]
    chains.sort(key=lambda chain: chain[-1].index)
    return [_build_segment(tree, chain) for chain in chains]


def trim_partial_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Shorten each partial turn to the tokens that a later turn continues, and drop those that no turn continues.

    A turn is partial if its client closed the stream before the reply was complete.
    """
    if not any(turn.partial for turn in turns):
        return list(turns)
    reached: dict[int, int] = {}
    for turn in turns:
        if turn.parent is not None and turn.prefix:
            reached[turn.parent] = max(reached.get(turn.parent, 0), turn.prefix)
    result: list[Turn] = []
    for turn in turns:
        if not turn.partial:
            result.append(turn)
        elif (end := reached.get(turn.index)) is not None:
            result.append(turn.shortened(end - turn.prefix - len(turn.prompt) // 4))
    return result


def get_continued_response(turn: Turn, following: Turn | None) -> Message:
    """Return the reply of `turn` as the turn `following` continues it.

    For a partial turn, whose client closed the stream early, this is the part of the reply that the client read.
    """
    if not turn.partial or following is None or not following.prefix:
        return turn.response
    tokens = following.prefix - turn.prefix - len(turn.prompt) // 4
    cut = next((cut for cut in unpack_cuts(turn.cuts) if cut.tokens == tokens), None)
    return turn.response if cut is None else truncate_response(turn.response, cut)


def _group_by_extras(turns: Iterable[Turn]) -> list[list[Turn]]:
    """Group turns by the names, types and widths of their extras (additional per-token arrays).

    Turns of different groups share no segment, because filling missing extras with zeros would train on wrong
    values.
    """
    result: dict[tuple[tuple[str, str, int], ...], list[Turn]] = {}
    for turn in turns:
        layout = tuple(sorted((name, extra.dtype, extra.width) for name, extra in turn.extras.items()))
        result.setdefault(layout, []).append(turn)
    return list(result.values())


class _PrefixNode:
    """A node of the radix tree of token IDs.

    `label` holds the token IDs (int32 bytes) between the parent and this node, `depth` the bytes from the root.
    """

    __slots__ = ("children", "depth", "label", "parent", "turns")

    def __init__(self, parent: "_PrefixNode | None", label: bytes) -> None:
        self.parent = parent
        self.label = label
        self.depth: int = len(label) if parent is None else parent.depth + len(label)
        self.children: dict[bytes, _PrefixNode] = {}
        """Children by the first token ID of their labels."""
        self.turns: list[Turn] = []
        """Turns whose sampled tokens end here."""

    def path(self) -> "Iterator[_PrefixNode]":
        """Yield this node and its ancestors."""
        node: _PrefixNode | None = self
        while node is not None:
            yield node
            node = node.parent


class _PrefixTree:
    """Radix tree of the token IDs of turns, which must be in order of their indices.

    A turn holds only the tokens after those of its parent; the tree supplies the others.
    """

    def __init__(self, turns: Iterable[Turn]) -> None:
        self.root = _PrefixNode(None, b"")
        self.prompt_ends: dict[int, _PrefixNode] = {}
        """By turn index: the node at which the prompt ends."""
        self.sampled_ends: dict[int, _PrefixNode] = {}
        """By turn index: the node at which the sampled tokens end."""
        self._partial_turns: dict[int, Turn] = {}
        for turn in turns:
            if turn.index in self.sampled_ends:
                raise ValueError(f"two turns have the index {turn.index}")
            start = self._insert(self._find_start(turn), turn.prompt)
            end = self._insert(start, turn.sampled)
            end.turns.append(turn)
            self.prompt_ends[turn.index], self.sampled_ends[turn.index] = start, end
            if turn.partial:
                self._partial_turns[turn.index] = turn

    def _find_start(self, turn: Turn) -> _PrefixNode:
        if not turn.prefix:
            return self.root
        node = self.sampled_ends.get(turn.parent) if turn.parent is not None else None
        if node is None:  # training without the missing prefix would use a wrong context
            raise ValueError(f"turn {turn.index} extends turn {turn.parent}, which is missing")
        parent = self._partial_turns.get(turn.parent or 0)
        if parent is not None and turn.prefix * 4 < node.depth:  # another turn continues more of the partial turn
            start = self.prompt_ends[parent.index]
            return self._insert(start, parent.sampled[: 4 * turn.prefix - start.depth])
        if node.depth != 4 * turn.prefix:
            raise ValueError(
                f"turn {turn.index} extends {turn.prefix} tokens of turn {turn.parent}, which has "
                f"{node.depth // 4}"
            )
        return node

    def _insert(self, node: _PrefixNode, ids: bytes) -> _PrefixNode:
        """Return the node that is reached from `node` by the token IDs `ids`; create it if it does not exist."""
        at = 0
        while at < len(ids):
            first = ids[at : at + 4]
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = _PrefixNode(node, ids[at:] if at else ids)
                return child
            shared = common_prefix_length(ids, at, child.label) & ~3  # a multiple of the size of an ID
            if shared < len(child.label):
                child = self._split(node, child, shared)
            node = child
            at += shared
        return node

    @staticmethod
    def _split(parent: _PrefixNode, child: _PrefixNode, shared: int) -> _PrefixNode:
        """Split the label of `child` after `shared` bytes, and return the new node between `parent` and `child`.

        `child` stays the same object, because other tables refer to it.
        """
        middle = _PrefixNode(parent, child.label[:shared])
        parent.children[child.label[:4]] = middle
        child.label = child.label[shared:]
        child.parent = middle
        middle.children[child.label[:4]] = child
        return middle

    def children_first(self) -> list[_PrefixNode]:
        """Return all nodes, each after its children."""
        order = [self.root]
        for node in order:
            order.extend(node.children.values())
        order.reverse()
        return order


def _chain_turns(tree: _PrefixTree, turns: list[Turn]) -> list[list[Turn]]:
    """Group turns into chains. In a chain, each prompt starts with the tokens of the turn before; it becomes one
    segment.

    A segment is as long as its last turn, so a turn that has a successor saves its own length. Below a node, any
    prompt can follow any turn that ends at the node or above it. So the nodes are visited children first, and
    every turn takes a successor if a prompt is left: of two turns that compete for one, the deeper one saves more
    tokens and comes first.
    """
    by_index = {turn.index: turn for turn in turns}
    unmatched: dict[_PrefixNode, list[int]] = {}
    for turn in turns:
        unmatched.setdefault(tree.prompt_ends[turn.index], []).append(turn.index)
    successors: dict[int, int] = {}
    for node in tree.children_first():
        available = unmatched.pop(node, [])
        heapify(available)
        for child in node.children.values():
            more = unmatched.pop(child, [])
            if len(more) > len(available):
                available, more = more, available
            for index in more:
                heappush(available, index)
        for turn in node.turns:
            if available and turn.index in by_index:
                successors[turn.index] = heappop(available)
        if available:
            unmatched[node] = available
    result: list[list[Turn]] = []
    for index in by_index.keys() - set(successors.values()):
        chain = [by_index[index]]
        while (following := successors.get(chain[-1].index)) is not None:
            chain.append(by_index[following])
        result.append(chain)
    return result


def _build_segment(tree: _PrefixTree, chain: list[Turn]) -> Segment:
    path = list(tree.sampled_ends[chain[-1].index].path())[::-1]
    tokens = b"".join([node.label for node in path])
    n = len(tokens) // 4
    mask, logprobs = bytearray(n), bytearray(4 * n)
    layout = chain[-1].extras
    extras = {name: bytearray(extra.width * n) for name, extra in layout.items()}
    spans: list[Span] = []
    if extras:
        for node in path:  # context tokens that are trained in another segment have extras too
            for turn in node.turns:
                _copy_extras(extras, layout, tree.prompt_ends[turn.index].depth // 4, turn)
    for turn in chain:
        start, count = tree.prompt_ends[turn.index].depth // 4, len(turn.sampled) // 4
        end = start + count
        if turn.upstream != REPLY_CACHE:
            mask[start:end] = b"\x01" * count
            logprobs[4 * start : 4 * end] = turn.logprobs or NO_LOGPROB * count
            spans += [Span(start + span.start, start + span.end, span.version) for span in turn.spans] or [
                Span(start, end, turn.version)
            ]
        _copy_extras(extras, layout, start, turn)
    return Segment(
        tokens=tokens,
        mask=bytes(mask),
        logprobs=bytes(logprobs),
        versions=tuple(spans),
        extras={name: Extra(layout[name].dtype, layout[name].width, bytes(data)) for name, data in extras.items()},
        turns=tuple(turn.index for turn in chain if turn.upstream != REPLY_CACHE),
    )


def _copy_extras(extras: dict[str, bytearray], layout: dict[str, Extra], start: int, turn: Turn) -> None:
    for name, like in layout.items():
        extra = turn.extras.get(name)
        if extra is not None and (extra.dtype, extra.width) == (like.dtype, like.width):
            extras[name][extra.width * start : extra.width * start + len(extra.data)] = extra.data


def build_transcript(turns: Sequence[Turn], role: str = "policy") -> list[Message]:
    """Return the messages of the latest conversation of a role, from its first message to its last reply.

    Other branches of the conversation, for example abandoned ones, are left out.
    """
    role_turns = {turn.index: turn for turn in turns if turn.role == role}
    if not role_turns:
        return []
    kept = {turn.index for turn in trim_partial_turns(list(role_turns.values()))} or role_turns.keys()
    path = [role_turns[max(kept)]]
    while path[-1].parent is not None and path[-1].parent in role_turns:
        path.append(role_turns[path[-1].parent])
    path.reverse()
    return [
        message
        for turn, following in zip(path, (*path[1:], None), strict=True)
        for message in (*turn.messages, get_continued_response(turn, following))
    ]
