"""A Docker engine for the tests alone, and an image made of this machine's own programs.

Promises:
- everything of it lies below one folder, and it lives in process and mount namespaces of its own: it is gone with
  all that it held when it is stopped, when it is killed, and when the tests are;
- no registry and no builder is asked: the image is made of programs that are installed here.
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
import time
from pathlib import Path
from typing import Any

from benchmarks.docker_engine import engine_command
from rookery.sandbox_runtime import processes
from rookery.sandboxes.docker.client import BlockingEngineClient, EngineUnreachable
from tests.sandboxes.root_filesystems import list_libraries

ROOT = Path(__file__).resolve().parents[3] / ".peers" / "sandboxes" / "root"
"""What `make docker-engine` (or `make peers`) unpacks."""
IMAGE = "rookery-test:latest"
BARE = "rookery-bare:latest"
"""An image with one file that is no program."""
GROUP = "rookery-test-"
_START_SECONDS = 30.0
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/work:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"
_PROGRAMS = """
sh bash cat ls id stat chown chmod touch rm mkdir env readlink ln sleep cut sed grep head tail tr yes wc
true false echo printf basename dirname printenv setsid mkfifo sha256sum sort seq cp mv rmdir dd df kill test expr
date uname mknod tee nproc find xargs""".split()  # noqa: SIM905
_LEFT_OUT = {"test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages", "dist-packages",
             "pydoc_data", "__pycache__", "config-3.11-x86_64-linux-gnu"}  # fmt: skip


def can_be_had() -> bool:
    """Whether this machine can run one."""
    return os.geteuid() == 0 and os.access(ROOT / "usr/sbin/dockerd", os.X_OK)


class PrivateEngine:
    """One that can be stopped, killed and started again."""

    suffix = ""
    """Of the name of its control group."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program: subprocess.Popen[bytes] | None = None
        self._group = f"{GROUP}{os.getpid()}{self.suffix}"
        (folder / "data").mkdir(parents=True)
        for found in Path("/sys/fs/cgroup").glob(f"*/{GROUP}*"):  # of tests that were killed
            if not Path(f"/proc/{found.name.removeprefix(GROUP).partition('-')[0]}").exists():
                _remove_group(found)

    @property
    def socket(self) -> str:
        return str(self._folder / "docker.sock")

    @property
    def client(self) -> BlockingEngineClient:
        return BlockingEngineClient(self.socket)

    def _words(self) -> tuple[list[str], dict[str, str]]:
        """How it is started, and with which variables; what a killed one left is out of the way then."""
        for name in ("docker.sock", "pid"):
            (self._folder / name).unlink(missing_ok=True)
        shutil.rmtree(self._folder / "exec", ignore_errors=True)
        return engine_command(ROOT, self._folder, self._folder / "data", self._group)

    def start(self) -> None:
        """By the thread that the tests run on: the engine ends with the thread that started it."""
        words, env = self._words()
        with (self._folder / "log").open("ab") as log:
            self._program = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._program.poll() is None:
            with contextlib.suppress(EngineUnreachable):
                self.client.call("GET", "/_ping", timeout=end - time.monotonic())
                return
            time.sleep(0.02)
        raise RuntimeError(f"the engine did not start: {(self._folder / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """With everything in it, at once."""
        self._end()

    def _end(self) -> None:
        """Its pid 1 is gone when all that lived with it is; until then another one could not have its files."""
        assert self._program is not None
        children = processes.list_children(self._program.pid)
        handles = [os.pidfd_open(child) for child in children]
        self._program.kill()
        self._program.wait()
        for handle in handles:
            select.select([handle], [], [], _START_SECONDS)
            os.close(handle)
        self._remove_groups()

    def stop(self) -> None:
        if self._program is not None and self._program.poll() is None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                for child in processes.list_children(self._program.pid):
                    os.kill(child, signal.SIGTERM)
                self._program.wait(timeout=4)
        if self._program is not None and self._program.poll() is None:
            self._end()
        self._remove_groups()

    def _remove_groups(self) -> None:
        end = time.monotonic() + 5
        while True:
            left = 0
            tops = Path("/sys/fs/cgroup")
            for found in (tops / self._group, *(top / self._group for top in tops.iterdir())):
                _remove_group(found)
                left += found.exists()
            if not left or time.monotonic() > end:
                return
            time.sleep(0.02)  # the last of them are just dying

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
            status, said = self._post(f"/images/create?fromSrc=-&repo={repo}&tag={tag}", file)
        assert status == 200, said
        assert b'"error"' not in said, said

    def tag(self, image: str, name: str) -> None:
        repo, _, tag = name.partition(":")
        status, said = self._post(f"/images/{image}/tag?repo={repo}&tag={tag}", None)
        assert status == 201, said

    def image_id(self, name: str) -> str:
        return str(self.client.call("GET", f"/images/{name}/json")["Id"])

    def commit(self, container: str, name: str) -> None:
        """With the container's labels."""
        repo, _, tag = name.partition(":")
        where = f"/commit?container={container}&repo={repo}&tag={tag}"
        status, said = self._post(where, "{}", **{"Content-Type": "application/json"})
        assert status == 201, said

    def create(self, name: str, labels: dict[str, str]) -> None:
        body = json.dumps({"Image": IMAGE, "Cmd": ["true"], "Labels": labels})
        status, said = self._post(f"/containers/create?name={name}", body, **{"Content-Type": "application/json"})
        assert status == 201, said

    def pause(self, container: str) -> None:
        for _ in range(100):
            status, said = self._post(f"/containers/{container}/pause", None)
            if b"unable to freeze" not in said:  # something in it was just being born
                break
        assert status == 204, said

    def containers(self) -> list[str]:
        return [one["Id"] for one in self.client.call("GET", "/containers/json?all=1", timeout=30.0)]

    def snapshots(self) -> list[str]:
        found = self.client.call("GET", "/images/json", timeout=30.0)
        tags = [tag.rpartition("/")[2] for one in found for tag in one["RepoTags"] or ()]
        return [tag for tag in tags if tag.startswith("rookery-snapshot")]

    def names(self) -> list[str]:
        return [one["Names"][0][1:] for one in self.client.call("GET", "/containers/json?all=1", timeout=30.0)]


def _remove_group(found: Path) -> None:
    """With those in it, the deepest first; those that are in use stay."""
    for here, _, _ in os.walk(found, topdown=False):
        with contextlib.suppress(OSError):
            Path(here).rmdir()


def image_at(tar: Path) -> Path:
    """A system with a shell, the usual small programs and Python, out of this machine's own."""
    files: dict[str, str] = {}
    for name in _PROGRAMS:
        found = shutil.which(name)
        if found is not None:
            files[f"bin/{name}"] = found
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    files["usr/bin/python3"] = python
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    dynload = sorted((stdlib / "lib-dynload").glob("*.so"))
    for path in (*list(files.values()), *map(str, dynload)):
        for library in list_libraries(path):
            usual = library.startswith(("/lib", "/usr/lib"))
            files.setdefault(library[1:] if usual else f"usr/lib/{Path(library).name}", library)
    half = tar.with_suffix(".incomplete")
    with tarfile.open(half, "w") as file:
        for target, source in files.items():
            file.add(os.path.realpath(source), target)
        file.add(stdlib, f"usr/lib/{stdlib.name}", filter=_kept)
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


def bare_at(tar: Path) -> Path:
    with tarfile.open(tar, "w") as file:
        _add(file, "only", b"this is no program\n")
    return tar


def _add(file: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    file.addfile(info, io.BytesIO(data))


def _kept(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(info.name).parts
    return None if _LEFT_OUT & set(parts) or any(part.startswith("config-") for part in parts) else info
