"""The agent: the process that manages one node of a cluster for one run. It runs no user code.

A launcher (for Ray, an actor) starts it and writes one `AgentConfig` as a line of JSON to its standard input. The
agent connects to the supervisor, starts the node's keeper and gateway, and starts and watches runners as the
supervisor asks. Each runner gets its own authenticated connection to the supervisor, which the agent opens.

- The agent ends when its standard input is closed, also if the launcher was killed.
- Before it starts a keeper or a runner, it removes the directories and sandboxes that dead agents left on this
  machine.
- **Fencing:** if the connection to the supervisor is lost, or nothing was received for `FENCE_SECONDS`, the
  agent kills its runners and removes their sandboxes. Then it joins again as a new, empty node.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from rookery.cluster import messages
from rookery.cluster.authentication import AuthenticationError, connect
from rookery.cluster.node_resources import CpuMeter, read_available_memory, read_resources
from rookery.cluster.placement import NodeResources
from rookery.cluster.token_sender import SharedTokens, TokenSender
from rookery.core import RookeryError
from rookery.core.errors import describe
from rookery.engine.background_tasks import BackgroundTasks
from rookery.engine.framing import FramedConnection
from rookery.engine.processes import new_event_loop
from rookery.engine.run_services import RunGateway, RunKeeper
from rookery.engine.runner_handle import RunnerProcess, read_log_tail
from rookery.engine.runner_protocol import Pause, Paused, Resume
from rookery.sandboxes import reap
from rookery.telemetry import REGISTRY, Snapshot

JOIN_SECONDS = 120.0
"""The agent ends if it cannot reach the supervisor for this long."""
MAX_REJOIN_SECONDS = 30.0
"""The longest pause before a fenced node joins again. The pause begins with one second and doubles."""
FOLDER_VARIABLE = "ROOKERY_NODE_DIR"
"""Environment variable that names the directory for a node's files; by default one in the directory for temporary
files. `{node}` in it is replaced by the node's name."""
LOCK = ".lock"
log = logging.getLogger("rookery.cluster")


class AgentConfig(msgspec.Struct, frozen=True):
    """Arguments with which an agent joins a run: the supervisor's address, the key and the name of the node."""

    host: str
    port: int
    key: bytes
    node: str
    resources: NodeResources | None = None
    """The node's resources, if the launcher knows them. If it is None, the agent measures them."""


class NodeFolder:
    """A directory on the node that belongs to this process as long as it holds the lock next to it."""

    def __init__(self, base: Path, name: str) -> None:
        self.path = base / f"{name}-{os.getpid()}"
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = base.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise OSError(f"{base} must be a directory of this user that nobody else can write to")
        with _locked(base):
            self._lock = _take_lock(base / f"{self.path.name}{LOCK}")
        if self._lock is None:
            raise OSError(f"{self.path} belongs to another process")
        for name_inside in ("tokens", "logs"):
            (self.path / name_inside).mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        if self._lock is not None:
            _remove_folder(self.path)
            self._lock.close()
            self._lock = None


def remove_leftovers(base: Path) -> list[str]:
    """Remove the directories of agents that are dead, with their sandboxes. Return the directories' names."""
    removed = []
    with contextlib.ExitStack() as locks:
        with _locked(base):  # not while sandboxes are removed, which can take long
            for lock in sorted(base.glob(f"*{LOCK}")):
                held = _take_lock(lock, create=False)
                if held is not None:
                    locks.enter_context(held)
                    removed.append(lock.name.removesuffix(LOCK))
        for name in removed:
            _remove_folder(base / name)
    return removed


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Hold the lock of the directory `base`, so that no agent takes a new lock file for one of a dead agent."""
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _take_lock(path: Path, *, create: bool = True) -> "IO[bytes] | None":
    """Lock a file and return it, or return None if another process holds the lock or has just removed the file."""
    try:
        file = path.open("ab" if create else "rb")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None


def _remove_folder(folder: Path) -> None:
    if (folder / "sandboxes").exists():
        reap(folder / "sandboxes", now=time.time())
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(f"{folder.name}{LOCK}").unlink(missing_ok=True)


def find_base_folder(node: str) -> Path:
    """Return the directory on this machine in which the agents of a node keep their directories."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    return (
        Path(chosen.replace("{node}", node))
        if chosen
        else Path(tempfile.gettempdir()) / f"rookery-nodes-{os.getuid()}"
    )


