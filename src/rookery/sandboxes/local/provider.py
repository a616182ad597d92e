"""The `local` provider: sandboxes made of Linux namespaces and cgroups, which the keeper daemon creates.

Runs in the process that owns the sandboxes.

Guarantees:
- `check` reports what a spec requests and this machine cannot provide, before a sandbox is created for the spec;
- a failed or cancelled creation leaves no process, file or lease behind;
- a sandbox whose keeper or PID 1 died is lost, and calls on it fail at once;
- with network `model` a sandbox reaches one address, which its owner serves; with `allow` the hosts of its rules,
  through a proxy in the owner's process. It reaches nothing else, and this needs no privileges on the host.
"""

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.core.sandboxes import check_mounts
from rookery.sandbox_runtime import cgroups
from rookery.sandboxes import leases, transfers
from rookery.sandboxes.channel import GuardChannel
from rookery.sandboxes.guarded_sandbox import (
    DEFAULT_PATH,
    CommandUser,
    close_all,
    limit_time,
    merge_fork_spec,
    open_or_close,
)
from rookery.sandboxes.jobs import Job, OomWatch
from rookery.sandboxes.local.keeper_client import KeeperClient, SandboxHandle, SandboxRequest
from rookery.sandboxes.local.keeper_group import KeeperGroup
from rookery.sandboxes.networked_sandbox import PORT, USER, WORK, NetworkedSandbox
from rookery.sandboxes.protocol import Command, Lease, MachineCheck, ProviderHome
from rookery.sandboxes.usage import read_peaks

if TYPE_CHECKING:
    from rookery.sandboxes.egress.proxy import Resolver
    from rookery.sandboxes.images.image_fetcher import ImageFetcher
    from rookery.sandboxes.images.progress import OnProgress
    from rookery.sandboxes.images.references import ImageReference
    from rookery.sandboxes.images.store import AcquiredImage

DISK = 1 << 30
"""Default disk size in bytes. The disk is a tmpfs: what is written to it uses memory and counts as memory."""
INTERPRETER = Path(sys.base_prefix).resolve() / "bin"
"""First entry of PATH in sandboxes without an image, so that `python3` is the interpreter that runs Rookery."""
_HIDDEN_DIRECTORIES = ("proc", "dev", "sys")
_CHANGES = {b"a": "added", b"c": "changed", b"r": "removed"}
_MAX_DIFF = 64 << 20


