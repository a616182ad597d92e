"""Simulations of the staleness bound with rollouts of any duration."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Task
from rookery.engine.scheduler import GroupScheduler
from rookery.engine.staleness import StalenessBound
from tests.gateway.scripted_upstream import ANY_SPEED


class Simulation:
    """Simulates a trainer and rollouts without an engine: groups of one rollout, one tick at a time."""

    def __init__(self, size: int, lag: int, lengths: list[int], width: int) -> None:
        self.pace = StalenessBound(size, lag)
        self.stream = GroupScheduler(k=1, buffer=size * (lag + 1), staleness=self.pace)
        self.lengths, self.width = lengths, width
        self.version = self.taken = 0
        self.sampled_version: dict[int, int] = {}
        """Group → the version that sampled its first token."""
        self.unfinished: dict[int, tuple[int, object]] = {}
        self.ready: list[int] = []

    def tick(self, drops: set[int]) -> None:
        while len(self.unfinished) < self.width:
            pick = self.stream.next_rollout(0.0)
            if pick is None:
                if self.stream.admitted == len(self.lengths):
                    self.stream.exhausted = True
                if not self.stream.can_start_group():
                    break
                index = self.stream.admitted
                self.stream.start_group(index, Task(id=str(index), prompt="x"), 0.0)
                continue
            self.sampled_version[pick.group.index] = self.version
            self.unfinished[pick.group.index] = (self.lengths[pick.group.index], pick)
        self.run(drops)

    def run(self, drops: set[int]) -> None:
        for index, (ticks, pick) in list(self.unfinished.items()):
            if ticks > 0:
                self.unfinished[index] = (ticks - 1, pick)
                continue
            del self.unfinished[index]
            self.ready += [out.index for out in self.stream.resolve_group(pick.group, kept=index not in drops)]

    def step(self, drops: set[int]) -> list[int]:
        """Return the groups of the next step; fail if it waits longer than all rollouts take together."""
        self.pace.start_step(self.version, self.taken)
        for _ in range(sum(self.lengths) + 3 * len(self.lengths) + 9):
            ending = self.stream.done
            chosen = self.pace.choose(self.ready, self.pace.size, ending=ending)
            if chosen or (ending and not self.ready):
                break
            self.tick(drops)
        else:
            raise AssertionError("a step that nothing can end")
        for index in chosen:
            self.ready.remove(index)
            self.pace.remove(index)
            self.stream.mark_taken()
        self.taken += len(chosen)
        return chosen


plays = given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60)), max_size=40),
    st.integers(1, 12),
    st.sets(st.integers(0, 39), max_size=12),
    st.lists(st.integers(0, 8), min_size=1, max_size=5),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)


@settings(ANY_SPEED, max_examples=300)
@plays
def test_no_group_becomes_too_old_and_none_is_dropped_for_its_age(
    size: int, lag: int, lengths: list[int], width: int, drops: set[int], training: list[int], repeats: list[int]
) -> None:
    play = Simulation(size, lag, lengths, width)
    trained: list[int] = []
    steps = 0
    while chosen := play.step(drops):
        ages = [play.version - play.sampled_version[index] for index in chosen]
        assert max(ages) <= lag, (play.version, chosen, play.sampled_version)
        trained += chosen
        steps += 1
        for _ in range(training[steps % len(training)]):
            play.tick(drops)
        play.version += steps % repeats[steps % len(repeats)] == 0  # several steps may train on one version
    assert sorted(trained) == [index for index in range(len(lengths)) if index not in drops]


@settings(ANY_SPEED, max_examples=100)
@plays
def test_sampling_runs_as_far_ahead_as_the_lag_allows(
    size: int, lag: int, lengths: list[int], width: int, drops: set[int], training: list[int], repeats: list[int]
) -> None:
    play = Simulation(size, lag, lengths, width=1000)
    while play.step(set()):
        for _ in range(max(lengths) + 2):
            play.tick(set())
        ahead = len(play.ready) + len(play.unfinished)
        assert ahead == min(lag * size, len(lengths) - play.taken)
        play.version += 1
