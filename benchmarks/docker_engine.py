"""Docker engine for the benchmarks: the one that `DOCKER_HOST` names, or a private one.

Behaviour:
- a private engine stores everything in its own directory, and is gone with all its containers at the end, also if
  the benchmark is killed, because it runs in its own PID and mount namespaces;
- in another engine only the measured containers are created, and they are removed;
- an engine that is missing or does not work yields a note.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.peers import peers_folder
from benchmarks.sandbox_peers import COMMAND, PYTHON, TimedOperation, spawn_ms

IMAGE = "rookery-peer:latest"
RUN, EXEC = "docker run", "Docker API exec"
DEFAULT_SOCKET = "/var/run/docker.sock"
_LIMITS = ("--network", "none", "--memory", "256m", "--pids-limit", "128")
_CGROUP_PREFIX = "rookery-peer-"
_PRIVATE_MOUNTS = """
mount -t tmpfs -o mode=755 own "$0/own" && mkdir "$0/own/etc" "$0/own/opt" "$0/own/w1" "$0/own/w2" &&
mount -t overlay -o "lowerdir=/etc,upperdir=$0/own/etc,workdir=$0/own/w1" own /etc &&
mount -t overlay -o "lowerdir=/opt,upperdir=$0/own/opt,workdir=$0/own/w2" own /opt &&
mount -t tmpfs -o mode=755 own /run && exec "$@"
"""
"""Runs in the private namespaces. An engine also writes to fixed paths, which get private mounts."""
_START_SECONDS = 20.0
_STOP_SECONDS = 15.0


class DockerEngine:
    """A client of a running Docker engine."""

    def __init__(self, cli: str, socket: str, image: str) -> None:
        self.cli = cli
        self.socket = socket
        self.image = image
        self._session: aiohttp.ClientSession | None = None
        self._container = ""

    async def open(self) -> None:
        connector = aiohttp.UnixConnector(path=self.socket, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, base_url="http://docker")
        version = await self.call("GET", "/version")
        if await self.call("GET", f"/images/{self.image}/json", missing_ok=True) is None:
            raise RuntimeError(
                f"the Docker engine {version.get('Version')} has no image {self.image!r}: "
                "set ROOKERY_BENCH_IMAGE to an image with python3"
            )
        created = await self.call("POST", "/containers/create", self._container_config())
        self._container = created["Id"]
        await self.call("POST", f"/containers/{self._container}/start")

    def _container_config(self) -> dict[str, Any]:
        host = {"NetworkMode": "none", "Memory": 256 << 20, "PidsLimit": 128}
        return {"Image": self.image, "Cmd": ["sleep", "infinity"], "HostConfig": host}

    async def call(self, method: str, path: str, body: Any = None, *, missing_ok: bool = False) -> Any:
        assert self._session is not None
        async with self._session.request(method, path, json=body) as reply:
            if reply.status == 404 and missing_ok:
                return None
            if reply.status >= 400:
                raise RuntimeError(f"the Docker engine answered {reply.status}: {(await reply.text())[:300]}")
            return await reply.json() if "json" in reply.content_type else await reply.read()

    @property
    def container(self) -> str:
        """ID of a live container."""
        return self._container

    async def exec(self, *command: str) -> float:
        """Run a command in the live container, with output and exit code, and return milliseconds."""
        began = time.perf_counter()
        request = {"Cmd": list(command or COMMAND), "AttachStdout": True, "AttachStderr": True}
        created = await self.call("POST", f"/containers/{self._container}/exec", request)
        await self.call("POST", f"/exec/{created['Id']}/start", {"Detach": False, "Tty": False})
        ended = await self.call("GET", f"/exec/{created['Id']}/json")
        took = 1e3 * (time.perf_counter() - began)
        if ended["ExitCode"]:
            raise RuntimeError(f"a command in a container exited with {ended['ExitCode']}")
        return took

    async def create_and_remove(self) -> float:
        """Create, start and remove a container, and return milliseconds."""
        began = time.perf_counter()
        created = await self.call("POST", "/containers/create", self._container_config())
        await self.call("POST", f"/containers/{created['Id']}/start")
        await self.call("DELETE", f"/containers/{created['Id']}?force=1")
        return 1e3 * (time.perf_counter() - began)

    async def docker_run(self) -> float:
        argv = [self.cli, "-H", f"unix://{self.socket}", "run", "--rm", *_LIMITS, self.image, *PYTHON]
        return await spawn_ms(argv, {"PATH": os.defpath, "HOME": "/nonexistent"})

    async def close(self) -> None:
        if self._session is not None:
            try:
                if self._container:
                    await self.call("DELETE", f"/containers/{self._container}?force=1", missing_ok=True)
            finally:
                await self._session.close()


@contextlib.asynccontextmanager
async def open_engine() -> AsyncIterator[DockerEngine | str]:
    """Yield a running engine that has an image with Python, or why there is none."""
    cli = shutil.which("docker", path=f"{_unpacked() / 'usr/bin'}:{os.environ.get('PATH', os.defpath)}")
    named = os.environ.get("DOCKER_HOST", "")
    image = os.environ.get("ROOKERY_BENCH_IMAGE") or IMAGE
    async with contextlib.AsyncExitStack() as stack:
        found: DockerEngine | str
        try:
            if cli is None:
                raise RuntimeError("Docker is not installed: run `make peers` in a checkout for a private engine")
            if named and not named.startswith("unix://"):
                raise RuntimeError(f"DOCKER_HOST is {named}: only an engine on this machine can be measured")
            if named:
                socket = named.removeprefix("unix://")
            elif os.access(_unpacked() / "usr/sbin/dockerd", os.X_OK):
                socket = await stack.enter_async_context(private_engine(_folder()))
            elif os.access(DEFAULT_SOCKET, os.W_OK):
                socket = DEFAULT_SOCKET
            else:
                raise RuntimeError("no Docker engine runs here: run `make peers` in a checkout for a private one")
            found = DockerEngine(cli, socket, image)
            stack.push_async_callback(found.close)
            await found.open()
        except (RuntimeError, OSError, aiohttp.ClientError, TimeoutError) as error:
            found = f"{error}"[:500] or repr(error)
        yield found


def timed_operations(engine: DockerEngine | str, *, every: int) -> tuple[TimedOperation, TimedOperation]:
    """Return the operations `docker run` and exec in a live container."""
    if isinstance(engine, str):
        return TimedOperation(RUN, None, note=engine), TimedOperation(EXEC, None, note=engine)
    return TimedOperation(RUN, engine.docker_run, 1, every), TimedOperation(EXEC, engine.exec, 2, every)


@contextlib.asynccontextmanager
async def private_engine(folder: Path) -> AsyncIterator[str]:
    """Run dockerd with all its files below `folder`, where `make peers` unpacked it, and yield its socket."""
    if os.geteuid() != 0:
        raise RuntimeError("a private Docker engine needs root")
    root = folder / "root"
    cgroup = f"{_CGROUP_PREFIX}{os.getpid()}"
    _remove_cgroups()
    with tempfile.TemporaryDirectory(prefix="rookery-docker-") as state:
        socket = f"{state}/docker.sock"
        argv, env = engine_command(root, Path(state), folder / "data", cgroup)
        with (Path(state) / "log").open("wb") as log:
            program = await asyncio.create_subprocess_exec(
                *argv, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            await _wait_until_listening(program, socket, Path(state) / "log")
            yield socket
        finally:
            await _stop(program)
            _remove_cgroups()


def engine_command(root: Path, state: Path, data: Path, cgroup: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of an engine that is killed with its parent.

    Its programs are below `root`, its socket and state in `state`, its images in `data`. `cgroup` is the parent
    cgroup of its containers.
    """
    (state / "daemon.json").write_text("{}")
    (state / "own").mkdir(exist_ok=True)
    argv = [
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
        *("sh", "-c", _PRIVATE_MOUNTS, str(state)),
        *(
            str(root / "usr/sbin/dockerd"),
            "--config-file",
            f"{state}/daemon.json",
            "-H",
            f"unix://{state}/docker.sock",
        ),
        *("--data-root", str(data), "--exec-root", f"{state}/exec", "--pidfile", f"{state}/pid"),
        *("--iptables=false", "--bridge=none", "--cgroup-parent", cgroup),
    ]
    env = {
        "PATH": f"{root}/usr/sbin:{root}/usr/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LD_LIBRARY_PATH": f"{root}/usr/lib/{os.uname().machine}-linux-gnu",
        "HOME": str(state),
        # No registry of another host can be reached: nothing listens at this proxy.
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
        "NO_PROXY": "127.0.0.1,localhost",
    }
    return argv, env


