"""The choice of a replica and the exclusion of failing ones, without a clock or a socket."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rookery.upstreams.health import LONGEST, SHORTEST, STRIKES, Health
from rookery.upstreams.replica_choice import SLACK, choose, stable_hash


@dataclass
class Server:
    name: str
    load: int = 0
    limit: int = 256

    @property
    def salt(self) -> int:
        return stable_hash(self.name)


def servers(*loads: int) -> list[Server]:
    return [Server(f"http://10.0.0.{n}:8000/v1", load) for n, load in enumerate(loads)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 1000))
def test_without_an_affinity_the_least_loaded_is_taken(loads, turn):
    assert choose(servers(*loads), affinity="", turn=turn).load == min(loads)


def test_equal_replicas_take_turns():
    among = servers(0, 0, 0, 0)
    assert Counter(choose(among, affinity="", turn=turn).name for turn in range(40)) == {s.name: 10 for s in among}


def test_load_is_relative_to_the_concurrency_limit():
    small, large = Server("a", load=8, limit=10), Server("b", load=20, limit=100)
    assert choose([small, large], affinity="", turn=0) is large


@given(st.integers(0, 100), st.text(max_size=10), st.integers(0, 7))
def test_affinity_keeps_its_replica_within_the_slack(turn, affinity, at):
    among = servers(*[0] * 8)
    home = choose(among, affinity=affinity + "x", turn=0)
    home.load = SLACK
    assert choose(among, affinity=affinity + "x", turn=turn) is home
    home.load = SLACK + 1
    away = choose(among, affinity=affinity + "x", turn=turn)
    assert away is not home
    assert choose(among, affinity=affinity + "x", turn=turn + 1) is away


def test_affinities_are_spread_evenly():
    among = servers(*[0] * 8)
    homes = Counter(choose(among, affinity=f"rollout-{n}", turn=n).name for n in range(8_000))
    assert len(homes) == 8
    assert all(850 < count < 1150 for count in homes.values())


def test_removed_replica_moves_only_its_own_affinities():
    among = servers(*[0] * 8)
    before = {f"r{n}": choose(among, affinity=f"r{n}", turn=0) for n in range(500)}
    removed = among.pop(3)
    for affinity, home in before.items():
        now = choose(among, affinity=affinity, turn=0)
        assert now is home or home is removed
    moved = Counter(choose(among, affinity=a, turn=0).name for a, home in before.items() if home is removed)
    assert len(moved) == 7, "the affinities are spread over all remaining replicas"


def test_call_does_not_wait_while_another_replica_has_a_free_slot():
    among = [Server("a", limit=4), Server("b", limit=4)]
    home = choose(among, affinity="x", turn=0)
    home.load = 4
    assert choose(among, affinity="x", turn=0) is not home
    for server in among:
        server.load = 4
    assert choose(among, affinity="x", turn=0) is home


# --------------------------------------------------------------------------------------------------- health


def test_exclusion_of_an_unreachable_replica_grows():
    health, now, whiles = Health(), 100.0, []
    for _ in range(10):
        assert health.failed("gone", "refused", now=now) == (not whiles)
        assert health.until is not None
        whiles.append(health.until - now)
        assert not health.probe(now=health.until - 0.001)
        now = health.until
        assert health.probe(now=now)
        assert not health.probe(now=now), "only one probe runs at a time"
    assert whiles[:3] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST]
    assert whiles[-1] == LONGEST
    assert health.reason == "refused"
    assert health.answered()
    assert (health.healthy, health.reason) == (True, "")
    assert not health.answered(), "it was healthy already"
    assert health.failed("gone", "again", now=now)
    assert health.until == now + SHORTEST, "the exclusion is as short as the first one"


def test_failing_replica_is_excluded_after_several_failures_in_a_row():
    health = Health()
    for _ in range(STRIKES - 1):
        assert not health.failed("failing", "500", now=1.0)
    health.answered()
    for _ in range(STRIKES - 1):
        assert not health.failed("failing", "500", now=1.0)
    assert health.healthy
    assert health.failed("failing", "500", now=1.0)
    assert not health.healthy


def test_failures_of_older_calls_do_not_extend_the_exclusion():
    health = Health()
    health.failed("gone", "first", now=10.0)
    for _ in range(100):
        assert not health.failed("gone", "later", now=10.5)
    assert (health.until, health.reason) == (10.0 + SHORTEST, "first")


def test_unfinished_probe_is_repeated():
    health = Health()
    health.failed("gone", "x", now=0.0)
    assert health.probe(now=5.0)
    health.unprobed(now=6.0)
    assert not health.probe(now=6.5)
    assert health.probe(now=6.0 + SHORTEST)


@given(st.lists(st.tuples(st.sampled_from(["gone", "failing", "ok", "probe"]), st.floats(0, 100)), max_size=40))
def test_exclusion_has_an_end_and_a_reason(steps):
    health, now = Health(), 0.0
    for what, seconds in steps:
        now += seconds
        if what == "ok":
            health.answered()
        elif what == "probe":
            health.probe(now=now)
        else:
            health.failed(what, "why", now=now)
        assert health.healthy == (health.until is None) == (health.reason == "")
        assert health.until is None or health.until <= now + LONGEST
