"""A container engine of this machine, Docker's or podman's, as a place that has images.

Promises:
- it is asked over its own socket, and nothing is changed in it but what was asked for: a build, a load;
- an engine that is not there is told from an image that it does not have.
"""

import http.client
import os
import socket
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from rookery.core import SandboxError
from rookery.sandboxes.images import records
from rookery.sandboxes.images.records import Name
from rookery.sandboxes.images.references import Reference, shown
from rookery.sandboxes.images.sources import Blob, Found, OnBytes, SavedSource, Span, unavailable

ASK_SECONDS = 30.0
SAVE_SECONDS = 600.0
"""Between two pieces of what it saves: it may collect all of it first."""
CHUNK = 1 << 20
MAX_ANSWER = 16 << 20
VERSION = "/v1.40"
"""Of the API: old enough for every engine in use, and podman's."""


def sockets() -> list[str]:
    """Where one may listen, the first of which is meant: what the environment names, else the usual places."""
    for variable in ("DOCKER_HOST", "CONTAINER_HOST"):
        if said := os.environ.get(variable):
            return [said.removeprefix("unix://")] if said.startswith("unix://") else []
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = [f"{runtime}/docker.sock", f"{runtime}/podman/podman.sock"] if runtime else []
    return ["/var/run/docker.sock", *own, "/run/podman/podman.sock"]


def find_socket() -> str:
    """Of an engine that can be connected to; empty where there is none."""
    for path in sockets():
        if Path(path).exists():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(5.0)
                try:
                    sock.connect(path)
                except OSError:
                    continue
            return path
    return ""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("engine", timeout=timeout, blocksize=CHUNK)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Engine:
    def __init__(self, path: str) -> None:
        self._path = path

    @contextmanager
    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        kind: str = "",
        headers: Mapping[str, str] | None = None,
        seconds: float = ASK_SECONDS,
    ) -> Iterator[http.client.HTTPResponse]:
        connection = _Connection(self._path, seconds)
        try:
            said = {**({"Content-Type": kind} if kind else {}), **(headers or {})}
            connection.request(method, f"{VERSION}{path}", body, said)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise unavailable("the container engine does not answer", str(why)) from error
        finally:
            connection.close()

    def image(self, name: str) -> str:
        """The id of an image; empty where it has none of this name."""
        with self.ask("GET", f"/images/{urllib.parse.quote(name, safe='')}/json") as reply:
            data = reply.read(MAX_ANSWER)
            if reply.status == 404:
                return ""
            if reply.status != 200:
                raise unavailable("the container engine cannot be asked for images", _message(reply.status, data))
        return str(msgspec.json.decode(data).get("Id") or "")

    def save(self, name: str, target: Path, on_bytes: OnBytes) -> None:
        path = f"/images/{urllib.parse.quote(name, safe='')}/get"
        with self.ask("GET", path, seconds=SAVE_SECONDS) as reply:
            if reply.status != 200:
                raise unavailable(
                    f"the engine does not give the image {name}", _message(reply.status, reply.read(MAX_ANSWER))
                )
            with target.open("wb") as file:
                while chunk := reply.read(CHUNK):
                    file.write(chunk)
                    on_bytes(len(chunk))

    def load(self, archive: Path, on_bytes: OnBytes | None = None) -> list[str]:
        """Gives it what `docker save` wrote; the names or ids that it has now."""
        with archive.open("rb") as file:
            return _loaded(self, "/images/load?quiet=1", _Counted(file, on_bytes))

    def import_system(self, archive: Path, name: str, on_bytes: OnBytes | None = None) -> str:
        """Gives it an archive of a whole system, under a name."""
        # All of it as one word: of a tag beside it podman knows nothing, and the name would come to mean another.
        query = urllib.parse.urlencode({"fromSrc": "-", "repo": name})
        with archive.open("rb") as file:
            _loaded(self, f"/images/create?{query}", _Counted(file, on_bytes))
        return name


class _Counted:
    """A file that is sent, and tells how much of it was."""

    def __init__(self, file: IO[bytes], on_bytes: OnBytes | None) -> None:
        self._file = file
        self._on_bytes = on_bytes

    def read(self, size: int) -> bytes:
        block = self._file.read(size)
        if self._on_bytes is not None and block:
            self._on_bytes(len(block))
        return block


def _loaded(engine: Engine, path: str, file: Any) -> list[str]:
    with engine.ask("POST", path, file, kind="application/x-tar", seconds=SAVE_SECONDS) as reply:
        data = reply.read(MAX_ANSWER)
        if reply.status != 200:
            raise unavailable("the engine does not take the image", _message(reply.status, data))
    found = []
    for line in data.splitlines():
        try:
            said = msgspec.json.decode(line)
        except msgspec.MsgspecError:
            continue
        if said.get("error"):
            raise SandboxError(f"the engine does not take the image: {said['error'][:500]}", cause="task.image")
        for mark in ("Loaded image ID: ", "Loaded image: "):
            if str(said.get("stream") or "").startswith(mark):
                found.append(said["stream"].removeprefix(mark).strip())
                break
    return found


def _message(status: int, data: bytes) -> str:
    try:
        return f"{status}: {str(msgspec.json.decode(data).get('message'))[:500]}"
    except (msgspec.MsgspecError, AttributeError):
        return str(status)


class EngineSource:
    """An image that an engine has: it saves it, as `docker save` does."""

    def __init__(self, reference: Reference, engine: Engine, work: Path) -> None:
        self._name = shown(reference.name)
        self._engine = engine
        self._archive = work / "saved.tar"
        self._id = ""

    def find(self) -> Found:
        self._id = self._engine.image(self._name)
        if not self._id:
            raise records.broken(self._name, "the container engine has none of this name")
        self._engine.save(self._name, self._archive, lambda _: None)
        found = SavedSource(str(self._archive), "", self._name, "engine").find()
        return msgspec.structs.replace(found, digest=self._id)

    def fetch(self, blob: Blob, target: Path, on_bytes: OnBytes) -> Span:  # noqa: ARG002
        assert blob.span is not None
        on_bytes(blob.size)
        return blob.span

    def close(self) -> None:
        self._archive.unlink(missing_ok=True)


def changed_in_engine(known: Name) -> bool:
    """Whether an engine has another image of this name by now: somebody built it anew."""
    path = find_socket()
    if not path:
        return False
    try:
        found = Engine(path).image(shown(known.name))
    except SandboxError:
        return False
    return bool(found) and found != known.digest