class Membership:
    """One membership of the node in the run: from the connection to the supervisor until it is lost or ended."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._connection = FramedConnection(messages.to_agent_decoder, self.on_message, self.on_lost)
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        """Set when a runner has ended."""
        self._heard = self._loop.time()
        self._creating_folder: asyncio.Task[NodeFolder] | None = None
        """Is not cancelled, so that a directory that it creates is always removed."""
        self._folder: NodeFolder | None = None
        self._keeper: RunKeeper | None = None
        self._gateway: RunGateway | None = None
        self._runners: dict[str, RunnerProcess] = {}
        self._writers: set[str] = set()
        """The prefixes of the files of live runners."""
        self._shared: SharedTokens | None = None
        """Reports the token files, if the runners write them to the run's directory themselves."""
        self._tasks = BackgroundTasks(self._on_failure)
        self.leaving = False
        """True if the supervisor has asked this node to leave."""

    async def run(self) -> None:
        """Take part in the run until the membership ends, then remove everything from the node."""
        sock = await connect(
            self._config.host, self._config.port, self._config.key, messages.Join("agent", self._config.node)
        )
        await self._loop.create_connection(lambda: self._connection, sock=sock)
        beating = self._loop.create_task(self._beat())
        try:
            await self._ended.wait()
        finally:
            beating.cancel()
            await asyncio.shield(self._loop.create_task(self.clean_up()))

    def _send(self, message: messages.FromAgent) -> None:
        self._connection.send(message)

    def on_lost(self, _: BaseException | None) -> None:
        self._ended.set()

    async def _beat(self) -> None:
        cpu = CpuMeter()
        while True:
            self._send(messages.NodeBeat(read_available_memory(), cpu.read_free()))
            before = self._loop.time()
            await asyncio.sleep(messages.BEAT_SECONDS)
            # If this process was late itself, the silence proves nothing.
            self._heard += max(0.0, self._loop.time() - before - messages.BEAT_SECONDS)
            if self._loop.time() - self._heard > messages.FENCE_SECONDS:
                log.warning("nothing was received from the supervisor for %g s: fencing", messages.FENCE_SECONDS)
                self._ended.set()
                return

    def on_message(self, message: messages.ToAgent) -> None:
        if self._ended.is_set() and not isinstance(message, messages.Leave):
            return  # a runner that is started now would be missed by the cleaning of the node
        self._heard = self._loop.time()
        match message:
            case messages.Beat():
                pass
            case messages.Welcome():
                self._tasks.start(self._prepare(message))
            case messages.StartRunner():
                self._tasks.start(self._start_runner(message))
            case messages.KillRunner(name, stack):
                if (runner := self._runners.get(name)) is not None:
                    runner.kill(stack=stack)
            case Pause():
                self._tasks.start(self._pause_gateway(message))
            case Resume(version):
                self._tasks.start(self._resume_gateway(version))
            case messages.Leave():
                self.leaving = True
                self._ended.set()

    def _on_failure(self, error: BaseException) -> None:
        log.error("the node failed", exc_info=error)
        self._send(messages.NodeFailed(describe(error)))

    async def _prepare(self, welcome: messages.Welcome) -> None:
        base = find_base_folder(self._config.node)
        resources = read_resources(self._config.node, self._config.resources)
        name = f"{welcome.settings.run}-{self._config.node}"
        self._creating_folder = self._loop.create_task(asyncio.to_thread(NodeFolder, base, name))
        self._folder = await asyncio.shield(self._creating_folder)
        for name in await asyncio.to_thread(remove_leftovers, base):
            log.warning("removed what a dead agent had left: %s", name)
        folder = self._folder.path
        settings = msgspec.structs.replace(welcome.settings, folder=str(folder))
        self._keeper = RunKeeper(settings)
        problem = await self._keeper.open()
        if welcome.needs_gateway:
            self._gateway = RunGateway(settings)
            await self._gateway.open()
            if settings.metrics:
                self._tasks.start(self._report_metrics(self._gateway))
        sender = TokenSender(
            folder,
            self._config.host,
            welcome.collector,
            self._config.key,
            self._config.node,
            lambda file: file.rpartition("-")[0] in self._writers,
            kinds=("logs",) if welcome.shared else ("tokens", "logs"),
        )
        if welcome.shared:
            self._shared = await asyncio.to_thread(SharedTokens, folder, Path(welcome.shared))
            self._tasks.start(self._shared.run(self._send))
        self._tasks.start(sender.run())
        gateway = self._gateway.address if self._gateway is not None else None
        self._send(messages.NodeReady(str(folder), resources, gateway, problem))

    async def _report_metrics(self, gateway: RunGateway) -> None:
        """Send what the node's gateway counts to the supervisor. Runners send their metrics themselves."""
        known: Snapshot = {}
        while True:
            await asyncio.sleep(messages.BEAT_SECONDS)
            try:
                metrics = await gateway.read_metrics()
            except RookeryError as error:
                log.warning("the metrics of the node's gateway cannot be read: %s", describe(error))
                continue
            self._send(messages.NodeMetrics(REGISTRY.subtract(metrics, known)))
            known = metrics

    async def _start_runner(self, request: messages.StartRunner) -> None:
        assert self._folder is not None
        name = request.name
        log_file = self._folder.path / "logs" / f"{request.writer}.log"

        def on_exit(code: int) -> None:
            self._runners.pop(name, None)
            self._changed.set()
            self._writers.discard(request.writer)
            if self._shared is not None:
                self._shared.end(request.writer)
            self._send(messages.RunnerExited(name, code, read_log_tail(log_file)))

        sock = await connect(
            self._config.host,
            self._config.port,
            self._config.key,
            messages.Join("runner", self._config.node, name),
        )
        with sock:
            self._writers.add(request.writer)
            if self._shared is not None:
                self._shared.begin(request.writer)
            self._runners[name] = RunnerProcess(
                sock, log_file, lambda frame: self._send(messages.RunnerAlarm(name, frame)), on_exit
            )

    async def _pause_gateway(self, pause: Pause) -> None:
        problem = ""
        try:
            if self._gateway is not None:
                await self._gateway.pause(pause.mode, pause.timeout)
        except RookeryError as error:
            problem = describe(error)
        self._send(Paused(pause.number, problem))

    async def _resume_gateway(self, version: int | None) -> None:
        if self._gateway is not None:
            await self._gateway.resume(version, lambda kind, payload: log.error("%s: %s", kind, payload))

    async def clean_up(self) -> None:
        for runner in list(self._runners.values()):
            runner.kill()
        await self._tasks.cancel()
        while self._runners:  # each is removed when its exit is noticed
            self._changed.clear()
            await self._changed.wait()
        for service in (self._gateway, self._keeper):
            if service is not None:
                try:
                    await service.close()
                except (RookeryError, OSError) as error:
                    log.error("a service of the node could not be closed: %s", describe(error))
        if self._creating_folder is not None:
            with contextlib.suppress(OSError):
                await asyncio.to_thread((await self._creating_folder).remove)
        self._connection.close()


