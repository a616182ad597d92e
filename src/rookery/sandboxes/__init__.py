"""The boxes untrusted programs run in.

Promises:
- every provider keeps the protocol's promises, and one suite (`conformance`) tests them all the same way;
- a provider is found by its name among the entry points of the group `rookery.sandboxes`; adding one edits
  nothing here, and opening one starts nothing;
- one that does not isolate is never fallen back to in silence: it was named, or consented to;
- the best provider is one that isolates and works on this machine; one that cannot even be asked is passed over;
- whatever an owner leaves behind when it dies, `reap` removes.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rookery.core import SandboxSpec, UsageError
from rookery.core.errors import describe
from rookery.core.suggestions import suggestion
from rookery.sandboxes.leases import owner_alive, start_ticks
from rookery.sandboxes.protocol import (
    Command,
    Egress,
    Home,
    Lease,
    Listening,
    OnOutput,
    Pooled,
    Process,
    Provider,
    Reaching,
    Sandbox,
    Shell,
    Stream,
)
from rookery.sandboxes.reaper import reap

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "Best",
    "Command",
    "Egress",
    "Home",
    "Lease",
    "Listening",
    "OnOutput",
    "Process",
    "Provider",
    "Reaching",
    "Sandbox",
    "Shell",
    "Stream",
    "best_provider",
    "is_isolated",
    "is_pooled",
    "open_provider",
    "owner_alive",
    "provider_names",
    "reap",
    "settle",
    "start_ticks",
]

GROUP = "rookery.sandboxes"
LAST = "subprocess"
"""The provider of last resort: it works everywhere and isolates nothing."""
WAY_OUT = (
    "`rookery doctor` says what is missing; to run programs without isolation, as you and on your files, "
    "consent with --unsafe (in Python: SandboxSpec(untrusted_ok=True)) or name the provider subprocess"
)
QUICKEST = "local"
"""The provider that is asked first."""


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """A provider chosen for this machine."""

    name: str
    isolated: bool
    refused: dict[str, str] = {}
    """Providers that isolate, or that could not be asked, and why they cannot be used here."""


def best_provider(spec: SandboxSpec | None = None) -> Best:
    """The installed provider that isolates and can give `spec` on this machine; else `subprocess`.

    Where several can, it is the one whose sandboxes start quickest, then the first by name. A provider may try one
    sandbox to know; it is gone when this returns, and tried once in a process.
    """
    refused: dict[str, str] = {}
    for name, entry in sorted(_installed().items(), key=lambda pair: (pair[0] != QUICKEST, pair[0])):
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


def settle(spec: SandboxSpec) -> tuple[SandboxSpec, str]:
    """The spec with its provider, the best of this machine unless it names one, and "".

    Where nothing isolates and nobody consented: the spec as it is, and what to do. `UsageError` for a spec that no
    provider could give.
    """
    if spec.image is not None:
        from rookery.sandboxes.images.references import settled  # few have one

        # A run that is resumed from another folder means the same one.
        spec = msgspec.structs.replace(spec, image=settled(spec.image))
    if spec.provider:
        return spec, ""
    if spec.network == "allow" or spec.allow:
        from rookery.sandboxes.egress_rules import problems  # slow to import

        if wrong := problems(spec):
            raise UsageError(" ".join(wrong))
    best = best_provider(spec)
    if best.isolated or spec.untrusted_ok:
        return msgspec.structs.replace(spec, provider=best.name), ""
    whys = " ".join(f"({name}: {why})" for name, why in best.refused.items())
    return spec, f"no sandbox that isolates can be had here{' ' if whys else ''}{whys}; {WAY_OUT}"


def is_isolated(name: str) -> bool:
    """Whether the provider of this name keeps programs off the user's files and network; opens nothing."""
    return open_provider(name, Home(folder=Path(), run="ask")).isolated


def is_pooled(name: str) -> bool:
    """Whether sandboxes of the provider of this name take so long that some are made ahead; opens nothing."""
    provider = open_provider(name, Home(folder=Path(), run="ask"))
    return isinstance(provider, Pooled) and provider.pooled


def provider_names() -> list[str]:
    """Of all that are installed."""
    return sorted(_installed())


def open_provider(name: str, home: Home) -> Provider:
    """The provider of this name, ready to create sandboxes below `home`."""
    found = _installed()
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise UsageError(f"there is no sandbox provider {name!r}; known: {known}{suggestion(name, found)}")
    provider: Provider = found[name].load()(home)
    return provider


def _installed() -> "dict[str, EntryPoint]":
    """Providers by name; of two with one name the first counts."""
    from importlib.metadata import entry_points  # slow to import

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return found
