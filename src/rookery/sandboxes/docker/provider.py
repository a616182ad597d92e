"""The `docker` provider: sandboxes that are containers of an engine on this machine.

Promises:
- what a spec asks for and this engine cannot give is said by `check`, before anything starts; an image that the
  engine does not have is the task's fault, by its name;
- connections are bounded and reused, and a few containers are in the making at once, however many are asked for;
- a creation waits for an engine that is just away, as long as its own deadline lets it;
- containers of dead owners are ended before the first one is made; those of others are never touched.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.core.apart import apart
from rookery.sandboxes import leases, procs
from rookery.sandboxes.docker import api, asking, bundle, orphans, wanted
from rookery.sandboxes.docker.sandbox import DockerSandbox
from rookery.sandboxes.docker.snapshots import Family
from rookery.sandboxes.guarded import close_all, opened
from rookery.sandboxes.protocol import Home

if TYPE_CHECKING:
    from rookery.sandboxes.egress import Outside

_log = logging.getLogger("rookery.sandboxes")
AT_ONCE = max(4, 2 * (os.cpu_count() or 1))
"""Containers in the making: an engine that is asked for hundreds at once answers none of them in time."""
AWAY_SECONDS = (0.05, 1.0)
REMOVE_SECONDS = 5.0
CLOSE_SECONDS = 15.0
PATIENCE = 4
STUCK_SECONDS = 1.0
"""In which an engine removes any container, unless it is stuck in what a program left there."""
PAY_SECONDS = 30.0
"""Between tries to remove what an engine would not."""


class DockerProvider:
    """Makes containers at the engine that `DOCKER_HOST` names, or the one in the usual place."""

    name = "docker"
    isolated = True

    def __init__(
        self, home: Home, *, image: str | None = None, engine: str | None = None, direct: bool | None = None
    ) -> None:
        """`image`: for specs that name none. `engine`: the path of its socket. `direct`: whether files of
        containers are opened from here, which takes root, or asked of the engine."""
        self._home = home
        self._image = image
        self._place = engine
        self.direct = os.geteuid() == 0 if direct is None else direct
        self._engine: api.Engine | None = None
        self._open: set[DockerSandbox] = set()
        self._debts: set[DockerSandbox] = set()
        """Those that are closed, but for their container, which the engine would not remove."""
        self.pace = asyncio.Semaphore(AT_ONCE)
        self._images: dict[str, asyncio.Task[dict[str, Any] | None]] = {}
        self._bundle: asyncio.Task[Path] | None = None
        self._info: dict[str, Any] | None = None
        self._quota = True
        self._reaped = False
        self._paying: asyncio.Task[None] | None = None
        self._pay_at = 0.0
        self.outside: Outside | None = None

    # ---- what can be had

    def _whole(self, spec: SandboxSpec) -> SandboxSpec:
        return spec if spec.image or not self._image else msgspec.structs.replace(spec, image=self._image)

    def place(self) -> str:
        """Where the engine listens."""
        return self._place or api.socket_path()

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        spec = self._whole(spec)
        said = wanted.refused(spec)
        if said:
            return said
        try:
            place = self.place()
            info = asking.ask(place, "GET", api.path("info"))
            networks = [one["Name"] for one in asking.ask(place, "GET", api.path("networks"))]
            said = wanted.missing(spec, info, networks)
            if asking.ask(place, "GET", api.path("images", str(spec.image), "json"), ok=(404,)) is None:
                said.append(_no_image(str(spec.image)))
        except (SandboxError, UsageError) as error:
            return [f"No container can be had: {error}."]
        return said

    async def info(self) -> dict[str, Any]:
        """What the engine says of itself, asked once."""
        if self._info is None:
            self._info = dict(await self.engine.call("GET", api.path("info")))
        return self._info

    async def may_have_quota(self) -> bool:
        return self._quota and wanted.may_have_quota(await self.info())

    def no_quota(self) -> None:
        self._quota = False

    # ---- what sandboxes share

    @property
    def engine(self) -> api.Engine:
        if self._engine is None:
            self._engine = api.Engine(self.place())
        return self._engine

    async def image(self, name: str) -> Mapping[str, Any]:
        """What the engine knows of an image; asked once, however many want it. A name can mean another one later:
        a provider stays with the one it found first, so that all sandboxes of a run are made of the same."""
        if name not in self._images:
            call = self.engine.call("GET", api.path("images", name, "json"), ok=(404,))
            self._images[name] = asyncio.get_running_loop().create_task(call, context=apart())
        task = self._images[name]
        try:
            found = await asyncio.shield(task)
        except SandboxError:
            self._images.pop(name, None)
            raise
        if found is None:
            self._images.pop(name, None)
            raise SandboxError(_no_image(name), cause="task.image")
        return found

    def forget_image(self, name: str) -> None:
        """The engine has it no more."""
        self._images.pop(name, None)

    async def bundle(self) -> Path:
        """What pid 1 is made of; made once."""
        if self._bundle is None or (self._bundle.done() and not _is_whole(self._bundle)):
            self._bundle = asyncio.get_running_loop().create_task(
                asyncio.to_thread(self._make_bundle), context=apart()
            )
        return await asyncio.shield(self._bundle)

    def _make_bundle(self) -> Path:
        folder, identity = self._home.folder.resolve(), f"g{secrets.token_hex(8)}"
        leases.write(folder, leases.lease(identity, self._home.run, "", self.name, folder / identity))
        try:
            (folder / identity).mkdir(mode=0o755)
            bundle.make(folder / identity / "bundle")
        except BaseException:
            procs.remove_tree(str(folder / identity))
            leases.path_of(folder, identity).unlink(missing_ok=True)
            raise
        return folder / identity / "bundle"

    # ---- making

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> DockerSandbox:
        spec = self._whole(spec)
        problems = wanted.refused(spec)
        if problems:
            raise SandboxError(" ".join(problems), cause="sandbox.refused")
        return await self.make(spec, attempt, timeout)

    async def make(
        self, spec: SandboxSpec, attempt: str, timeout: float, family: Family | None = None, below: str = ""
    ) -> DockerSandbox:
        """A container of this spec; with the files of a family's snapshot, where one is named."""
        end = time.monotonic() + timeout
        await self._contact(spec, end)
        sandbox = DockerSandbox(spec, self._home, attempt, self, family, below)
        self._open.add(sandbox)
        return await opened(sandbox, self._begin(sandbox), max(0.001, end - time.monotonic()))

    async def _begin(self, sandbox: DockerSandbox) -> None:
        if sandbox.spec.network == "allow" and self.outside is None:
            from rookery.sandboxes.egress import Outside

            self.outside = Outside()
        await sandbox.open(self.outside)

    async def _contact(self, spec: SandboxSpec, end: float) -> None:
        """Waits for an engine that is away, pays what is owed to it, and asks what it cannot give."""
        pause, most = AWAY_SECONDS
        while True:
            try:
                info = await self.info()
                if self._reaped:
                    await self.engine.call("GET", "/_ping", timeout=api.QUICK_SECONDS)
                else:
                    self._reaped = True
                    await asyncio.to_thread(orphans.reap, self.engine.place)
                self._pay_soon()
                break
            except api.EngineGone:
                self._reaped, self._pay_at = False, 0.0
                if time.monotonic() + pause > end:
                    raise
            await asyncio.sleep(pause)  # nothing tells when it is back
            pause = min(most, 2 * pause)
        networks = ["bridge"]
        if spec.network == "all":
            networks = [one["Name"] for one in await self.engine.call("GET", api.path("networks"))]
        said = wanted.missing(spec, info, networks)
        if said:
            raise SandboxError(" ".join(said), cause="sandbox.refused")

    # ---- ending

    async def remove(self, identity: str, *, seconds: float = REMOVE_SECONDS) -> bool:
        """A container, and sees it gone; False where the engine does not answer or cannot: then it is owed."""
        name = orphans.name_of(identity)
        began = time.monotonic()
        pause = 0.01
        while True:
            why = "it is still being removed"
            told = None
            try:
                where = api.path("containers", name, force="1", v="1")
                failed = await self._tried("DELETE", where)
                told = await self.engine.call("GET", api.path("containers", name, "json"), ok=(404,))
                if told is None:
                    return True
                why = failed or why
            except SandboxError as error:
                why = str(error)
            taken = time.monotonic() - began
            if told is not None and (why.startswith("the engine") or taken > STUCK_SECONDS):
                await asyncio.to_thread(orphans.flatten, told)
            # One that answers is at it, and is waited for longer than one that is away.
            if taken > (seconds if told is None else PATIENCE * seconds):
                _log.warning("the container of sandbox %s is left for later: %.300s", identity, why)
                self._owe(identity)
                return False
            await asyncio.sleep(pause)  # nothing tells when it is done
            pause = min(0.5, 2 * pause)

    async def _tried(self, method: str, where: str) -> str:
        """What the engine says where it failed to; empty where it did it, or is at it."""
        try:
            await self.engine.call(method, where, ok=(404, 409))
        except api.Refused as error:
            if error.status < 500:
                raise
            return str(error)
        return ""

    def _owe(self, identity: str) -> None:
        self._debts |= {sandbox for sandbox in self._open if sandbox.id == identity}

    async def _pay(self, *, seconds: float = 0.0) -> None:
        """Tries what is owed, each once or for some seconds."""
        for sandbox in list(self._debts):
            if await self.remove(sandbox.id, seconds=seconds):
                await asyncio.to_thread(sandbox.forget_folder)
                self._debts.discard(sandbox)

    def _pay_soon(self) -> None:
        """Beside what is asked for: nobody waits for what another left."""
        now = time.monotonic()
        if self._debts and now >= self._pay_at and (self._paying is None or self._paying.done()):
            self._pay_at = now + PAY_SECONDS
            self._paying = asyncio.get_running_loop().create_task(self._pay(), context=apart())

    def forget(self, sandbox: DockerSandbox) -> None:
        self._open.discard(sandbox)

    async def close(self) -> None:
        try:
            await close_all(list(self._open))
            if self._paying is not None:
                await asyncio.wait({self._paying}, timeout=CLOSE_SECONDS)
                self._paying.cancel()
            if self._debts:
                await self._pay(seconds=CLOSE_SECONDS / len(self._debts))
        finally:
            made, self._bundle = self._bundle, None
            if made is not None:
                await asyncio.wait({made})
                if not made.cancelled() and made.exception() is None:
                    place = made.result().parent
                    await asyncio.to_thread(procs.remove_tree, str(place))
                    leases.path_of(self._home.folder.resolve(), place.name).unlink(missing_ok=True)
            engine, self._engine = self._engine, None
            if engine is not None:
                await engine.close()


def _is_whole(made: "asyncio.Task[Path]") -> bool:
    return not made.cancelled() and made.exception() is None and made.result().is_dir()


def _no_image(name: str) -> str:
    return (
        f"The engine has no image {name!r}: pull it (docker pull {name}), load or build it there, "
        "or correct the name."
    )
