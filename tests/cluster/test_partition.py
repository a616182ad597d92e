"""A network partition: the link between the supervisor and a node in its own namespace goes down, then up."""

import asyncio
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rookery.cluster.agent import AgentConfig
from rookery.cluster.launchers import AgentProcess, LocalLauncher, encode_config
from rookery.cluster.node_pool import NodePool
from rookery.core import Completed, Failed
from tests.cluster.conftest import HeldModel
from tests.cluster.test_nodes import build_engine, collect, find_processes, wait_for_nodes
from tests.engine.conftest import events, records
from tests.processes import cmdline, descendants
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.needs("network namespaces")]


class Link:
    """A network namespace, which exists as long as a process in it, and a virtual cable to it."""

    def __init__(self, number: int) -> None:
        self._device, peer = f"rk{number}a", f"rk{number}b"
        subnet = f"10.{200 + number // 256 % 50}.{number % 256}"
        self.address = f"{subnet}.1"
        self._process = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"ready\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == b"ready\n"  # it is in its namespace now
        self.enter = ("nsenter", f"--net=/proc/{self._process.pid}/ns/net", "--")
        """The beginning of a command that is executed in the namespace."""
        run("ip", "link", "add", "name", self._device, "type", "veth", "peer", "name", peer)
        run("ip", "link", "set", peer, "netns", str(self._process.pid))
        run("ip", "addr", "add", f"{self.address}/24", "dev", self._device)
        self.set("up")
        run(*self.enter, "ip", "addr", "add", f"{subnet}.2/24", "dev", peer)
        for device in (peer, "lo"):
            run(*self.enter, "ip", "link", "set", device, "up")

    def set(self, state: str) -> None:
        run("ip", "link", "set", self._device, state)

    def close(self) -> None:
        run("ip", "link", "del", self._device)
        self._process.communicate()


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class PartitionedLauncher(LocalLauncher):
    """Starts node-1 in the namespace of a link, and node-2 next to the supervisor."""

    def __init__(self, link: Link) -> None:
        super().__init__("2")
        self._link = link

    async def connect(self) -> str:
        return self._link.address

    def start_agents(self, supervisor: AgentConfig, on_lost: Callable[[str, str], None]) -> None:
        self.agents["node-1"] = AgentProcess(encode_config(supervisor, "node-1"), self._link.enter)
        super().start_agents(supervisor, on_lost)


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link(os.getpid() % 10_000)
    yield made
    made.close()


@pytest.fixture
async def model(link: Link) -> AsyncIterator[HeldModel]:
    server = HeldModel()
    server.host = link.address
    async with server:
        yield server


async def test_partitioned_node_stops_its_attempts_and_counts_nothing_when_it_comes_back(
    link: Link, model: HeldModel, tmp_path: Path, nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.engine.supervisor.open_cluster", lambda _: NodePool(PartitionedLauncher(link)))
    env = "tests.engine.envs:WithSandbox"
    async with build_engine(model, tmp_path, env=env) as engine:
        await wait_for_nodes(engine, 2)
        running = asyncio.create_task(collect(engine, [f"hold {n}" for n in range(8)]))
        await model.wait_for_requests(8)
        (agent,) = (pid for pid in find_processes("rookery.cluster.agent") if in_namespace(pid))
        behind = [pid for pid in descendants(agent) if cmdline(pid)]
        link.set("down")
        await wait_until(lambda: not any(in_namespace(pid) for pid in behind))  # it fences itself
        await wait_until(lambda: not list(nodes.glob("*-node-1-*/sandboxes")))
        await wait_for_nodes(engine, 1)
        model.release.set()
        groups = await asyncio.wait_for(running, 90)
        link.set("up")
        await wait_for_nodes(engine, 2)
        again = await collect(engine, [{"prompt": "again", "node_labels": {"node": "node-1"}} for _ in range(4)])
    assert Counter(one.outcome for group in groups + again for one in group.rollouts) == {Completed(): 12}
    written = records(tmp_path)
    assert sorted(record.id for record in written) == sorted(f"{n}.0" for n in range(12))
    failed: list[Any] = [a.outcome for r in written for a in r.attempts if isinstance(a.outcome, Failed)]
    assert {outcome.cause for outcome in failed} == {"machine.lost"}
    assert {event["node"] for event in events(tmp_path, "node.lost")} == {"node-1"}


def in_namespace(pid: int) -> bool:
    """Return whether a process is alive and in another network namespace than this one."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    except OSError:
        return False
