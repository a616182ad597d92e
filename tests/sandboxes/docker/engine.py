"""A private Docker engine for tests, and images that are built from this machine's programs.

All files of the engine are below one directory, and it runs in its own PID and mount namespaces: it ends, with all
its containers, when it is stopped or killed or when the tests end. No registry and no builder is used.
"""

import contextlib
import http.client
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.docker_engine import engine_command
from rookery.sandbox_runtime import processes
from rookery.sandboxes.docker.client import BlockingEngineClient, EngineUnreachable
from tests.sandboxes.root_filesystems import list_libraries
from tests.waiting import block_until

ROOT = Path(__file__).resolve().parents[3] / ".peers" / "sandboxes" / "root"
"""Directory into which `make docker-engine` (or `make peers`) unpacks the engine."""
IMAGE = "rookery-test:latest"
BARE = "rookery-bare:latest"
"""An image with a single file, which is not a program."""
CGROUP_PREFIX = "rookery-test-"
_START_SECONDS = 30.0
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/work:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"
_PROGRAMS = """
sh bash cat ls id stat chown chmod touch rm mkdir env readlink ln sleep cut sed grep head tail tr yes wc
true false echo printf basename dirname printenv setsid mkfifo sha256sum sort seq cp mv rmdir dd df kill test expr
date uname mknod tee nproc find xargs""".split()  # noqa: SIM905
_EXCLUDED_MODULES = {
    "test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages", "dist-packages",
    "pydoc_data", "__pycache__", "config-3.11-x86_64-linux-gnu",
}  # fmt: skip


def is_available() -> bool:
    """Return whether a private engine can run on this machine."""
    return os.geteuid() == 0 and os.access(ROOT / "usr/sbin/dockerd", os.X_OK)


