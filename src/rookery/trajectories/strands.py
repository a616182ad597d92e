"""Token ids of many turns, each id once: a turn that goes on where another ended shares its ids.

Promises:
- going on costs what is new, however long the sequence is; two turns that go on from one share all before them;
- ids that were written are never changed: what a node gives stays the same for good;
- reading a node's ids is safe while another thread records.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rookery.core import Finish, Message

_FIRST, _BLOCK = 256, 1 << 16


class Strand:
    """Ids that follow those of `base`, up to `start` bytes of it; only ever longer."""

    __slots__ = ("base", "data", "start")

    def __init__(self, base: "Strand | None", start: int, data: bytes) -> None:
        self.base = base
        self.start = start
        self.data = bytearray(data)

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end` of the sequence that this strand ends."""
        parts: list[bytes] = []
        strand: Strand | None = self
        while strand is not None and end > start:
            if end > strand.start:
                low, high = max(start - strand.start, 0), end - strand.start
                # Each read is one step of the interpreter: another thread may append between any two.
                if low or high < len(strand.data):
                    parts.append(bytes(strand.data[low:high]))
                else:
                    whole = bytes(strand.data)
                    parts.append(whole if len(whole) == high else whole[:high])
                end = max(strand.start, start)
            strand = strand.base
        return parts[0] if len(parts) == 1 else b"".join(reversed(parts))


class Agreement:
    """How far one prompt agrees with strands; each strand is compared once."""

    def __init__(self, prompt: bytes) -> None:
        self._prompt = prompt
        self._known: dict[Strand, int] = {}

    def with_strand(self, strand: Strand) -> int:
        """How many bytes of the prompt are also the first of the strand, those of its bases included."""
        todo: list[Strand] = []
        at: Strand | None = strand
        while at is not None and at not in self._known:
            todo.append(at)
            at = at.base
        agreed = self._known[at] if at is not None else 0
        while todo:
            below = todo.pop()
            if agreed >= below.start:
                agreed = below.start + common(self._prompt, below.start, below.data)
            self._known[below] = agreed
        return agreed

    def with_node(self, node: "Node") -> bool:
        """Whether the prompt begins with all ids of the node."""
        strand = node.strand
        return strand is not None and node.end <= len(self._prompt) and self.with_strand(strand) >= node.end


def begins_with(prompt: bytes, node: "Node") -> bool:
    """Whether a prompt begins with the ids of the last node of a strand without bases: the usual case, cheaply."""
    strand = node.strand
    return (
        strand is not None
        and strand.base is None
        and len(strand.data) == node.end
        and prompt.startswith(strand.data)
    )


def common(prompt: bytes, at: int, data: bytes | bytearray) -> int:
    """How many bytes of `data` the prompt has from `at` on."""
    if prompt.startswith(data, at):
        return len(data)
    limit = min(len(prompt) - at, len(data))
    low, size = 0, _FIRST
    while low < limit:
        size = min(size, limit - low)
        if prompt[at + low : at + low + size] == data[low : low + size]:
            low += size
            size = min(4 * size, _BLOCK)
        elif size == 1:
            break
        else:  # it lies in here: halve until one byte is left
            size = (size + 1) // 2
            limit = min(limit, low + 2 * size)
    return min(low, limit)


class Cut(NamedTuple):
    """A place at which the client of a partial turn may have stopped reading."""

    content: int
    """Characters of the content that were sent."""
    reasoning: int
    calls: int
    """Complete tool calls that were sent."""
    tokens: int
    """The sampled tokens that all of these were read from."""


class Node:
    """A recorded turn, for those who go on from it."""

    __slots__ = ("cuts", "end", "finish", "index", "prompt_end", "response", "short", "strand")

    def __init__(
        self,
        index: int,
        response: Message,
        finish: Finish,
        strand: Strand | None,
        prompt_end: int,
        end: int,
        cuts: Sequence[Cut] = (),
    ) -> None:
        self.index = index
        self.response = response
        self.finish: Finish = finish
        self.strand = strand
        """None where the engine gave no ids: then nothing can be exact about it."""
        self.prompt_end = prompt_end
        self.end = end
        self.cuts = cuts
        """Of a partial turn with ids: where its client may have stopped reading."""
        self.short = False
        """Whether this is less of a partial turn than its client was sent."""

    @property
    def length(self) -> int:
        """Tokens of its prompt and of what was sampled; 0 where they are not known."""
        return self.end // 4

    def tokens(self) -> bytes:
        """The ids of its prompt and of what was sampled."""
        return self.strand.read(0, self.end) if self.strand is not None else b""

    def tail(self, n: int) -> bytes:
        """The last `n` ids of its prompt, or all of them where there are fewer."""
        if self.strand is None:
            return b""
        return self.strand.read(max(self.prompt_end - 4 * n, 0), self.prompt_end)

    @property
    def sampled(self) -> bytes:
        return self.strand.read(self.prompt_end, self.end) if self.strand is not None else b""

    @property
    def whole(self) -> bool:
        """Whether its answer has ids and came to its own end, so that messages can follow it."""
        return self.strand is not None and self.finish in ("stop", "tool_calls")

    def upto(self, cut: Cut) -> "Node":
        """This partial turn, as if its client had stopped reading at `cut`."""
        end = min(self.prompt_end + 4 * cut.tokens, self.end)
        node = Node(self.index, shown_at(self.response, cut), self.finish, self.strand, self.prompt_end, end)
        node.short = True
        return node


def cuts_of(packed: bytes) -> list[Cut]:
    """The cuts of a partial turn, with strictly increasing numbers of tokens."""
    if not packed:
        return []
    places = memoryview(packed).cast("i").tolist()
    return [Cut(*places[at : at + 4]) for at in range(0, len(places), 4)]


def shown_at(response: Message, cut: Cut) -> Message:
    """The part of a partial answer that its client had read at `cut`."""
    return Message(
        "assistant",
        response.text[: cut.content] if cut.content or not cut.calls else None,
        response.tool_calls[: cut.calls],
        reasoning=(response.reasoning or "")[: cut.reasoning] or None,
    )


def grown(parent: Node | None, prompt: bytes, sampled: bytes) -> tuple[Strand, int, int]:
    """Where the ids of a new turn lie: after those of `parent`, or on their own."""
    if parent is None or parent.strand is None:
        strand = Strand(None, 0, prompt)
        start = 0
        strand.data += sampled
    else:
        strand, start = parent.strand, parent.end
        if strand.start + len(strand.data) == start:
            strand.data += prompt + sampled
        else:  # another turn went on from the parent before
            strand = Strand(strand, start, prompt + sampled)
    return strand, start + len(prompt), start + len(prompt) + len(sampled)
