"""One container: commands, shells, files and networks of it, and its end.

Promises:
- a container whose pid 1 died, however that came, is lost, and says so at once; nothing goes on in another one;
- its programs are dead when `close` returns, also while the engine does not answer; the container itself is then
  removed when it answers again, or by the reaper: its lease stays until then;
- a creation that fails or is cancelled leaves nothing, also where the engine finished it behind our back;
- where the engine's storage holds no limit for one container, what it wrote is looked at while commands run, and
  they end with `disk_limit`; one file is held to that size at once.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.core.apart import apart
from rookery.sandboxes import leases, procs, transfers
from rookery.sandboxes.docker import api, orphans, wanted
from rookery.sandboxes.docker.archives import Archives
from rookery.sandboxes.docker.door import Door, Met
from rookery.sandboxes.docker.held import DockerChannel, group_of, has_sixth, seen_as
from rookery.sandboxes.docker.snapshots import Family, Looking, compared, still
from rookery.sandboxes.guarded import ANYONE, PATH, GuardedSandbox, User
from rookery.sandboxes.jobs import Job, OomWatch
from rookery.sandboxes.local import users
from rookery.sandboxes.local.provider import URL, WORK, _forked, _within
from rookery.sandboxes.protocol import Command, Egress, Home, OnOutput

if TYPE_CHECKING:
    from rookery.sandboxes.docker.provider import DockerProvider
    from rookery.sandboxes.egress import Outside, Proxy

T = TypeVar("T")
_log = logging.getLogger("rookery.sandboxes")
LOOK_SECONDS = (0.5, 5.0)
"""How often what a container wrote is looked at: at first, and at most this long apart."""
_HIDDEN = ("proc", "dev", "sys", ".rookery")
TOO_LARGE = 128 + signal.SIGXFSZ
_TAIL = 4096


class ImageGone(SandboxError):  # noqa: N818
    """Somebody removed the image from the engine since it was asked for."""

    cause = "sandbox.image"


class DockerSandbox(GuardedSandbox):
    """A container whose pid 1 is the guard."""

    provider = "docker"

    def __init__(
        self,
        spec: SandboxSpec,
        home: Home,
        attempt: str,
        made_by: "DockerProvider",
        family: Family,
        below: str = "",
    ) -> None:
        """Of the image of its `family`, or of that snapshot of it that `below` names: then it is a fork."""
        identity = f"d{secrets.token_hex(8)}"
        super().__init__(identity, spec, leases.marker(home.run, identity), made_by.forget)
        self._made_by = made_by
        self._home = home
        self._folder = home.folder.resolve()
        self._attempt = attempt
        self._uid = -1
        self._owner = -1
        self._work = wanted.work_of(spec, family.image)
        self._creation: asyncio.Task[Any] | None = None
        self._ending: asyncio.Task[Any] | None = None
        self._asked = False
        self._fds: dict[str, int] = {}
        self._group = ""
        self._family = family
        self._below = below
        self._jobs: dict[int, Job] = {}
        self._watch: asyncio.Task[None] | None = None
        self._proxy: Proxy | None = None
        self._shut = False
        self.inside_url = URL if spec.network == "model" else ""
        self.held_together = bool(spec.memory)

    def adopt(self, attempt: str) -> None:
        """It was made ahead, and is this attempt's now. The engine's labels keep what they said at first."""
        self._attempt = attempt
        try:
            leases.adopt(self._folder, self.id, attempt)
        except (OSError, msgspec.MsgspecError) as error:  # it still names the owner, which is what ends it
            _log.warning("the lease of sandbox %s does not name its attempt: %s", self.id, error)

    @property
    def root(self) -> Path:
        """Its folder on the host."""
        return self._folder / self.id

    # ---- its beginning

    async def open(self, outside: "Outside | None") -> None:
        spec, made_by = self.spec, self._made_by
        lease = leases.lease(self.id, self._home.run, self._attempt, self.provider, self.root)
        leases.write(self._folder, lease)
        self.root.mkdir(mode=0o755)
        line = self.root / "line"
        line.mkdir(mode=0o755)
        (self.root / orphans.ENGINE).write_text(made_by.engine.place)
        self._family.members.add(self.id)
        image = self._family.image
        if self._below:
            image = {**image, "Id": self._family.named(self._below).image}
        bundle = await made_by.bundle()
        door = Door(line)
        try:
            async with made_by.pace:
                info = await made_by.info()
                watched = bool(spec.disk) and not spec.read_only
                quota = watched and await made_by.may_have_quota()
                body = partial(
                    wanted.container,
                    spec,
                    image=image,
                    folder=str(bundle),
                    line=str(line),
                    word=door.word,
                    labels=orphans.labels(lease),
                    sixth=has_sixth(),
                    podman=wanted.is_podman(info),
                )
                try:
                    await self._create(body(quota=quota))
                except api.Refused as error:
                    if not quota or "storage" not in str(error):
                        raise
                    made_by.no_quota()
                    quota = False
                    await self._create(body(quota=False))
                watched = watched and not quota
                met = await self._begin(door, wanted.settings(spec, image, watched=watched))
        finally:
            door.close()
        self._take(met, image, outside)
        # Of an engine that holds no limit it may be everybody's.
        self._group = group_of(met.pid) if wanted.holds(info, "MemoryLimit") else ""
        self._oom = OomWatch(self._group)
        if watched:
            self._watch = asyncio.get_running_loop().create_task(self._look())

    async def _create(self, body: dict[str, Any]) -> None:
        """Not given up half way: an engine goes on with what it was asked for, whether we listen or not."""
        self._asked = True
        where = api.path("containers", "create", name=orphans.name_of(self.id))
        call = self._made_by.engine.call("POST", where, body)
        self._creation = asyncio.get_running_loop().create_task(call, context=apart())
        try:
            await asyncio.shield(self._creation)
        except api.Refused as error:
            if error.status == 404:  # it was there when the provider asked
                raise ImageGone(str(error)) from error
            raise

    async def _begin(self, door: Door, settings: dict[str, Any]) -> Met:
        engine, name = self._made_by.engine, orphans.name_of(self.id)
        attach = api.path("containers", name, "attach", stream="1", stdout="1", stderr="1")
        async with engine.stream("POST", attach) as words:
            await engine.call("POST", api.path("containers", name, "start"))
            return await door.meet(settings, words)

    def _take(self, met: Met, image: Mapping[str, Any], outside: "Outside | None") -> None:
        spec = self.spec
        self._fds = met.fds
        self._uid = met.uid
        try:
            self._channel = DockerChannel(met, self._end_soon)
        except BaseException:
            met.sock.close()
            raise
        self._owner = seen_as(met.pid, self._uid)
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._base = {
            "PATH": PATH,
            "HOME": WORK,
            "USER": {0: "root", 1000: "user"}.get(self._uid, str(self._uid)),
            "TMPDIR": "/tmp",  # noqa: S108  (the container's own)
            "LANG": "C.UTF-8",
            **wanted.variables(image),
            **(self._way_out(outside) if outside is not None else {}),
            **spec.env,
        }

    def _way_out(self, outside: "Outside") -> dict[str, str]:
        """Opens what the network `allow` is; the variables that programs find it by."""
        if self.spec.network != "allow":
            return {}
        from rookery.sandboxes import egress, egress_rules

        rules = egress_rules.Rules.of(self.spec.allow)
        self._proxy = egress.Proxy(socket.socket(fileno=os.dup(self._fds["listener"])), rules, self.id, outside)
        self._proxy.start()
        return egress_rules.environment(rules, URL)

    # ---- networks

    def listener(self) -> socket.socket:
        door = self._door()
        if self._shut:
            raise SandboxError(f"the listener of sandbox {self.id} was shut", cause="sandbox.refused")
        return socket.socket(fileno=os.dup(door))

    def unlisten(self) -> None:
        with socket.socket(fileno=os.dup(self._door())) as door:
            self._shut = True
            if door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                door.shutdown(socket.SHUT_RD)

    def _door(self) -> int:
        self._live()
        if self.spec.network != "model":
            raise SandboxError(
                f"the network of sandbox {self.id} is {self.spec.network!r}: it has no listener to serve",
                cause="sandbox.refused",
            )
        return self._fds["listener"]

    def egress(self) -> Sequence[Egress]:
        return self._proxy.record.all() if self._proxy is not None else ()

    # ---- what the others ask

    def place(self) -> transfers.Place:
        self._live()
        work = tuple(Path(self._work).parts[1:])
        return transfers.Place(f"/proc/self/fd/{self._fds['top']}/.", work, {"/": ()}, self._owner, _HIDDEN)

    # ---- files, for whom the engine has to open them

    async def read(self, path: str, *, limit: int = 16 << 20, timeout: float = 30.0) -> bytes:
        await self._is_exhausted()
        if self._made_by.direct:
            return await super().read(path, limit=limit, timeout=timeout)
        return await self._asked_for(self._archives().read(path, limit), timeout)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, timeout: float = 30.0) -> None:
        await self._is_exhausted()
        if self._made_by.direct:
            await super().write(path, data, mode=mode, timeout=timeout)
        else:
            await self._asked_for(self._archives(writing=True).write(path, data, mode), timeout)

    async def upload(
        self, source: Path, target: str, *, inside: Path | None = None, timeout: float = 120.0
    ) -> None:
        await self._is_exhausted()
        if self._made_by.direct:
            await super().upload(source, target, inside=inside, timeout=timeout)
        else:
            await self._asked_for(self._archives(writing=True).upload(source, target, inside), timeout)

    async def download(self, source: str, target: Path, *, limit: int = 1 << 30, timeout: float = 120.0) -> None:
        await self._is_exhausted()
        if self._made_by.direct:
            await super().download(source, target, limit=limit, timeout=timeout)
        else:
            await self._asked_for(self._archives().download(source, target, limit), timeout)

    def _archives(self, *, writing: bool = False) -> Archives:
        self._live()
        if self.spec.read_only and writing:
            self._cannot("write into a read-only container, unless it runs as root")
        return Archives(self._made_by.engine, orphans.name_of(self.id), self.place(), self._uid)

    async def guard_ran_out_of_memory(self) -> bool:
        if await super().guard_ran_out_of_memory():
            return True
        if not self.spec.memory:
            return False
        # The engine removes the control group with the container's last process; then only the engine knows.
        where = api.path("containers", orphans.name_of(self.id), "json")
        try:
            async with asyncio.timeout(api.CALL_SECONDS):
                while True:
                    state = (await self._made_by.engine.call("GET", where)).get("State") or {}
                    if not state.get("Running"):
                        return bool(state.get("OOMKilled"))
                    await asyncio.sleep(0.05)  # the engine has not noticed the death yet
        except (SandboxError, TimeoutError) as error:
            _log.debug("why sandbox %s died cannot be seen: %s", self.id, error)
            return False

    async def _asked_for(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        async with asyncio.timeout(timeout):
            return await work

    def folder_of(self, command: Command) -> str:
        return os.path.join(self._work, command.cwd or "")  # noqa: PTH118  (a program's own text)

    def own_uid(self) -> int:
        return self._uid

    def may_be(self, user: str) -> bool:
        names = {0: ("root", "0"), 1000: ("user", "1000")}.get(self._uid) or (str(self._uid),)
        return user in names or (user == "image" and self.spec.user == user)

    async def whom(self, user: str) -> User:
        if self.may_be(user):
            return ANYONE
        return await users.find(user, partial(self.read, limit=users.MOST))

    def made(self, job: Job) -> Job:
        job.group = self._group
        if "space" in self._fds:
            job.top = lambda: self._fds.get("space", -1)
        if self._watch is not None:
            self._jobs[job.number] = job
        return job

    async def exec(self, command: Command, *, on_output: OnOutput | None = None) -> ExecResult:
        result = await super().exec(command, on_output=on_output)
        if self._watch is None or result.ok or result.status not in ("exited", "signaled"):
            return result
        # A file that may not grow ends its writer by a signal, which a shell tells as a code and Python as words.
        if result.exit_code != TOO_LARGE and b"File too large" not in result.stderr[-_TAIL:]:
            return result
        with contextlib.suppress(SandboxError):
            if await self._wrote() >= 0.9 * (self.spec.disk or 0):
                return msgspec.structs.replace(result, status="disk_limit", detail="a file grew over the limit")
        return result

    async def _wrote(self) -> int:
        """Bytes in the container's own layer."""
        where = api.path("containers", orphans.name_of(self.id), "json", size="1")
        return int((await self._made_by.engine.call("GET", where)).get("SizeRw") or 0)

    async def _look(self) -> None:
        """At what was written, while somebody could write."""
        every, most = LOOK_SECONDS
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(every)  # nothing tells
            self._jobs = {number: job for number, job in self._jobs.items() if not job.promise.done()}
            if not self._jobs:
                every = LOOK_SECONDS[0]
                continue
            began = loop.time()
            try:
                wrote = await self._wrote()
            except SandboxError as error:
                _log.debug("what sandbox %s wrote cannot be seen: %s", self.id, error)
                continue
            # An engine that has to walk over many files is not to be kept busy by it.
            every = min(most, max(every * 1.5, 10 * (loop.time() - began)))
            if wrote > (self.spec.disk or 0):
                for job in self._jobs.values():
                    job.overdrawn = True
                    job.kill_soon()

    # ---- snapshots

    def _layered(self) -> Family:
        self._live()
        if not self._made_by.direct:
            self._cannot("take snapshots unless it runs as root")
        if self.spec.read_only:
            self._cannot("take snapshots of a read-only container: what it writes lies in memory")
        return self._family

    async def snapshot(self, *, timeout: float = 60.0) -> str:
        await self._is_exhausted()
        family = self._layered()
        lease = leases.lease(self.id, self._home.run, self._attempt, self.provider, self.root)
        look = Looking(self.place(), timeout)
        with _within(timeout, f"the snapshot of sandbox {self.id}"):
            async with asyncio.timeout(timeout):
                return await family.take(
                    self._made_by.engine, orphans.name_of(self.id), self.id, orphans.labels(lease), look
                )

    async def fork(
        self, snapshot: str, *, timeout: float = 60.0, spec: SandboxSpec | None = None
    ) -> "DockerSandbox":
        await self._is_exhausted()
        family = self._layered()
        family.named(snapshot)
        if spec is not None and (problems := wanted.refused(spec)):
            raise SandboxError(" ".join(problems), cause="sandbox.refused")
        return await self._made_by.make(_forked(self.spec, spec), self._attempt, timeout, family, snapshot)

    async def diff(self, snapshot: str, *, timeout: float = 60.0) -> Mapping[str, str]:
        await self._is_exhausted()
        taken = self._layered().named(snapshot)
        if taken.taken_of != self.id and self._below != snapshot:
            self._cannot(f"compare with {snapshot!r}: it is of another sandbox, and not what this one was made of")
        own = taken.taken_of == self.id
        look = Looking(self.place(), timeout)
        engine, name = self._made_by.engine, orphans.name_of(self.id)
        with _within(timeout, f"the diff of sandbox {self.id}"):
            async with asyncio.timeout(timeout), still(engine, name):
                if own:
                    return compared(taken.seen, await look.at(engine, name))
                return compared({}, await look.since(taken, engine, name))

    # ---- its end

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._end_transfers()
        self._release("top", "space")  # who holds its files keeps the engine from removing them
        try:
            if self._proxy is not None:
                await self._proxy.close()
        finally:
            await super()._close()

    def _end_soon(self) -> None:
        """By the engine, for a pid 1 that does not answer."""
        if self._ending is None:
            name = orphans.name_of(self.id)
            call = self._made_by.engine.call(
                "DELETE", api.path("containers", name, force="1", v="1"), ok=(404, 409)
            )
            self._ending = asyncio.get_running_loop().create_task(call, context=apart())

    def _release(self, *names: str) -> None:
        for name in names or tuple(self._fds):
            fd = self._fds.pop(name, -1)
            if fd >= 0:
                os.close(fd)

    async def clean(self) -> None:
        self._release()
        for task in (self._creation, self._ending):
            if task is not None:
                await asyncio.wait({task}, timeout=api.CALL_SECONDS)
                if task.done() and not task.cancelled():
                    task.exception()  # looked at: whoever asked for it knows, and what is left is removed now
        gone = not self._asked or await self._made_by.remove(self.id)
        await self._family.leave(self._made_by.engine, self.id)
        if gone:  # else the lease says what is left to do
            self.forget_folder()

    def forget_folder(self) -> None:
        """What is left on the host, when there is no container any more."""
        procs.remove_tree(str(self.root))
        leases.path_of(self._folder, self.id).unlink(missing_ok=True)
