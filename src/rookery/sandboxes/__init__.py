"""The boxes untrusted programs run in.

Promises:
- every provider keeps the protocol's promises, and one suite (`conformance`) tests them all the same way;
- a provider is found by its name among the entry points of the group `rookery.sandboxes`; adding one edits
  nothing here, and opening one starts nothing;
- the best provider is one that isolates and works on this machine; one that cannot even be asked is passed over;
- whatever an owner leaves behind when it dies, `reap` removes.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rookery.core import SandboxSpec, UsageError
from rookery.core.errors import describe
from rookery.sandboxes.leases import owner_alive, reap, start_ticks
from rookery.sandboxes.protocol import Command, Home, Lease, OnOutput, Process, Provider, Sandbox, Shell, Stream

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "Best",
    "Command",
    "Home",
    "Lease",
    "OnOutput",
    "Process",
    "Provider",
    "Sandbox",
    "Shell",
    "Stream",
    "best_provider",
    "is_isolated",
    "open_provider",
    "owner_alive",
    "reap",
    "start_ticks",
]

GROUP = "rookery.sandboxes"
LAST = "subprocess"
"""The provider of last resort: it works everywhere and isolates nothing."""
_QUICKEST = "local"


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """A provider chosen for this machine."""

    name: str
    isolated: bool
    refused: dict[str, str] = {}
    """Providers that isolate, or that could not be asked, and why they cannot be used here."""


def best_provider(spec: SandboxSpec | None = None) -> Best:
    """The installed provider that isolates and can give `spec` on this machine; else `subprocess`. Starts nothing.

    Where several can, it is the one whose sandboxes start quickest, then the first by name.
    """
    refused: dict[str, str] = {}
    for name, entry in sorted(_installed().items(), key=lambda pair: (pair[0] != _QUICKEST, pair[0])):
        if name == LAST:
            continue
        try:
            provider: Provider = entry.load()(Home(folder=Path(), run="ask"))
            if not provider.isolated:
                continue
            problems = provider.check(msgspec.structs.replace(spec or SandboxSpec(), provider=name))
        except Exception as error:  # noqa: BLE001  (whatever a broken plug-in raises: the others still stand)
            problems = [describe(error)]
        if not problems:
            return Best(name=name, isolated=True, refused=refused)
        refused[name] = " ".join(problems)
    return Best(name=LAST, isolated=False, refused=refused)


def is_isolated(name: str) -> bool:
    """Whether the provider of this name keeps programs off the user's files and network; opens nothing."""
    return open_provider(name, Home(folder=Path(), run="ask")).isolated


def open_provider(name: str, home: Home) -> Provider:
    """The provider of this name, ready to create sandboxes below `home`."""
    found = _installed()
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise UsageError(f"there is no sandbox provider {name!r}; known: {known}")
    provider: Provider = found[name].load()(home)
    return provider


def _installed() -> "dict[str, EntryPoint]":
    """Providers by name; of two with one name the first counts."""
    from importlib.metadata import entry_points  # slow to import

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return found
