"""Store the token IDs of recorded turns, with a common prefix of several turns stored only once.

Runs in the runner or the gateway shard. A branch is an append-only buffer of token IDs that continues another
branch from some offset. A turn that continues an earlier turn appends to the branch of that turn; a second turn
that continues the same turn starts a new branch.

Guarantees:
- the cost of appending depends on the number of new tokens, not on the length of the sequence;
- two turns that continue the same turn share its tokens;
- recorded tokens never change.

Other threads may read the tokens of a recorded turn while this thread records.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rookery.core import Finish, Message

_FIRST_CHUNK, _MAX_CHUNK = 256, 1 << 16
"""Number of bytes that `common_prefix_length` compares at a time: at first, and at most."""


class TokenBranch:
    """Append-only buffer of token IDs (int32 bytes), which follow the first `start` bytes of the branch `base`."""

    __slots__ = ("base", "data", "start")

    def __init__(self, base: "TokenBranch | None", start: int, data: bytes) -> None:
        self.base = base
        self.start = start
        self.data = bytearray(data)

    def read(self, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` of the token sequence of this branch, which begins with that of its
        bases."""
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
    """Find the common prefix of one prompt with several branches. Each branch is compared at most once."""

    def __init__(self, prompt: bytes) -> None:
        self._prompt = prompt
        self._lengths: dict[TokenBranch, int] = {}

    def common_length(self, branch: TokenBranch) -> int:
        """Return the length in bytes of the common prefix of the prompt and the branch's sequence, bases
        included."""
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
        """Return True if the prompt starts with all tokens of `turn`: its prompt and its reply."""
        branch = turn.branch
        return branch is not None and turn.end <= len(self._prompt) and self.common_length(branch) >= turn.end


def extends_branch(prompt: bytes, turn: "RecordedTurn") -> bool:
    """Return True if the prompt starts with all tokens of `turn`, for the common case that one comparison decides.

    This is the case if the branch of the turn has no base and ends with the turn. Otherwise False is returned, and
    `PrefixMatcher` must be used.
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
    """A position in a streamed reply at which its client may have stopped reading. Used for partial turns only.

    A turn is partial if its client closed the stream before the reply was complete.
    """

    content: int
    """Number of characters of the content that were sent up to this position."""
    reasoning: int
    """Number of characters of the reasoning that were sent up to this position."""
    calls: int
    """Number of complete tool calls that were sent up to this position."""
    tokens: int
    """Number of sampled tokens from which the output up to this position was decoded."""


class RecordedTurn(msgspec.Struct, eq=False):
    """A recorded turn that later turns can continue: its index, its reply, and the location of its tokens."""

    index: int
    response: Message
    finish: Finish
    branch: TokenBranch | None
    """The branch that holds the tokens of the turn; None if the inference engine returned no token IDs."""
    prompt_end: int
    """Offset in bytes at which the prompt ends in the branch."""
    end: int
    """Offset in bytes at which the sampled tokens end in the branch."""
    cuts: Sequence[CutPoint] = ()
    """For a partial turn with token IDs: positions at which its client may have stopped reading. Otherwise
    empty."""
    truncated: bool = False
    """True if this is a shorter version of a partial turn, from `truncate_at`."""

    @property
    def length(self) -> int:
        """Number of tokens of prompt and reply together; 0 if they are unknown."""
        return self.end // 4

    def tokens(self) -> bytes:
        """Return the token IDs of the prompt and the reply (int32 bytes); empty if they are unknown."""
        return self.branch.read(0, self.end) if self.branch is not None else b""

    def prompt_tail(self, count: int) -> bytes:
        """Return the last `count` token IDs of the prompt (int32 bytes), or all if it has fewer."""
        if self.branch is None:
            return b""
        return self.branch.read(max(self.prompt_end - 4 * count, 0), self.prompt_end)

    @property
    def sampled(self) -> bytes:
        """The sampled token IDs (int32 bytes); empty if they are unknown."""
        return self.branch.read(self.prompt_end, self.end) if self.branch is not None else b""

    @property
    def is_complete(self) -> bool:
        """True if the turn has token IDs and the model ended the reply itself, so that more messages can
        follow."""
        return self.branch is not None and self.finish in ("stop", "tool_calls")

    def truncate_at(self, cut_point: CutPoint) -> "RecordedTurn":
        """Return this partial turn up to `cut_point`, the position at which its client closed the stream."""
        end = min(self.prompt_end + 4 * cut_point.tokens, self.end)
        response = truncate_response(self.response, cut_point)
        return RecordedTurn(self.index, response, self.finish, self.branch, self.prompt_end, end, truncated=True)


def unpack_cuts(packed: bytes) -> list[CutPoint]:
    """Decode the packed cut points of a partial turn (`Turn.cuts`), ordered by their number of tokens."""
    if not packed:
        return []
    numbers = memoryview(packed).cast("i").tolist()
    return [CutPoint(*numbers[at : at + 4]) for at in range(0, len(numbers), 4)]


def truncate_response(response: Message, cut_point: CutPoint) -> Message:
    """Return the part of a partial reply that its client had read when it closed the stream at `cut_point`."""
    return Message(
        "assistant",
        response.text[: cut_point.content] if cut_point.content or not cut_point.calls else None,
        response.tool_calls[: cut_point.calls],
        reasoning=(response.reasoning or "")[: cut_point.reasoning] or None,
    )


def append_tokens(parent: RecordedTurn | None, prompt: bytes, sampled: bytes) -> tuple[TokenBranch, int, int]:
    """Store the tokens of a new turn after those of `parent`; if it is None, at the start of a new branch.

    `prompt` holds only the prompt tokens that follow those of `parent`. Returns the branch, and the offsets in
    bytes at which the prompt and the sampled tokens end.
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
