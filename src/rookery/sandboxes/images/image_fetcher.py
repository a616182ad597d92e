"""Fetch images for sandboxes, on an event loop. Runs in the process that creates the sandboxes.

Guarantees:
- an image in the store is acquired at once; a missing one is fetched by a child process, once for all requests;
- cancelling a request does not cancel the fetch: other requests may wait for it, and the next attempt needs it;
- all fetches end when `close` is called or this process ends;
- an acquired image is not removed from the store until it is released.
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
from rookery.core.lifetimes import detached_context
from rookery.sandboxes.images.engine_images import has_changed_in_engine
from rookery.sandboxes.images.progress import ImageProgress, OnProgress
from rookery.sandboxes.images.references import ImageReference
from rookery.sandboxes.images.store import AcquiredImage, ImageStore

MAX_PARALLEL_FETCHES = 4
FETCH_SECONDS = 3600.0
"""Time limit of a fetch in seconds, including the wait for other processes that fetch the same image."""
SYNC_SECONDS = 120.0
ENGINE_CHECK_SECONDS = 30.0
"""Seconds for which an image from a container engine is not checked again for changes."""
ACQUIRE_TRIES = 5
_log = logging.getLogger("rookery.sandboxes")


class ImageFetcher:
    """Acquires images from the store and fetches missing ones. Bound to the event loop of its first use."""

    def __init__(self, directory: Path | None = None, on_progress: OnProgress | None = None) -> None:
        self._store = ImageStore(directory)
        self._on_progress = on_progress
        self._fetches: dict[str, asyncio.Task[str]] = {}
        self._syncs: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_PARALLEL_FETCHES)
        self._checked_at: dict[str, float] = {}
        self._closed = False

    async def acquire(self, reference: ImageReference) -> AcquiredImage:
        """Return an image from the store, and fetch it first if it is not there. The caller must release it.

        Raise `SandboxError` with the cause `task.image` if the image does not exist or is invalid, and with the
        cause `sandbox.image` if it cannot be fetched now.
        """
        image_id = await self._find_known(reference)
        for _ in range(ACQUIRE_TRIES):
            acquired = self._store.acquire(image_id) if image_id else None
            if acquired is not None:
                return acquired
            image_id = await self._fetch_once(reference)
        raise SandboxError(
            f"the image {reference.text} was removed from the store {ACQUIRE_TRIES} times before it could be "
            "used: the store is too small for the images in use (raise ROOKERY_IMAGES_BUDGET)",
            cause="sandbox.image",
        )

    def acquire_again(self, acquired: AcquiredImage) -> AcquiredImage:
        """Acquire an image that is already acquired once more, for a fork of the sandbox that uses it."""
        again = self._store.acquire(acquired.record.id)
        assert again is not None
        return again

    async def load_into_engine(self, reference: ImageReference, socket_path: str) -> str:
        """Load an image into the container engine at `socket_path`; return its name in the container engine."""
        return await self._fetch_once(reference, socket_path)

    async def _find_known(self, reference: ImageReference) -> str:
        """Return the ID of an image in the store.

        Return "" if the image is missing, or if the container engine that it came from now has another image of
        this name.
        """
        if reference.kind == "dockerfile":
            return ""  # the child process compares the build context
        known = self._store.find_name(reference.key)
        if known is None or known.origin != "engine":
            return known.image if known is not None else ""
        now = asyncio.get_running_loop().time()
        if now - self._checked_at.get(reference.key, -ENGINE_CHECK_SECONDS) >= ENGINE_CHECK_SECONDS:
            if await asyncio.to_thread(has_changed_in_engine, known):
                return ""
            self._checked_at[reference.key] = now
        return known.image

    async def _fetch_once(self, reference: ImageReference, socket_path: str = "") -> str:
        """Fetch an image, or join a fetch that is already running."""
        if self._closed:
            raise SandboxError(f"the image {reference.text} is not fetched: the sandbox provider is closed")
        key = f"{socket_path} {reference.key}"
        task = self._fetches.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(
                self._fetch(reference, socket_path), context=detached_context()
            )
            self._fetches[key] = task
            task.add_done_callback(lambda done: self._forget_fetch(key, done))
        return await asyncio.shield(task)

    def _forget_fetch(self, key: str, task: asyncio.Task[str]) -> None:
        self._fetches.pop(key, None)
        if not task.cancelled():
            task.exception()  # retrieved, because every request may have been cancelled

    async def _fetch(self, reference: ImageReference, socket_path: str) -> str:
        self._store.open()
        request = {
            "directory": str(self._store.folder),
            "reference": reference,
            "parent_pid": os.getpid(),
            "engine_socket": socket_path,
        }
        async with self._slots, asyncio.timeout(FETCH_SECONDS):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "rookery.sandboxes.images.fetch_process",
                msgspec.json.encode(request).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            try:
                image = await self._read_messages(process, reference)
            except BaseException:
                if self._on_progress is not None:
                    self._on_progress(ImageProgress(image=reference.text, step="failed"))
                await _kill(process)
                raise
        # The process still flushes the layers to disk.
        sync = asyncio.get_running_loop().create_task(self._wait_for_sync(process))
        self._syncs.add(sync)
        sync.add_done_callback(self._syncs.discard)
        return image

    async def _wait_for_sync(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(SYNC_SECONDS):
                await process.wait()
        finally:
            await _kill(process)

    async def _read_messages(self, process: asyncio.subprocess.Process, reference: ImageReference) -> str:
        """Forward the progress of a fetch; return the ID or name of the fetched image."""
        assert process.stdout is not None
        logged = False
        async for line in process.stdout:
            message = msgspec.json.decode(line)
            if "error" in message:
                raise SandboxError(message["error"], cause=message["cause"])
            if "image" in message:
                if logged:
                    _log.info("fetched the image %s", reference.text)
                return str(message["image"])
            progress = msgspec.convert(message["progress"], ImageProgress)
            if self._on_progress is not None:
                self._on_progress(progress)
            if not logged and progress.step == "fetching":
                logged = True
                _log.info("fetching the image %s: %d bytes", reference.text, progress.total)
        raise SandboxError(
            f"the image {reference.text} was not fetched: its process ended with exit code {await process.wait()}",
            cause="sandbox.image",
        )

    async def close(self) -> None:
        """Cancel running fetches, kill their processes and remove their temporary files."""
        self._closed = True
        fetches = list(self._fetches.values())
        tasks: list[asyncio.Task[Any]] = [*fetches, *self._syncs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if fetches:
            await asyncio.to_thread(self._store.remove_leftovers)


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
