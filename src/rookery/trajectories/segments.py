"""From turns to segments and transcripts."""

from collections.abc import Sequence

from rookery.core import Extra, Message, Segment, Span, Turn

NO_LOGPROB = b"\x00\x00\xc0\x7f"
"""float32 NaN: the engine gave no logprob for a sampled token; never a number that could train."""


def segments(turns: Sequence[Turn], role: str = "policy") -> list[Segment]:
    """One segment for each leaf of the token tree; a sampled token trains in the first that holds it."""
    own = {turn.index: turn for turn in turns if turn.role == role and turn.sampled}
    extended = {turn.parent for turn in own.values() if turn.prefix}
    trained: set[int] = set()
    return [
        _segment(_path(own, turn), trained)
        for turn in sorted(own.values(), key=_index)
        if turn.index not in extended
    ]


def _index(turn: Turn) -> int:
    return turn.index


def _path(own: dict[int, Turn], leaf: Turn) -> list[Turn]:
    path = [leaf]
    while path[-1].prefix:
        parent = own.get(path[-1].parent) if path[-1].parent is not None else None
        if parent is None:  # without it the prompt would be cut off, and the wrong thing would train
            raise ValueError(f"turn {path[-1].index} extends turn {path[-1].parent}, which is not there")
        path.append(parent)
    path.reverse()
    return path


def _segment(path: list[Turn], trained: set[int]) -> Segment:
    tokens, mask, logprobs = bytearray(), bytearray(), bytearray()
    spans: list[Span] = []
    fresh: list[int] = []
    layout = {name: extra for turn in path for name, extra in turn.extras.items()}
    extras = {name: bytearray() for name in layout}
    for turn in path:
        if turn.prefix != len(mask):
            raise ValueError(f"turn {turn.index} extends {turn.prefix} tokens, but {len(mask)} are there")
        before, n = len(turn.prompt) // 4, len(turn.sampled) // 4
        start = len(mask) + before
        trains = turn.index not in trained
        tokens += turn.prompt + turn.sampled
        mask += bytes(before) + (b"\x01" if trains else b"\x00") * n
        logprobs += bytes(4 * before) + ((turn.logprobs or NO_LOGPROB * n) if trains else bytes(4 * n))
        if trains:
            trained.add(turn.index)
            fresh.append(turn.index)
            spans.append(Span(start, start + n, turn.version))
        for name, data in extras.items():
            data.extend(bytes(layout[name].width * before))
            data.extend(turn.extras[name].data if name in turn.extras else bytes(layout[name].width * n))
    return Segment(
        tokens=bytes(tokens),
        mask=bytes(mask),
        logprobs=bytes(logprobs),
        versions=tuple(spans),
        extras={name: Extra(layout[name].dtype, layout[name].width, bytes(data)) for name, data in extras.items()},
        turns=tuple(fresh),
    )


def transcript(turns: Sequence[Turn], role: str = "policy") -> list[Message]:
    """The messages of the last conversation of a role, its branches' common history once."""
    own = {turn.index: turn for turn in turns if turn.role == role}
    if not own:
        return []
    path = [own[max(own)]]
    while path[-1].parent is not None and path[-1].parent in own:
        path.append(own[path[-1].parent])
    return [message for turn in reversed(path) for message in (*turn.messages, turn.response)]