class LocalProvider:
    """Creates local sandboxes, through the keeper of the run or, if there is none, a keeper of its own."""

    name = "local"
    isolated = True

    def __init__(self, home: ProviderHome) -> None:
        self._home = home
        self.open_sandboxes: set[LocalSandbox] = set()
        self.keepers = KeeperGroup(home.folder)
        self.folder = home.folder.resolve()
        self._images: ImageFetcher | None = None
        self.on_image_progress: OnProgress | None = None
        self.resolver: Resolver | None = None
        """Resolves host names for the network `allow`; created with the first sandbox that needs it."""

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        from rookery.sandboxes.local import machine_checks

        problems = self.find_unsupported(spec)
        return problems or [why for why in (machine_checks.find_problem(),) if why]

    def diagnose(self) -> Sequence[MachineCheck]:
        from rookery.sandboxes.local import machine_checks
        from rookery.sandboxes.probe import probe_provider

        return machine_checks.run_checks(probe_provider("local"))

    def reap_home(self, *, force: bool) -> list[str]:
        from rookery.sandboxes.local.keeper_reaper import reap_keepers

        return reap_keepers(self._home.folder, force=force)

    def destroy_leased(self, lease: Lease, *, owner_alive: bool) -> bool:
        home = self._home.folder
        if not owner_alive:
            # The kernel ended the sandbox with its keeper, so only the lease is left. Searching all processes for
            # each of a thousand leases would take minutes.
            leases.lease_path(home, lease.id).unlink(missing_ok=True)
            return True
        marker = leases.make_marker(lease.run, lease.id)
        # An idle sandbox of a live owner has no process by which it could be found: its lease stays for now.
        return bool(leases.find_marked(marker)) and leases.destroy_sandbox(home, lease.id, marker) == 0

    def reap_machine(self) -> list[str]:
        return []

    def find_unsupported(self, spec: SandboxSpec) -> list[str]:
        """Return one sentence for each part of a spec that local sandboxes support on no machine.

        This is fast, because it runs before every creation.
        """
        problems = []
        if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
            return ["The local provider needs Linux on x86_64 or aarch64."]
        try:
            from_store = _parse_image(spec.image) is not None
        except UsageError as error:
            return [f"No sandbox can be created: {error}."]
        if spec.network == "allow" or spec.allow:
            from rookery.sandboxes.egress.rules import find_rule_problems  # slow to import, rarely needed

            problems += find_rule_problems(spec)
        if spec.user not in (None, "user", str(USER), "root", "0", *(("image",) if from_store else ())):
            problems.append(
                f"The local provider has no user {spec.user!r}; use 'user', 'root', or 'image' with an image."
            )
        if spec.workdir is not None and ".." in Path(spec.workdir).parts:
            problems.append(f"The working directory {spec.workdir!r} must not contain '..'.")
        if spec.gpus:
            problems.append("The local provider has no GPUs; use the docker provider.")
        if spec.mounts:
            problems += check_mounts(spec.mounts)
            problems += [
                f"The directory {one.source} to mount does not exist."
                for one in spec.mounts
                if not _is_directory(one.source)
            ]
        if spec.read_only:
            problems.append("The local provider has no read-only sandboxes; use the docker provider.")
        return problems

    async def keeper(self) -> KeeperClient:
        """Return the connection to the first keeper. Open it if there is none yet or that keeper died."""
        return await self.keepers.get()

    async def start_keeper(self) -> None:
        """Start keepers to which other processes of the run can connect. They run until this provider closes."""
        await self.keepers.start()

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> "LocalSandbox":
        """Create a sandbox. If its image is missing, it is fetched first, and `timeout` does not include that."""
        problems = self.find_unsupported(spec)
        if problems:
            cause = "sandbox.refused" if _is_valid_image(spec.image) else "task.image"
            raise SandboxError(" ".join(problems), cause=cause)
        reference = _parse_image(spec.image)
        acquired_image = await self.images().acquire(reference) if reference is not None else None
        return await self.make(spec, attempt, timeout, acquired_image=acquired_image)

    def images(self) -> "ImageFetcher":
        if self._images is None:
            from rookery.sandboxes.images.image_fetcher import ImageFetcher

            self._images = ImageFetcher(on_progress=self.on_image_progress)
        return self._images

    async def make(
        self,
        spec: SandboxSpec,
        attempt: str,
        timeout: float,
        snapshot: str = "",
        acquired_image: "AcquiredImage | None" = None,
        keeper: KeeperClient | None = None,
    ) -> "LocalSandbox":
        """Create a sandbox, with the files of the snapshot `snapshot` if it is not empty.

        `acquired_image` is the image of the sandbox if it comes from the image store. The sandbox releases it.
        `keeper` is the keeper that has the snapshot; by default the provider chooses a keeper.
        """
        sandbox = LocalSandbox(spec, self._home, attempt, self, acquired_image)
        self.open_sandboxes.add(sandbox)
        return await open_or_close(sandbox, self._open_sandbox(sandbox, snapshot, keeper), timeout)

    async def _open_sandbox(self, sandbox: "LocalSandbox", snapshot: str, keeper: KeeperClient | None) -> None:
        if keeper is not None or sandbox.spec.image or sandbox.spec.mounts:
            await sandbox.open(keeper or await self.keeper(), snapshot)
        else:
            async with self.keepers.choose() as chosen:
                await sandbox.open(chosen, snapshot)

    def forget(self, sandbox: "LocalSandbox") -> None:
        self.open_sandboxes.discard(sandbox)

    async def close(self) -> None:
        try:
            await close_all(list(self.open_sandboxes))
        finally:
            images, self._images = self._images, None
            if images is not None:
                await images.close()
            await self.keepers.close()


