"""Fault campaign: thousands of rollouts, a tenth of them with a fault, while processes are killed at random.

Rollouts make model calls and a tool call in a sandbox, and are graded in a fresh sandbox. The campaign injects
faults of the environment, the sandbox, the grader and the inference engine (`fault_plan`), and sends SIGKILL to
the supervisor, runners, keepers and, on a cluster, to agents, the collector and whole nodes. A killed supervisor
is resumed.

It fails (exit status 1) unless
- every rollout has exactly one final record;
- every rollout without a fault is completed, with the reward and the tokens that belong to it;
- every rollout with a fault has the outcome and the cause that belong to the fault;
- damaged token files are noticed: their rollouts run again, and no other rollout does;
- nothing is left: no process, no mount, no sandbox, no directory of a node.
"""

import asyncio
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import CHECKOUT, Progress, Result
from benchmarks.fault_model import reply_tokens
from benchmarks.fault_plan import BY_NAME, NONE, plan_faults
from benchmarks.instant_model import instant_model
from rookery.cluster.agent import FOLDER_VARIABLE
from rookery.core import Completed, Rollout, RookeryError, UsageError
from rookery.journal import RunReader
from rookery.sandbox_runtime.processes import list_children

NAME = "faults"
STRICT = True
QUICK_ROLLOUTS, FULL_ROLLOUTS = 1_000, 10_000
MIN_KILLS = 12
ROLLOUTS_PER_KILL = 200
"""A campaign kills `MIN_KILLS` processes, and one more for this many rollouts."""
LAST_KILL = 0.9
"""No process is killed after this fraction of the rollouts, so that the end of the campaign is bounded."""
DAMAGED = 5
"""The number of rollouts whose tokens are damaged after the run."""
STALL_SECONDS = 300.0
"""The campaign fails if no rollout finishes for this long."""
RAY_NODES = 3


def find_descendants(pid: int) -> list[int]:
    found, todo = list[int](), [pid]
    while todo:
        children = list_children(todo.pop())
        found += children
        todo += children
    return found


def read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


MODULES = {
    "runner": b"rookery.engine.runner",
    "agent": b"rookery.cluster.agent",
    "collector": b"rookery.cluster.collector",
}
"""Part of the command line of each kind of process."""


class Nodes:
    """The Ray nodes that the campaign starts on this machine, and kills."""

    def __init__(self, folder: Path) -> None:
        os.environ[FOLDER_VARIABLE] = str(folder / "nodes")
        os.environ["RAY_TMPDIR"] = str(folder)  # leaves the address of another Ray cluster of the user alone
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(RAY_NODES - 1)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def kill_one(self, rng: random.Random) -> None:
        """Kill a node with SIGKILL and add another one. Not the head, whose loss ends the Ray cluster."""
        node = self._nodes.pop(rng.randrange(len(self._nodes)))
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.append(self._cluster.add_node(num_cpus=1))

    def close(self) -> None:
        self._cluster.shutdown()
        self._nodes.clear()


