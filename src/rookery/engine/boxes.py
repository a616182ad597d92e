"""The sandboxes of one process: of which provider, with some made ahead where that takes long.

Promises:
- made ahead is what attempts that have begun have not asked for yet, then what will begin soon; never more than
  the run's `warm`, shared out over its runners, nor than half of the memory and disk that are free;
- a sandbox that came when its attempt was just cancelled is closed; other attempts' are not touched by an end;
- an environment whose attempts ask for no sandbox, or for another than it said, has none made ahead;
- a paused process starts none ahead;
- how far the fetching of an image is, is told: each step at once, the rest now and then.
"""

import asyncio
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from rookery.core import SandboxError, SandboxSpec, Task
from rookery.core.errors import describe
from rookery.engine.keeping import home_of
from rookery.engine.loose import begin_apart
from rookery.engine.wire import NOT_ISOLATED, Image, Note, RunSettings, Soon
from rookery.environments import Environment
from rookery.sandboxes import WAY_OUT, open_provider
from rookery.sandboxes.images.progress import Progress
from rookery.sandboxes.pools import START_SECONDS, Pool, PoolBudget, key_of
from rookery.sandboxes.protocol import Command, Fetching, Pooled, Provider, Sandbox

AT_ONCE: Final = PoolBudget(most=0)
"""How many are made at a time, in all runners together."""
CREATE_SECONDS: Final = 60.0
TOLD_SECONDS: Final = 0.5
log = logging.getLogger("rookery.attempts")


