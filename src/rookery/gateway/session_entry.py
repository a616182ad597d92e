"""One session of a shard: its clock, its requests under way, and the latest that were answered.

Promises:
- the clock of a session excludes pauses and the waiting for a place, and its deadline ends its calls;
- a deadline that passes while a model server hangs is that server's failure, and no spent budget;
- a retry of a request finds the one under way, or the answer that was recorded for it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Literal, TypeAlias

import msgspec

from rookery.core import Extent, Sampling, StageClock, TruncatedReason, Truncation, Turn, UpstreamError
from rookery.gateway.registration import RoleOptions, SessionOpened
from rookery.gateway.session import Session
from rookery.upstreams.hang_detector import LONGEST_LOOK, UpstreamEvidence

MAX_REPLAYABLE: Final = 64
"""Requests of a session whose retry is known."""
Ending: TypeAlias = Literal["cancelled", "deleted"]


class SessionEntry:
    """One session of a shard. The session itself is made when it is first used."""

    def __init__(self, opened: SessionOpened, clock: StageClock) -> None:
        self.registration = opened.registration
        self.id = opened.registration.id
        self.digest = opened.digest
        self.began = opened.at
        self.ended: Ending | None = None
        self.truncated: TruncatedReason | None = None
        self.calls = 0
        """Model calls that were sent to an upstream, whether or not they were answered."""
        self.failure = ""
        """The cause of the last call's failure at the upstream; empty after a call that was answered."""
        self.extents: list[Extent] = []
        self.session: Session | None = None
        self.last_used = time.monotonic()
        self.clock = clock
        self.replayable: dict[str, dict[int, Turn]] = {}
        """The latest requests that were answered, by choice: a retry gets the same again."""
        self.pending: dict[str, asyncio.Future[None]] = {}
        """Requests under way, by key: a retry of one waits for it."""
        self.stored_replies: dict[str, tuple[int, int]] = {}
        """Answers that a client may come back to: the turn, and how much of its first message nobody inherits."""
        self._turn_keys: dict[int, str] = {}
        self._reported: dict[str, int] = {}
        self._summary: dict[str, Any] | None = None
        self._timeouts: set[asyncio.Timeout] = set()
        """Of the calls under way; they expire together, once it is known whether a model server hangs."""
        self._timer: asyncio.TimerHandle | None = None
        self._examining: asyncio.Task[None] | None = None
        self.evidence: list[UpstreamEvidence] = []
        """What was seen of model servers whose calls stayed silent."""

    # ---- WaitObserver

    def hold(self) -> None:
        self.clock.hold(time.monotonic())
        self._arm()

    def release(self) -> None:
        if self.clock.stopped and self.clock.release(time.monotonic()):
            self._arm()

    def _arm(self) -> None:
        """Set the timer of the deadline, where there are calls and the clock runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._timeouts and not self.clock.stopped and self.clock.budget < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self.remaining), self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._examining is None:
            self._examining = asyncio.get_running_loop().create_task(self._end_late_calls())

    async def _end_late_calls(self) -> None:
        """The deadline has passed: ends the calls under way once it is known whether a server hangs."""
        try:
            await self.examine()
        finally:
            self._examining = None
            now = asyncio.get_running_loop().time()
            for timeout in self._timeouts:
                if not timeout.expired():
                    timeout.reschedule(now)

    async def examine(self) -> list[UpstreamEvidence]:
        """Find out whether the servers of the calls under way hang; everything that was seen so far."""
        if self.session is not None and self.session.in_flight:
            async with asyncio.timeout(LONGEST_LOOK + 1.0):
                self.evidence += await self.session.examine()
        return self.evidence

    def deadline_error(self) -> Exception:
        """What a call past the deadline raises: the hung server, where one was found, or the spent budget."""
        said = f"its deadline of {self.clock.budget:g} seconds has passed"
        hung = next((seen for seen in self.evidence if seen.verdict == "hung"), None)
        if hung is None:
            return Truncation("time", said)
        error = UpstreamError(f"{hung.replica} does not respond: {hung.text}; {said}", cause=hung.cause)
        error.evidence = hung
        return error

    def waiting(self, on: str, step: int) -> None:
        """Nobody asks."""

    def credit(self, held: float) -> None:
        """Nobody else waits for it."""

    @property
    def remaining(self) -> float:
        return self.clock.remaining(time.monotonic())

    @property
    def waited(self) -> float:
        """Seconds that were not its own so far."""
        return self.clock.held_by(time.monotonic())

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """For as long as the session's deadline allows."""
        budget = self.clock.budget
        if budget == float("inf"):
            yield
            return
        if self.remaining <= 0:
            raise self.deadline_error()
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._timeouts.add(timeout)
                self._arm()
                try:
                    yield
                finally:
                    self._timeouts.discard(timeout)
                    self._arm()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self.deadline_error() from None

    @contextmanager
    def track_request(self, key: str) -> Iterator[None]:
        """A request is under way: its retry can wait for it."""
        if key in self.pending:  # an equal one, not a retry: it is the first that a retry would mean
            yield
            return
        over = self.pending[key] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self.pending[key]
            over.set_result(None)

    def take_new_counts(self, session: Session) -> dict[str, int]:
        """What was counted about its turns since this was asked last."""
        counts = session.recorder.counts
        now = {
            "drifted": counts.drifted,
            "forks": counts.forks,
            "partial": counts.partial,
            "rerendered": session.rerendered,
        }
        new = {
            name: n - self._reported.get(name, 0) for name, n in now.items() if n != self._reported.get(name, 0)
        }
        self._reported = now
        return new

    def summary(self) -> dict[str, Any] | None:
        """Usage and fidelity; None where it was not used since this shard started."""
        session = self.session
        if session is None:
            return self._summary
        counts = msgspec.structs.asdict(session.recorder.counts)
        return {
            "usage": {
                "turns": session.turns,
                "prompt_tokens": session.prompt_tokens,
                "sampled_tokens": session.sampled_tokens,
                "others": session.others,
            },
            "fidelity": {**counts, "rerendered": session.rerendered, "promptless": session.promptless},
        }

    def unload(self) -> None:
        """Lets go of what can be read from the disk again."""
        self._summary = self.summary()
        self.session = None
        self.replayable.clear()
        self.stored_replies.clear()
        self._turn_keys.clear()

    def turn_key(self, turn: int) -> str:
        return self._turn_keys.get(turn, "")

    def sampling(self, role: str) -> Sampling:
        """What goes over whatever a client asks for."""
        wished = self.registration.roles.get(role, RoleOptions()).sampling
        return wished.over(self.registration.sampling) if role == "policy" else wished

    def add_turn(self, turn: Turn) -> None:
        if not turn.key:
            return
        self._turn_keys[turn.index] = turn.key
        if turn.partial:  # no retry gets it as an answer, and no client comes back to it by name
            return
        key, choice, name, head = (*turn.key.split("."), "", "", "")[:4]
        self.replayable.setdefault(key, {})[int(choice or 0)] = turn
        if name:
            self.stored_replies[name] = (turn.index, int(head))
        while len(self.replayable) > MAX_REPLAYABLE:
            del self.replayable[next(iter(self.replayable))]


def make_turn_key(key: str, choice: int, name: str = "", head: int = 0) -> str:
    """The key of one choice of a request that wants several, and of an answer that has a name."""
    if name:
        return f"{key}.{choice}.{name}.{head}"
    return f"{key}.{choice}" if choice else key


def reply_id_in_key(key: str) -> str:
    """The name of the answer that has this key."""
    return (*key.split("."), "", "")[2]
