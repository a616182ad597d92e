"""The state of one registered session in a shard: its clock, requests in progress and replies kept for retries.

Runs in gateway shards.

Guarantees:
- the clock of a session stops during pauses and while calls wait in the inference engine's queue; at the deadline,
  calls in flight are cancelled;
- if the deadline passes while an inference engine hangs, the calls fail with an error of that server, and the
  session's time budget does not count as exhausted;
- a retry finds the original request in progress, or its recorded reply if that is one of the latest.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeAlias

import msgspec

from rookery.core import Extent, Sampling, StageClock, TruncatedReason, Truncation, Turn, UpstreamError
from rookery.gateway.registration import RoleOptions, SessionOpened
from rookery.gateway.session import Session
from rookery.upstreams.hang_detector import MAX_EXAMINATION_SECONDS, UpstreamEvidence

MAX_REPLAYABLE: Final = 64
"""Number of a session's latest requests whose replies are kept in memory for retries."""
Ending: TypeAlias = Literal["cancelled", "deleted"]


class SessionEntry:
    """The state of one registered session in a shard.

    `session`, with the budgets and recorded turns, is None until it is used, and again after a time without use.
    """

    def __init__(self, opened: SessionOpened, clock: StageClock) -> None:
        self.registration = opened.registration
        self.id = opened.registration.id
        self.digest = opened.digest
        self.began = opened.at
        self.ended: Ending | None = None
        self.truncated: TruncatedReason | None = None
        self.calls = 0
        """Number of model calls that were sent to an upstream since this shard started, including those that
        failed."""
        self.failure = ""
        """Cause code of the failure of the last model call, such as `upstream.timeout`; empty if the call
        succeeded."""
        self.extents: list[Extent] = []
        self.session: Session | None = None
        self.last_used = time.monotonic()
        self.clock = clock
        self.replayable: dict[str, dict[int, Turn]] = {}
        """Recorded turns of the latest requests, by request key and choice index, to answer retries."""
        self.pending: dict[str, asyncio.Future[None]] = {}
        """Requests in progress, by request key. A retry waits for the future, which is done when the request
        ends."""
        self.stored_replies: dict[str, tuple[int, int]] = {}
        """Replies that a client can refer to, by reply ID: the index of the turn, and the number of leading
        characters of its first message that are not part of the stored history
        (`ClientRequest.instruction_length`)."""
        self._turn_keys: dict[int, str] = {}
        self._reported = (0, 0, 0, 0)
        """The counters of special turns at the last call of `take_new_counts`."""
        self._sampling: dict[str, Sampling] = {}
        """Cache of `sampling`."""
        self._summary: dict[str, Any] | None = None
        self._timeouts: set[asyncio.Timeout] = set()
        """Timeouts of the calls in flight. At the deadline they expire together, after a check for hanging
        servers."""
        self._timer: asyncio.TimerHandle | None = None
        self._examining: asyncio.Task[None] | None = None
        self.evidence: list[UpstreamEvidence] = []
        """Observations of replicas that did not answer calls of this session."""

    # ---- WaitObserver

    def stop_clock(self) -> None:
        self.clock.stop(time.monotonic())
        self._arm()

    def restart_clock(self) -> None:
        if self.clock.stopped and self.clock.restart(time.monotonic()):
            self._arm()

    def _arm(self) -> None:
        """Set the timer for the session's deadline if calls are in flight and the clock is not stopped."""
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
        """End the calls in flight after the deadline, once it was checked whether an inference engine hangs."""
        try:
            await self.examine()
        finally:
            self._examining = None
            now = asyncio.get_running_loop().time()
            for timeout in self._timeouts:
                if not timeout.expired():
                    timeout.reschedule(now)

    async def examine(self) -> list[UpstreamEvidence]:
        """Check whether the replicas of the calls in flight hang.

        Returns the observations of this check and of earlier ones.
        """
        if self.session is not None and self.session.in_flight:
            async with asyncio.timeout(MAX_EXAMINATION_SECONDS + 1.0):
                self.evidence += await self.session.examine()
        return self.evidence

    def deadline_error(self) -> Exception:
        """Return the exception for a call after the deadline.

        It is an `UpstreamError` if an inference engine was seen to hang, else a `Truncation` for the time budget.
        """
        message = f"its deadline of {self.clock.budget:g} seconds has passed"
        hung = next((seen for seen in self.evidence if seen.verdict == "hung"), None)
        if hung is None:
            return Truncation("time", message)
        error = UpstreamError(f"{hung.replica} does not respond: {hung.text}; {message}", cause=hung.cause)
        error.evidence = hung
        return error

    def count_wait(self, resource: str, change: int) -> None:
        """Do nothing (method of `WaitObserver`): a shard does not report what its sessions wait for."""

    def on_calls_ended(self) -> None:
        """Do nothing (method of `WaitObserver`): the check for hanging servers ends by itself."""

    def exclude_at_least(self, total_seconds: float) -> None:
        """Do nothing: a shard measures waiting times itself.

        Method of `WaitObserver`, for runners.
        """

    @property
    def remaining(self) -> float:
        """Seconds until the session's deadline."""
        return self.clock.remaining(time.monotonic())

    @property
    def waited(self) -> float:
        """Seconds so far that do not count against the deadline.

        These are pauses, and waits in the inference engine's queue.
        """
        return self.clock.stopped_seconds_at(time.monotonic())

    @property
    def has_deadline(self) -> bool:
        """True if the registration limits the time of the session."""
        return self.clock.budget < float("inf")

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Context manager that cancels its body at the session's deadline and then raises `deadline_error()`.

        Raises at once if the deadline has already passed.
        """
        if not self.has_deadline:
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

    def begin_request(self, key: str) -> "asyncio.Future[None] | None":
        """Mark the request with this key as in progress, so that a retry of it can wait for its end.

        Return the argument for `end_request`: None if an equal request is in progress, which retries wait for.
        """
        if key in self.pending:
            return None
        over = self.pending[key] = asyncio.get_running_loop().create_future()
        return over

    def end_request(self, key: str, over: "asyncio.Future[None] | None") -> None:
        """End what `begin_request` began."""
        if over is not None:
            del self.pending[key]
            over.set_result(None)

    def take_new_counts(self, session: Session) -> dict[str, int]:
        """Return how much the counters of special turns (such as forks) have grown since the last call.

        Counters that have not changed are left out.
        """
        counts = session.recorder.counts
        now = (counts.drifted, counts.forks, counts.partial, session.rerendered)
        before, self._reported = self._reported, now
        if now == before:
            return {}
        names = ("drifted", "forks", "partial", "rerendered")
        return {name: n - old for name, n, old in zip(names, now, before, strict=True) if n != old}

    def summary(self) -> dict[str, Any] | None:
        """Return the session's token usage, and how many turns have exact or inexact token data (`fidelity`).

        Returns None if the session was not used since this shard started.
        """
        session = self.session
        if session is None:
            return self._summary
        counts = msgspec.structs.asdict(session.recorder.counts)
        return {
            "usage": {
                "turns": session.turns,
                "prompt_tokens": session.prompt_tokens,
                "sampled_tokens": session.sampled_tokens,
                "others": session.sampled_tokens_by_role,
            },
            "fidelity": {**counts, "rerendered": session.rerendered, "promptless": session.promptless},
        }

    def unload(self) -> None:
        """Drop the `Session` and the replies kept for retries from memory. They are read from disk when needed."""
        self._summary = self.summary()
        self.session = None
        self.replayable.clear()
        self.stored_replies.clear()
        self._turn_keys.clear()

    def turn_key(self, turn: int) -> str:
        """Return the key of the recorded turn with this index; empty if the turn has no key.

        See `make_turn_key`.
        """
        return self._turn_keys.get(turn, "")

    def sampling(self, role: str) -> Sampling:
        """Return the sampling parameters of the registration for a model role.

        They override those of a request.
        """
        found = self._sampling.get(role)
        if found is None:
            own = self.registration.roles.get(role, RoleOptions()).sampling
            found = own.over(self.registration.sampling) if role == "policy" else own
            self._sampling[role] = found
        return found

    def add_turn(self, turn: Turn) -> None:
        """Add a recorded turn to the replies that retries can get and that clients can refer to by ID.

        A partial turn, whose reply is incomplete, is not added.
        """
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
    """Return the key under which the turn of one choice of a request is recorded.

    It consists of the request's key, the index of the choice, and the ID under which clients can refer to the
    reply.
    """
    if reply_id:
        return f"{key}.{choice}.{reply_id}.{instruction_length}"
    return f"{key}.{choice}" if choice else key


def reply_id_in_key(key: str) -> str:
    """Return the reply ID that is part of a turn's key; empty if the key contains none."""
    return (*key.split("."), "", "")[2]
