"""The `docker` provider: sandboxes that are containers of an engine on this machine.

Promises:
- what a spec asks for and this engine cannot give is said by `check`, before anything starts;
- an image that the engine does not have is given to it, whatever it is called by, once for all who ask; one that
  cannot be had is the task's fault, by its name (see `images.giving`);
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.core.apart import apart
from rookery.sandboxes import leases, procs
from rookery.sandboxes.docker import api, asking, bundle, orphans, wanted
from rookery.sandboxes.docker.sandbox import DockerSandbox, ImageGone
from rookery.sandboxes.docker.snapshots import Family
from rookery.sandboxes.guarded import close_all, opened
from rookery.sandboxes.protocol import Home

if TYPE_CHECKING:
    from rookery.sandboxes.egress import Outside
    from rookery.sandboxes.images.asking import Images
    from rookery.sandboxes.images.progress import OnProgress
    from rookery.sandboxes.images.references import Reference

_log = logging.getLogger("rookery.sandboxes")
AT_ONCE = min(api.CONNECTIONS // 2, max(4, 2 * (os.cpu_count() or 1)))
"""Containers in the making: an engine that is asked for hundreds at once answers none of them in time. Each
of them holds one connection while it waits for another."""
AWAY_SECONDS = (0.05, 1.0)
TRIES = 3
"""To make a container of an image that somebody else removes meanwhile."""
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
    pooled = True

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
        self._images: dict[str, asyncio.Task[Mapping[str, Any]]] = {}
        self._giving: Images | None = None
        self.on_image: OnProgress | None = None
        self._bundle: asyncio.Task[Path] | None = None
        self._info: dict[str, Any] | None = None
        self._quota = True
        self._reaped = False
        self._contacting: asyncio.Task[dict[str, Any]] | None = None
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
            info = asking.ask(place, "GET", api.path("info"), timeout=asking.SLOW_SECONDS)
            networks = [one["Name"] for one in asking.ask(place, "GET", api.path("networks"))]
        except (SandboxError, UsageError) as error:
            return [f"No container can be had: {error}."]
        said = wanted.missing(spec, info, networks)
        try:
            _reference(str(spec.image))
        except SandboxError as error:
            said.append(str(error))
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
        task = self._images.get(name)
        if task is None:
            task = self._images[name] = asyncio.get_running_loop().create_task(self._found(name), context=apart())
            task.add_done_callback(partial(self._looked, name))
        return await asyncio.shield(task)

    def _looked(self, name: str, task: "asyncio.Task[Mapping[str, Any]]") -> None:
        if task.cancelled() or task.exception() is not None:  # who waits for it is told; who comes next asks anew
            self._images.pop(name, None)

    async def _found(self, name: str) -> Mapping[str, Any]:
        reference = await asyncio.to_thread(_reference, name)
        found = None if reference.path else await self._known(name)
        if found is None:
            if self._giving is None:
                from rookery.sandboxes.images.asking import Images

                self._giving = Images(on_progress=lambda progress: self.on_image and self.on_image(progress))
            given = await self._giving.give(reference, self.engine.place)
            found = await self._known(given)
        if found is None:
            raise SandboxError(f"the engine has no image {name}, although it took it", cause="sandbox.image")
        return found

    async def _known(self, name: str) -> dict[str, Any] | None:
        """What the engine knows by a name, or by an id."""
        found: dict[str, Any] | None = await self.engine.call(
            "GET", api.path("images", name, "json"), ok=(400, 404)
        )
        return found

    def forget_image(self, name: str, image: Mapping[str, Any]) -> None:
        """The engine has this one no more; another may be on its way by now."""
        task = self._images.get(name)
        if task is not None and task.done() and task.result() is image:
            del self._images[name]

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
        """A container of this spec; with the files of a family's snapshot, where one is named.

        Getting an image that the engine does not have is not counted: see `images.asking`."""
        left = await self._contact(spec, timeout)
        if family is not None:
            return await self._make(spec, attempt, left, family, below)
        for _ in range(TRIES):
            image = await self.image(str(spec.image))
            try:
                return await self._make(spec, attempt, left, Family(image))
            except ImageGone:
                self.forget_image(str(spec.image), image)
        raise SandboxError(
            f"the image {spec.image} is removed from the engine again and again: does something prune it?",
            cause="sandbox.image",
        )

    async def _make(
        self, spec: SandboxSpec, attempt: str, timeout: float, family: Family, below: str = ""
    ) -> DockerSandbox:
        sandbox = DockerSandbox(spec, self._home, attempt, self, family, below)
        self._open.add(sandbox)
        return await opened(sandbox, self._begin(sandbox), timeout)

    async def _begin(self, sandbox: DockerSandbox) -> None:
        if sandbox.spec.network == "allow" and self.outside is None:
            from rookery.sandboxes.egress import Outside

            self.outside = Outside()
        await sandbox.open(self.outside)

    async def _contact(self, spec: SandboxSpec, timeout: float) -> float:
        """Waits for an engine that is away, and asks what it cannot give. What is left of the time, of which an
        engine that answers takes none: it may have much to remove first."""
        pause, most = AWAY_SECONDS
        began = time.monotonic()
        while True:
            asked = time.monotonic()
            try:
                info = await self._answered()
                left = max(0.001, timeout - (asked - began))
                break
            except api.EngineGone:
                if time.monotonic() + pause > began + timeout:
                    raise
            await asyncio.sleep(pause)  # nothing tells when it is back
            pause = min(most, 2 * pause)
        networks = ["bridge"]
        if spec.network == "all":
            networks = [one["Name"] for one in await self.engine.call("GET", api.path("networks"))]
        said = wanted.missing(spec, info, networks)
        if said:
            raise SandboxError(" ".join(said), cause="sandbox.refused")
        return left

    async def _answered(self) -> dict[str, Any]:
        """Whether the engine is there, asked once for all who want to know at the same time."""
        if self._contacting is None or self._contacting.done():
            self._contacting = asyncio.get_running_loop().create_task(self._reach(), context=apart())
            self._contacting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._contacting)

    async def _reach(self) -> dict[str, Any]:
        """Removes what dead owners left there, before the first of ours is made; pays what is owed."""
        try:
            info = await self.info()
            if self._reaped:
                await self.engine.call("GET", "/_ping", timeout=api.QUICK_SECONDS)
            else:
                await asyncio.to_thread(orphans.reap, self.engine.place)
                self._reaped = True
        except api.EngineGone:
            self._reaped, self._pay_at = False, 0.0
            raise
        self._pay_soon()
        return info

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
        giving, self._giving = self._giving, None
        try:
            if giving is not None:
                await giving.close()
            if self._contacting is not None:
                await asyncio.wait({self._contacting})
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


def _reference(name: str) -> "Reference":
    """What an image is called by; what can be none is the task's fault."""
    from rookery.sandboxes.images.references import parse

    try:
        return parse(name)
    except UsageError as error:
        raise SandboxError(str(error), cause="task.image") from error
