"""Fault campaign: thousands of rollouts, a tenth of them with a fault, while processes are killed at random.

Rollouts make model calls, some through the gateway, and a tool call in a sandbox, and are graded in a fresh
sandbox. The campaign injects faults of the environment, the sandbox, the grader and the inference engine
(`fault_plan`), sends SIGKILL to every kind of process and, on a cluster, to whole nodes (everything that runs on
them), and fills up a disk (as root). A run that was killed or stopped is resumed.

It fails (exit status 1) unless
- every rollout has exactly one final record;
- every rollout without a fault is completed, with the tokens that belong to it and with the reward that it has in
  a run of the same seed without faults and kills, which the campaign executes first;
- every rollout with a fault has the outcome and the cause that belong to the fault;
- damaged token files are noticed: their rollouts run again, and no other rollout does;
- a node whose disk is full is fenced, and a run whose disk is full stops and can be resumed;
- nothing is left on any node: no process, mount, cgroup, container, sandbox or file.

The files of a campaign that failed are kept, except for what is on the small disk.
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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks import CHECKOUT, Progress, Result
from benchmarks.fault_disk import DEVICE, SmallDisk
from benchmarks.fault_leftovers import (
    RayMachines,
    belongs_to,
    find_cgroups,
    find_left_cgroups,
    find_leftovers,
    list_pids,
    read_command,
)
from benchmarks.fault_model import reply_tokens
from benchmarks.fault_plan import BY_NAME, NONE, plan_faults
from benchmarks.fault_run import STOPPED
from benchmarks.instant_model import instant_model
from rookery.cluster.agent import FOLDER_VARIABLE
from rookery.core import Completed, Rollout, RookeryError, UsageError
from rookery.journal import RunReader
from rookery.sandbox_runtime.processes import list_children
from rookery.sandboxes.local.keeper_reaper import KeeperCgroups

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
STALL_SECONDS = 600.0
"""The campaign fails if no rollout finishes for this long."""
FULL_SECONDS = 120.0
"""The campaign fails if a full disk is not noticed for this long."""
CGROUP_SECONDS = 1.0
"""Seconds between two looks at the cgroups that the run uses."""
RAY_NODES = 3
DISK_FULL = "disk full"
MODULES = {
    "runner": b"rookery.engine.runner",
    "gateway shard": b"rookery.gateway.shard",
    "agent": b"rookery.cluster.agent",
    "collector": b"rookery.cluster.collector",
}
"""Part of the command line of each kind of process."""


def find_descendants(pids: Iterable[int]) -> list[int]:
    found, todo = list[int](), list(pids)
    while todo:
        children = list_children(todo.pop())
        found += children
        todo += children
    return found


class Nodes:
    """The Ray nodes that the campaign starts on this machine, and kills. One of them has a small disk."""

    def __init__(self, folder: Path, disk: Path) -> None:
        self._environment = dict(os.environ)
        self._folders = {False: folder / "nodes" / "ray", True: disk}
        os.environ["RAY_TMPDIR"] = str(folder)  # leaves the address of another Ray cluster of the user alone
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_worker_niceness", "0")  # the default is 15
        os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
        os.environ["TMPDIR"] = str(folder / "tmp")
        os.environ[FOLDER_VARIABLE] = str(self._folders[False])
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: list[tuple[Any, bool]] = []
        for number in range(RAY_NODES - 1):
            self._add(small=number == 0)

    def _add(self, *, small: bool) -> None:
        os.environ[FOLDER_VARIABLE] = str(self._folders[small])  # the node inherits it
        self._nodes.append((self._cluster.add_node(num_cpus=1), small))

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def kill_one(self, rng: random.Random) -> None:
        """Kill a node with SIGKILL and add another one. Not the head, whose loss ends the Ray cluster."""
        node, small = self._nodes.pop(rng.randrange(len(self._nodes)))
        self._cluster.remove_node(node, allow_graceful=False)
        self._add(small=small)

    def close(self) -> None:
        self._cluster.shutdown()
        self._nodes.clear()
        os.environ.clear()
        os.environ.update(self._environment)


class Campaign:
    """One campaign: starts the run, kills its processes, resumes it, and checks what it left."""

    def __init__(self, folder: Path, url: str, rollouts: int, seed: int, cluster: str, progress: Progress) -> None:
        self.folder = folder
        self.rollouts = rollouts
        self.seed = seed
        self.plan = plan_faults(rollouts, seed)
        self.kills = Counter[str]()
        self.violations: list[str] = []
        self.reference: dict[str, float | None] = {}
        """The reward of each task in the run without faults."""
        self.differences: list[str] = []
        """The tasks without a fault whose reward is not that of the run without faults."""
        self.seconds = 0.0
        """The duration of the run with faults and kills."""
        self._url = url
        self._cluster = cluster
        self._nodes: Nodes | None = None
        self._machines = RayMachines(cluster.removeprefix("ray:")) if cluster.startswith("ray:") else None
        """The nodes of a Ray cluster that the campaign has not started."""
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
        # On a cluster the disk of one node is small, otherwise that of the run.
        place = folder / "nodes" / "node-1" if cluster.startswith("local") else folder / "small"
        self._disk = SmallDisk(place)
        self._fills_disk = self._disk.mounted
        if not self._fills_disk:
            progress("no file system can be mounted here, so the campaign does not fill up a disk: run it as root")
        self._full = False
        """True while the disk is full."""
        self._cgroups: dict[str, KeeperCgroups] = {}
        """Cgroups of the sandboxes of each keeper of the run, also of dead keepers."""
        (folder / "tmp").mkdir()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end_processes()
        self._disk.close()

    @property
    def runs(self) -> Path:
        """The directory of the run."""
        return self.folder / "runs" if self._cluster else self._disk.folder / "runs"

    # ---- the run and its kills

    async def execute(self) -> None:
        """Execute the run without faults, then the run with faults to its end, with kills."""
        reading = await self._start("reference")
        if self._cluster == "ray":  # meanwhile
            self._nodes = Nodes(self.folder, self._disk.folder)
            self._cluster = f"ray:{self._nodes.address}"
        await self._read_reference(reading)
        began = time.monotonic()
        await self._execute_with_kills()
        self.seconds = time.monotonic() - began

    async def _execute_with_kills(self) -> None:
        reading = await self._start("new")
        kinds = self.list_kinds()
        looked = 0.0
        while True:
            done, _ = await asyncio.wait({reading}, timeout=0.1)
            if time.monotonic() - looked > CGROUP_SECONDS:
                self._cgroups |= find_cgroups(self.folder, "*/*", "*/*/*")
                if self._machines is not None:
                    await asyncio.to_thread(self._machines.update_cgroups)
                looked = time.monotonic()
            if done:
                assert self._process is not None
                code = await self._process.wait()
                if code == 0:
                    return
                expected = STOPPED if self._full and not self._cluster else -signal.SIGKILL
                if code not in (expected, -signal.SIGKILL):
                    raise RookeryError(f"the run of the campaign failed with status {code}: see its output above")
                self._free_disk()
                reading = await self._start("resume")
            if self._is_stalled():
                return
            # While a run starts, a killed keeper is a reason to refuse the start. That is not tested here.
            if self._working and self._kill_points and self._finished >= self._kill_points[0]:
                self._kill_points.pop(0)
                await self._kill(kinds, reading)

    async def _read_reference(self, reading: "asyncio.Task[None]") -> None:
        if not await self._has_succeeded(reading):
            raise RookeryError("the run without faults failed: see its output above")
        self._finished = 0
        with RunReader(self.folder / "reference" / "latest") as reader:
            self.reference = {one.task: one.reward for one in reader.iter_rollouts()}

    async def _has_succeeded(self, reading: "asyncio.Task[None]") -> bool:
        """Wait for the end of a run without kills. Return whether it succeeded."""
        assert self._process is not None
        while not reading.done():
            await asyncio.wait({reading}, timeout=1.0)
            if self._is_stalled():
                self._process.kill()
        return await self._process.wait() == 0

    def _is_stalled(self) -> bool:
        if time.monotonic() - self._last <= STALL_SECONDS:
            return False
        self.violations.append(f"no rollout finished for {STALL_SECONDS:g} seconds")
        return True

    async def end_processes(self) -> None:
        """End the run if it is still running, and the nodes that the campaign has started."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._nodes is not None:
            self._nodes.close()

    def list_kinds(self) -> list[str]:
        """Return the kinds of processes to kill in turn."""
        if self._machines is not None:
            return ["collector", "supervisor"]  # the nodes are other machines
        kinds = ["runner", "gateway shard", "keeper", "sandbox", "supervisor"]
        if self._cluster:
            kinds = ["node", "agent", "collector", *kinds]
        return [DISK_FULL, *kinds] if self._fills_disk else kinds

    async def _start(self, what: str) -> "asyncio.Task[None]":
        self._working = False
        self._last = time.monotonic()
        runs = self.folder / "reference" if what == "reference" else self.runs
        if what in ("resume", "repair"):
            with RunReader(runs / "latest") as reader:
                self._finished = sum(1 for _ in reader.iter_rollouts())
        # The run without faults needs a cluster only if its nodes are other machines: this one may lack sandboxes.
        cluster = self._cluster if what != "reference" or self._machines is not None else ""
        arguments = (str(runs), self._url, str(self.rollouts), str(self.seed), cluster)
        variables = {FOLDER_VARIABLE: str(self.folder / "nodes" / "{node}"), "TMPDIR": str(self.folder / "tmp")}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.fault_run", what, *arguments),
            cwd=CHECKOUT,
            env=os.environ | variables,
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

    async def _kill(self, kinds: list[str], reading: "asyncio.Task[None]") -> None:
        """Kill one process of the kind that was killed least often, or fill up the disk."""
        assert self._process is not None
        for kind in sorted(kinds, key=lambda kind: self.kills[kind]):
            if kind == "node" and self._nodes is not None:
                self._nodes.kill_one(self._rng)
            elif kind == "supervisor":
                self._process.kill()
            elif kind == DISK_FULL:
                if not await self._fill_disk(reading):
                    continue
            else:
                found = self._find(kind if kind != "node" else "agent")
                if not found:
                    continue
                victim = self._rng.choice(found)
                for pid in [victim, *(find_descendants([victim]) if kind == "node" else ())]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.kills[kind] += 1
            return

    async def _fill_disk(self, reading: "asyncio.Task[None]") -> bool:
        """Fill up the small disk until its node is fenced, or until the run has stopped. Return False if no node
        uses it at the moment."""
        before = self._disk.list_directories()
        agents = [pid for pid in self._find("agent") if belongs_to(pid, [str(self._disk.folder)])]
        if not before or (self._cluster and not agents):
            return False
        self._disk.fill()
        self._full = True
        end = time.monotonic() + FULL_SECONDS
        while not reading.done():
            # The agent of a fenced node removes its directory.
            if self._cluster and not before & self._disk.list_directories():
                break
            if time.monotonic() > end:
                # The directory of a node that has died meanwhile stays, and nobody has to notice anything.
                if not self._cluster or any(belongs_to(pid, [str(self._disk.folder)]) for pid in agents):
                    self.violations.append(f"a full disk was not noticed for {FULL_SECONDS:g} seconds")
                break
            await asyncio.wait({reading}, timeout=0.1)
        if not reading.done():
            self._free_disk()
        return True

    def _free_disk(self) -> None:
        self._disk.free()
        self._full = False

    def _find(self, kind: str) -> list[int]:
        """Return the processes of a kind on this machine that belong to the run, also those of its Ray nodes."""
        assert self._process is not None
        ours = [pid for pid in list_pids() if belongs_to(pid, [str(self.folder)])]
        if kind in MODULES:
            return [pid for pid in ours if MODULES[kind] in read_command(pid)]
        parents = [self._process.pid, *(pid for pid in ours if MODULES["agent"] in read_command(pid))]
        keepers = [
            pid for one in parents for pid in list_children(one) if read_command(pid).startswith(b"sandbox")
        ]
        return keepers if kind == "keeper" else find_descendants(keepers)

    # ---- checks

    async def check(self) -> dict[str, tuple[int, int]]:
        """Check all records and what is left. Return the numbers of rollouts and wrong ends by kind of fault."""
        counts = self.check_records()
        await self._check_damaged_tokens()
        self.compare_rewards()
        await self.end_processes()
        await self._check_leftovers()
        return counts

    def compare_rewards(self) -> None:
        """Compare the rewards of rollouts without a fault with those of the run without faults."""
        with RunReader(self.runs / "latest") as reader:
            self.differences = [
                record.task
                for record in reader.iter_rollouts()
                if self._kind_of(record) == NONE and record.reward != self.reference.get(record.task)
            ]
        if self.differences:
            self.violations.append(f"rewards differ from the run without faults: {self.differences[:10]}")

    def _kind_of(self, record: Rollout) -> str:
        return self.plan[int(record.task.removeprefix("c-"))]

    def check_records(self) -> dict[str, tuple[int, int]]:
        numbers = Counter[str]()
        wrong = Counter[str]()
        with RunReader(self.runs / "latest") as reader:
            records = list(reader.iter_rollouts())
            for record in records:
                kind = BY_NAME[self._kind_of(record)]
                numbers[kind.name] += 1
                if not kind.check(record) or not self._has_its_tokens(reader, record):
                    wrong[kind.name] += 1
                    if wrong[kind.name] <= 3:
                        self.violations.append(
                            f"rollout {record.id} ({kind.name}; expected: {kind.expected}) ended as "
                            f"{record.outcome!r:.300} with reward {record.reward} and {record.info!r:.100}"
                        )
        tasks = Counter(record.task for record in records)
        if tasks != {f"c-{number}": 1 for number in range(self.rollouts)}:
            doubled = [task for task, count in tasks.items() if count > 1]
            self.violations.append(
                f"{len(tasks)} of {self.rollouts} rollouts have a record, {len(doubled)} of them several"
            )
        return {name: (numbers[name], wrong[name]) for name in BY_NAME}

    def _has_its_tokens(self, reader: RunReader, record: Rollout) -> bool:
        if record.outcome != Completed():
            return True
        number = int(record.task.removeprefix("c-"))
        found = [np.frombuffer(turn.sampled, "<i4").tolist() for turn in reader.turns(record)]
        return found == [reply_tokens(number, turn) for turn in range(len(found))] and bool(found)

    async def _check_damaged_tokens(self) -> None:
        """Damage the tokens of a few rollouts and resume: these rollouts run again, and no other one does."""
        run = self.runs / "latest"
        with RunReader(run) as reader:
            before = {record.id: record for record in reader.iter_rollouts()}
        plain = [one for one in before.values() if self._kind_of(one) == NONE and one.tokens]
        damaged = self._rng.sample(plain, min(DAMAGED, len(plain)))
        for record in damaged:
            extent = record.tokens[0]
            with (run / "tokens" / extent.file).open("r+b") as file:
                file.seek(extent.offset + extent.length)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0xFF]))
        if not await self._has_succeeded(await self._start("repair")):
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
            left = await asyncio.to_thread(self._find_leftovers)
            if not left:
                return
            await asyncio.sleep(0.5)
        self.violations += [f"left behind: {one}" for one in left[:10]]

    def _find_leftovers(self) -> list[str]:
        run = (self.runs / "latest").resolve()
        own_mount = f"mount {DEVICE} {self._disk.folder} "
        found = [one for one in find_leftovers([str(self.folder)], run.name) if not one.startswith(own_mount)]
        found += find_left_cgroups(self._cgroups.values())
        places = [
            (run, "sandboxes/*"),
            (run, "gateway/*"),
            (self.folder, "tmp/rookery-*"),
            (self.folder, "nodes/*/*"),
        ]
        if self._cluster:
            places.append((self._disk.folder, "*"))
        found += [str(path) for folder, pattern in places for path in folder.glob(pattern)]
        if self._machines is not None:
            found += self._machines.find_leftovers(run.name)
        return found


