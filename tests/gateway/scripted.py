"""An upstream that does what a test says, when it says so; a chat format in which every character is a token."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from hypothesis import HealthCheck, settings

from rookery.core import Finish, Message, ToolCall, ToolSchema, floats, ints
from rookery.upstreams.protocol import CallDelta, Delta, ModelReply, ModelRequest, OnDelta, PauseMode, UpstreamInfo

WAIT: Final = 60.0
"""Nothing that a test waits for takes so long: who waits longer has failed."""
END: Final = "\x03"
ANY_SPEED: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For properties: a slow machine is no failure."""


def letters(text: str) -> bytes:
    return ints([ord(letter) for letter in text])


def rendered(all_: Sequence[Message | msgspec.Raw]) -> str:
    """A conversation, up to where the answer begins."""
    said = [msgspec.json.decode(one) if isinstance(one, msgspec.Raw) else msgspec.to_builtins(one) for one in all_]
    return "".join(f"\x01{one['role']}\x02{one.get('content') or ''}{END}" for one in said) + "\x01assistant\x02"


def pieces_of(text: str, size: int = 1) -> tuple[Delta, ...]:
    """An answer as a stream, so many letters at a time."""
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return tuple(Delta(content=part, sampled=letters(part), logprobs=floats([-0.5] * len(part))) for part in parts)


class Letters:
    """The chat format of letters, in the shape that the pipeline uses."""

    name = "letters"
    stop_token_ids = (ord(END),)

    async def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], choice: str | None) -> bytes:
        return letters(rendered(messages))

    async def extend(
        self, tail: bytes, sampled: bytes, new: Sequence[Message], tools: Sequence[ToolSchema], choice: str | None
    ) -> bytes | None:
        return letters(rendered(new)) if sampled.endswith(letters(END)) else None

    @property
    def renderer(self) -> "Letters":
        """The renderer itself: nothing here runs in a thread."""
        return self

    async def parse(
        self, tail: bytes, sampled: bytes, tools: Sequence[ToolSchema], prompt_length: int = 0
    ) -> Message:
        return Message("assistant", _text(sampled))

    def new_reply_parser(
        self, tail: bytes, tools: Sequence[ToolSchema], prompt_length: int = 0
    ) -> "LettersReader":
        return LettersReader()

    async def finish(self, reader: "LettersReader", tokens: int = 0) -> tuple[Delta, Message]:
        return Delta(), Message("assistant", reader.text)

    def token_bytes(self, ids: bytes) -> list[bytes]:
        return [chr(token).encode() for token in memoryview(ids).cast("i").tolist()]

    def close(self) -> None: ...


class LettersReader:
    def __init__(self) -> None:
        self.text = ""

    def feed(self, sampled: bytes, logprobs: bytes = b"") -> Delta:
        more = _text(sampled)
        self.text += more
        return Delta(content=more)


def _text(sampled: bytes) -> str:
    return "".join(map(chr, memoryview(sampled).cast("i").tolist())).removesuffix(END) if sampled else ""


# ---- what an upstream is told to do


@dataclass
class Play:
    """One answer: pieces for those who want its on_delta, and how it ends."""

    text: str = "ok"
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    finish: Finish = "stop"
    size: int = 1
    """Letters in a piece."""
    pieces: tuple[Delta, ...] | None = None
    """Instead of those that the text makes."""
    error: BaseException | None = None
    """Ends the call after `after` pieces."""
    after: int = 1 << 30
    held: bool = False
    """Each step waits until the test says `go`."""
    tops: int = 0
    more: dict[str, Any] = field(default_factory=dict)
    """Fields of the reply."""

    def deltas(self) -> tuple[Delta, ...]:
        if self.pieces is not None:
            return self.pieces
        told = [Delta(reasoning=self.reasoning)] if self.reasoning else []
        told += pieces_of(self.text, self.size)
        for at, call in enumerate(self.calls):
            told.append(Delta(tool_calls=(CallDelta(at, call.id, call.name),)))
            told += [Delta(tool_calls=(CallDelta(at, arguments=letter),)) for letter in call.arguments]
        told.append(Delta(sampled=letters(END), logprobs=floats([-0.5])))
        return tuple(told)

    def reply(self, request: ModelRequest) -> ModelReply:
        prompt = request.tokens or letters(rendered(request.messages))
        sampled = letters(self.text + END)
        n = len(self.text) + 1
        tops: list[tuple[tuple[int, float], ...]] = []
        if request.top_logprobs:
            tops = [tuple((ord("a") + at, -1.0 - at) for at in range(request.top_logprobs))] * n
        return ModelReply(
            **{
                "message": Message("assistant", self.text, self.calls, reasoning=self.reasoning),
                "finish": "tool_calls" if self.calls else self.finish,
                "prompt": prompt,
                "sampled": sampled,
                "logprobs": floats([-0.5] * n),
                "version": 7,
                "prompt_tokens": len(prompt) // 4,
                "sampled_tokens": n,
                "replica": "one",
                "tops": tuple(tops),
            }
            | self.more
        )


class Asked:
    """A call that an upstream got."""

    def __init__(self, request: ModelRequest, play: Play) -> None:
        self.request = request
        self.play = play
        self.told = 0
        """Pieces that were taken."""
        self.cancelled = False
        self.over = asyncio.Event()
        self._steps: asyncio.Semaphore = asyncio.Semaphore(0)

    def go(self, steps: int = 1) -> None:
        """So many more pieces, the end being one."""
        for _ in range(steps):
            self._steps.release()

    def finish(self) -> None:
        self.go(1 << 10)

    async def step(self) -> None:
        if self.play.held:
            await self._steps.acquire()

    async def ended(self) -> None:
        async with asyncio.timeout(WAIT):
            await self.over.wait()


class Scripted:
    """An upstream that plays what it was told, then its default for ever."""

    name = "scripted"
    accepts_tokens = True
    version = 0
    accepts_raw_json = True

    def __init__(self, default: Play | str = "ok") -> None:
        self.default = Play(default) if isinstance(default, str) else default
        self.calls: list[Asked] = []
        self.closed = False
        self._script: deque[Play] = deque()
        self._came = asyncio.Condition()

    def then(self, *plays: Play) -> None:
        self._script.extend(plays)

    async def called(self, count: int = 1) -> Asked:
        """The call of that number, when it has come."""
        async with asyncio.timeout(WAIT), self._came:
            await self._came.wait_for(lambda: len(self.calls) >= count)
        return self.calls[count - 1]

    async def complete(
        self, request: ModelRequest, *, timeout: float, on_delta: OnDelta | None = None, **more: Any
    ) -> ModelReply:
        asked = Asked(request, self._script.popleft() if self._script else self.default)
        self.calls.append(asked)
        async with self._came:
            self._came.notify_all()
        play = asked.play
        try:
            for delta in play.deltas()[: play.after]:
                await asked.step()
                if on_delta is not None:
                    await on_delta(delta)
                asked.told += 1
            await asked.step()
            if play.error is not None:
                raise play.error
            return play.reply(request)
        except asyncio.CancelledError:
            asked.cancelled = True
            raise
        finally:
            asked.over.set()

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        return UpstreamInfo(url="")

    async def freeze(self, mode: PauseMode, *, timeout: float) -> None: ...

    async def thaw(self, *, timeout: float) -> None: ...

    async def close(self) -> None:
        self.closed = True