class LocalSandbox(NetworkedSandbox):
    """A sandbox in its own namespaces. Its PID 1 is the guard, which starts and kills its commands."""

    provider = LocalProvider.name

    def __init__(
        self,
        spec: SandboxSpec,
        home: ProviderHome,
        attempt: str,
        provider: LocalProvider,
        acquired_image: "AcquiredImage | None" = None,
    ) -> None:
        identity = f"b{secrets.token_hex(8)}"
        super().__init__(identity, spec, leases.make_marker(home.run, identity), provider.forget)
        self._provider = provider
        self.folder = provider.folder
        self._home = home
        self._attempt = attempt
        self.handle: SandboxHandle | None = None
        self._keeper: KeeperClient | None = None
        self._acquired_image = acquired_image
        """The image of the sandbox if it comes from the image store; else None."""
        self._uid = 0 if spec.user in ("root", "0") else USER
        self._work = os.path.join(WORK, spec.workdir or "")  # noqa: PTH118
        self._create_workdir = bool(spec.workdir)
        if acquired_image is not None:
            if spec.user == "image" and acquired_image.record.uid >= 0:
                self._uid = acquired_image.record.uid
            if spec.workdir is None and acquired_image.record.config.workdir:
                self._work = acquired_image.record.config.workdir
                self._create_workdir = not acquired_image.record.made_workdir

    async def open(self, keeper: KeeperClient, snapshot: str = "") -> None:
        spec = self.spec
        path = leases.write_lease(
            self.folder,
            leases.create_lease(self.id, self._home.run, self._attempt, self.provider, self.folder / self.id),
        )
        self._keeper = keeper
        handle = await keeper.create(
            SandboxRequest(
                lease=path,
                memory=spec.memory or 0,
                pids=spec.pids or 0,
                cpus=spec.cpus or 0.0,
                disk=spec.disk or DISK,
                uid=self._uid,
                image="" if snapshot else self._find_image_path(),
                layers=()
                if snapshot or self._acquired_image is None
                else self._acquired_image.record.layers[::-1],
                mounts=tuple((mount.source, mount.target) for mount in spec.mounts),
                snapshot=snapshot,
                network=spec.network,
                listen=PORT if spec.network in ("model", "allow") else 0,
            )
        )
        self.handle = handle
        self.memory_limit_is_shared = bool(handle.memory_cgroup)
        self._oom = OomWatch(handle.memory_cgroup)
        self._peaks_before = read_peaks(handle.memory_cgroup)
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._base_env = self.make_environment(
            DEFAULT_PATH if spec.image else f"{INTERPRETER}:{DEFAULT_PATH}",
            self._acquired_image.record.config.env if self._acquired_image is not None else {},
            self._provider,
        )
        self.channel = GuardChannel(handle.pid, handle.channel, None, handle.pidfd)
        if self._create_workdir:
            made = await self.exec(Command(argv=("mkdir", "-p", "--", self._work), cwd="/"))
            if not made.ok:
                raise SandboxError(f"cannot create the working directory {self._work!r}: {made.stderr!r:.200}")

    def _find_image_path(self) -> str:
        if self._acquired_image is not None:
            return str(self._acquired_image.folder)
        return os.path.realpath(self.spec.image) if self.spec.image else ""

    def duplicate_listener(self) -> socket.socket:
        assert self.handle is not None
        assert self.handle.listener is not None
        return self.handle.listener.dup()

    def get_root(self) -> transfers.SandboxRoot:
        self._require_channel()
        assert self.handle is not None
        owner = self.handle.root_uid + self._uid if self.handle.root_uid >= 0 else -1
        work = tuple(Path(self._work).parts[1:])
        return transfers.SandboxRoot(
            f"/proc/self/fd/{self.handle.root}/.", work, {"/": ()}, owner, _HIDDEN_DIRECTORIES
        )

    def get_cwd(self, command: Command) -> str:
        return os.path.join(self._work, command.cwd or "")  # noqa: PTH118  (a program's own text)

    async def resolve_user(self, user: str) -> CommandUser:
        assert self.handle is not None
        if self.handle.root_uid < 0 and not self.is_default_user(user):
            raise SandboxError(
                f"a command cannot run as {user!r}: this sandbox has a single user; run Rookery as root for more",
                cause="sandbox.refused",
            )
        return await super().resolve_user(user)

    def count_limit_hits(self) -> tuple[int, int]:
        directory = self.handle.memory_cgroup if self.handle is not None else ""
        if not directory:
            return 0, 0
        pids_directory = cgroups.find_pids_directory(directory)
        return cgroups.count_oom_kills(directory), cgroups.count_refused_forks(pids_directory)

    def get_memory_cgroup(self) -> str:
        return self.handle.memory_cgroup if self.handle is not None else ""

    def prepare_job(self, job: Job) -> Job:
        assert self.handle is not None
        job.cgroup = self.handle.memory_cgroup
        job.get_disk_fd = self._get_root_fd
        return job

    def _get_root_fd(self) -> int:
        return -1 if self.handle is None or self._closing is not None else self.handle.root

    async def snapshot(self, *, timeout: float = 60.0) -> str:
        handle, keeper = await self._require_overlay()
        async with limit_time(timeout, f"the snapshot of sandbox {self.id}"):
            return await keeper.snapshot(handle.name, handle.layer)

    async def fork(
        self, snapshot: str, *, timeout: float = 60.0, spec: SandboxSpec | None = None
    ) -> "LocalSandbox":
        _, keeper = await self._require_overlay()
        if spec is not None and (problems := self._provider.find_unsupported(spec)):
            raise SandboxError(" ".join(problems), cause="sandbox.refused")
        image = self._acquired_image
        acquired = self._provider.images().acquire_again(image) if image is not None else None
        fork_spec = merge_fork_spec(self.spec, spec)
        return await self._provider.make(fork_spec, self._attempt, timeout, snapshot, acquired, keeper)

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:
        handle, keeper = await self._require_overlay()
        async with limit_time(timeout, f"the diff of sandbox {self.id}"):
            result = await keeper.diff(handle.name, handle.layer, snapshot)
        try:
            found = os.pread(result, _MAX_DIFF, 0).split(b"\0")[:-1]
        finally:
            os.close(result)
        return {os.fsdecode(item[1:]): _CHANGES[item[:1]] for item in found}

    async def _require_overlay(self) -> tuple[SandboxHandle, KeeperClient]:
        await self._require_alive()
        if self.handle is None or self._keeper is None or self.handle.layer < 0:
            self._refuse("take snapshots on this kernel")
        return self.handle, self._keeper

    def close_files(self) -> None:
        if self.handle is not None and self._keeper is not None:
            # Closed first: the process that closes the last descriptor waits for the kernel to unmount the files.
            self.handle.close_files()
            # The kernel kills everything at once; pid 1 would first have to win against a fork bomb.
            self._keeper.end(self.handle.name)

    async def clean_up(self) -> None:
        if self.handle is not None:
            self.handle.close_listener()
            if self.channel is None:
                self.handle.close_channel()
        if self.handle is None or self._keeper is None or self._keeper.dead.done():
            # Without a sandbox or a keeper, nobody else deletes the lease.
            leases.lease_path(self.folder, self.id).unlink(missing_ok=True)
        self.handle = None
        if self._acquired_image is not None:
            self._acquired_image.release()


def _parse_image(image: str | None) -> "ImageReference | None":
    """Return the reference of an image that comes from the image store.

    None if `image` is None, or if it is a directory or an archive with a root file system, which is used
    without the store. Raise `UsageError` if `image` is not a valid reference.
    """
    if image is None:
        return None
    from rookery.sandboxes.images.references import parse_reference  # few sandboxes have an image

    reference = parse_reference(image)
    return None if reference.plain else reference


def _is_directory(path: str) -> bool:
    return path.startswith("/") and "\0" not in path and Path(path).is_dir()


def _is_valid_image(image: str | None) -> bool:
    """Return whether `image` is None or a text that can be the name or the path of an image."""
    try:
        _parse_image(image)
    except UsageError:
        return False
    return True
