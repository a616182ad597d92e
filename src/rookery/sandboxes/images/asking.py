"""Images for sandboxes, asked for on an event loop.

Promises:
- an image that is there is held at once; one that is not is made by a program of its own, once for all who ask;
- who stops waiting does not stop the making: others wait for it, and so does the next attempt;
- all of it ends with `close`, or with this process;
- what is held is not removed until it is let go.
"""

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import SandboxError
from rookery.core.apart import apart
from rookery.sandboxes.images.content import Store, Use
from rookery.sandboxes.images.engine import changed_in_engine
from rookery.sandboxes.images.progress import OnProgress, Progress
from rookery.sandboxes.images.references import Reference

AT_ONCE = 4
SECONDS = 3600.0
"""For an image to be made, the waiting for others included."""
SYNC_SECONDS = 120.0
RECENT_SECONDS = 30.0
"""How long an engine's image is taken for the same."""
TRIES = 5
_log = logging.getLogger("rookery.sandboxes")


class Images:
    """One for each provider. Bound to the loop that it is first used on."""

    def __init__(self, folder: Path | None = None, on_progress: OnProgress | None = None) -> None:
        self._store = Store(folder)
        self._on_progress = on_progress
        self._making: dict[str, asyncio.Task[str]] = {}
        self._resting: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._looked: dict[str, float] = {}
        self._closed = False

    async def hold(self, reference: Reference) -> Use:
        """The image, held; `task.image` where there is none, `sandbox.image` where it cannot be had now."""
        image = await self._known(reference)
        for _ in range(TRIES):
            use = self._store.use(image) if image else None
            if use is not None:
                return use
            image = await self._made(reference)
        raise SandboxError(
            f"the image {reference.text} was removed again and again before it could be used: the image store is "
            "too small for what is in use (ROOKERY_IMAGES_BUDGET)",
            cause="sandbox.image",
        )

    def hold_again(self, use: Use) -> Use:
        """One more hold on what is held."""
        again = self._store.use(use.record.id)
        assert again is not None
        return again

    async def _known(self, reference: Reference) -> str:
        """Its id, where the store has it and it is not another by now: an engine's is looked at now and then."""
        if reference.kind == "dockerfile":
            return ""  # its files have to be looked at: the program that builds does that
        found = self._store.named(reference.key)
        if found is None or found.origin != "engine":
            return found.image if found is not None else ""
        now = asyncio.get_running_loop().time()
        if now - self._looked.get(reference.key, -RECENT_SECONDS) >= RECENT_SECONDS:
            if await asyncio.to_thread(changed_in_engine, found):
                return ""
            self._looked[reference.key] = now
        return found.image

    async def give(self, reference: Reference, socket: str) -> str:
        """The name by which the engine that listens there knows the image from now on: see `giving`."""
        return await self._made(reference, socket)

    async def _made(self, reference: Reference, socket: str = "") -> str:
        if self._closed:
            raise SandboxError(f"the image {reference.text} is not fetched any more: the provider is closed")
        key = f"{socket} {reference.key}"
        task = self._making.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._make(reference, socket), context=apart())
            self._making[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(task)

    def _ended(self, key: str, task: asyncio.Task[str]) -> None:
        self._making.pop(key, None)
        if not task.cancelled():
            task.exception()  # looked at: those who wait for it are told, and perhaps nobody does any more

    async def _make(self, reference: Reference, socket: str) -> str:
        self._store.open()
        asked = {
            "folder": str(self._store.folder),
            "reference": reference,
            "parent": os.getpid(),
            "engine": socket,
        }
        async with self._places, asyncio.timeout(SECONDS):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "rookery.sandboxes.images.worker",
                msgspec.json.encode(asked).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            try:
                made = await self._followed(process, reference)
            except BaseException:
                if self._on_progress is not None:
                    self._on_progress(Progress(image=reference.text, step="failed"))
                await _ended(process)
                raise
        # What is left of it is only to let it reach the disk.
        rest = asyncio.get_running_loop().create_task(self._rest(process))
        self._resting.add(rest)
        rest.add_done_callback(self._resting.discard)
        return made

    async def _rest(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(SYNC_SECONDS):
                await process.wait()
        finally:
            await _ended(process)

    async def _followed(self, process: asyncio.subprocess.Process, reference: Reference) -> str:
        assert process.stdout is not None
        told = False
        async for line in process.stdout:
            said = msgspec.json.decode(line)
            if "error" in said:
                raise SandboxError(said["error"], cause=said["cause"])
            if "made" in said:
                if told:
                    _log.info("the image %s is there", reference.text)
                return str(said["made"])
            progress = msgspec.convert(said["progress"], Progress)
            if self._on_progress is not None:
                self._on_progress(progress)
            if not told and progress.step == "fetching":
                told = True
                _log.info("fetching the image %s: %d bytes", reference.text, progress.total)
        raise SandboxError(
            f"the image {reference.text} could not be made: its program ended with {await process.wait()}",
            cause="sandbox.image",
        )

    async def close(self) -> None:
        """Ends what is still being made."""
        self._closed = True
        making = list(self._making.values())
        tasks: list[asyncio.Task[Any]] = [*making, *self._resting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if making:  # their programs were killed in the middle
            await asyncio.to_thread(self._store.clean)


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
