"""The boxes untrusted programs run in.

Promises:
- every provider keeps the protocol's promises, and one suite (`conformance`) tests them all the same way;
- a provider is found by its name among the entry points of the group `rookery.sandboxes`; adding one edits
  nothing here, and opening one starts nothing;
- whatever an owner leaves behind when it dies, `reap` removes.
"""

from pathlib import Path

from rookery.core import UsageError
from rookery.sandboxes.leases import owner_alive, reap, start_ticks
from rookery.sandboxes.protocol import Command, Home, Lease, OnOutput, Process, Provider, Sandbox, Shell, Stream

__all__ = [
    "Command",
    "Home",
    "Lease",
    "OnOutput",
    "Process",
    "Provider",
    "Sandbox",
    "Shell",
    "Stream",
    "is_isolated",
    "open_provider",
    "owner_alive",
    "reap",
    "start_ticks",
]

GROUP = "rookery.sandboxes"


def is_isolated(name: str) -> bool:
    """Whether the provider of this name keeps programs off the user's files and network; opens nothing."""
    return open_provider(name, Home(folder=Path(), run="ask")).isolated


def open_provider(name: str, home: Home) -> Provider:
    """The provider of this name, ready to create sandboxes below `home`."""
    from importlib.metadata import entry_points  # slow to import

    found = entry_points(group=GROUP)
    for entry in found:
        if entry.name == name:
            provider: Provider = entry.load()(home)
            return provider
    known = ", ".join(sorted({entry.name for entry in found})) or "none"
    raise UsageError(f"there is no sandbox provider {name!r}; known: {known}")
