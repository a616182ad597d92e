"""The `local` provider: boxes of this machine's kernel, held by a keeper.

Promises:
- what a spec asks for and this machine cannot give is said by `check`, before anything starts;
- a failed or cancelled creation leaves nothing;
- a box whose keeper or whose pid 1 died is lost, and says so at once;
- with the network `model` a box reaches one address, which the owner serves; with `allow` the hosts of its rules,
  through a proxy in the owner's process; nothing else in either, and this takes no rights on the host.
"""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.core.sandboxes import mount_problems
from rookery.sandboxes import leases, transfers
from rookery.sandboxes.channel import Channel
from rookery.sandboxes.guarded import ANYONE, PATH, GuardedSandbox, User, close_all, opened
from rookery.sandboxes.jobs import Job, OomWatch
from rookery.sandboxes.local import groups, users
from rookery.sandboxes.local.line import Asked, Given, Line
from rookery.sandboxes.protocol import Command, Egress, Home

if TYPE_CHECKING:
    from rookery.sandboxes.egress import Outside, Proxy
    from rookery.sandboxes.images.asking import Images
    from rookery.sandboxes.images.content import Use
    from rookery.sandboxes.images.progress import OnProgress
    from rookery.sandboxes.images.references import Reference

WORK = "/work"
USER = 1000
DISK = 1 << 30
"""Of a box whose spec names none. It is memory that is only used when written to, and counts as such."""
PORT = 7465
"""On a box's own loopback: where the networks `model` and `allow` begin."""
URL = f"http://127.0.0.1:{PORT}"
INTERPRETER = Path(sys.base_prefix).resolve() / "bin"
"""First on the path of a box without an image: its `python3` is the one that we run on, and is there already."""
_HIDDEN = ("proc", "dev", "sys")
_HOW = {b"a": "added", b"c": "changed", b"r": "removed"}
_MOST_OF_DIFF = 64 << 20


class LocalProvider:
    """Makes boxes, through one keeper for each process unless the run has one."""

    name = "local"
    isolated = True

    def __init__(self, home: Home) -> None:
        self._home = home
        self._open: set[LocalSandbox] = set()
        self._line: Line | None = None
        self._opening = asyncio.Lock()
        self._images: Images | None = None
        self.on_image: OnProgress | None = None
        self.outside: Outside | None = None
        """Names and addresses, for the network `allow`, from the first box that has it."""

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        from rookery.sandboxes.local import probe

        said = self._refused(spec)
        return said or [why for why in (probe.problem(),) if why]

    def _refused(self, spec: SandboxSpec) -> list[str]:
        """What no box could give, whatever this machine can do. Quick: every creation asks it."""
        said = []
        if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
            return ["The local provider needs Linux on x86_64 or aarch64."]
        try:
            kept = _reference(spec.image) is not None
        except UsageError as error:
            return [str(error)]
        if spec.network == "allow" or spec.allow:
            from rookery.sandboxes import egress_rules  # slow to import, and few boxes have one

            said += egress_rules.problems(spec)
        if spec.user not in (None, "user", str(USER), "root", "0", *(("image",) if kept else ())):
            said.append(f"The local provider has no user {spec.user!r} in its boxes.")
        if spec.workdir is not None and ".." in Path(spec.workdir).parts:
            said.append(f"The working folder {spec.workdir!r} must not contain '..'.")
        if spec.gpus:
            said.append("The local provider has no GPUs in its boxes; the docker provider can.")
        if spec.mounts:
            said += mount_problems(spec.mounts)
            said += [
                f"There is no folder {one.source} to mount." for one in spec.mounts if not _folder(one.source)
            ]
        if spec.read_only:
            said.append("The local provider has no read-only boxes; the docker provider does.")
        return said

    async def line(self) -> Line:
        """To the keeper; a new one when the last has died."""
        async with self._opening:
            if self._line is None or self._line.dead.done():
                if self._line is not None:
                    await self._line.close()
                self._home.folder.mkdir(parents=True, exist_ok=True)
                self._line = await Line.open(self._home.folder.resolve())
            return self._line

    async def keep(self) -> None:
        """A keeper that the other processes of the run find in its home."""
        async with self._opening:
            if self._line is None:
                self._home.folder.mkdir(parents=True, exist_ok=True)
                self._line = await Line.launch(self._home.folder.resolve(), listen=True)

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> "LocalSandbox":
        """An image that is not there yet is fetched first, which `timeout` does not count: see `images.asking`."""
        problems = self._refused(spec)
        if problems:
            raise SandboxError(" ".join(problems), cause="sandbox.refused" if _there(spec.image) else "task.image")
        reference = _reference(spec.image)
        use = await self.images().hold(reference) if reference is not None else None
        return await self.make(spec, attempt, timeout, use=use)

    def images(self) -> "Images":
        if self._images is None:
            from rookery.sandboxes.images.asking import Images

            self._images = Images(on_progress=self.on_image)
        return self._images

    async def make(
        self, spec: SandboxSpec, attempt: str, timeout: float, snapshot: str = "", use: "Use | None" = None
    ) -> "LocalSandbox":
        """A box of this spec; with the files of a snapshot, where one is named. `use`: the image that it has."""
        sandbox = LocalSandbox(spec, self._home, attempt, self, use)
        self._open.add(sandbox)
        return await opened(sandbox, self._begin(sandbox, snapshot), timeout)

    async def _begin(self, sandbox: "LocalSandbox", snapshot: str) -> None:
        if sandbox.spec.network == "allow" and self.outside is None:
            from rookery.sandboxes.egress import Outside

            self.outside = Outside()
        await sandbox.open(await self.line(), snapshot, self.outside)

    def forget(self, sandbox: "LocalSandbox") -> None:
        self._open.discard(sandbox)

    async def close(self) -> None:
        try:
            await close_all(list(self._open))
        finally:
            images, self._images = self._images, None
            if images is not None:
                await images.close()
            line, self._line = self._line, None
            if line is not None:
                await line.close()


