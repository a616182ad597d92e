"""Token IDs of the recorded turns, stored once where turns share a prefix.

Runs in the runner or the gateway shard. A branch is an append-only buffer of token IDs that continues another
branch from some offset. A turn that continues an earlier turn appends to its branch; a second turn that continues
the same turn starts a new branch.

Guarantees:
- appending costs the new tokens, however long the sequence is; two continuations of one turn share its tokens;
- recorded tokens never change;
- the tokens of a recorded turn can be read while another thread records.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rookery.core import Finish, Message

_FIRST_CHUNK, _MAX_CHUNK = 256, 1 << 16
"""Bytes compared at a time, at first and at most."""


class TokenBranch:
    """Append-only token IDs (int32 bytes) that follow the first `start` bytes of `base`."""

    __slots__ = ("base", "data", "start")

    def __init__(self, base: "TokenBranch | None", start: int, data: bytes) -> None:
        self.base = base
        self.start = start
        self.data = bytearray(data)

    def read(self, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` of the sequence that ends in this branch."""
        parts: list[bytes] = []
        branch: TokenBranch | None = self
        while branch is not None and end > start:
            if end > branch.start:
                low, high = max(start - branch.start, 0), end - branch.start
                # Each read is one bytecode operation, because another thread may append between two operations.
                if low or high < len(branch.data):
                    parts.append(bytes(branch.data[low:high]))
                else:
                    data = bytes(branch.data)
                    parts.append(data if len(data) == high else data[:high])
                end = max(branch.start, start)
            branch = branch.base
        return parts[0] if len(parts) == 1 else b"".join(reversed(parts))


class PrefixMatcher:
    """Compares one prompt with branches. Each branch is compared at most once."""

    def __init__(self, prompt: bytes) -> None:
        self._prompt = prompt
        self._lengths: dict[TokenBranch, int] = {}

    def common_length(self, branch: TokenBranch) -> int:
        """Return the length in bytes of the common prefix of the prompt and the branch, its bases included."""
        pending: list[TokenBranch] = []
        base: TokenBranch | None = branch
        while base is not None and base not in self._lengths:
            pending.append(base)
            base = base.base
        length = self._lengths[base] if base is not None else 0
        while pending:
            child = pending.pop()
            if length >= child.start:
                length = child.start + common_prefix_length(self._prompt, child.start, child.data)
            self._lengths[child] = length
        return length

    def starts_with(self, turn: "RecordedTurn") -> bool:
        """Return whether the prompt starts with the turn's prompt and sampled tokens."""
        branch = turn.branch
        return branch is not None and turn.end <= len(self._prompt) and self.common_length(branch) >= turn.end


def extends_branch(prompt: bytes, turn: "RecordedTurn") -> bool:
    """Return whether the prompt starts with all tokens of a branch that has no base and ends with `turn`.

    This is the common case, and needs one comparison.
    """
    branch = turn.branch
    return (
        branch is not None
        and branch.base is None
        and len(branch.data) == turn.end
        and prompt.startswith(branch.data)
    )


def common_prefix_length(prompt: bytes, offset: int, data: bytes | bytearray) -> int:
    """Return the length in bytes of the common prefix of `prompt[offset:]` and `data`."""
    if prompt.startswith(data, offset):
        return len(data)
    limit = min(len(prompt) - offset, len(data))
    low, size = 0, _FIRST_CHUNK
    while low < limit:
        size = min(size, limit - low)
        if prompt[offset + low : offset + low + size] == data[low : low + size]:
            low += size
            size = min(4 * size, _MAX_CHUNK)
        elif size == 1:
            break
        else:  # the difference is in this chunk: halve it
            size = (size + 1) // 2
            limit = min(limit, low + 2 * size)
    return min(low, limit)