async def _wait_until_listening(program: asyncio.subprocess.Process, socket: str, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while program.returncode is None and time.monotonic() < end:
        try:
            _, writer = await asyncio.open_unix_connection(socket)
        except OSError:
            await asyncio.sleep(0.02)  # dockerd does not announce when it listens
        else:
            writer.close()
            return
    raise RuntimeError(f"the private Docker engine did not start: {_last_line(log)}"[:500])


def _last_line(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").strip().splitlines()[-1:])


def _remove_cgroups() -> None:
    """Remove the cgroups of earlier engines, also of killed benchmarks. A cgroup in use cannot be removed."""
    for top in Path("/sys/fs/cgroup").glob("*"):
        for found in (
            *top.glob(f"{_CGROUP_PREFIX}*"),
            *top.glob(f"*/{_CGROUP_PREFIX}*"),
            *top.glob(f"*/*/{_CGROUP_PREFIX}*"),
        ):
            for folder in (*found.glob("*/"), found):
                with contextlib.suppress(OSError):
                    folder.rmdir()


async def _stop(program: asyncio.subprocess.Process) -> None:
    """Stop the engine with SIGTERM, then kill its PID namespace."""
    try:
        for child in _children(program.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await program.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            program.kill()
        await program.wait()


def _children(pid: int) -> list[int]:
    from rookery.sandbox_runtime import processes

    return processes.list_children(pid)


def _folder() -> Path:
    return peers_folder() / "sandboxes"


def _unpacked() -> Path:
    return _folder() / "root"
