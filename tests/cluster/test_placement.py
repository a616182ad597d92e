"""Placement: by free capacity and speed, bounded per node."""

from collections import Counter

from rookery.cluster.placement import MIN_MEMORY, NodeLoad, choose_node


def place(nodes: list[NodeLoad], number: int, *, concurrency: int, total_cpus: int | None = None) -> Counter[str]:
    total = total_cpus or sum(node.cpus for node in nodes)
    placed = Counter[str]()
    for _ in range(number):
        name = choose_node(nodes, concurrency=concurrency, total_cpus=total)
        if name is None:
            break
        placed[name] += 1
        next(node for node in nodes if node.name == name).running += 1
    return placed


def test_attempts_are_spread_by_cpus() -> None:
    assert place([NodeLoad("a", 2), NodeLoad("b", 6)], 80, concurrency=80) == {"a": 20, "b": 60}


def test_slow_node_gets_less() -> None:
    nodes = [NodeLoad("fast", 4, seconds=1.0), NodeLoad("slow", 4, seconds=3.0)]
    assert place(nodes, 40, concurrency=40) == {"fast": 30, "slow": 10}


def test_very_slow_node_still_gets_some() -> None:
    nodes = [NodeLoad("fast", 4, seconds=1.0), NodeLoad("slow", 4, seconds=1000.0)]
    assert place(nodes, 50, concurrency=50) == {"fast": 40, "slow": 10}


def test_last_node_does_not_get_everything() -> None:
    assert place([NodeLoad("a", 2)], 100, concurrency=100, total_cpus=20) == {"a": 20}


def test_node_without_memory_and_draining_node_get_nothing() -> None:
    nodes = [NodeLoad("full", 2, memory=MIN_MEMORY / 2), NodeLoad("leaving", 2, draining=True), NodeLoad("ok", 2)]
    assert place(nodes, 4, concurrency=12) == {"ok": 4}
    assert choose_node(nodes[:2], concurrency=12, total_cpus=6) is None


def test_speed_is_a_decayed_mean() -> None:
    node = NodeLoad("a", 1)
    for _ in range(200):
        node.observe(4.0)
    for _ in range(200):
        node.observe(1.0)
    assert 1.0 <= node.seconds < 1.01