class PrivateEngine:
    """An engine that can be stopped, killed and started again."""

    suffix = ""
    """Suffix of the name of its cgroup."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program: subprocess.Popen[bytes] | None = None
        self._cgroup = f"{CGROUP_PREFIX}{os.getpid()}{self.suffix}"
        (folder / "data").mkdir(parents=True)
        for found in Path("/sys/fs/cgroup").glob(f"*/{CGROUP_PREFIX}*"):  # left by killed tests
            if not Path(f"/proc/{found.name.removeprefix(CGROUP_PREFIX).partition('-')[0]}").exists():
                _remove_cgroup(found)

    @property
    def socket(self) -> str:
        return str(self._folder / "docker.sock")

    @property
    def client(self) -> BlockingEngineClient:
        return BlockingEngineClient(self.socket)

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """Return the command line and environment of the engine, after removing what a killed one left."""
        for name in ("docker.sock", "pid"):
            (self._folder / name).unlink(missing_ok=True)
        shutil.rmtree(self._folder / "exec", ignore_errors=True)
        return engine_command(ROOT, self._folder, self._folder / "data", self._cgroup)

    def start(self) -> None:
        """Start the engine. Call it in the main thread of the tests: the engine ends with the calling thread."""
        command, env = self._command()
        with (self._folder / "log").open("ab") as log:
            self._program = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        with contextlib.suppress(TimeoutError):
            block_until(lambda: self._answers() or not self.is_alive(), _START_SECONDS)
        if not self._answers():
            raise RuntimeError(f"the engine did not start: {(self._folder / 'log').read_text()[-2000:]}")

    def _answers(self) -> bool:
        with contextlib.suppress(EngineUnreachable):
            self.client.call("GET", "/_ping", timeout=_START_SECONDS)
            return True
        return False

    def kill(self) -> None:
        """Kill the engine with all its containers."""
        self._end()

    def _end(self) -> None:
        """Kill the engine and wait until its PID namespace is empty, so that another one can use its files."""
        assert self._program is not None
        children = processes.list_children(self._program.pid)
        handles = [os.pidfd_open(child) for child in children]
        self._program.kill()
        self._program.wait()
        for handle in handles:
            select.select([handle], [], [], _START_SECONDS)
            os.close(handle)
        self._remove_cgroups()

    def stop(self) -> None:
        if self._program is not None and self._program.poll() is None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                for child in processes.list_children(self._program.pid):
                    os.kill(child, signal.SIGTERM)
                self._program.wait(timeout=4)
        if self._program is not None and self._program.poll() is None:
            self._end()
        self._remove_cgroups()

    def _remove_cgroups(self) -> None:
        tops = Path("/sys/fs/cgroup")
        cgroups = (tops / self._cgroup, *(top / self._cgroup for top in tops.iterdir()))

        def removed() -> bool:
            for cgroup in cgroups:
                _remove_cgroup(cgroup)
            return not any(cgroup.exists() for cgroup in cgroups)

        with contextlib.suppress(TimeoutError):  # the last processes may still be dying
            block_until(removed, 5)

    def is_alive(self) -> bool:
        return self._program is not None and self._program.poll() is None

    def _post(self, where: str, body: Any, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("engine")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(self.socket)
        try:
            connection.request("POST", where, body=body, headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def load(self, tar: Path, name: str) -> None:
        repo, _, tag = name.partition(":")
        with tar.open("rb") as file:
            status, reply_body = self._post(f"/images/create?fromSrc=-&repo={repo}&tag={tag}", file)
        assert status == 200, reply_body
        assert b'"error"' not in reply_body, reply_body

    def tag(self, image: str, name: str) -> None:
        repo, _, tag = name.partition(":")
        status, reply_body = self._post(f"/images/{image}/tag?repo={repo}&tag={tag}", None)
        assert status == 201, reply_body

    def image_id(self, name: str) -> str:
        return str(self.client.call("GET", f"/images/{name}/json")["Id"])

    def commit(self, container: str, name: str) -> None:
        """Commit a container with its labels."""
        repo, _, tag = name.partition(":")
        where = f"/commit?container={container}&repo={repo}&tag={tag}"
        status, reply_body = self._post(where, "{}", **{"Content-Type": "application/json"})
        assert status == 201, reply_body

    def create(self, name: str, labels: dict[str, str]) -> None:
        body = json.dumps({"Image": IMAGE, "Cmd": ["true"], "Labels": labels})
        status, reply_body = self._post(
            f"/containers/create?name={name}", body, **{"Content-Type": "application/json"}
        )
        assert status == 201, reply_body

    def pause(self, container: str) -> None:
        for _ in range(100):
            status, reply_body = self._post(f"/containers/{container}/pause", None)
            if b"unable to freeze" not in reply_body:  # a process was being created
                break
        assert status == 204, reply_body

    def containers(self) -> list[str]:
        return [one["Id"] for one in self.client.call("GET", "/containers/json?all=1", timeout=30.0)]

    def snapshots(self) -> list[str]:
        found = self.client.call("GET", "/images/json", timeout=30.0)
        tags = [tag.rpartition("/")[2] for one in found for tag in one["RepoTags"] or ()]
        return [tag for tag in tags if tag.startswith("rookery-snapshot")]

    def names(self) -> list[str]:
        return [one["Names"][0][1:] for one in self.client.call("GET", "/containers/json?all=1", timeout=30.0)]


def _remove_cgroup(found: Path) -> None:
    """Remove a cgroup and those below it; those in use stay."""
    for here, _, _ in os.walk(found, topdown=False):
        with contextlib.suppress(OSError):
            Path(here).rmdir()


def build_test_image(tar: Path) -> Path:
    """Build an image with a shell, small programs and Python from this machine."""
    files: dict[str, str] = {}
    for name in _PROGRAMS:
        found = shutil.which(name)
        if found is not None:
            files[f"bin/{name}"] = found
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    files["usr/bin/python3"] = python
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    dynload = sorted((stdlib / "lib-dynload").glob("*.so"))
    for path in (*list(files.values()), *map(str, dynload), msgspec._core.__file__):
        for library in list_libraries(path):
            usual = library.startswith(("/lib", "/usr/lib"))
            files.setdefault(library[1:] if usual else f"usr/lib/{Path(library).name}", library)
    half = tar.with_suffix(".incomplete")
    with tarfile.open(half, "w") as file:
        for target, source in files.items():
            file.add(os.path.realpath(source), target)
        file.add(stdlib, f"usr/lib/{stdlib.name}", filter=_select_library)
        for name, text in (
            ("etc/passwd", _PASSWD),
            ("etc/group", "root:x:0:\nuser:x:1000:\n"),
        ):
            _add(file, name, text.encode())
        for name in ("tmp", "root", "home", "srv", "mnt", "media", "opt", "var", "var/tmp", "run"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if "tmp" in name else 0o755
            file.addfile(info)
    half.rename(tar)
    return tar


def build_bare_image(tar: Path) -> Path:
    with tarfile.open(tar, "w") as file:
        _add(file, "only", b"this is no program\n")
    return tar


def _add(file: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    file.addfile(info, io.BytesIO(data))


def _select_library(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(info.name).parts
    return None if _EXCLUDED_MODULES & set(parts) or any(part.startswith("config-") for part in parts) else info
