"""A Docker engine to measure beside ours: the one that `DOCKER_HOST` names, or a private one for the bench alone.

Promises:
- a private engine keeps everything under its own folder, is started for as long as it is measured, and is gone
  afterwards with all it held: it lives in process and mount namespaces of its own, which end with us, whatever
  happens to us;
- of an engine that is not ours nothing is changed but the containers that are measured, which are removed;
- an engine that is not there, or does not work, gives a note.
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
from benchmarks.sandbox_peers import COMMAND, PYTHON, Contender, spawned

IMAGE = "rookery-peer:latest"
RUN, EXEC = "docker run", "Docker API exec"
USUAL = "/var/run/docker.sock"
_LIMITS = ("--network", "none", "--memory", "256m", "--pids-limit", "128")
_GROUP = "rookery-peer-"
_OWN = """
mount -t tmpfs -o mode=755 own "$0/own" && mkdir "$0/own/etc" "$0/own/opt" "$0/own/w1" "$0/own/w2" &&
mount -t overlay -o "lowerdir=/etc,upperdir=$0/own/etc,workdir=$0/own/w1" own /etc &&
mount -t overlay -o "lowerdir=/opt,upperdir=$0/own/opt,workdir=$0/own/w2" own /opt &&
mount -t tmpfs -o mode=755 own /run && exec "$@"
"""
"""In namespaces of its own. An engine also writes to places that no setting names: it gets its own of them."""
_START_SECONDS = 20.0
_STOP_SECONDS = 15.0


class Engine:
    """An engine that answers."""

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
                "ROOKERY_BENCH_IMAGE names one with python3"
            )
        made = await self.call("POST", "/containers/create", self._wanted())
        self._container = made["Id"]
        await self.call("POST", f"/containers/{self._container}/start")

    def _wanted(self) -> dict[str, Any]:
        host = {"NetworkMode": "none", "Memory": 256 << 20, "PidsLimit": 128}
        return {"Image": self.image, "Cmd": ["sleep", "infinity"], "HostConfig": host}

    async def call(self, method: str, path: str, body: Any = None, *, missing_ok: bool = False) -> Any:
        assert self._session is not None
        async with self._session.request(method, path, json=body) as reply:
            if reply.status == 404 and missing_ok:
                return None
            if reply.status >= 400:
                raise RuntimeError(f"the Docker engine answers {reply.status}: {(await reply.text())[:300]}")
            return await reply.json() if "json" in reply.content_type else await reply.read()

    async def exec(self) -> float:
        """A command in a live container, with what it writes and how it ended; milliseconds."""
        began = time.perf_counter()
        asked = {"Cmd": list(COMMAND), "AttachStdout": True, "AttachStderr": True}
        made = await self.call("POST", f"/containers/{self._container}/exec", asked)
        await self.call("POST", f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False})
        ended = await self.call("GET", f"/exec/{made['Id']}/json")
        took = 1e3 * (time.perf_counter() - began)
        if ended["ExitCode"]:
            raise RuntimeError(f"a command in a container ended with {ended['ExitCode']}")
        return took

    async def life(self) -> float:
        """A container, made, started and removed; milliseconds."""
        began = time.perf_counter()
        made = await self.call("POST", "/containers/create", self._wanted())
        await self.call("POST", f"/containers/{made['Id']}/start")
        await self.call("DELETE", f"/containers/{made['Id']}?force=1")
        return 1e3 * (time.perf_counter() - began)

    async def run(self) -> float:
        words = [self.cli, "-H", f"unix://{self.socket}", "run", "--rm", *_LIMITS, self.image, *PYTHON]
        return await spawned(words, {"PATH": os.defpath, "HOME": "/nonexistent"})

    async def close(self) -> None:
        if self._session is not None:
            try:
                if self._container:
                    await self.call("DELETE", f"/containers/{self._container}?force=1", missing_ok=True)
            finally:
                await self._session.close()


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[Engine | str]:
    """One that answers and has an image with Python; or why there is none."""
    cli = shutil.which("docker", path=f"{_unpacked() / 'usr/bin'}:{os.environ.get('PATH', os.defpath)}")
    named = os.environ.get("DOCKER_HOST", "")
    image = os.environ.get("ROOKERY_BENCH_IMAGE") or IMAGE
    async with contextlib.AsyncExitStack() as stack:
        found: Engine | str
        try:
            if cli is None:
                raise RuntimeError("Docker is missing: `make peers` in a checkout makes a private engine")
            if named and not named.startswith("unix://"):
                raise RuntimeError(f"DOCKER_HOST is {named}: only an engine of this machine can be compared")
            if named:
                socket = named.removeprefix("unix://")
            elif os.access(_unpacked() / "usr/sbin/dockerd", os.X_OK):
                socket = await stack.enter_async_context(private_engine(_folder()))
            elif os.access(USUAL, os.W_OK):
                socket = USUAL
            else:
                raise RuntimeError("no Docker engine runs here: `make peers` in a checkout makes a private one")
            found = Engine(cli, socket, image)
            stack.push_async_callback(found.close)
            await found.open()
        except (RuntimeError, OSError, aiohttp.ClientError, TimeoutError) as error:
            found = f"{error}"[:500] or repr(error)
        yield found


def contenders(found: Engine | str, *, every: int) -> tuple[Contender, Contender]:
    """`docker run`, and an exec in a live container."""
    if isinstance(found, str):
        return Contender(RUN, None, note=found), Contender(EXEC, None, note=found)
    return Contender(RUN, found.run, 1, every), Contender(EXEC, found.exec, 2, every)


@contextlib.asynccontextmanager
async def private_engine(folder: Path) -> AsyncIterator[str]:
    """A dockerd of our own whose files are all below `folder`, unpacked there by `make peers`; its socket."""
    if os.geteuid() != 0:
        raise RuntimeError("a private Docker engine needs root")
    root = folder / "root"
    group = f"{_GROUP}{os.getpid()}"
    _remove_groups()
    with tempfile.TemporaryDirectory(prefix="rookery-docker-") as spot:
        socket = f"{spot}/docker.sock"
        words, env = engine_words(root, Path(spot), folder / "data", group)
        with (Path(spot) / "log").open("wb") as log:
            program = await asyncio.create_subprocess_exec(
                *words, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            await _answers(program, socket, Path(spot) / "log")
            yield socket
        finally:
            await _stopped(program)
            _remove_groups()


def engine_words(root: Path, spot: Path, data: Path, group: str) -> tuple[list[str], dict[str, str]]:
    """How an engine is started whose programs lie below `root`, and which ends with who starts it: words and
    variables. `spot` is for its socket and its state, `data` for its images; `group` is the control group above
    those of its containers."""
    (spot / "daemon.json").write_text("{}")
    (spot / "own").mkdir(exist_ok=True)
    words = [
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
        *("sh", "-c", _OWN, str(spot)),
        *(
            str(root / "usr/sbin/dockerd"),
            "--config-file",
            f"{spot}/daemon.json",
            "-H",
            f"unix://{spot}/docker.sock",
        ),
        *("--data-root", str(data), "--exec-root", f"{spot}/exec", "--pidfile", f"{spot}/pid"),
        *("--iptables=false", "--bridge=none", "--cgroup-parent", group),
    ]
    env = {
        "PATH": f"{root}/usr/sbin:{root}/usr/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LD_LIBRARY_PATH": f"{root}/usr/lib/{os.uname().machine}-linux-gnu",
        "HOME": str(spot),
        # It may ask registries of this machine alone: behind the proxy that it is told of is nobody.
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
        "NO_PROXY": "127.0.0.1,localhost",
    }
    return words, env


async def _answers(program: asyncio.subprocess.Process, socket: str, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while program.returncode is None and time.monotonic() < end:
        try:
            _, writer = await asyncio.open_unix_connection(socket)
        except OSError:
            await asyncio.sleep(0.02)  # nothing tells when it listens
        else:
            writer.close()
            return
    raise RuntimeError(f"the private Docker engine did not start: {_last_line(log)}"[:500])


def _last_line(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").strip().splitlines()[-1:])


def _remove_groups() -> None:
    """Those that engines of ours have left: a killed bench's too. One that is in use cannot be removed."""
    for top in Path("/sys/fs/cgroup").glob("*"):
        for found in (*top.glob(f"{_GROUP}*"), *top.glob(f"*/{_GROUP}*"), *top.glob(f"*/*/{_GROUP}*")):
            for folder in (*found.glob("*/"), found):
                with contextlib.suppress(OSError):
                    folder.rmdir()


async def _stopped(program: asyncio.subprocess.Process) -> None:
    """Asks it to end; then its namespace is ended, and with it whatever it started."""
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
