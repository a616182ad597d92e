"""Which rollout runs next and which group is handed out: a pure controller for one stream of groups.

Promises:
- members of open groups go before new groups, in order of admission, so groups end soon after they begin;
- a straggler holds its own place and nothing else: others are admitted past it;
- a slow consumer slows admission: no group opens while the buffer of finished groups is full;
- with `want` and a filter, dropped groups are replaced; the groups handed out are the first `want` kept ones in
  order of *admission*, never of speed, so over-sampling does not prefer short rollouts;
- over-sampling means more groups, never more members.
"""

from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Literal, TypeAlias

import msgspec

from rookery.core import Attempt, Rollout, Task
from rookery.engine.retry import Ended

GroupState: TypeAlias = Literal["open", "kept", "dropped", "handed", "surplus"]


class Member(msgspec.Struct):
    """One rollout of an open group."""

    history: list[Ended] = []
    attempts: list[Attempt] = []
    since: float = 0.0
    """When it became ready for a runner."""
    record: Rollout | None = None


class OpenGroup(msgspec.Struct, eq=False):
    """A group under way. `position` counts within the stream, `index` within the run."""

    position: int
    index: int
    task: Task
    members: list[Member]
    left: int
    ordinal: int = 0
    """Where it stands in the whole stream, over resumes."""
    number: int = 0
    """The task's number in the journal."""
    state: GroupState = "open"

    def rollout_id(self, member: int) -> str:
        return f"{self.index}.{member}"


class Pick(msgspec.Struct, frozen=True):
    group: OpenGroup
    member: int


class Stream:
    """The schedule of one call of `engine.groups`."""

    def __init__(self, *, k: int, want: int | None = None, oversample: int = 0, buffer: int = 64) -> None:
        if k < 1 or buffer < 1 or oversample < 0 or (want is not None and want < 1):
            raise ValueError("k, want and buffer must be at least 1, oversample at least 0")
        self.k = k
        self.want = want
        self.oversample = oversample
        self.buffer = buffer
        self.exhausted = False
        """No more tasks."""
        self.handed = 0
        self.buffered = 0
        """Finished groups that the consumer has not taken yet."""
        self.groups: dict[int, OpenGroup] = {}
        """Every group that is open, or kept and not yet handed out, by position; in order of admission."""
        self.positions = 0
        """How many groups were admitted."""
        self._ready: deque[Pick] = deque()
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
        if self.exhausted or self.buffered >= self.buffer:
            return False
        return self.want is None or self.handed + len(self.groups) < self.want + self.oversample

    def open(self, index: int, task: Task, now: float, finished: Mapping[int, Rollout] | None = None) -> OpenGroup:
        """Admits a group; `finished` are members that an earlier process already ended."""
        members = [Member(since=now) for _ in range(self.k)]
        group = OpenGroup(self.positions, index, task, members, self.k)
        self.positions += 1
        self.groups[group.position] = group
        for number, member in enumerate(members):
            if finished and number in finished:
                member.record = finished[number]
                group.left -= 1
            else:
                self._ready.append(Pick(group, number))
        return group

    def pick(self, now: float) -> Pick | None:
        """The next rollout for a shared runner."""
        while self._delayed and self._delayed[0][0] <= now:
            pick = heappop(self._delayed)[3]
            pick.group.members[pick.member].since = now
            self._ready.append(pick)
        return self._ready.popleft() if self._ready else None

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
        """Takes out the ready ones that have waited for a runner longer than `limit` seconds."""
        late: list[Pick] = []
        while self._ready and now - self._ready[0].group.members[self._ready[0].member].since > limit:
            late.append(self._ready.popleft())
        return late

    def not_counting(self, seconds: float) -> None:
        """A pause went by: it is nobody's waiting time."""
        for pick in self._ready:
            pick.group.members[pick.member].since += seconds

    def again(self, pick: Pick, now: float, delay: float, *, alone: bool = False) -> None:
        """A new attempt: ahead of rollouts that never ran, after `delay` seconds, or alone."""
        if alone:
            self._suspects.append(pick)
        elif delay <= 0:
            pick.group.members[pick.member].since = now
            self._ready.appendleft(pick)
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
        if self.want is None or self.handed < self.want:
            return []
        left = list(self.groups.values())
        self.groups.clear()
        self._ready.clear()
        self._suspects.clear()
        self._delayed.clear()
        for group in left:
            group.state = "surplus"
        return left

    def taken(self) -> None:
        """The consumer took a finished group."""
        self.buffered -= 1
