"""Simulations of the scheduler: any order of completion, any filter, any speed of the consumer."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from rookery.core import Cancelled, Completed, Outcome, Rollout, Task
from rookery.engine.scheduler import GroupScheduler, OpenGroup, OpenRollout


def record(pick: OpenRollout, outcome: Outcome | None = None) -> Rollout:
    return Rollout(
        id=pick.id,
        group=pick.group.index,
        member=pick.member,
        task=pick.group.task.id,
        outcome=outcome or Completed(),
    )


@dataclass
class Simulation:
    """Uses a scheduler like the supervisor does, one event at a time."""

    stream: GroupScheduler
    tasks: int
    concurrency: int
    verdicts: list[bool]
    now: float = 0.0
    drawn: int = 0
    running: list[OpenRollout] = field(default_factory=list)
    queue: list[OpenGroup] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    ends: Counter[tuple[int, int]] = field(default_factory=Counter)
    repeats: Counter[tuple[int, int]] = field(default_factory=Counter)
    first_picks: list[tuple[int, int]] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    wake_times: list[float] = field(default_factory=list)

    def verdict(self, position: int) -> bool:
        return self.verdicts[position % len(self.verdicts)]

    def admit(self) -> None:
        stream = self.stream
        while len(self.running) < self.concurrency:
            pick = stream.next_suspect() or stream.next_rollout(self.now)
            if pick is None:
                if not stream.can_start_group():
                    break
                if self.drawn == self.tasks:
                    stream.exhausted = True
                    break
                assert stream.buffered < stream.buffer, "a group opened while the buffer was full"
                stream.start_group(self.drawn, Task(id=str(self.drawn)), self.now)
                self.drawn += 1
                continue
            key = (pick.group.admission_index, pick.member)
            if not self.repeats[key]:
                self.first_picks.append(key)
            self.running.append(pick)
        self.check()

    def check(self) -> None:
        stream = self.stream
        assert all(len(group.rollouts) == stream.k for group in stream.groups.values()), "more members"
        assert stream.buffered == len(self.queue)
        if stream.want is not None:
            assert stream.delivered <= stream.want
            assert stream.delivered + len(stream.groups) <= stream.want + stream.oversample, "too many outstanding"

    def again(self, at: int, delay: float, *, alone: bool) -> None:
        pick = self.running.pop(at)
        key = (pick.group.admission_index, pick.member)
        self.repeats[key] += 1
        if pick.group.cancelled is not None or self.repeats[key] > 3:
            self._end(pick)
        else:
            self.wake_times.append(self.now + delay)
            self.stream.requeue(pick, self.now, delay, alone=alone)

    def end(self, at: int) -> None:
        self._end(self.running.pop(at))

    def _end(self, pick: OpenRollout, outcome: Outcome | None = None) -> None:
        self.ends[pick.group.admission_index, pick.member] += 1
        if not self.stream.finish(pick, record(pick, outcome)) or pick.group.cancelled is not None:
            return
        outs = self.stream.resolve_group(pick.group, kept=self.verdict(pick.group.admission_index))
        self.queue.extend(outs)
        self.delivered.extend(out.admission_index for out in outs)
        surplus = self.stream.pop_surplus()
        for group in surplus:
            group.cancelled = "filtered"
        for group in surplus:
            flying = {other.member for other in self.running if other.group is group}
            self.cancelled.add(group.admission_index)
            for number, member in enumerate(group.rollouts):
                if member.record is None and number not in flying:
                    self._end(member, Cancelled("filtered"))

    def take(self) -> None:
        self.queue.pop(0)
        self.stream.mark_taken()

    def finish(self, pace: int) -> None:
        """End all running rollouts, the oldest last; the consumer takes all groups."""
        for _ in range(100_000):
            self.admit()
            if self.stream.done and not self.running and not self.queue:
                return
            if self.running:
                self.end(pace % len(self.running))
            elif self.queue:
                self.take()
            else:
                later = [time for time in self.wake_times if time > self.now]
                assert later, "nothing runs, nothing is ready, and it is not done"
                self.now = min(later)
        raise AssertionError("never done")

    def expected(self) -> set[int]:
        kept = [position for position in range(self.tasks) if self.verdict(position)]
        return set(kept[: self.stream.want])


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_first_wanted_groups_by_admission_are_delivered_in_any_order_of_completion(
    data: st.DataObject,
) -> None:
    draw = data.draw
    k = draw(st.integers(1, 4), label="k")
    want = draw(st.none() | st.integers(0, 6), label="want")
    oversample = draw(st.integers(0, 4), label="oversample")
    buffer = draw(st.integers(1, 4), label="buffer")
    game = Simulation(
        GroupScheduler(k=k, want=want, oversample=oversample, buffer=buffer),
        tasks=draw(st.integers(0, 16), label="tasks"),
        concurrency=draw(st.integers(1, 12), label="concurrency"),
        verdicts=draw(st.lists(st.booleans(), min_size=1, max_size=16), label="verdicts"),
    )
    for _ in range(draw(st.integers(0, 60), label="steps")):
        game.admit()
        match draw(st.sampled_from(["end", "end", "end", "again", "later", "alone", "take", "tick"])):
            case "end" if game.running:
                game.end(draw(st.integers(0, len(game.running) - 1)))
            case "again" | "later" | "alone" as kind if game.running:
                at = draw(st.integers(0, len(game.running) - 1))
                game.again(at, 5.0 if kind == "later" else 0.0, alone=kind == "alone")
            case "take" if game.queue:
                game.take()
            case "tick":
                game.now += 1.0
    game.finish(draw(st.integers(0, 5)))
    event("surplus" if game.cancelled else "no surplus")
    assert len(game.delivered) == len(set(game.delivered))
    assert set(game.delivered) == game.expected()
    admitted = {(position, member) for position in range(game.stream.admitted) for member in range(k)}
    ended = {key for key, count in game.ends.items() if count == 1}
    assert ended == admitted == set(game.ends), "every admitted member ends exactly once"
    assert game.first_picks == sorted(game.first_picks), "members of open groups first, in order of admission"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_oversampling_does_not_prefer_short_rollouts(kept: list[bool], want: int, oversample: int, k: int) -> None:
    """Each group has its own duration; the selection does not depend on the order of completion."""
    chosen = []
    for pace in (0, -1):  # the oldest first; the newest, which is the shortest, first
        game = Simulation(GroupScheduler(k=k, want=want, oversample=oversample), 40, 64, kept)
        game.finish(pace)
        chosen.append(set(game.delivered))
    assert chosen[0] == chosen[1] == game.expected()


def test_straggler_occupies_one_slot_only() -> None:
    game = Simulation(GroupScheduler(k=2), tasks=50, concurrency=2, verdicts=[True])
    game.admit()
    straggler = game.running[0]
    for _ in range(500):
        game.admit()
        others = [at for at, pick in enumerate(game.running) if pick is not straggler]
        if others:
            game.end(others[0])
        if game.queue:
            game.take()
    assert (game.drawn, len(game.delivered), game.running) == (50, 49, [straggler])


def test_straggler_in_an_oversampled_stream_delays_only_undecided_groups() -> None:
    game = Simulation(GroupScheduler(k=1, want=4, oversample=2), tasks=50, concurrency=9, verdicts=[True])
    game.admit()
    assert len(game.running) == 6
    for _ in range(5):
        game.end(1)
    assert game.delivered == [1, 2, 3]
    game.end(0)
    assert sorted(game.delivered) == [0, 1, 2, 3]
    assert game.cancelled == {4, 5}
    assert game.stream.done


def test_slow_consumer_slows_admission() -> None:
    game = Simulation(GroupScheduler(k=1, buffer=3), tasks=100, concurrency=2, verdicts=[True])
    for _ in range(100):
        game.admit()
        if game.running:
            game.end(0)
    # With two free slots, two groups could be opened for the last slot of the buffer.
    assert (len(game.queue), game.drawn, game.running) == (4, 4, [])
    game.take()
    game.admit()
    assert game.drawn == 4
    game.take()
    game.admit()
    assert game.drawn == 6


def test_stream_with_enough_groups_opens_no_more() -> None:
    game = Simulation(GroupScheduler(k=1, want=2, oversample=3), tasks=50, concurrency=9, verdicts=[True])
    game.finish(0)
    assert (game.drawn, game.stream.can_start_group(), game.stream.done) == (5, False, True)


def test_dropped_groups_are_replaced_until_enough_are_kept_or_tasks_end() -> None:
    some = Simulation(GroupScheduler(k=2, want=3), tasks=100, concurrency=4, verdicts=[False, False, True])
    some.finish(0)
    assert (some.delivered, some.drawn) == ([2, 5, 8], 9)
    none = Simulation(GroupScheduler(k=2, want=3, oversample=1), tasks=10, concurrency=4, verdicts=[False])
    none.finish(0)
    assert (none.delivered, none.drawn) == ([], 10)


def open_one(stream: GroupScheduler, position: int, now: float = 0.0, **options: Any) -> OpenGroup:
    return stream.start_group(position, Task(id=str(position)), now, **options)


def picks(stream: GroupScheduler, now: float) -> list[tuple[int, int]]:
    got = []
    while (pick := stream.next_rollout(now)) is not None:
        got.append((pick.group.admission_index, pick.member))
    return got


def test_retries_run_before_new_rollouts_in_order_of_admission() -> None:
    stream = GroupScheduler(k=2)
    for position in range(3):
        open_one(stream, position)
    taken = [stream.next_rollout(0.0) for _ in range(3)]
    for pick, delay in zip(reversed(taken), (0.0, 5.0, 7.0), strict=True):
        assert pick is not None
        stream.requeue(pick, 0.0, delay)
    assert picks(stream, 9.0) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_delayed_rollout_is_not_returned_before_its_time() -> None:
    stream = GroupScheduler(k=1)
    open_one(stream, 0)
    pick = stream.next_rollout(0.0)
    assert pick is not None
    stream.requeue(pick, 1.0, 2.0)
    assert (stream.next_rollout(2.9), stream.next_rollout(3.0)) == (None, pick)


def test_rollout_that_waits_longer_than_the_limit_is_overdue() -> None:
    stream = GroupScheduler(k=3)
    group = open_one(stream, 0)
    first, second = stream.next_rollout(0.0), stream.next_rollout(0.0)
    assert first is not None
    assert second is not None
    stream.requeue(
        first, 9.0, 0.0
    )  # its waiting time starts again; it is queued before the one that waits from the start
    stream.requeue(second, 0.0, 2.0)  # due at 2, and not returned since
    assert [pick.member for pick in stream.pop_overdue(11.0, 10.0)] == [2]
    assert [pick.member for pick in stream.pop_overdue(13.0, 10.0)] == [1]
    assert picks(stream, 13.0) == [(0, 0)]
    assert group.rollouts[1].waiting_since == 2.0


def test_pause_does_not_count_as_waiting_time() -> None:
    stream = GroupScheduler(k=1)
    open_one(stream, 0)
    stream.exclude_wait(100.0)
    assert stream.pop_overdue(105.0, 10.0) == []
    assert len(stream.pop_overdue(111.0, 10.0)) == 1


def test_suspect_without_a_runner_becomes_overdue() -> None:
    stream = GroupScheduler(k=1)
    open_one(stream, 0)
    pick = stream.next_rollout(0.0)
    assert pick is not None
    stream.requeue(pick, 3.0, 0.0, alone=True)
    stream.exclude_wait(50.0)
    assert stream.pop_overdue(63.0, 10.0) == []
    assert stream.pop_overdue(63.1, 10.0) == [pick]
    assert (len(stream.suspect_tasks()), stream.next_suspect()) == (0, None)


def test_suspects_only_run_alone() -> None:
    stream = GroupScheduler(k=1)
    open_one(stream, 0)
    pick = stream.next_rollout(0.0)
    assert pick is not None
    stream.requeue(pick, 3.0, 0.0, alone=True)
    stream.exclude_wait(90.0, shared=True, suspects=False)
    assert (len(stream.suspect_tasks()), stream.next_rollout(100.0), stream.pop_overdue(100.0, 97.0)) == (
        1,
        None,
        [],
    )
    assert stream.next_suspect() is pick
    assert (len(stream.suspect_tasks()), stream.next_suspect(), pick.group.rollouts[0].waiting_since) == (
        0,
        None,
        3.0,
    )


def test_members_finished_by_an_earlier_process_do_not_run_again() -> None:
    stream = GroupScheduler(k=3)
    group = OpenGroup(0, 0, Task(id="0"), 3)
    done = {member: record(OpenRollout(group, member)) for member in (0, 2)}
    group = open_one(stream, 0, finished=done)
    assert group.unfinished == 1
    assert picks(stream, 0.0) == [(0, 1)]
    rollout = group.rollouts[1]
    assert stream.finish(rollout, record(rollout))
    with pytest.raises(ValueError, match=r"\b0\.1\b"):
        stream.finish(rollout, record(rollout))


def test_stream_that_wants_no_groups_is_done_at_once() -> None:
    stream = GroupScheduler(k=1, want=0, oversample=3)
    assert stream.done
    assert GroupScheduler(k=1, want=1).can_start_group()


@pytest.mark.parametrize("bad", [{"k": 0}, {"buffer": 0}, {"want": -1}, {"oversample": -1}])
def test_invalid_scheduler_numbers_are_refused(bad: dict[str, int]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        GroupScheduler(**{"k": 1, **bad})  # type: ignore[arg-type]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=3, max_size=12),
    dropped=st.sets(st.integers(0, 11), max_size=4),
    data=st.data(),
)
def test_predicted_lengths_and_the_order_of_completion_do_not_change_which_groups_are_delivered(
    lengths: list[int], dropped: set[int], data: st.DataObject
) -> None:
    scheduler = GroupScheduler(k=2, want=2, oversample=len(lengths) - 2)
    for index in range(len(lengths)):
        scheduler.start_group(index, Task(id=str(index)), 0.0)
    scheduler.start_longest_first(lambda task: lengths[int(task.id)])
    rollouts = []
    while (rollout := scheduler.next_rollout(0.0)) is not None:
        rollouts.append(rollout)
    started = [lengths[rollout.group.index] for rollout in rollouts]
    assert started == sorted(started, reverse=True)
    delivered: list[int] = []
    for rollout in data.draw(st.permutations(rollouts)):
        if scheduler.finish(rollout, Rollout(id=rollout.id, group=0, member=0, task="t", outcome=Completed())):
            kept = rollout.group.index not in dropped
            delivered += [one.index for one in scheduler.resolve_group(rollout.group, kept=kept)]
            if len(delivered) == 2:
                break
    assert sorted(delivered) == [index for index in range(len(lengths)) if index not in dropped][:2]
