"""Which rollout runs next and which group is handed out: a pure controller for one stream of groups.

Promises:
- members of open groups go before new groups, in order of admission, so groups end soon after they begin; one
  that runs again goes before those that never ran;
- a straggler holds its own place and nothing else: others are admitted past it;
- a slow consumer slows admission: no group opens while the buffer of finished groups is full;
- with `want` and a filter, dropped groups are replaced; the groups handed out are the first `want` kept ones in
  order of *admission*, never of speed, so over-sampling does not prefer short rollouts;
- over-sampling means more groups, never more members;
- a stream with a pace runs ahead of its consumer as far as that allows.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import chain
from operator import itemgetter
from typing import Literal, TypeAlias

import msgspec

from rookery.core import Attempt, CancelledReason, Rollout, Task
from rookery.engine.pacing import Pace
from rookery.engine.retry import Ended

GroupState: TypeAlias = Literal["open", "kept", "dropped", "handed"]


class Member(msgspec.Struct):
    """One rollout of an open group."""

    history: list[Ended] = []
    attempts: list[Attempt] = []
    since: float = 0.0
    """When it became ready for a runner."""
    record: Rollout | None = None
    earlier: int = 0
    """Attempts that an earlier process may have begun: their numbers are not used again."""

    @property
    def next_attempt(self) -> int:
        return self.earlier + len(self.history) + 1


class OpenGroup(msgspec.Struct, eq=False):
    """A group under way. `position` counts within the stream, `index` within the run."""

    position: int
    index: int
    task: Task
    members: list[Member]
    left: int
    stream: str = ""
    """The name of the stream that admitted it."""
    ordinal: int = 0
    """Where it stands in the whole stream, over resumes."""
    number: int = 0
    """The task's number in the journal."""
    state: GroupState = "open"
    cancelled: CancelledReason | None = None
    """Not needed any more: what still runs of it is cancelled for this reason."""

    def rollout_id(self, member: int) -> str:
        return f"{self.index}.{member}"


class Pick(msgspec.Struct, frozen=True):
    group: OpenGroup
    member: int