async def run_agent(config: AgentConfig) -> None:
    """Be a node of the run until the supervisor asks it to leave, or until it cannot be reached."""
    loop = asyncio.get_running_loop()
    reached, delay = loop.time(), 1.0
    while True:
        membership = Membership(config)
        began = loop.time()
        try:
            await membership.run()
            if membership.leaving:
                return
            reached = loop.time()
        except (OSError, TimeoutError) as error:
            if loop.time() - reached > JOIN_SECONDS:
                sys.exit(f"rookery agent: the supervisor cannot be reached: {describe(error)}")
        delay = 1.0 if loop.time() - began > 4 * MAX_REJOIN_SECONDS else min(MAX_REJOIN_SECONDS, 2 * delay)
        await asyncio.sleep(delay / 2)


async def _run_until_input_ends(config: AgentConfig) -> None:
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()

    def on_input() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            closed.set()

    loop.add_reader(0, on_input)
    agent = loop.create_task(run_agent(config))
    waiting = loop.create_task(closed.wait())
    await asyncio.wait({agent, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not agent.done():
        agent.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await agent


def main() -> None:
    """Run as `python -m rookery.cluster.agent`, with an `AgentConfig` as the first line of standard input."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    line = b""
    while not line.endswith(b"\n"):  # unbuffered: what follows is read by the event loop
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    config = msgspec.json.decode(line, type=AgentConfig)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_run_until_input_ends(config))
    except AuthenticationError as error:
        sys.exit(f"rookery agent: {error}")


if __name__ == "__main__":
    main()
