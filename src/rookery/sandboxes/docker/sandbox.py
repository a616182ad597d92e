"""A sandbox that is one container. Runs in the process that owns the sandbox.

Guarantees:
- a sandbox whose PID 1 died is lost: calls on it fail at once, and the container is not restarted;
- the programs are dead when `close` returns, even if the container engine does not answer; in that case the
  container is removed when the container engine answers again, or by the reaper, and its lease stays until then;
- a creation that fails or is cancelled leaves no container, even if the container engine completes the request
  later;
- where the container engine's storage has no quota, the size of the container's layer is polled while commands
  run, and commands over the limit end with `disk_limit`; single files are limited by the kernel.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.core.lifetimes import detached_context
from rookery.sandboxes import leases, transfers
from rookery.sandboxes.docker import container_config, orphans, portable_python
from rookery.sandboxes.docker.archive_transfer import ArchiveTransfer
from rookery.sandboxes.docker.client import CALL_SECONDS, EngineAPIError, api_path
from rookery.sandboxes.docker.guard_connection import (
    DockerChannel,
    GuardConnection,
    GuardListener,
    find_memory_cgroup,
    has_ipv6,
    map_uid_to_host,
)
from rookery.sandboxes.docker.snapshots import ChangeReader, ForkTree, compare_changes, paused
from rookery.sandboxes.file_transfer import FileTransfer
from rookery.sandboxes.guarded_sandbox import DEFAULT_PATH, limit_time, merge_fork_spec
from rookery.sandboxes.jobs import Job, OomWatch
from rookery.sandboxes.networked_sandbox import NetworkedSandbox
from rookery.sandboxes.protocol import Command, Lease, OnOutput, ProviderHome

if TYPE_CHECKING:
    from rookery.sandboxes.docker.provider import DockerProvider

_log = logging.getLogger("rookery.sandboxes")
POLL_SECONDS = (0.5, 5.0)
"""First and longest interval in seconds between two measurements of a container's writable layer."""
_HIDDEN = ("proc", "dev", "sys", ".rookery")
EXIT_FILE_TOO_LARGE = 128 + signal.SIGXFSZ
_STDERR_TAIL = 4096


class ImageRemovedError(SandboxError):
    """The image was removed from the container engine after the provider had looked it up."""

    cause = "sandbox.image"