async def run(quick: bool, progress: Progress, cluster: str = "", rollouts: int = 0) -> list[Result]:
    """Run the campaign on this machine, or on a cluster: `local:N`, `ray` (three own nodes) or `ray:ADDRESS`.

    `rollouts` is the number of rollouts, if it is not 0.
    """
    host = find_own_address(cluster.removeprefix("ray:")) if cluster.startswith("ray:") else "127.0.0.1"
    rollouts = rollouts or (QUICK_ROLLOUTS if quick else FULL_ROLLOUTS)
    folder = Path(tempfile.mkdtemp(prefix="rookery-faults-"))
    try:
        async with (
            instant_model("benchmarks.fault_model", host) as model,
            Campaign(folder, f"http://{host}:{model.port}/v1", rollouts, 0, cluster, progress) as campaign,
        ):
            await campaign.execute()
            counts = await campaign.check()
    except RookeryError:
        progress(f"the files of the campaign are kept in {folder}")
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for violation in campaign.violations:
        progress(f"VIOLATION: {violation}")
    if campaign.violations:
        progress(f"the files of the campaign are kept in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return [*_fault_rows(counts), *_summary_rows(campaign)]


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


def _summary_rows(campaign: Campaign) -> list[Result]:
    rows = [
        Result(
            name="rewards unlike those without faults",
            unit=f"of {campaign.plan.count(NONE):,}",
            ours=len(campaign.differences),
            target="<= 0",
        )
    ]
    for kind in campaign.list_kinds():
        name, unit = (DISK_FULL, "times") if kind == DISK_FULL else (f"SIGKILL: {kind}", "kills")
        rows.append(Result(name=name, unit=unit, ours=campaign.kills[kind], target=">= 1"))
    rate = campaign.rollouts / campaign.seconds
    rows.append(Result(name="rollouts per second, with kills", unit="1/s", ours=rate, lower_is_better=False))
    rows.append(Result(name="violations", unit="", ours=len(campaign.violations), target="<= 0"))
    return rows
