"""From turns to segments and transcripts.

Promises:
- every sampled token of the role trains exactly once, after the prompt that it was sampled from;
- no other segments that do so have fewer tokens in total: prefixes are shared wherever they are token-exact, also
  between turns that were not recorded as each other's; only turns whose extras differ in layout share no segment;
- ids, mask, logprobs, version spans and extras of a segment describe the same tokens;
- a partial turn, whose client closed the stream, trains exactly the tokens that a later turn continues from, and
  nothing where no turn does;
- the same turns give the same segments in the same order, whatever order the turns come in;
- the cost is that of the turns' own bytes and of the segments' bytes, plus a sort: a chain copies nothing twice.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from rookery.core import Extra, Message, Segment, Span, Turn
from rookery.trajectories.strands import common, cuts_of, shown_at

NO_LOGPROB = b"\x00\x00\xc0\x7f"
"""float32 NaN: the engine gave no logprob for a sampled token; never a number that could train."""


def segments(turns: Sequence[Turn], role: str = "policy") -> list[Segment]:
    """The fewest tokens that train all turns of a role; by the index of the last turn in each."""
    own = sorted((turn for turn in continued(turns) if turn.role == role and turn.sampled), key=_index)
    tree = _Ids(own)
    chains = [chain for alike in _by_layout(own) for chain in _chains(tree, alike)]
    chains.sort(key=lambda chain: chain[-1].index)
    return [_segment(tree, chain) for chain in chains]


def _index(turn: Turn) -> int:
    return turn.index


def continued(turns: Sequence[Turn]) -> list[Turn]:
    """The turns without what nobody continued from: of partial ones, the tokens that a later turn extends."""
    if not any(turn.partial for turn in turns):
        return list(turns)
    reached: dict[int, int] = {}
    for turn in turns:
        if turn.parent is not None and turn.prefix:
            reached[turn.parent] = max(reached.get(turn.parent, 0), turn.prefix)
    found: list[Turn] = []
    for turn in turns:
        if not turn.partial:
            found.append(turn)
        elif (end := reached.get(turn.index)) is not None:
            found.append(turn.shortened(end - turn.prefix - len(turn.prompt) // 4))
    return found


def answered(turn: Turn, following: Turn | None) -> Message:
    """The answer of a turn, as the turn after it continues it: of a partial one, what its client had read."""
    if not turn.partial or following is None or not following.prefix:
        return turn.response
    tokens = following.prefix - turn.prefix - len(turn.prompt) // 4
    cut = next((cut for cut in cuts_of(turn.cuts) if cut.tokens == tokens), None)
    return turn.response if cut is None else shown_at(turn.response, cut)


def _by_layout(turns: Iterable[Turn]) -> list[list[Turn]]:
    """Turns whose extras are alike: zeros in the place of what another turn has would train as if they were it."""
    found: dict[tuple[tuple[str, str, int], ...], list[Turn]] = {}
    for turn in turns:
        layout = tuple(sorted((name, extra.dtype, extra.width) for name, extra in turn.extras.items()))
        found.setdefault(layout, []).append(turn)
    return list(found.values())


class _Point:
    """A place in the tree of ids: after `label`, which follows the point above."""

    __slots__ = ("above", "below", "depth", "label", "turns")

    def __init__(self, above: "_Point | None", label: bytes) -> None:
        self.above = above
        self.label = label
        self.depth: int = len(label) if above is None else above.depth + len(label)
        self.below: dict[bytes, _Point] = {}
        """By the first id of their labels."""
        self.turns: list[Turn] = []
        """Those whose sampled ids end here."""

    def way(self) -> "Iterator[_Point]":
        """This point and those above it."""
        point: _Point | None = self
        while point is not None:
            yield point
            point = point.above


class _Ids:
    """The ids of turns as a tree in which equal beginnings are one. A turn brings what its parent has not."""

    def __init__(self, turns: Iterable[Turn]) -> None:
        self.top = _Point(None, b"")
        self.starts: dict[int, _Point] = {}
        """By a turn's index: where its prompt ends."""
        self.ends: dict[int, _Point] = {}
        """And where what it sampled does."""
        self._partial: dict[int, Turn] = {}
        for turn in turns:
            if turn.index in self.ends:
                raise ValueError(f"there are two turns {turn.index}")
            start = self._put(self._before(turn), turn.prompt)
            end = self._put(start, turn.sampled)
            end.turns.append(turn)
            self.starts[turn.index], self.ends[turn.index] = start, end
            if turn.partial:
                self._partial[turn.index] = turn

    def _before(self, turn: Turn) -> _Point:
        if not turn.prefix:
            return self.top
        point = self.ends.get(turn.parent) if turn.parent is not None else None
        if point is None:  # without it the prompt would be cut off, and the wrong thing would train
            raise ValueError(f"turn {turn.index} extends turn {turn.parent}, which is not there")
        parent = self._partial.get(turn.parent or 0)
        if parent is not None and turn.prefix * 4 < point.depth:  # this one continues from less of it than another
            start = self.starts[parent.index]
            return self._put(start, parent.sampled[: 4 * turn.prefix - start.depth])
        if point.depth != 4 * turn.prefix:
            raise ValueError(f"turn {turn.index} extends {turn.prefix} tokens, but {point.depth // 4} are there")
        return point

    def _put(self, point: _Point, ids: bytes) -> _Point:
        """The point after `ids`, made where it is not there."""
        at = 0
        while at < len(ids):
            first = ids[at : at + 4]
            below = point.below.get(first)
            if below is None:
                below = point.below[first] = _Point(point, ids[at:] if at else ids)
                return below
            shared = common(ids, at, below.label) & ~3  # whole ids
            if shared < len(below.label):
                below = self._split(point, below, shared)
            point = below
            at += shared
        return point

    @staticmethod
    def _split(above: _Point, below: _Point, shared: int) -> _Point:
        """A point in the middle of a label; the one below stays the same object, for those who know it."""
        middle = _Point(above, below.label[:shared])
        above.below[below.label[:4]] = middle
        below.label = below.label[shared:]
        below.above = middle
        middle.below[below.label[:4]] = below
        return middle

    def bottom_up(self) -> list[_Point]:
        """All points, each after those below it."""
        order = [self.top]
        for point in order:
            order.extend(point.below.values())
        order.reverse()
        return order