class DockerSandbox(NetworkedSandbox):
    """A container whose PID 1 is the guard."""

    provider = "docker"

    def __init__(
        self,
        spec: SandboxSpec,
        home: ProviderHome,
        attempt: str,
        creator: "DockerProvider",
        tree: ForkTree,
        snapshot: str = "",
    ) -> None:
        """Prepare a sandbox; `open` creates its container.

        `tree` is the group of forks that this sandbox belongs to. The container is created from the snapshot
        `snapshot` of that group, by default from its image.
        """
        identity = f"d{secrets.token_hex(8)}"
        super().__init__(identity, spec, leases.make_marker(home.run, identity), creator.open_sandboxes.discard)
        self._creator = creator
        self._home = home
        self._directory = home.folder.resolve()
        self._attempt = attempt
        self._host_uid = -1
        self._workdir = container_config.choose_workdir(spec, tree.image)
        self._container = orphans.container_name(identity)
        self._creation: asyncio.Task[Any] | None = None
        self._removal: asyncio.Task[Any] | None = None
        self._requested = False
        self._fds: dict[str, int] = {}
        self._cgroup = ""
        self._tree = tree
        self._base_snapshot = snapshot
        self._jobs: dict[int, Job] = {}
        self._disk_watch: asyncio.Task[None] | None = None
        self.memory_limit_is_shared = bool(spec.memory)

    def adopt(self, attempt: str) -> None:
        """Assign a prewarmed sandbox to an attempt in its lease. The container's labels do not change."""
        self._attempt = attempt
        try:
            leases.reassign(self._directory, self.id, attempt)
        except (OSError, msgspec.MsgspecError) as error:  # the lease still names the owner, which is what counts
            _log.warning("the lease of sandbox %s does not name its attempt: %s", self.id, error)

    @property
    def root(self) -> Path:
        """The sandbox's directory on the host, with its sockets. The container's files are not in it."""
        return self._directory / self.id

    # ---- creation

    async def open(self) -> None:
        spec, creator = self.spec, self._creator
        lease = self._make_lease()
        leases.write_lease(self._directory, lease)
        self.root.mkdir(mode=0o755)
        socket_directory = self.root / portable_python.CONTROL_DIRECTORY
        socket_directory.mkdir(mode=0o755)
        (self.root / orphans.SOCKET_FILE).write_text(creator.engine.socket_path)
        self._tree.members.add(self.id)
        image = self._tree.image
        if self._base_snapshot:
            image = {**image, "Id": self._tree.get_snapshot(self._base_snapshot).image}
        bundle = await creator.get_bundle()
        listener = GuardListener(socket_directory)
        try:
            async with creator.creation_slots:
                info = await creator.get_info()
                limited = bool(spec.disk) and not spec.read_only
                quota = limited and await creator.may_support_quota()
                make_request = partial(
                    container_config.creation_request,
                    spec,
                    image=image,
                    bundle_directory=str(bundle),
                    socket_directory=str(socket_directory),
                    token=listener.token,
                    labels=orphans.make_labels(lease),
                    ipv6=has_ipv6(),
                    podman=container_config.is_podman(info),
                )
                try:
                    await self._create(make_request(quota=quota))
                except EngineAPIError as error:
                    if not quota or not error.refuses_quota:
                        raise
                    creator.disable_quota()
                    quota = False
                    await self._create(make_request(quota=False))
                polled = limited and not quota
                settings = container_config.guard_settings(spec, image, limit_file_size=polled)
                connection = await self._start_container(listener, settings)
        finally:
            listener.close()
        self._adopt_connection(connection, image)
        # A container engine that enforces no memory limit may share the cgroup between containers.
        if container_config.enforces_limit(info, "MemoryLimit"):
            self._cgroup = find_memory_cgroup(connection.pid)
        self._oom = OomWatch(self._cgroup)
        if polled:
            self._disk_watch = asyncio.get_running_loop().create_task(self._watch_disk())

    def _make_lease(self) -> Lease:
        return leases.create_lease(self.id, self._home.run, self._attempt, self.provider, self.root)

    async def _create(self, request: dict[str, Any]) -> None:
        """Send the request that creates the container. If this call is cancelled, the request continues.

        The container engine would complete a cancelled request anyway.
        """
        self._requested = True
        path = api_path("containers", "create", name=self._container)
        call = self._creator.engine.call("POST", path, request)
        self._creation = asyncio.get_running_loop().create_task(call, context=detached_context())
        try:
            await asyncio.shield(self._creation)
        except EngineAPIError as error:
            if error.status == 404:
                raise ImageRemovedError(str(error)) from error
            raise

    async def _start_container(self, listener: GuardListener, settings: dict[str, Any]) -> GuardConnection:
        engine = self._creator.engine
        attach = api_path("containers", self._container, "attach", stream="1", stdout="1", stderr="1")
        async with engine.stream("POST", attach) as output:
            await engine.call("POST", api_path("containers", self._container, "start"))
            return await listener.accept(settings, output)

    def _adopt_connection(self, connection: GuardConnection, image: Mapping[str, Any]) -> None:
        self._fds = connection.fds
        self._uid = connection.uid
        try:
            self.channel = DockerChannel(connection, self._remove_soon)
        except BaseException:
            connection.sock.close()
            raise
        self._host_uid = map_uid_to_host(connection.pid, self._uid)
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._base_env = self.make_environment(
            DEFAULT_PATH, container_config.image_environment(image), self._creator
        )

    def duplicate_listener(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._fds["listener"]))

    # ---- files

    def get_root(self) -> transfers.SandboxRoot:
        self._require_channel()
        workdir = tuple(Path(self._workdir).parts[1:])
        return transfers.SandboxRoot(
            f"/proc/self/fd/{self._fds['root']}/.", workdir, {"/": ()}, self._host_uid, _HIDDEN
        )

    def make_file_transfer(self) -> FileTransfer:
        if self._creator.direct:
            return super().make_file_transfer()
        return ArchiveTransfer(
            self._creator.engine, self._container, self.get_root(), self._uid, read_only=self.spec.read_only
        )

    # ---- commands

    async def guard_ran_out_of_memory(self) -> bool:
        if await super().guard_ran_out_of_memory():
            return True
        if not self.spec.memory:
            return False
        # The container engine removes the cgroup with the last process of the container; then only the container
        # engine knows.
        path = api_path("containers", self._container, "json")
        try:
            async with asyncio.timeout(CALL_SECONDS):
                while True:
                    state = (await self._creator.engine.call("GET", path)).get("State") or {}
                    if not state.get("Running"):
                        return bool(state.get("OOMKilled"))
                    await asyncio.sleep(0.05)  # the container engine has not noticed the death yet
        except (SandboxError, TimeoutError) as error:
            _log.debug("cannot determine why sandbox %s died: %s", self.id, error)
            return False

    def get_cwd(self, command: Command) -> str:
        return os.path.join(self._workdir, command.cwd or "")  # noqa: PTH118  (a path in the container)

    def get_memory_cgroup(self) -> str:
        return self._cgroup

    def prepare_job(self, job: Job) -> Job:
        job.cgroup = self._cgroup
        if "work_tmpfs" in self._fds:
            job.get_disk_fd = lambda: self._fds.get("work_tmpfs", -1)
        if self._disk_watch is not None:
            self._jobs[job.number] = job
        return job

    async def exec(self, command: Command, *, on_output: OnOutput | None = None) -> ExecResult:
        result = await super().exec(command, on_output=on_output)
        if self._disk_watch is None or result.ok or result.status not in ("exited", "signaled"):
            return result
        # SIGXFSZ kills the writer of a file that is too large; a shell reports an exit code, Python a message.
        if result.exit_code != EXIT_FILE_TOO_LARGE and b"File too large" not in result.stderr[-_STDERR_TAIL:]:
            return result
        with contextlib.suppress(SandboxError):
            if await self._measure_layer() >= 0.9 * (self.spec.disk or 0):
                return msgspec.structs.replace(
                    result, status="disk_limit", detail="the command wrote a file larger than the disk limit"
                )
        return result

    async def _measure_layer(self) -> int:
        """Return the size of the container's writable layer in bytes."""
        path = api_path("containers", self._container, "json", size="1")
        return int((await self._creator.engine.call("GET", path)).get("SizeRw") or 0)

    async def _watch_disk(self) -> None:
        """Measure the writable layer while commands run; kill the commands if it exceeds the disk limit."""
        interval, longest = POLL_SECONDS
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval)  # the container engine sends no notification
            self._jobs = {number: job for number, job in self._jobs.items() if not job.ended.done()}
            if not self._jobs:
                interval = POLL_SECONDS[0]
                continue
            began = loop.time()
            try:
                size = await self._measure_layer()
            except SandboxError as error:
                _log.debug("cannot measure what sandbox %s wrote: %s", self.id, error)
                continue
            # The container engine may have to walk many files: use at most a tenth of its time.
            interval = min(longest, max(interval * 1.5, 10 * (loop.time() - began)))
            if size > (self.spec.disk or 0):
                for job in self._jobs.values():
                    job.over_disk_limit = True
                    job.kill_soon()

    # ---- snapshots

    async def _require_snapshots(self) -> ForkTree:
        await self._require_alive()
        if not self._creator.direct:
            self._refuse("take snapshots unless Rookery runs as root")
        if self.spec.read_only:
            self._refuse("take snapshots of a read-only container, whose files are in memory")
        return self._tree

    async def snapshot(self, *, timeout: float = 60.0) -> str:
        tree = await self._require_snapshots()
        labels = orphans.make_labels(self._make_lease())
        changes = ChangeReader(self.get_root(), timeout)
        async with limit_time(timeout, f"the snapshot of sandbox {self.id}"):
            return await tree.take_snapshot(self._creator.engine, self._container, self.id, labels, changes)

    async def fork(
        self, snapshot: str, *, timeout: float = 60.0, spec: SandboxSpec | None = None
    ) -> "DockerSandbox":
        tree = await self._require_snapshots()
        tree.get_snapshot(snapshot)
        if spec is not None and (problems := container_config.find_spec_problems(spec)):
            raise SandboxError(" ".join(problems), cause="sandbox.refused")
        merged = merge_fork_spec(self.spec, spec)
        return await self._creator.make(merged, self._attempt, timeout, tree, snapshot)

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:
        taken = (await self._require_snapshots()).get_snapshot(snapshot)
        own = taken.sandbox_id == self.id
        if not own and self._base_snapshot != snapshot:
            self._refuse(f"compare with {snapshot!r}: this sandbox was not forked from it")
        changes = ChangeReader(self.get_root(), timeout)
        engine, container = self._creator.engine, self._container
        async with limit_time(timeout, f"the diff of sandbox {self.id}"), paused(engine, container):
            if own:
                return compare_changes(taken.changes, await changes.read(engine, container))
            return compare_changes({}, await changes.read_since(taken, engine, container))

    # ---- close

    async def _close(self) -> None:
        if self._disk_watch is not None:
            self._disk_watch.cancel()
            await asyncio.gather(self._disk_watch, return_exceptions=True)
        await super()._close()

    def close_files(self) -> None:
        self._close_fds("root", "work_tmpfs")  # they keep the container engine from unmounting the file system

    def _remove_soon(self) -> None:
        """Remove the container in the background, through the container engine, as its guard does not answer."""
        if self._removal is None:
            path = api_path("containers", self._container, force="1", v="1")
            call = self._creator.engine.call("DELETE", path, ok=(404, 409))
            self._removal = asyncio.get_running_loop().create_task(call, context=detached_context())

    def _close_fds(self, *names: str) -> None:
        for name in names or tuple(self._fds):
            fd = self._fds.pop(name, -1)
            if fd >= 0:
                os.close(fd)

    async def clean_up(self) -> None:
        self._close_fds()
        for task in (self._creation, self._removal):
            if task is not None:
                await asyncio.wait({task}, timeout=CALL_SECONDS)
                if task.done() and not task.cancelled():
                    task.exception()  # retrieved, so that asyncio does not log it
        removed = not self._requested or await self._creator.remove_container(self.id)
        await self._tree.leave(self._creator.engine, self.id)
        if removed:  # otherwise the lease tells the reaper what to remove
            self.remove_files()

    def remove_files(self) -> None:
        """Remove the sandbox's directory and lease. Its container must be gone."""
        leases.remove_sandbox(self._directory, self.id)
