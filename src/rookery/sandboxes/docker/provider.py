"""The `docker` provider: creates containers of a Docker or Podman engine. Runs in the owner's process.

Guarantees:
- `check` reports what a spec requests and this container engine does not support, before anything starts;
- an image that the container engine does not have is loaded into it once for all requests, whatever its source; an
  image that cannot be found is an error of the task (cause `task.image`), not of the infrastructure;
- connections are bounded and reused, and only a few containers are created at the same time;
- `create` waits for a container engine that is temporarily unreachable, up to its deadline;
- containers whose owner (the process that created them) is dead are removed before the first container is created;
  those of live owners are not touched before their deadline.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.core.lifetimes import detached_context
from rookery.sandboxes import leases
from rookery.sandboxes.docker import container_config, orphans, portable_python
from rookery.sandboxes.docker.client import (
    MAX_CONNECTIONS,
    SLOW_CALL_SECONDS,
    BlockingEngineClient,
    EngineAPIError,
    EngineClient,
    EngineUnreachable,
    api_path,
    find_socket,
)
from rookery.sandboxes.docker.endpoint import CONNECT_SECONDS
from rookery.sandboxes.docker.sandbox import DockerSandbox, ImageRemovedError
from rookery.sandboxes.docker.snapshots import ForkTree
from rookery.sandboxes.guarded_sandbox import close_all, open_or_close
from rookery.sandboxes.protocol import Lease, MachineCheck, ProviderHome

if TYPE_CHECKING:
    from rookery.sandboxes.egress.proxy import Resolver
    from rookery.sandboxes.images.image_fetcher import ImageFetcher
    from rookery.sandboxes.images.progress import OnProgress
    from rookery.sandboxes.images.references import ImageReference

_log = logging.getLogger("rookery.sandboxes")
PARALLEL_CREATIONS = min(MAX_CONNECTIONS // 2, max(4, 2 * (os.cpu_count() or 1)))
"""Number of containers that are created at the same time. A container engine that gets hundreds of requests at
once answers none in time. Each creation uses two connections."""
RETRY_SECONDS = (0.05, 1.0)
"""First and longest pause between attempts to reach a container engine that does not answer."""
IMAGE_TRIES = 3
"""Number of times that a creation is tried if the image disappears from the container engine each time."""
REMOVE_SECONDS = 5.0
CLOSE_SECONDS = 15.0
BUSY_FACTOR = 4
"""A container engine that answers but is still removing a container gets this many times the usual time limit."""
STUCK_SECONDS = 1.0
"""If a removal takes longer, the container engine probably cannot delete the files that the container wrote."""
RETRY_REMOVAL_SECONDS = 30.0
_INSTALL_HINT = (
    "start a container engine (Debian: apt install docker.io) and let this user write to its "
    "socket; or set DOCKER_HOST"
)


class DockerProvider:
    """Creates containers at the container engine that `DOCKER_HOST` names, or at the default socket."""

    name = "docker"
    isolated = True
    poolable = True
    own_loopback = True

    def __init__(
        self,
        home: ProviderHome,
        *,
        image: str | None = None,
        engine: str | None = None,
        direct: bool | None = None,
    ) -> None:
        """Open the provider without contacting the container engine.

        `image` is the image of specs that name none. `engine` is the path of the container engine's socket.
        `direct` says whether to access files of containers through /proc, which needs root, or through the
        container engine's archive API; the default is True if this process is root.
        """
        self._home = home
        self._default_image = image
        self._socket_path = engine
        self.direct = os.geteuid() == 0 if direct is None else direct
        self._engine: EngineClient | None = None
        self.open_sandboxes: set[DockerSandbox] = set()
        self._unremoved: set[DockerSandbox] = set()
        """Closed sandboxes whose container has not been removed yet, because the container engine failed to."""
        self.creation_slots = asyncio.Semaphore(PARALLEL_CREATIONS)
        self._images: dict[str, asyncio.Task[Mapping[str, Any]]] = {}
        self._fetcher: ImageFetcher | None = None
        self.on_image_progress: OnProgress | None = None
        self._bundle: asyncio.Task[Path] | None = None
        self._info: dict[str, Any] | None = None
        self._quota = True
        self._reaped = False
        self._contact_task: asyncio.Task[dict[str, Any]] | None = None
        self._removal_task: asyncio.Task[None] | None = None
        self._retry_removal_at = 0.0
        self.resolver: Resolver | None = None

    # ---- checks

    def _with_default_image(self, spec: SandboxSpec) -> SandboxSpec:
        if spec.image or not self._default_image:
            return spec
        return msgspec.structs.replace(spec, image=self._default_image)

    def get_socket_path(self) -> str:
        return self._socket_path or find_socket()

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        spec = self._with_default_image(spec)
        problems = container_config.find_spec_problems(spec)
        if problems:
            return problems
        try:
            client = BlockingEngineClient(self.get_socket_path())
            info = client.call("GET", api_path("info"), timeout=SLOW_CALL_SECONDS)
            networks = [network["Name"] for network in client.call("GET", api_path("networks"))]
        except (SandboxError, UsageError) as error:
            return [f"No container can be created: {error}."]
        problems = container_config.find_engine_problems(spec, info, networks)
        try:
            _parse_reference(str(spec.image))
        except SandboxError as error:
            problems.append(f"No container can be created: {error}.")
        return problems

    def diagnose(self) -> Sequence[MachineCheck]:
        """Describe the container engine for `rookery doctor`, without creating a container.

        A missing container engine is reported with the status `info`, because the provider is optional.
        """
        try:
            socket_path = self.get_socket_path()
            info = BlockingEngineClient(socket_path).call("GET", api_path("info"), timeout=SLOW_CALL_SECONDS)
        except UsageError as error:
            return [MachineCheck("docker", "info", str(error), "correct DOCKER_HOST or the Docker context")]
        except SandboxError as error:
            reason = error.__cause__ or error
            return [
                MachineCheck(
                    "docker", "info", f"no container engine answers at {socket_path}: {reason}", _INSTALL_HINT
                )
            ]
        kind = "podman" if container_config.is_podman(info) else "engine"
        facts = [f"{kind} {info.get('ServerVersion', '?')} at {socket_path}", f"storage {info.get('Driver', '?')}"]
        facts.append(f"cgroups v{info.get('CgroupVersion', '1')}")
        if not container_config.may_support_quota(info):
            facts.append("disk usage is measured from time to time, not limited by a quota")
        if not container_config.has_gpus(info):
            facts.append("no GPUs")
        limits = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "processors"}
        missing = [limit for key, limit in limits.items() if not container_config.enforces_limit(info, key)]
        if missing:
            found = f"{', '.join(facts)}; it cannot limit {', '.join(missing)}"
            return [MachineCheck("docker", "weaker", found, "see docker info")]
        return [MachineCheck("docker", "ok", ", ".join(facts))]

    # ---- reaping, see `ReapableProvider`

    def reap_home(self, *, force: bool) -> list[str]:  # noqa: ARG002
        return []

    def destroy_leased(self, lease: Lease, *, owner_alive: bool) -> bool:  # noqa: ARG002
        return orphans.destroy_leased(self._home.folder, lease)

    def reap_machine(self) -> list[str]:
        try:
            return orphans.reap(BlockingEngineClient(self.get_socket_path()))
        except (SandboxError, UsageError):
            return []  # no engine answers

    # ---- resources that sandboxes share

    @property
    def engine(self) -> EngineClient:
        if self._engine is None:
            self._engine = EngineClient(self.get_socket_path())
        return self._engine

    async def get_info(self) -> dict[str, Any]:
        """Return the container engine's response to `info`, which is cached."""
        if self._info is None:
            self._info = dict(await self.engine.call("GET", api_path("info")))
        return self._info

    async def may_support_quota(self) -> bool:
        return self._quota and container_config.may_support_quota(await self.get_info())

    def disable_quota(self) -> None:
        self._quota = False

    async def get_image(self, name: str) -> Mapping[str, Any]:
        """Return the container engine's description of an image; load the image into the container engine if
        necessary.

        Concurrent calls share one lookup, and the result is cached: all sandboxes of this provider use the same
        image, even if the name is assigned to another image later.
        """
        task = self._images.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._find_image(name), context=detached_context())
            self._images[name] = task
            task.add_done_callback(partial(self._drop_failed_lookup, name))
        return await asyncio.shield(task)

    def _drop_failed_lookup(self, name: str, task: "asyncio.Task[Mapping[str, Any]]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._images.pop(name, None)

    async def _find_image(self, name: str) -> Mapping[str, Any]:
        reference = await asyncio.to_thread(_parse_reference, name)
        found = None if reference.path else await self._inspect_image(name)
        if found is None:
            if self._fetcher is None:
                from rookery.sandboxes.images.image_fetcher import ImageFetcher

                self._fetcher = ImageFetcher(on_progress=self._report_image_progress)
            loaded = await self._fetcher.load_into_engine(reference, self.engine.socket_path)
            found = await self._inspect_image(loaded)
        if found is None:
            raise SandboxError(
                f"the container engine loaded the image {name}, but then did not find it: another process may "
                "have removed it; read the engine's log and try again",
                cause="sandbox.image",
            )
        return found

    def _report_image_progress(self, progress: Any) -> None:
        if self.on_image_progress is not None:
            self.on_image_progress(progress)

    async def _inspect_image(self, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await self.engine.call(
            "GET", api_path("images", name, "json"), ok=(400, 404)
        )
        return found

    def _forget_image(self, name: str, image: Mapping[str, Any]) -> None:
        """Drop an image from the cache that the container engine no longer has, unless it was looked up again."""
        task = self._images.get(name)
        if task is not None and task.done() and task.result() is image:
            del self._images[name]

    async def get_bundle(self) -> Path:
        """Return the host directory with the program that is PID 1 of containers; create it on the first call."""
        if self._bundle is None or (self._bundle.done() and not _is_complete(self._bundle)):
            self._bundle = asyncio.get_running_loop().create_task(
                asyncio.to_thread(self._make_bundle), context=detached_context()
            )
        return await asyncio.shield(self._bundle)

    def _make_bundle(self) -> Path:
        home, identity = self._home.folder.resolve(), f"g{secrets.token_hex(8)}"
        leases.write_lease(home, leases.create_lease(identity, self._home.run, "", self.name, home / identity))
        try:
            (home / identity).mkdir(mode=0o755)
            portable_python.build(home / identity / "bundle")
        except BaseException:
            leases.remove_sandbox(home, identity)
            raise
        return home / identity / "bundle"

    # ---- creation

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> DockerSandbox:
        spec = self._with_default_image(spec)
        problems = container_config.find_spec_problems(spec)
        if problems:
            raise SandboxError(" ".join(problems), cause="sandbox.refused")
        return await self.make(spec, attempt, timeout)

    async def make(
        self, spec: SandboxSpec, attempt: str, timeout: float, tree: ForkTree | None = None, snapshot: str = ""
    ) -> DockerSandbox:
        """Create a sandbox from the image in `spec` or, for a fork, from a snapshot of `tree`.

        `timeout` does not include the time to load an image that the container engine does not have.
        """
        remaining = await self._contact_engine(spec, timeout)
        if tree is not None:
            return await self._make_from(spec, attempt, remaining, tree, snapshot)
        for _ in range(IMAGE_TRIES):
            image = await self.get_image(str(spec.image))
            try:
                return await self._make_from(spec, attempt, remaining, ForkTree(image))
            except ImageRemovedError:
                self._forget_image(str(spec.image), image)
        raise SandboxError(
            f"the image {spec.image} was removed from the container engine {IMAGE_TRIES} times "
            "during the creation of a "
            "container: check whether something prunes images",
            cause="sandbox.image",
        )

    async def _make_from(
        self, spec: SandboxSpec, attempt: str, timeout: float, tree: ForkTree, snapshot: str = ""
    ) -> DockerSandbox:
        sandbox = DockerSandbox(spec, self._home, attempt, self, tree, snapshot)
        self.open_sandboxes.add(sandbox)
        return await open_or_close(sandbox, sandbox.open(), timeout)

    async def _contact_engine(self, spec: SandboxSpec, timeout: float) -> float:
        """Wait until the container engine answers, and check that it supports the sandbox that `spec` describes.

        Return how many seconds of `timeout` are left after the wait. The request that succeeds is not counted: the
        first one may take long, because it also removes containers whose owner processes are dead.
        """
        pause, longest = RETRY_SECONDS
        began = time.monotonic()
        while True:
            tried_at = time.monotonic()
            try:
                info = await self._get_contact()
                remaining = max(0.001, timeout - (tried_at - began))
                break
            except EngineUnreachable:
                if time.monotonic() + pause > began + timeout:
                    raise
            await asyncio.sleep(pause)
            pause = min(longest, 2 * pause)
        networks = ["bridge"]
        if spec.network == "all":
            networks = [network["Name"] for network in await self.engine.call("GET", api_path("networks"))]
        problems = container_config.find_engine_problems(spec, info, networks)
        if problems:
            raise SandboxError(" ".join(problems), cause="sandbox.refused")
        return remaining

    async def _get_contact(self) -> dict[str, Any]:
        """Contact the container engine and return its response to `info`. Concurrent callers share one request."""
        if self._contact_task is None or self._contact_task.done():
            self._contact_task = asyncio.get_running_loop().create_task(
                self._try_contact(), context=detached_context()
            )
            self._contact_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._contact_task)

    async def _try_contact(self) -> dict[str, Any]:
        try:
            info = await self.get_info()
            if self._reaped:
                await self.engine.call("GET", "/_ping", timeout=CONNECT_SECONDS)
            else:
                await asyncio.to_thread(orphans.reap, BlockingEngineClient(self.engine.socket_path))
                self._reaped = True
        except EngineUnreachable:
            self._reaped, self._retry_removal_at = False, 0.0
            raise
        self._retry_removals_soon()
        return info

    # ---- removal

    async def remove_container(self, sandbox_id: str, *, seconds: float = REMOVE_SECONDS) -> bool:
        """Remove a sandbox's container and wait until it is gone.

        Return False if the container engine does not answer for `seconds`, or answers but has not removed the
        container after `BUSY_FACTOR` times as long. The removal is then tried again later.
        """
        container = orphans.container_name(sandbox_id)
        began = time.monotonic()
        pause = 0.01
        while True:
            reason, refused = "the container engine is still removing it", False
            details = None
            try:
                error_text = await self._try_removal(container)
                details = await self.engine.call("GET", api_path("containers", container, "json"), ok=(404,))
                if details is None:
                    return True
                reason, refused = error_text or reason, bool(error_text)
            except SandboxError as error:
                reason = str(error)
            taken = time.monotonic() - began
            if details is not None and (refused or taken > STUCK_SECONDS):
                await asyncio.to_thread(orphans.remove_upper_directory, details)
            if taken > (seconds if details is None else BUSY_FACTOR * seconds):
                _log.warning("the container of sandbox %s will be removed later: %.300s", sandbox_id, reason)
                self._unremoved |= {sandbox for sandbox in self.open_sandboxes if sandbox.id == sandbox_id}
                return False
            await asyncio.sleep(pause)  # the container engine sends no notification
            pause = min(0.5, 2 * pause)

    async def _try_removal(self, container: str) -> str:
        """Request the removal of a container. Return the container engine's error message, or "" on success."""
        try:
            path = api_path("containers", container, force="1", v="1")
            await self.engine.call("DELETE", path, ok=(404, 409))
        except EngineAPIError as error:
            if error.status < 500:
                raise
            return str(error)
        return ""

    async def _retry_removals(self, *, seconds: float = 0.0) -> None:
        for sandbox in list(self._unremoved):
            if await self.remove_container(sandbox.id, seconds=seconds):
                await asyncio.to_thread(sandbox.remove_files)
                self._unremoved.discard(sandbox)

    def _retry_removals_soon(self) -> None:
        """Retry failed removals of containers in the background, at most once in `RETRY_REMOVAL_SECONDS`."""
        now = time.monotonic()
        idle = self._removal_task is None or self._removal_task.done()
        if self._unremoved and now >= self._retry_removal_at and idle:
            self._retry_removal_at = now + RETRY_REMOVAL_SECONDS
            self._removal_task = asyncio.get_running_loop().create_task(
                self._retry_removals(), context=detached_context()
            )

    async def close(self) -> None:
        fetcher, self._fetcher = self._fetcher, None
        try:
            if fetcher is not None:
                await fetcher.close()
            if self._contact_task is not None:
                await asyncio.wait({self._contact_task})
            await close_all(list(self.open_sandboxes))
            if self._removal_task is not None:
                await asyncio.wait({self._removal_task}, timeout=CLOSE_SECONDS)
                self._removal_task.cancel()
            if self._unremoved:
                await self._retry_removals(seconds=CLOSE_SECONDS / len(self._unremoved))
        finally:
            bundle_task, self._bundle = self._bundle, None
            if bundle_task is not None:
                await asyncio.wait({bundle_task})
                if not bundle_task.cancelled() and bundle_task.exception() is None:
                    directory = bundle_task.result().parent
                    await asyncio.to_thread(leases.remove_sandbox, directory.parent, directory.name)
            engine, self._engine = self._engine, None
            if engine is not None:
                await engine.close()


def _is_complete(task: "asyncio.Task[Path]") -> bool:
    return not task.cancelled() and task.exception() is None and task.result().is_dir()


def _parse_reference(name: str) -> "ImageReference":
    """Parse an image reference. Raise `SandboxError(task.image)`, an error of the task, if it is invalid."""
    from rookery.sandboxes.images.references import parse_reference

    try:
        return parse_reference(name)
    except UsageError as error:
        raise SandboxError(str(error), cause="task.image") from error
