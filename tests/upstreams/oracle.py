"""A deterministic in-memory upstream: a reply sampled in parts must equal the reply sampled at once.

Every token is a letter. The oracle records which version sampled each position of each sequence; tests compare
spans with that. It can be frozen, aborted, held at a token, and made to fail.
"""

import asyncio
from collections.abc import Callable

from rookery.core import Message, Truncation, UpstreamError, floats, ints
from rookery.upstreams.protocol import (
    Delta,
    ModelReply,
    ModelRequest,
    OnDelta,
    OnWait,
    PauseMode,
    UpstreamConfig,
    UpstreamInfo,
)

END = 0


def following(ids: list[int], ending: int) -> int:
    """Return the next token: a letter, or the end."""
    mixed = 7
    for token in ids[-6:]:
        mixed = (mixed * 31 + token + 11) % 10_007
    return END if mixed % ending == 0 else 97 + mixed % 4


def chance(ids: list[int]) -> float:
    return -(sum(ids[-3:]) % 64) / 64


class Oracle:
    def __init__(
        self,
        *,
        can: tuple[PauseMode, ...] = ("keep", "abort"),
        pieces: Callable[[int], int] = lambda _: 1,
        ending: int = 40,
        context: int = 10_000,
        slots: int = 1_000,
        config: UpstreamConfig | None = None,
    ) -> None:
        self.name = "oracle"
        self.accepts_raw_json = True
        self.accepts_tokens = True
        self.version = 1
        self.config = config or UpstreamConfig()
        self.requests: list[ModelRequest] = []
        self.control_calls: list[str] = []
        """Pauses (by mode) and resumes, in order."""
        self.truth: dict[tuple[int, int], int] = {}
        """By first ID of the prompt and number of earlier tokens: the version that sampled the token there."""
        self.sampled = 0
        self.under_way = 0
        self.closed = False
        self.fail_freeze: UpstreamError | None = None
        self.fail_thaw = 0
        self.gate = asyncio.Event()
        """Event that must be set for tokens to be sampled; `freeze` clears it."""
        self.gate.set()
        self._can = can
        self._pieces = pieces
        self._ending = ending
        self._context = context
        self._slots = asyncio.Semaphore(slots)
        self._aborts = 0
        self._marks: list[tuple[int, asyncio.Event]] = []

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        return UpstreamInfo(url="oracle")

    async def close(self) -> None:
        self.closed = True

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        self.control_calls.append(mode)
        if self.fail_freeze is not None:
            raise self.fail_freeze
        if mode not in self._can:
            return False
        if mode == "abort":
            self.abort()
        self.gate.clear()
        return True

    async def thaw(self, *, timeout: float) -> None:
        self.control_calls.append("thaw")
        if self.fail_thaw:
            self.fail_thaw -= 1
            raise UpstreamError("it does not listen")
        self.gate.set()

    def abort(self) -> None:
        """End the calls in flight with the tokens they have."""
        self._aborts += 1
        self.gate.set()

    def reached(self, count: int) -> asyncio.Event:
        """Return an event that is set when this number of tokens was sampled over all calls."""
        event = asyncio.Event()
        if self.sampled >= count:
            event.set()
        self._marks.append((count, event))
        return event

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        self.requests.append(request)
        if self._slots.locked():
            if on_wait is not None:
                on_wait(True)
            try:
                await self._slots.acquire()
            finally:
                if on_wait is not None:
                    on_wait(False)
        else:
            await self._slots.acquire()
        self.under_way += 1
        try:
            return await self._sample(request, on_delta)
        finally:
            self.under_way -= 1
            self._slots.release()

    async def _sample(self, request: ModelRequest, on_delta: OnDelta | None) -> ModelReply:
        sampling = request.sampling.over(self.config.sampling)
        data = request.tokens or ints(map(ord, str(request.messages)))
        prompt = list(memoryview(data).cast("i"))
        if len(prompt) >= self._context:
            raise Truncation("context", "too long")
        stop_ids = {END, *request.stop_ids}
        ids, first, version = prompt[:], prompt[0], self.version
        aborts = self._aborts
        sent = len(ids)
        finish = ""
        while not finish:
            await asyncio.sleep(0)
            while not self.gate.is_set() and aborts == self._aborts:
                await self.gate.wait()
            if aborts != self._aborts:
                finish = "abort"
                break
            token = following(ids, self._ending)
            self.truth[first, len(ids)] = self.version
            ids.append(token)
            self.sampled += 1
            for count, event in self._marks:
                if self.sampled >= count:
                    event.set()
            text = "".join(map(chr, ids[len(prompt) :]))
            if token in stop_ids or any(text.endswith(stop) for stop in sampling.stop):
                finish = "stop"
            elif len(text) == sampling.max_tokens or len(ids) >= self._context:
                finish = "length"
            if on_delta is not None and (finish or len(ids) - sent >= self._pieces(len(ids))):
                await on_delta(self._delta(ids, sent))
                sent = len(ids)
        if on_delta is not None and sent < len(ids):
            await on_delta(self._delta(ids, sent))
        whole = self._delta(ids, len(prompt))
        return ModelReply(
            message=Message("assistant", whole.content),
            finish=finish,  # type: ignore[arg-type]
            prompt=request.tokens,
            sampled=whole.sampled,
            logprobs=whole.logprobs,
            version=version,
            prompt_tokens=len(prompt),
            sampled_tokens=len(ids) - len(prompt),
            replica="oracle",
            tops=whole.tops,
        )

    def _delta(self, ids: list[int], begin: int) -> Delta:
        return Delta(
            content="".join(map(chr, ids[begin:])),
            sampled=ints(ids[begin:]),
            logprobs=floats([chance(ids[:n]) for n in range(begin, len(ids))]),
            tops=tuple(((token, -0.5),) for token in ids[begin:]),
        )