class Campaign:
    """One campaign: starts the run, kills its processes, resumes it, and checks what it left."""

    def __init__(self, folder: Path, url: str, rollouts: int, seed: int, cluster: str, progress: Progress) -> None:
        self.folder = folder
        self.rollouts = rollouts
        self.seed = seed
        self.plan = plan_faults(rollouts, seed)
        self.kills = Counter[str]()
        self.violations: list[str] = []
        self._url = url
        self._cluster = cluster
        self._nodes: Nodes | None = None
        self._progress = progress
        self._rng = random.Random(seed)  # noqa: S311
        self._process: asyncio.subprocess.Process | None = None
        kills = MIN_KILLS + rollouts // ROLLOUTS_PER_KILL
        self._kill_points = sorted(self._rng.uniform(0, LAST_KILL) * rollouts for _ in range(kills))
        """The numbers of finished rollouts at which a process is killed."""
        self._finished = 0
        self._working = False
        """True if the current process of the run has finished a rollout."""
        self._last = time.monotonic()

    # ---- the run and its kills

    async def execute(self) -> None:
        """Run all rollouts to their end, with kills."""
        if self._cluster == "ray":
            self._nodes = Nodes(self.folder)
            self._cluster = f"ray:{self._nodes.address}"
        reading = await self._start("new")
        kinds = self.list_kinds()
        while True:
            done, _ = await asyncio.wait({reading}, timeout=0.1)
            if done:
                assert self._process is not None
                code = await self._process.wait()
                if code == 0:
                    return
                if code != -signal.SIGKILL:
                    raise RookeryError(f"the run of the campaign failed with status {code}: see its output above")
                reading = await self._start("resume")
            if time.monotonic() - self._last > STALL_SECONDS:
                self.violations.append(f"no rollout finished for {STALL_SECONDS:g} seconds")
                return
            # While a run starts, a killed keeper is a reason to refuse the start. That is not tested here.
            if self._working and self._kill_points and self._finished >= self._kill_points[0]:
                self._kill_points.pop(0)
                self._kill(kinds)

    async def close(self) -> None:
        """End the run if it is still running, and the nodes that the campaign has started."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._nodes is not None:
            self._nodes.close()

    def list_kinds(self) -> list[str]:
        """Return the kinds of processes to kill in turn."""
        if not self._cluster:
            return ["runner", "keeper", "sandbox", "supervisor"]
        if self._cluster == "ray" or self._nodes is not None:
            return ["node", "collector", "supervisor"]
        if self._cluster.startswith("local"):
            return ["runner", "agent", "collector", "keeper", "sandbox", "supervisor"]
        return ["collector", "supervisor"]  # the nodes are other machines

    async def _start(self, what: str) -> "asyncio.Task[None]":
        self._working = False
        if what != "new":
            with RunReader(self.folder / "runs" / "latest") as reader:
                self._finished = sum(1 for _ in reader.iter_rollouts())
        arguments = (str(self.folder / "runs"), self._url, str(self.rollouts), str(self.seed), self._cluster)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.fault_run", what, *arguments),
            cwd=CHECKOUT,
            env={**os.environ, FOLDER_VARIABLE: str(self.folder / "nodes")},
            stdout=asyncio.subprocess.PIPE,
        )
        self._progress(f"{what}: {self._finished:,} of {self.rollouts:,} rollouts finished")
        return asyncio.create_task(self._count(self._process))

    async def _count(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for _ in process.stdout:
            self._finished += 1
            self._working = True
            self._last = time.monotonic()
            if self._finished % 1000 == 0:
                self._progress(f"{self._finished:,} rollouts finished, kills: {dict(self.kills)}")

    def _kill(self, kinds: list[str]) -> None:
        """Kill one process of the kind that was killed least often."""
        assert self._process is not None
        for kind in sorted(kinds, key=lambda kind: self.kills[kind]):
            if kind == "node":
                assert self._nodes is not None
                self._nodes.kill_one(self._rng)
            elif kind == "supervisor":
                self._process.kill()
            else:
                found = self._find(kind)
                if not found:
                    continue
                with suppress(ProcessLookupError):
                    os.kill(self._rng.choice(found), signal.SIGKILL)
            self.kills[kind] += 1
            return

    def _find(self, kind: str) -> list[int]:
        """Return the processes of a kind on this machine that belong to the run."""
        assert self._process is not None
        tree = find_descendants(self._process.pid)
        if kind in MODULES:
            return [pid for pid in tree if MODULES[kind] in read_command(pid)]
        parents = [self._process.pid, *(pid for pid in tree if MODULES["agent"] in read_command(pid))]
        keepers = [
            pid for one in parents for pid in list_children(one) if read_command(pid).startswith(b"sandbox")
        ]
        return keepers if kind == "keeper" else [pid for keeper in keepers for pid in find_descendants(keeper)]

    # ---- checks

    async def check(self) -> dict[str, tuple[int, int]]:
        """Check all records and what is left. Return the numbers of rollouts and wrong ends by kind of fault."""
        counts = self.check_records()
        await self._check_damaged_tokens()
        await self.close()
        await self._check_leftovers()
        return counts

    def check_records(self) -> dict[str, tuple[int, int]]:
        numbers = Counter[str]()
        wrong = Counter[str]()
        with RunReader(self.folder / "runs" / "latest") as reader:
            records = list(reader.iter_rollouts())
            for record in records:
                number = int(record.task.removeprefix("c-"))
                kind = BY_NAME[self.plan[number]]
                numbers[kind.name] += 1
                if not kind.check(record, number) or not self._has_its_tokens(reader, record, number):
                    wrong[kind.name] += 1
                    if wrong[kind.name] <= 3:
                        self.violations.append(
                            f"rollout {record.id} ({kind.name}; expected: {kind.expected}) ended as "
                            f"{record.outcome!r:.300} with reward {record.reward}"
                        )
        tasks = Counter(record.task for record in records)
        if tasks != {f"c-{number}": 1 for number in range(self.rollouts)}:
            doubled = [task for task, count in tasks.items() if count > 1]
            self.violations.append(
                f"{len(tasks)} of {self.rollouts} rollouts have a record, {len(doubled)} of them several"
            )
        return {name: (numbers[name], wrong[name]) for name in BY_NAME}

    def _has_its_tokens(self, reader: RunReader, record: Rollout, number: int) -> bool:
        if record.outcome != Completed():
            return True
        found = [np.frombuffer(turn.sampled, "<i4").tolist() for turn in reader.turns(record)]
        return found == [reply_tokens(number, turn) for turn in range(len(found))] and bool(found)

    async def _check_damaged_tokens(self) -> None:
        """Damage the tokens of a few rollouts and resume: these rollouts run again, and no other one does."""
        run = self.folder / "runs" / "latest"
        with RunReader(run) as reader:
            before = {record.id: record for record in reader.iter_rollouts()}
        plain = [one for one in before.values() if self.plan[int(one.task[2:])] == NONE and one.tokens]
        damaged = self._rng.sample(plain, min(DAMAGED, len(plain)))
        for record in damaged:
            extent = record.tokens[0]
            with (run / "tokens" / extent.file).open("r+b") as file:
                file.seek(extent.offset + extent.length)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0xFF]))
        reading = await self._start("repair")
        await reading
        assert self._process is not None
        if await self._process.wait() != 0:
            self.violations.append("the run cannot be resumed after its token files were damaged")
            return
        with RunReader(run) as reader:
            after = {record.id: record for record in reader.iter_rollouts()}
        changed = {one for one in after if after[one].tokens != before[one].tokens}
        if changed != {record.id for record in damaged}:
            self.violations.append(
                f"after damage to {len(damaged)} rollouts, others or fewer ran again: {changed}"
            )

    async def _check_leftovers(self) -> None:
        left: list[str] = []
        for _ in range(120):  # what was killed last may need a moment
            left = self._find_leftovers()
            if not left:
                return
            await asyncio.sleep(0.5)
        self.violations += [f"left behind: {one}" for one in left[:10]]

    def _find_leftovers(self) -> list[str]:
        folder = str(self.folder)
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                command = read_command(int(entry.name))
                if folder.encode() in command and b"fault_model" not in command:
                    found.append(f"process {command.replace(bytes(1), b' ').decode(errors='replace')[:200]}")
        found += [f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines() if folder in line]
        run = (self.folder / "runs" / "latest").resolve()
        found += [str(path) for path in (run / "sandboxes").glob("*")]
        found += [str(path) for path in (self.folder / "nodes").glob("*")]
        return found


async def run(quick: bool, progress: Progress, cluster: str = "") -> list[Result]:
    """Run the campaign on this machine, or on a cluster: `local:N`, `ray` (three own nodes) or `ray:ADDRESS`."""
    host = find_own_address(cluster.removeprefix("ray:")) if cluster.startswith("ray:") else "127.0.0.1"
    rollouts = QUICK_ROLLOUTS if quick else FULL_ROLLOUTS
    folder = Path(tempfile.mkdtemp(prefix="rookery-faults-"))
    began = time.monotonic()
    try:
        async with instant_model("benchmarks.fault_model", host) as model:
            campaign = Campaign(folder, f"http://{host}:{model.port}/v1", rollouts, 0, cluster, progress)
            try:
                await campaign.execute()
                seconds = time.monotonic() - began
                counts = await campaign.check()
            finally:
                await campaign.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for violation in campaign.violations:
        progress(f"VIOLATION: {violation}")
    return [*_fault_rows(counts), *_summary_rows(campaign, seconds)]


def find_own_address(peer: str) -> str:
    """Return the address of this machine from which `HOST:PORT` is reached. Nothing is sent."""
    host, _, port = peer.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"the campaign needs the address of the Ray cluster as HOST:PORT, not {peer!r}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, int(port)))
        return str(sock.getsockname()[0])


def _fault_rows(counts: dict[str, tuple[int, int]]) -> list[Result]:
    return [
        Result(
            name=f"{'no fault' if name == NONE else name}: {BY_NAME[name].expected}",
            unit=f"of {number:,}",
            ours=wrong,
            target="<= 0",
        )
        for name, (number, wrong) in counts.items()
    ]


def _summary_rows(campaign: Campaign, seconds: float) -> list[Result]:
    rows = [
        Result(name=f"SIGKILL: {kind}", unit="kills", ours=campaign.kills[kind], target=">= 1")
        for kind in campaign.list_kinds()
    ]
    rate = campaign.rollouts / seconds
    rows.append(Result(name="rollouts per second, with kills", unit="1/s", ours=rate, lower_is_better=False))
    rows.append(Result(name="violations", unit="", ours=len(campaign.violations), target="<= 0"))
    return rows
