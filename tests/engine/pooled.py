"""A local provider that declares its sandboxes slow to create, and records which ones it created."""

import asyncio
from typing import Any, ClassVar

from rookery.core import SandboxSpec
from rookery.sandboxes.images.progress import ImageProgress
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox


class Provider(LocalProvider):
    """Records the sandboxes that this process created and closed."""

    poolable = True
    created: ClassVar[list[tuple[str, SandboxSpec]]] = []
    ended: ClassVar[list[str]] = []
    fetch: ClassVar[asyncio.Event | None] = None
    """If set, each creation reports the progress of an image pull and waits for this event."""

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> LocalSandbox:
        Provider.created.append((attempt, spec))
        if Provider.fetch is not None and self.on_image_progress is not None:
            self.on_image_progress(ImageProgress(image="python:3.12", step="fetching", done=34, total=100))
            await Provider.fetch.wait()
            self.on_image_progress(ImageProgress(image="python:3.12", step="ready"))
        return await super().create(spec, attempt=attempt, timeout=timeout)

    def forget(self, sandbox: Any) -> None:
        Provider.ended.append(sandbox.id)
        super().forget(sandbox)