def _chains(tree: _Ids, turns: list[Turn]) -> list[list[Turn]]:
    """Turns that share a segment, each ending where the prompt of the next has begun the same way.

    A segment costs what its last turn is long, so a turn with a next one saves its own length. Below a point, any
    prompt can follow any turn that ends there or above: from the bottom up, every turn takes a next one where a
    prompt is left. The deeper of two that want the same one saves more, and comes first.
    """
    mine = {turn.index: turn for turn in turns}
    waiting: dict[_Point, list[int]] = {}
    for turn in turns:
        waiting.setdefault(tree.starts[turn.index], []).append(turn.index)
    after: dict[int, int] = {}
    for point in tree.bottom_up():
        left = waiting.pop(point, [])
        heapify(left)
        for below in point.below.values():
            more = waiting.pop(below, [])
            if len(more) > len(left):
                left, more = more, left
            for index in more:
                heappush(left, index)
        for turn in point.turns:
            if left and turn.index in mine:
                after[turn.index] = heappop(left)
        if left:
            waiting[point] = left
    found: list[list[Turn]] = []
    for index in mine.keys() - set(after.values()):
        chain = [mine[index]]
        while (following := after.get(chain[-1].index)) is not None:
            chain.append(mine[following])
        found.append(chain)
    return found


def _segment(tree: _Ids, chain: list[Turn]) -> Segment:
    way = list(tree.ends[chain[-1].index].way())[::-1]
    tokens = b"".join([point.label for point in way])
    n = len(tokens) // 4
    mask, logprobs = bytearray(n), bytearray(4 * n)
    layout = chain[-1].extras
    extras = {name: bytearray(extra.width * n) for name, extra in layout.items()}
    spans: list[Span] = []
    if extras:
        for point in way:  # what trains elsewhere is context here, and its extras are known all the same
            for turn in point.turns:
                _fill(extras, layout, tree.starts[turn.index].depth // 4, turn)
    for turn in chain:
        start, count = tree.starts[turn.index].depth // 4, len(turn.sampled) // 4
        end = start + count
        mask[start:end] = b"\x01" * count
        logprobs[4 * start : 4 * end] = turn.logprobs or NO_LOGPROB * count
        spans += [Span(start + span.start, start + span.end, span.version) for span in turn.spans] or [
            Span(start, end, turn.version)
        ]
        _fill(extras, layout, start, turn)
    return Segment(
        tokens=tokens,
        mask=bytes(mask),
        logprobs=bytes(logprobs),
        versions=tuple(spans),
        extras={name: Extra(layout[name].dtype, layout[name].width, bytes(data)) for name, data in extras.items()},
        turns=tuple(turn.index for turn in chain),
    )


def _fill(extras: dict[str, bytearray], layout: dict[str, Extra], start: int, turn: Turn) -> None:
    for name, like in layout.items():
        extra = turn.extras.get(name)
        if extra is not None and (extra.dtype, extra.width) == (like.dtype, like.width):
            extras[name][extra.width * start : extra.width * start + len(extra.data)] = extra.data


def transcript(turns: Sequence[Turn], role: str = "policy") -> list[Message]:
    """The messages of the last conversation of a role, its branches' common history once."""
    own = {turn.index: turn for turn in turns if turn.role == role}
    if not own:
        return []
    kept = {turn.index for turn in continued(list(own.values()))} or own.keys()
    path = [own[max(kept)]]
    while path[-1].parent is not None and path[-1].parent in own:
        path.append(own[path[-1].parent])
    path.reverse()
    return [
        message
        for turn, following in zip(path, (*path[1:], None), strict=True)
        for message in (*turn.messages, answered(turn, following))
    ]
