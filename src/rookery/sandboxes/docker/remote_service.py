"""Containers of a container engine on another machine, as a `SandboxService`. Runs in the owner's process.

Nothing of this machine can be mounted into such a container, so Rookery's program runs in it as a process that the
engine starts, and the image must have Python 3.11 or newer.

Guarantees:
- a container has no network unless the spec's is `all`, no capabilities and no new privileges; the engine limits
  its memory, processes and CPUs;
- a container ends by itself when its lifetime is over, even if its owner is dead;
- an SSH connection to the machine ends with this process, and is opened again if it ends before.
"""

import asyncio
import contextlib
import os
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.core.child_processes import end_with_parent
from rookery.sandboxes import reaper
from rookery.sandboxes.docker import container_config
from rookery.sandboxes.docker.client import EngineAPIError, EngineClient, EngineUnreachable, api_path, label_filter
from rookery.sandboxes.docker.endpoint import EngineEndpoint, find_endpoint
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.protocol import Provider, ProviderHome
from rookery.sandboxes.remote.link import MachineGone
from rookery.sandboxes.remote.service import ServiceProvider
from rookery.sandboxes.ssh_provider import ssh_options

FORWARD_SECONDS = 30.0
PULL_SECONDS = 1800.0
_STDOUT, _STDERR = 1, 2
_HEADER = struct.Struct(">BxxxI")
# PID 1 of a container: reaps orphans, and ends the container unless SIGUSR1 extends its lifetime.
_INIT = (
    "import os,signal,sys;t=int(sys.argv[1]);end=lambda *_:os._exit(0);s=signal.signal;"
    "s(signal.SIGCHLD,lambda *_:None);s(signal.SIGUSR1,lambda *_:signal.alarm(t));"
    "s(signal.SIGALRM,end);s(signal.SIGTERM,end);signal.alarm(t)\n"
    "while 1:\n try:os.wait()\n except ChildProcessError:signal.pause()\n"
)


def open_docker(home: ProviderHome) -> Provider:
    """Return the `docker` provider for the container engine that the user has chosen, here or elsewhere."""
    try:
        endpoint = find_endpoint()
    except UsageError:
        return DockerProvider(home)  # its checks report the error
    return ServiceProvider(RemoteDocker(endpoint), home) if endpoint.remote else DockerProvider(home)