class Boxes:
    """Opens sandboxes for attempts."""

    def __init__(
        self, settings: RunSettings, environment: Environment, send: Callable[[Any], None], *, paused: bool
    ) -> None:
        self._settings = settings
        self._spec = settings.sandbox
        self._environment = environment
        self._send = send
        self._paused = paused
        self._providers: dict[str, Provider] = {}
        self._pools: dict[str, Pool] = {}
        self._soon: dict[str, tuple[SandboxSpec | None, int]] = {}
        """By task: what its attempts will ask for, and how many will begin."""
        self._due: dict[str, SandboxSpec] = {}
        """By attempt: what it has not asked for yet."""
        self._wanted = environment.needs_sandbox
        """Whether what is expected is asked for: by the environment's own word, then as the last attempt did."""
        self._closing: set[asyncio.Task[None]] = set()
        self._told: dict[str, tuple[str, float]] = {}

    # ---- what is asked for

    def spec_for(self, task: Task) -> SandboxSpec:
        """The run's spec over the environment's, a task's image over both; the environment has the last word."""
        given = replace(self._spec, image=task.image) if task.image else self._spec
        spec = self._environment.sandbox_for(task, given)
        if not isinstance(spec, SandboxSpec):
            raise TypeError(f"{self._environment.title}.sandbox_for must return a SandboxSpec, not {spec!r:.80}")
        return spec

    def _named(self, spec: SandboxSpec) -> SandboxSpec:
        """With its provider, or else the run's; refused where that has none: nothing isolates here."""
        name = spec.provider or self._spec.provider
        if not name:
            raise SandboxError(f"no sandbox that isolates can be had here; {WAY_OUT}", cause="sandbox.refused")
        return spec if spec.provider else replace(spec, provider=name)

    async def open(self, spec: SandboxSpec, attempt: str) -> Sandbox:
        spec = self._named(spec)
        provider = self._provider(spec.provider)
        creation = begin_apart(self._create(provider, spec, attempt))
        try:
            return await creation
        except asyncio.CancelledError:
            if creation.done() and not creation.cancelled() and creation.exception() is None:
                closing = begin_apart(
                    creation.result().close()
                )  # it came in the same moment; nobody else knows of it
                self._closing.add(closing)
                closing.add_done_callback(self._closed)
            raise

    async def _create(self, provider: Provider, spec: SandboxSpec, attempt: str) -> Sandbox:
        """What is asked for is due no longer. The pool counts it off by itself, in the same step: counted off
        twice, as when others begin between the two, it would close a warm one that is needed."""
        due = self._due.get(attempt)
        if due is not None and (due == spec) != self._wanted:
            self._wanted = due == spec
            self._expect()
        self._due.pop(attempt, None)
        # Many that ask one that is slow together wait for their turn; their stage has a deadline of its own.
        seconds = START_SECONDS if isinstance(provider, Pool) else CREATE_SECONDS
        return await provider.create(spec, attempt=attempt, timeout=seconds)

    def _closed(self, closing: "asyncio.Task[None]") -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            self._send(Note("sandbox.close_failed", {"detail": describe(error)}))

    def _provider(self, name: str) -> Provider:
        found = self._providers.get(name)
        if found is not None:
            return found
        found = open_provider(name, home_of(self._settings))
        if not found.isolated:
            detail = f"{name} sandboxes do not isolate: programs run as you, on your files and network"
            self._send(Note(NOT_ISOLATED, {"detail": detail}))
        if isinstance(found, Fetching):
            found.on_image = self._on_image
        if self._settings.warm and isinstance(found, Pooled) and found.pooled:
            found = self._pools[name] = Pool(found, budget_of(self._settings))
            found.hold(back=self._paused)
        self._providers[name] = found
        return found

    async def healthy(self) -> bool:
        """Whether the run's provider still makes sandboxes that work: asked after one was lost."""
        spec = self._named(self._spec)
        provider = self._provider(spec.provider)
        if isinstance(provider, Pool):
            provider = provider.inner  # a warm one would say how things were
        box = await provider.create(spec, attempt="health")
        try:
            return (await box.exec(Command(argv=("true",), wall=10.0))).ok
        finally:
            await box.close()

    # ---- ahead of need

    def soon(self, soon: Soon) -> None:
        """What will begin here; of all else nothing."""
        new = {task.id: task for task in soon.tasks}
        before, self._soon = self._soon, {}
        for task, count in soon.wanted:
            spec = self._foreseen(new[task]) if task in new else before.get(task, (None, 0))[0]
            self._soon[task] = (spec, count)
        self._expect()

    def begun(self, attempt: str, task: Task) -> None:
        """It will ask for a sandbox, sooner or later."""
        if not self._settings.warm:
            return
        spec, count = self._soon.get(task.id, (None, 0))
        if count:  # it was expected, and is due now: not both
            self._soon[task.id] = (spec, count - 1)
        spec = spec or self._foreseen(task)
        if spec is not None:
            self._due[attempt] = spec
            self._expect()

    def ended(self, attempt: str) -> None:
        """It asks for nothing more."""
        if self._due.pop(attempt, None) is not None:
            self._expect()

    def _foreseen(self, task: Task) -> SandboxSpec | None:
        """What an attempt will ask a pool for; None where no pool is asked, or its own setup will say why not."""
        try:
            spec = self._named(self.spec_for(task))
            return spec if isinstance(self._provider(spec.provider), Pool) else None
        except Exception as error:  # noqa: BLE001  (the environment's code: its attempt raises the same, and ends)
            log.debug("what task %s needs cannot be made ahead: %s", task.id, error)
            return None

    def _expect(self) -> None:
        if not self._pools:
            return
        specs: dict[bytes, SandboxSpec] = {}
        counts: Counter[bytes] = Counter()
        if self._wanted:
            asked = [(spec, 1) for spec in self._due.values()]
            asked += [(spec, count) for spec, count in self._soon.values() if spec is not None]
            for spec, count in asked:
                key = key_of(spec)
                specs.setdefault(key, spec)
                counts[key] += count
        for name, pool in self._pools.items():
            pool.expect([(spec, counts[key]) for key, spec in specs.items() if spec.provider == name])

    def hold(self, *, back: bool) -> None:
        self._paused = back
        for pool in self._pools.values():
            pool.hold(back=back)

    # ---- images

    def _on_image(self, progress: Progress) -> None:
        step, at = self._told.get(progress.image, ("", 0.0))
        if step == progress.step and time.monotonic() - at < TOLD_SECONDS:
            return
        if progress.step in ("ready", "failed"):
            self._told.pop(progress.image, None)
        else:
            self._told[progress.image] = (progress.step, time.monotonic())
        self._send(Image(progress.image, progress.step, progress.done, progress.total))

    # ---- the end

    async def close(self) -> None:
        """All that are still open."""
        errors: list[SandboxError | OSError] = []
        for name, provider in self._providers.items():
            try:
                await provider.close()
            except (SandboxError, OSError) as error:
                errors.append(error)
            pool = self._pools.get(name)
            if pool is not None and (pool.hits or pool.misses):
                said = {"provider": name, "warm": pool.hits, "made": pool.misses, "unwell": pool.unwell}
                self._send(Note("sandboxes.opened", said))
        if errors:
            raise errors[0]


def budget_of(settings: RunSettings) -> PoolBudget:
    """One runner's part of what may be held warm."""
    share = settings.share
    folder = Path(settings.folder)
    return PoolBudget(
        most=-(-settings.warm // share),
        memory=_memory() // 2 // share,
        disk=shutil.disk_usage(folder).free // 2 // share,
        at_once=-(-AT_ONCE.at_once // share),
        asked=-(-AT_ONCE.asked // share),
    )


def _memory() -> int:
    """What is free of this machine's memory."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
