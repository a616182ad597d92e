"""What the runners of a run share on this machine: the keeper of their sandboxes.

Promises:
- it is there before a runner could ask for a sandbox, and gone when the last runner is;
- a machine that cannot have one is no reason not to run: a runner that needs a sandbox is told why by its own.
"""

from pathlib import Path

from rookery.core import SandboxError, UsageError
from rookery.core.errors import describe
from rookery.engine.wire import RunSettings
from rookery.sandboxes import open_provider
from rookery.sandboxes.protocol import Home, Keeping, Provider


def home_of(settings: RunSettings) -> Home:
    """Where the sandboxes of a run live."""
    return Home(folder=Path(settings.folder) / "sandboxes", run=settings.run)


class Kept:
    """The provider that holds the keeper, in the supervisor."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._provider: Provider | None = None

    async def open(self) -> str:
        """What kept it from being there; empty where it is, or where nobody needs one."""
        if not self._settings.sandbox.provider:
            return ""
        try:
            provider = open_provider(self._settings.sandbox.provider, home_of(self._settings))
        except UsageError as error:
            return describe(error)
        if not isinstance(provider, Keeping):
            return ""
        self._provider = provider
        try:
            await provider.keep()
        except (SandboxError, OSError) as error:
            return describe(error)
        return ""

    async def close(self) -> None:
        provider, self._provider = self._provider, None
        if provider is not None:
            await provider.close()