class CutPoint(NamedTuple):
    """A position at which the client of a partial turn may have stopped reading the stream."""

    content: int
    """Characters of the content sent up to here."""
    reasoning: int
    """Characters of the reasoning sent up to here."""
    calls: int
    """Complete tool calls sent up to here."""
    tokens: int
    """Number of sampled tokens that this output was decoded from."""


class RecordedTurn:
    """A recorded turn that later turns can continue: its reply and the location of its tokens."""

    __slots__ = ("branch", "cuts", "end", "finish", "index", "prompt_end", "response", "truncated")

    def __init__(
        self,
        index: int,
        response: Message,
        finish: Finish,
        branch: TokenBranch | None,
        prompt_end: int,
        end: int,
        cuts: Sequence[CutPoint] = (),
    ) -> None:
        self.index = index
        self.response = response
        self.finish: Finish = finish
        self.branch = branch
        """None if the inference engine returned no token IDs."""
        self.prompt_end = prompt_end
        """Offset in bytes at which the prompt ends in the branch."""
        self.end = end
        """Offset in bytes at which the sampled tokens end in the branch."""
        self.cuts = cuts
        """For a partial turn with token IDs: where its client may have stopped reading."""
        self.truncated = False
        """Whether this is a partial turn cut shorter than the output sent to its client."""

    @property
    def length(self) -> int:
        """Number of prompt and sampled tokens; 0 if they are unknown."""
        return self.end // 4

    def tokens(self) -> bytes:
        """Return the token IDs of the prompt and the reply."""
        return self.branch.read(0, self.end) if self.branch is not None else b""

    def prompt_tail(self, count: int) -> bytes:
        """Return the last `count` token IDs of the prompt, or all if it has fewer."""
        if self.branch is None:
            return b""
        return self.branch.read(max(self.prompt_end - 4 * count, 0), self.prompt_end)

    @property
    def sampled(self) -> bytes:
        """The sampled token IDs."""
        return self.branch.read(self.prompt_end, self.end) if self.branch is not None else b""

    @property
    def is_complete(self) -> bool:
        """Whether the reply has token IDs and ended on its own, so that messages can follow it."""
        return self.branch is not None and self.finish in ("stop", "tool_calls")

    def truncate_at(self, cut: CutPoint) -> "RecordedTurn":
        """Return this partial turn as if its client had stopped reading at `cut`."""
        end = min(self.prompt_end + 4 * cut.tokens, self.end)
        response = truncate_response(self.response, cut)
        turn = RecordedTurn(self.index, response, self.finish, self.branch, self.prompt_end, end)
        turn.truncated = True
        return turn


def unpack_cuts(packed: bytes) -> list[CutPoint]:
    """Decode `Turn.cuts`: the cut points of a partial turn, in order of their number of tokens."""
    if not packed:
        return []
    numbers = memoryview(packed).cast("i").tolist()
    return [CutPoint(*numbers[at : at + 4]) for at in range(0, len(numbers), 4)]


def truncate_response(response: Message, cut: CutPoint) -> Message:
    """Return the part of a partial reply that its client had received at `cut`."""
    return Message(
        "assistant",
        response.text[: cut.content] if cut.content or not cut.calls else None,
        response.tool_calls[: cut.calls],
        reasoning=(response.reasoning or "")[: cut.reasoning] or None,
    )


def append_tokens(parent: RecordedTurn | None, prompt: bytes, sampled: bytes) -> tuple[TokenBranch, int, int]:
    """Store the tokens of a new turn after those of `parent`.

    Returns the branch and the offsets at which the prompt and the sampled tokens end.
    """
    if parent is None or parent.branch is None:
        branch = TokenBranch(None, 0, prompt)
        start = 0
        branch.data += sampled
    else:
        branch, start = parent.branch, parent.end
        if branch.start + len(branch.data) == start:
            branch.data += prompt + sampled
        else:  # another turn continues the parent already
            branch = TokenBranch(branch, start, prompt + sampled)
    return branch, start + len(prompt), start + len(prompt) + len(sampled)