class RemoteDocker:
    """The containers of a container engine on another machine."""

    name = "docker"
    isolated = True

    def __init__(self, endpoint: EngineEndpoint, *, image: str | None = None) -> None:
        """Open the service without contacting the container engine. `image` is that of specs that name none."""
        self._endpoint = endpoint
        self._image = image
        self._forward: SshForward | None = None
        self._client: EngineClient | None = None
        self._lock = asyncio.Lock()
        self._images: dict[str, Mapping[str, Any]] = {}
        self._users: dict[str, str] = {}
        """The user of a container's programs, by its ID. PID 1 is another one, which programs cannot signal."""

    async def _engine(self) -> EngineClient:
        """Return a client; open the SSH connection first if there is none."""
        if not self._endpoint.ssh:
            self._client = self._client or EngineClient(self._endpoint)
            return self._client
        async with self._lock:
            if self._forward is None or not self._forward.is_open():
                await self.close()
                self._forward = SshForward(self._endpoint)
                await asyncio.to_thread(self._forward.open)
                self._client = EngineClient(self._forward.path)
            assert self._client is not None
            return self._client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        forward, self._forward = self._forward, None
        if forward is not None:
            await asyncio.to_thread(forward.close)

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        return container_config.find_spec_problems(
            msgspec.structs.replace(spec, image=spec.image or self._image, network="none", allow=())
        )

    async def create(self, spec: SandboxSpec, *, labels: Mapping[str, str], lifetime: float) -> str:
        engine = await self._engine()
        image = await self._find_image(engine, str(spec.image or self._image))
        body = container_config.creation_request(
            spec, image=image, bundle_directory="", socket_directory="", token="", labels=labels, quota=False
        )
        body["HostConfig"] |= {"Mounts": [], "CapAdd": []}
        body["Entrypoint"] = ["python3", "-I", "-S", "-c", _INIT, str(int(lifetime))]
        body["Env"] = [f"{name}={value}" for name, value in container_config.image_environment(image).items()]
        try:
            made = await engine.call("POST", api_path("containers", "create"), body)
            self._users[made["Id"]] = str(container_config.choose_user(spec, image))
            await engine.call("POST", api_path("containers", made["Id"], "start"))
        except EngineAPIError as error:
            if "python3" in str(error):
                raise SandboxError(
                    f"the image {spec.image or self._image} has no python3: use one with Python 3.11 or newer",
                    cause="task.image" if spec.image else "sandbox.refused",
                ) from error
            if error.status < 500:
                raise SandboxError(str(error), cause="sandbox.refused") from error
            raise
        return str(made["Id"])

    async def _find_image(self, engine: EngineClient, name: str) -> Mapping[str, Any]:
        """Return the description of an image; let the container engine pull it if it does not have it."""
        if name not in self._images:
            path = api_path("images", name, "json")
            found = await engine.call("GET", path, ok=(404,))
            if found is None:
                try:
                    await engine.call("POST", api_path("images", "create", fromImage=name), timeout=PULL_SECONDS)
                    found = await engine.call("GET", path)
                except EngineAPIError as error:
                    raise SandboxError(
                        f"the image {name} cannot be pulled: {error}", cause="task.image"
                    ) from error
            self._images[name] = found
        return self._images[name]

    async def exec(self, machine: str, argv: Sequence[str]) -> "ExecConnection":
        engine = await self._engine()
        body = {
            "Cmd": list(argv),
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "User": self._users.get(machine, ""),
            "Env": ["ROOKERY_HOST_DIR=/tmp/.rookery"],
        }
        made = await engine.call("POST", api_path("containers", machine, "exec"), body, ok=(404, 409))
        if made is None:
            raise MachineGone(f"the container {machine:.12} does not exist any more or has ended")
        path = api_path("exec", made["Id"], "start")
        return ExecConnection(*await engine.hijack(path, {"Detach": False, "Tty": False}))

    async def delete(self, machine: str) -> None:
        engine = await self._engine()
        await engine.call("DELETE", api_path("containers", machine, force="1", v="1"), ok=(404, 409))
        self._users.pop(machine, None)

    async def list(self, label: str) -> Mapping[str, Mapping[str, str]]:
        path = api_path("containers", "json", all="1", filters=label_filter(label))
        found = await (await self._engine()).call("GET", path)
        return {one["Id"]: one.get("Labels") or {} for one in found}

    async def extend(self, machine: str, *, lifetime: float) -> None:  # noqa: ARG002  (PID 1 knows it)
        engine = await self._engine()
        await engine.call("POST", api_path("containers", machine, "kill", signal="SIGUSR1"))


class ExecConnection:
    """The standard input and output of a process that a container engine started."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._stderr = b""

    async def read(self) -> bytes:
        try:
            while True:
                kind, size = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                data = await self._reader.readexactly(size)
                if kind == _STDOUT and data:
                    return data
                if kind == _STDERR:
                    self._stderr = (self._stderr + data)[-2000:]
        except asyncio.IncompleteReadError:
            if self._stderr:
                raise OSError(self._stderr.decode("utf-8", "replace").strip()[-500:]) from None
            return b""

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class SshForward:
    """A Unix socket of this machine that `ssh` forwards to the container engine of another one. Blocking."""

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self._endpoint = endpoint
        self._stack = contextlib.ExitStack()
        # If this process is killed, the reaper removes the directory.
        self._folder = self._stack.enter_context(reaper.scratch_home("engine")).folder
        self.path = str(self._folder / "socket")
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Start ssh and wait until the socket exists. Raise `EngineUnreachable` if that fails."""
        endpoint = self._endpoint
        forward = ("-N", "-T", "-o", "ExitOnForwardFailure=yes", "-L", f"{self.path}:{endpoint.path}")
        command = end_with_parent(["ssh", *forward, *ssh_options(), *endpoint.ssh[:-1], "--", endpoint.ssh[-1]])
        log = self._folder / "log"
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
            )
        end = time.monotonic() + FORWARD_SECONDS
        while not os.path.exists(self.path):  # noqa: PTH110
            if self._process.poll() is not None or time.monotonic() > end:
                text = log.read_bytes()[-500:].decode("utf-8", "replace").strip()
                self.close()
                raise EngineUnreachable(f"the container engine at {endpoint} cannot be reached: {text}")
            time.sleep(0.02)

    def is_open(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """End ssh and remove the socket."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stack.close()
