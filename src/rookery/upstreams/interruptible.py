"""One call that passes the valve: told piece by piece, interrupted between two pieces, never inside of one.

Promises:
- what was told to the caller is counted before the caller has it, so that nothing is told twice or forgotten;
- a caller's `news` is never interrupted: who is slow to take a piece takes it whole, and the call ends after it;
- an interruption from here is told apart from a cancellation from outside, which always passes through;
- `held` hears True and False in turn, and False at the end, however many reasons to wait there were.
"""

import asyncio

import msgspec

from rookery.core import Sampling
from rookery.upstreams.parts import continuable, heard, spanned, uncertain
from rookery.upstreams.protocol import Delta, Held, ModelReply, ModelRequest, News


class Interrupted(Exception):  # noqa: N818  (never leaves the room)
    """Raised out of the `news` of a call that is to end here."""


class Call:
    """A call under way, over all of its parts."""

    __slots__ = (
        "_cancelled",
        "_deltas",
        "_frozen_since",
        "_held",
        "_kept",
        "_kept_tokens",
        "_late",
        "_margin",
        "_marks",
        "_news",
        "_prompt",
        "_prompted",
        "_since",
        "_stopping",
        "_task",
        "_waits",
        "continuable",
        "count",
        "crossed",
        "mixed",
        "parts",
        "queued",
        "queueing",
        "telling",
        "told",
        "version",
        "wanted",
    )

    def __init__(self, request: ModelRequest, sampling: Sampling, *, news: News | None, held: Held | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._news = news
        self._held = held
        self._waits = 0
        self._since = 0.0
        self._cancelled = False
        self._frozen_since: float | None = None
        self._prompt = request.tokens
        self._prompted = False
        """Whether the caller has the prompt's ids."""
        self.continuable = continuable(request, sampling)
        self.parts: list[ModelReply] = []
        self.mixed = False
        """Whether there are tokens of which it is not known which of two versions sampled them."""
        self.told = False
        """Whether the caller has anything of the answer."""
        self.telling = False
        """Whether the caller is taking a piece just now."""
        self.queued = 0.0
        """Seconds of waiting for a place, and of standing still in a frozen engine."""
        self.queueing = False
        """Whether it waits for a place: the engine does not know it yet."""
        self._margin = uncertain(sampling) if self.continuable else 0
        self.begin(0)

    def begin(self, version: int) -> None:
        """Another part."""
        self.version = version
        self.wanted = False
        """Whether the part is expected to end early."""
        self._stopping = False
        self.crossed = False
        """Whether weights changed in the middle of the part."""
        self.count = 0
        """Tokens of the part that were read, told or not."""
        self._marks: list[tuple[int, int]] = []
        self._late: bool | None = None
        """Whether the first piece after a change of weights, which has not come yet, was read before it."""
        self._deltas: list[Delta] = []
        self._kept: list[Delta] = []
        """Pieces whose tokens may be the beginning of a stop text."""
        self._kept_tokens = 0

    @property
    def streamed(self) -> bool:
        return self._news is not None

    # ------------------------------------------------------------------------------------------- pieces

    async def news(self, delta: Delta) -> None:
        """What the upstream tells."""
        before = self.count
        self.count += len(delta.sampled) // 4
        if self._late is not None:
            # One token that comes alone was sampled after the change. Several that the engine tells at once may
            # have been begun before it, and what lay in a buffer was: these count as old.
            at_once = self.count - before if self._late else delta.first or self.count - before
            if self._late or at_once > 1:
                self._marks[-1] = (before + at_once, self._marks[-1][1])
                self.mixed = True
            self._late = None
        if delta.prompt:
            if self._prompted:
                delta = _unprompted(delta)
            self._prompted = True
        if self._margin:
            self._kept.append(delta)
            self._kept_tokens += self.count - before
            while self._kept and self._kept_tokens - len(self._kept[0].sampled) // 4 >= self._margin:
                delta = self._kept.pop(0)
                self._kept_tokens -= len(delta.sampled) // 4
                await self._tell(delta)
        else:
            await self._tell(delta)
        if self._stopping:
            raise Interrupted

    async def _tell(self, delta: Delta) -> None:
        assert self._news is not None
        self._deltas.append(delta)
        if delta.sampled or delta.content or delta.reasoning or delta.tool_calls:
            self.told = True
        self.telling = True
        try:
            await self._news(delta)
        finally:
            self.telling = False

    async def flush(self) -> None:
        """The answer is whole: what was kept back is no beginning of a stop."""
        while self._kept:
            await self._tell(self._kept.pop(0))

    def partial(self, reply: ModelReply | None, stops: bool) -> ModelReply | None:
        """What counts of a part that was aborted; None where nothing does."""
        if self._news is not None:
            part = heard(self._deltas, prompt=self._prompt, version=self.version)
            if self._marks:
                part = spanned(part, self._marks)
            return part if part.sampled else None
        # Not streamed: what may be the beginning of a stop cannot be told from the rest of the text.
        return self.settled(reply) if reply is not None and reply.sampled and not stops else None

    def settled(self, reply: ModelReply) -> ModelReply:
        """The part's answer with the versions that sampled it."""
        if not self.crossed or reply.spans:
            return reply
        if self._news is None:
            return _older(reply, self.version)
        return spanned(_older(reply, self.version), self._marks)

    # ------------------------------------------------------------------------------------ interruptions

    def interrupt(self) -> None:
        """The part ends as soon as it can. Once is enough."""
        self.wanted = self._stopping = True
        if not self.telling and not self._cancelled and not self._task.done():
            self._cancelled = True
            self._task.cancel()

    def ours(self) -> bool:
        """Whether a cancellation that came is our own, and nobody else's; takes it back."""
        if not self._cancelled:
            return False
        self._cancelled = False
        return self._task.uncancel() == 0

    def cross(self, version: int) -> None:
        """New weights, in the middle of the part."""
        if self.wanted or self.queueing:
            return
        self.crossed = True
        self._marks.append((self.count, version))
        if self._news is None:
            self.mixed = True
        else:
            self._late = self.telling

    # -------------------------------------------------------------------------------------------- waits

    def waits(self, begins: bool) -> None:
        """One more reason to wait, or one less."""
        before = self._waits
        self._waits += 1 if begins else -1
        if self._held is not None and (before == 0 or self._waits == 0):
            self._held(begins)

    def placing(self, begins: bool) -> None:
        """What the upstream says about its places."""
        now = asyncio.get_running_loop().time()
        if begins:
            self._since = now
        else:
            self.queued += now - self._since
        self.queueing = begins
        self.waits(begins)

    def freeze(self) -> None:
        """The engine stands still."""
        if self._frozen_since is None:
            self._frozen_since = asyncio.get_running_loop().time()
            self.waits(True)

    def thaw(self) -> None:
        """It goes on."""
        if self._frozen_since is not None:
            self.queued += asyncio.get_running_loop().time() - self._frozen_since
            self._frozen_since = None
            self.waits(False)

    def end(self) -> None:
        """Nothing more is waited for."""
        self.thaw()
        while self._waits:
            self.waits(False)


def _unprompted(delta: Delta) -> Delta:
    return Delta(
        delta.content,
        delta.reasoning,
        delta.tool_calls,
        delta.sampled,
        delta.logprobs,
        tops=delta.tops,
        logprob_content=delta.logprob_content,
        first=delta.first,
    )


def _older(reply: ModelReply, version: int) -> ModelReply:
    return reply if reply.version == version else msgspec.structs.replace(reply, version=version)