class LocalSandbox(GuardedSandbox):
    """A box: pid 1 of its own namespaces is the guard."""

    provider = LocalProvider.name

    def __init__(
        self, spec: SandboxSpec, home: Home, attempt: str, made_by: LocalProvider, use: "Use | None" = None
    ) -> None:
        identity = f"b{secrets.token_hex(8)}"
        super().__init__(identity, spec, leases.marker(home.run, identity), made_by.forget)
        self._made_by = made_by
        self._folder = home.folder.resolve()
        self._home = home
        self._attempt = attempt
        self._given: Given | None = None
        self._line: Line | None = None
        self._proxy: Proxy | None = None
        self._shut = False
        self.inside_url = URL if spec.network == "model" else ""
        self._use = use
        """Of its image, where that is one of the store."""
        self._uid = 0 if spec.user in ("root", "0") else USER
        self._work = os.path.join(WORK, spec.workdir or "")  # noqa: PTH118
        self._missing = bool(spec.workdir)
        if use is not None:
            if spec.user == "image" and use.record.uid >= 0:
                self._uid = use.record.uid
            if spec.workdir is None and use.record.config.workdir:
                self._work = use.record.config.workdir
                self._missing = not use.record.made_workdir

    async def open(self, line: Line, snapshot: str = "", outside: "Outside | None" = None) -> None:
        spec = self.spec
        path = leases.write(
            self._folder,
            leases.lease(self.id, self._home.run, self._attempt, self.provider, self._folder / self.id),
        )
        self._line = line
        given = await line.create(
            Asked(
                lease=str(path),
                memory=spec.memory or 0,
                pids=spec.pids or 0,
                cpus=spec.cpus or 0.0,
                disk=spec.disk or DISK,
                uid=self._uid,
                image="" if snapshot else self._image(),
                layers=() if snapshot or self._use is None else self._use.record.layers[::-1],
                mounts=tuple((mount.source, mount.target) for mount in spec.mounts),
                snapshot=snapshot,
                network=spec.network,
                listen=PORT if spec.network in ("model", "allow") else 0,
            )
        )
        self._given = given
        self.held_together = bool(given.memory)
        self._oom = OomWatch(given.memory)
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._base = {
            "PATH": PATH if spec.image else f"{INTERPRETER}:{PATH}",
            "HOME": WORK,
            "USER": {0: "root", USER: "user"}.get(self._uid, str(self._uid)),
            "TMPDIR": "/tmp",  # noqa: S108  (the box's own)
            "LANG": "C.UTF-8",
            **(self._use.record.config.env if self._use is not None else {}),
            **(self._way_out(given, outside) if outside is not None else {}),
            **spec.env,
        }
        self._channel = Channel(given.pid, given.channel, None, given.pidfd)
        if self._missing:
            made = await self.exec(Command(argv=("mkdir", "-p", "--", self._work), cwd="/"))
            if not made.ok:
                raise SandboxError(f"the working folder {self._work!r} cannot be made: {made.stderr!r:.200}")

    def _image(self) -> str:
        if self._use is not None:
            return str(self._use.folder)
        return os.path.realpath(self.spec.image) if self.spec.image else ""

    def _way_out(self, given: Given, outside: "Outside") -> dict[str, str]:
        """Opens what the network `allow` is; the variables that programs find it by."""
        if self.spec.network != "allow":
            return {}
        from rookery.sandboxes import egress, egress_rules

        assert given.listener is not None
        rules = egress_rules.Rules.of(self.spec.allow)
        self._proxy = egress.Proxy(given.listener.dup(), rules, self.id, outside)
        self._proxy.start()
        return egress_rules.environment(rules, URL)

    def listener(self) -> socket.socket:
        door = self._door()
        if self._shut:
            raise SandboxError(f"the listener of sandbox {self.id} was shut", cause="sandbox.refused")
        return door.dup()

    def unlisten(self) -> None:
        # It stays bound, so that nobody takes its place. Its old connections would keep it from listening again.
        door = self._door()
        self._shut = True
        if door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            door.shutdown(socket.SHUT_RD)

    def _door(self) -> socket.socket:
        self._live()
        assert self._given is not None
        if self.spec.network != "model" or self._given.listener is None:
            raise SandboxError(
                f"the network of sandbox {self.id} is {self.spec.network!r}: it has no listener to serve",
                cause="sandbox.refused",
            )
        return self._given.listener

    def egress(self) -> Sequence[Egress]:
        return self._proxy.record.all() if self._proxy is not None else ()

    def place(self) -> transfers.Place:
        self._live()
        assert self._given is not None
        owner = self._given.uid + self._uid if self._given.uid >= 0 else -1
        work = tuple(Path(self._work).parts[1:])
        return transfers.Place(f"/proc/self/fd/{self._given.top}/.", work, {"/": ()}, owner, _HIDDEN)

    def folder_of(self, command: Command) -> str:
        return os.path.join(self._work, command.cwd or "")  # noqa: PTH118  (a program's own text)

    def own_uid(self) -> int:
        return self._uid

    def may_be(self, user: str) -> bool:
        names = {0: ("root", "0"), USER: ("user", str(USER))}.get(self._uid, (str(self._uid),))
        return user in names or (user == "image" and self.spec.user == user)

    async def whom(self, user: str) -> User:
        if self.may_be(user):
            return ANYONE
        assert self._given is not None
        if self._given.uid < 0:
            raise SandboxError(
                f"a command cannot run as {user!r}: this sandbox has one user, since nobody but root of the "
                "machine can give it more",
                cause="sandbox.refused",
            )
        return await users.find(user, partial(self.read, limit=users.MOST))

    def struck(self) -> tuple[int, int]:
        folder = self._given.memory if self._given is not None else ""
        if not folder:
            return 0, 0
        return groups.oom_kills(folder), groups.forks_refused(groups.pids_folder(folder))

    def made(self, job: Job) -> Job:
        assert self._given is not None
        job.group = self._given.memory
        job.top = self._top
        return job

    def _top(self) -> int:
        return -1 if self._given is None or self._closing is not None else self._given.top

    async def snapshot(self, *, timeout: float = 60.0) -> str:
        await self._is_exhausted()
        given, line = self._layered()
        with _within(timeout, f"the snapshot of sandbox {self.id}"):
            async with asyncio.timeout(timeout):
                return await line.snapshot(given.name, given.layer)

    async def fork(
        self, snapshot: str, *, timeout: float = 60.0, spec: SandboxSpec | None = None
    ) -> "LocalSandbox":
        await self._is_exhausted()
        self._layered()
        if spec is not None and (problems := self._made_by._refused(spec)):
            raise SandboxError(" ".join(problems), cause="sandbox.refused")
        use = self._made_by.images().hold_again(self._use) if self._use is not None else None
        return await self._made_by.make(_forked(self.spec, spec), self._attempt, timeout, snapshot, use)

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:
        await self._is_exhausted()
        given, line = self._layered()
        with _within(timeout, f"the diff of sandbox {self.id}"):
            async with asyncio.timeout(timeout):
                result = await line.diff(given.name, given.layer, snapshot)
        try:
            found = os.pread(result, _MOST_OF_DIFF, 0).split(b"\0")[:-1]
        finally:
            os.close(result)
        return {os.fsdecode(item[1:]): _HOW[item[:1]] for item in found}

    def _layered(self) -> tuple[Given, Line]:
        self._live()
        if self._given is None or self._line is None or self._given.layer < 0:
            self._cannot("take snapshots on this kernel")
        return self._given, self._line

    async def _close(self) -> None:
        await self._end_transfers()
        if self._given is not None and self._line is not None:
            # Before the box goes: the last to hold its files waits milliseconds for the kernel to end them.
            self._given.close_files()
            # The kernel ends all of it at once; pid 1, asked nicely, would have to win against a bomb first.
            self._line.end(self._given.name)
        try:
            if self._proxy is not None:
                await self._proxy.close()
        finally:
            await super()._close()

    async def clean(self) -> None:
        if self._given is not None:
            self._given.close_listener()
            if self._channel is None:
                self._given.close_line()
        if self._given is None or self._line is None or self._line.dead.done():
            # Nobody else will: there is no box, or no keeper any more.
            leases.path_of(self._folder, self.id).unlink(missing_ok=True)
        self._given = None
        if self._use is not None:
            self._use.close()


def _forked(of: SandboxSpec, asked: SandboxSpec | None) -> SandboxSpec:
    """What a fork is: as asked, with the image that it has anyway."""
    return of if asked is None else msgspec.structs.replace(asked, provider=of.provider, image=of.image)


def _reference(image: str | None) -> "Reference | None":
    """Of an image that the store is asked for; a folder or an archive of a system is used as it is.

    `UsageError` where it can be no image."""
    if image is None:
        return None
    from rookery.sandboxes.images.references import parse  # few boxes have one

    found = parse(image)
    return None if found.plain else found


def _folder(path: str) -> bool:
    return path.startswith("/") and "\0" not in path and Path(path).is_dir()


def _there(image: str | None) -> bool:
    """Whether it can be an image's name or is one's path."""
    try:
        _reference(image)
    except UsageError:
        return False
    return True


@contextmanager
def _within(timeout: float, what: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise SandboxError(f"{what} took longer than {timeout:g} seconds", cause="sandbox.create") from error
