"""A shard's state of one registered session: its clock, its requests in progress and the replies it can repeat.

Runs in gateway shards.

Guarantees:
- the clock of a session excludes pauses and waiting in the upstream's queue; its deadline ends its calls;
- a deadline that passes while a model server hangs is that server's failure, not an exhausted budget;
- a retry of a request finds the request in progress, or the recorded reply.
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
"""Latest requests of a session whose replies are kept in memory for retries."""
Ending: TypeAlias = Literal["cancelled", "deleted"]


class SessionEntry:
    """One registered session of a shard. Its `Session` object is loaded when it is first used."""

    def __init__(self, opened: SessionOpened, clock: StageClock) -> None:
        self.registration = opened.registration
        self.id = opened.registration.id
        self.digest = opened.digest
        self.began = opened.at
        self.ended: Ending | None = None
        self.truncated: TruncatedReason | None = None
        self.calls = 0
        """Number of model calls that were sent to an upstream, also of those that failed."""
        self.failure = ""
        """Cause of the failure of the last model call; empty if it succeeded."""
        self.extents: list[Extent] = []
        self.session: Session | None = None
        self.last_used = time.monotonic()
        self.clock = clock
        self.replayable: dict[str, dict[int, Turn]] = {}
        """Turns of the latest requests, by request key and choice; a retry gets the same reply."""
        self.pending: dict[str, asyncio.Future[None]] = {}
        """Requests in progress, by key; a retry waits for the first one."""
        self.stored_replies: dict[str, tuple[int, int]] = {}
        """Replies that a client can refer to, by ID: the turn, and its `instruction_length`."""
        self._turn_keys: dict[int, str] = {}
        self._reported: dict[str, int] = {}
        self._summary: dict[str, Any] | None = None
        self._timeouts: set[asyncio.Timeout] = set()
        """Timeouts of the calls in flight. They expire together, after a check whether a model server hangs."""
        self._timer: asyncio.TimerHandle | None = None
        self._examining: asyncio.Task[None] | None = None
        self.evidence: list[UpstreamEvidence] = []
        """Observations of model servers that did not answer."""

    # ---- WaitObserver

    def hold(self) -> None:
        self.clock.hold(time.monotonic())
        self._arm()

    def release(self) -> None:
        if self.clock.stopped and self.clock.release(time.monotonic()):
            self._arm()

    def _arm(self) -> None:
        """Set the deadline timer if there are calls in flight and the clock runs."""
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
        """End the calls in flight after the deadline, once it is known whether a model server hangs."""
        try:
            await self.examine()
        finally:
            self._examining = None
            now = asyncio.get_running_loop().time()
            for timeout in self._timeouts:
                if not timeout.expired():
                    timeout.reschedule(now)

    async def examine(self) -> list[UpstreamEvidence]:
        """Check whether the servers of the calls in flight hang. Returns this and earlier observations."""
        if self.session is not None and self.session.in_flight:
            async with asyncio.timeout(LONGEST_LOOK + 1.0):
                self.evidence += await self.session.examine()
        return self.evidence

    def deadline_error(self) -> Exception:
        """Return the error of a call after the deadline: a hung server, or else the exhausted budget."""
        message = f"its deadline of {self.clock.budget:g} seconds has passed"
        hung = next((seen for seen in self.evidence if seen.verdict == "hung"), None)
        if hung is None:
            return Truncation("time", message)
        error = UpstreamError(f"{hung.replica} does not respond: {hung.text}; {message}", cause=hung.cause)
        error.evidence = hung
        return error

    def waiting(self, on: str, step: int) -> None:
        """Do nothing: a shard does not report what its sessions wait for."""

    def credit(self, held: float) -> None:
        """Do nothing: only runners get credits for waits at a gateway."""

    @property
    def remaining(self) -> float:
        """Seconds until the session's deadline."""
        return self.clock.remaining(time.monotonic())

    @property
    def waited(self) -> float:
        """Seconds excluded from the deadline so far."""
        return self.clock.held_by(time.monotonic())

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Context manager that cancels its body at the session's deadline and raises `deadline_error()`."""
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
        """Context manager that marks a request as in progress, so that a retry can wait for it."""
        if key in self.pending:  # an equal request that is not a retry; a retry waits for the first one
            yield
            return
        over = self.pending[key] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self.pending[key]
            over.set_result(None)

    def take_new_counts(self, session: Session) -> dict[str, int]:
        """Return how much the counters of the session's turns have grown since the last call."""
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
        """Return usage and fidelity counters; None if the session was not used since this shard started."""
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
        """Free the memory of everything that can be read from disk again."""
        self._summary = self.summary()
        self.session = None
        self.replayable.clear()
        self.stored_replies.clear()
        self._turn_keys.clear()

    def turn_key(self, turn: int) -> str:
        """Return the key of a recorded turn; empty if it has none."""
        return self._turn_keys.get(turn, "")

    def sampling(self, role: str) -> Sampling:
        """Return the sampling parameters that override those of a client's request."""
        own = self.registration.roles.get(role, RoleOptions()).sampling
        return own.over(self.registration.sampling) if role == "policy" else own

    def add_turn(self, turn: Turn) -> None:
        """Index a recorded turn, for retries and for references by ID."""
        if not turn.key:
            return
        self._turn_keys[turn.index] = turn.key
        if turn.partial:  # neither a retry nor a reference by ID gets a partial turn
            return
        key, choice, reply_id, instruction_length = (*turn.key.split("."), "", "", "")[:4]
        self.replayable.setdefault(key, {})[int(choice or 0)] = turn
        if reply_id:
            self.stored_replies[reply_id] = (turn.index, int(instruction_length))
        while len(self.replayable) > MAX_REPLAYABLE:
            del self.replayable[next(iter(self.replayable))]


def make_turn_key(key: str, choice: int, reply_id: str = "", instruction_length: int = 0) -> str:
    """Return the key under which the turn of one choice of a request is recorded."""
    if reply_id:
        return f"{key}.{choice}.{reply_id}.{instruction_length}"
    return f"{key}.{choice}" if choice else key


def reply_id_in_key(key: str) -> str:
    """Return the reply ID in the key of a turn; empty if it has none."""
    return (*key.split("."), "", "")[2]