class Stream:
    """The schedule of one call of `engine.groups`."""

    def __init__(
        self,
        *,
        k: int,
        want: int | None = None,
        oversample: int = 0,
        buffer: int = 64,
        pace: Pace | None = None,
    ) -> None:
        if k < 1 or buffer < 1 or oversample < 0 or (want is not None and want < 0):
            raise ValueError("k and buffer must be at least 1, want and oversample at least 0")
        self.k = k
        self.want = want
        self.oversample = oversample
        self.buffer = buffer
        self.pace = pace
        self.exhausted = False
        """No more tasks."""
        self.handed = 0
        self.buffered = 0
        """Finished groups that the consumer has not taken yet."""
        self.groups: dict[int, OpenGroup] = {}
        """Every group that is open, or kept and not yet handed out, by position; in order of admission."""
        self.positions = 0
        """How many groups were admitted."""
        self._fresh: deque[Pick] = deque()
        """Never ran yet; in order of admission."""
        self._repeats: list[tuple[int, int, Pick]] = []
        """Run again: a heap by position and member."""
        self._suspects: deque[Pick] = deque()
        self._delayed: list[tuple[float, int, int, Pick]] = []
        self._order = 0

    @property
    def done(self) -> bool:
        """Nothing is left to hand out or to wait for."""
        if self.want is not None and self.handed >= self.want:
            return True
        return self.exhausted and not self.groups

    def may_open(self) -> bool:
        """Whether a new group may be admitted now."""
        return self.may_open_so_many() != 0

    def may_open_so_many(self) -> int | None:
        """How many new groups may be admitted as things stand; None for as many as there are."""
        if self.exhausted or self.buffered >= self.buffer or (self.want is not None and self.handed >= self.want):
            return 0
        admitted = self.handed + len(self.groups)
        bounds = [self.pace.quota] if self.pace is not None else []
        if self.want is not None:
            bounds.append(self.want + self.oversample)
        return max(0, min(bounds) - admitted) if bounds else None

    def open(self, index: int, task: Task, now: float, finished: Mapping[int, Rollout] | None = None) -> OpenGroup:
        """Admits a group; `finished` are members that an earlier process already ended."""
        members = [Member(since=now) for _ in range(self.k)]
        group = OpenGroup(self.positions, index, task, members, self.k)
        self.positions += 1
        self.groups[group.position] = group
        if self.pace is not None:
            self.pace.admitted(index)
        for number, member in enumerate(members):
            if finished and number in finished:
                member.record = finished[number]
                group.left -= 1
            else:
                self._fresh.append(Pick(group, number))
        return group

    def pick(self, now: float) -> Pick | None:
        """The next rollout for a shared runner."""
        self._due(now)
        if self._repeats:
            return heappop(self._repeats)[2]
        return self._fresh.popleft() if self._fresh else None

    def _due(self, now: float) -> None:
        """Delayed rollouts whose time has come wait for a runner from the moment it came."""
        while self._delayed and self._delayed[0][0] <= now:
            due, _, _, pick = heappop(self._delayed)
            self._repeat(pick, due)

    def _repeat(self, pick: Pick, since: float) -> None:
        pick.group.members[pick.member].since = since
        heappush(self._repeats, (pick.group.position, pick.member, pick))

    def pick_suspect(self) -> Pick | None:
        """The next rollout that must run alone."""
        return self._suspects.popleft() if self._suspects else None

    @property
    def suspects(self) -> int:
        return len(self._suspects)

    def wakes_at(self) -> float | None:
        """When the next delayed rollout becomes ready."""
        return self._delayed[0][0] if self._delayed else None

    def overdue(self, now: float, limit: float) -> list[Pick]:
        """Takes out those that have waited for a runner longer than `limit` seconds, suspects included."""
        self._due(now)
        waiting = chain(self.waiting(), self._suspects)
        late = [pick for pick in waiting if now - pick.group.members[pick.member].since > limit]
        if late:
            taken = {(pick.group.position, pick.member) for pick in late}
            self._fresh = deque(pick for pick in self._fresh if (pick.group.position, pick.member) not in taken)
            self._repeats = [entry for entry in self._repeats if entry[:2] not in taken]
            heapify(self._repeats)
            self._suspects = deque(pick for pick in self._suspects if pick not in late)
        return late

    def waiting(self) -> Iterator[Pick]:
        """Those that are ready for a shared runner, in order."""
        yield from (entry[2] for entry in sorted(self._repeats, key=itemgetter(0, 1)))
        yield from self._fresh

    def not_counting(self, seconds: float, *, shared: bool = True, alone: bool = True) -> None:
        """Time went by that is nobody's waiting: a pause, or others of the run in the places there are."""
        for pick in chain(self.waiting() if shared else (), self._suspects if alone else ()):
            pick.group.members[pick.member].since += seconds

    def again(self, pick: Pick, now: float, delay: float, *, alone: bool = False) -> None:
        """A new attempt: ahead of rollouts that never ran, after `delay` seconds, or alone."""
        if alone:
            pick.group.members[pick.member].since = now
            self._suspects.append(pick)
        elif delay <= 0:
            self._repeat(pick, now)
        else:
            self._order += 1
            heappush(self._delayed, (now + delay, pick.group.position, self._order, pick))

    def end(self, pick: Pick, record: Rollout) -> bool:
        """Takes a terminal record; True when the group has all of its k."""
        member = pick.group.members[pick.member]
        if member.record is not None:
            raise ValueError(f"rollout {record.id} already has its terminal record")
        member.record = record
        pick.group.left -= 1
        return pick.group.left == 0

    def settle(self, group: OpenGroup, *, kept: bool) -> list[OpenGroup]:
        """A complete group passed the filter or did not; returns the groups that are now to be handed out."""
        group.state = "kept" if kept else "dropped"
        if not kept:
            del self.groups[group.position]
            if self.pace is not None:
                self.pace.gone(group.index)
        ready: list[OpenGroup] = []
        if self.want is None or self.oversample == 0:
            if kept:
                ready.append(group)
        else:
            # Certain of its place only when fewer than `want` groups before it are kept or still undecided.
            # Counting groups that were handed out from behind it does no harm: each of those was certain with
            # this one counted ahead of it.
            ahead = self.handed
            for other in self.groups.values():
                if other.state == "kept" and ahead < self.want:
                    ready.append(other)
                ahead += 1
                if ahead >= self.want:
                    break
        for out in ready:
            out.state = "handed"
            del self.groups[out.position]
            self.handed += 1
            self.buffered += 1
        return ready

    def surplus(self) -> list[OpenGroup]:
        """Once enough are handed out: the groups that are not needed any more."""
        return [] if self.want is None or self.handed < self.want else self.cancel()

    def cancel(self) -> list[OpenGroup]:
        """Ends the stream; returns the groups that were under way."""
        self.exhausted = True
        left = list(self.groups.values())
        self.groups.clear()
        self._fresh.clear()
        self._repeats.clear()
        self._suspects.clear()
        self._delayed.clear()
        return left

    def taken(self) -> None:
        """The consumer took a finished group."""
        self.buffered -= 1
