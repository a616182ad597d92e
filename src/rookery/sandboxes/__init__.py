"""Sandboxes: isolated environments for untrusted programs.

Guarantees:
- every provider (an implementation of sandboxes, such as `local` or `docker`) implements the same protocol and
  passes the same tests (`rookery.sandboxes.conformance`);
- providers are found by name among the entry points of the group `rookery.sandboxes`;
- a provider without isolation is used only if the sandbox's description (`SandboxSpec`) names it or consents to
  missing isolation;
- `best_provider` skips a provider that cannot be loaded or checked;
- `reap` removes the sandboxes that a process leaves behind when it dies.

Opening a provider starts no process.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rookery.core import SandboxSpec, UsageError
from rookery.core.errors import describe
from rookery.core.plugins import list_plugin_names, load_plugin
from rookery.sandboxes.leases import is_owner_alive, read_start_ticks
from rookery.sandboxes.protocol import (
    Command,
    DiagnosableProvider,
    EgressRecord,
    ImageFetchingProvider,
    KeeperProvider,
    Lease,
    MachineCheck,
    OnOutput,
    PoolableProvider,
    Process,
    Provider,
    ProviderHome,
    ReapableProvider,
    RemoteProvider,
    Sandbox,
    SeparateNetworkProvider,
    Shell,
    Stream,
    SupportsEgressRecords,
    SupportsKillAll,
    SupportsLimitCounters,
    SupportsModelNetwork,
    SupportsUsage,
)
from rookery.sandboxes.reaper import reap

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "Command",
    "DiagnosableProvider",
    "EgressRecord",
    "ImageFetchingProvider",
    "KeeperProvider",
    "Lease",
    "MachineCheck",
    "OnOutput",
    "PoolableProvider",
    "Process",
    "Provider",
    "ProviderChoice",
    "ProviderHome",
    "ReapableProvider",
    "RemoteProvider",
    "Sandbox",
    "SeparateNetworkProvider",
    "Shell",
    "Stream",
    "SupportsEgressRecords",
    "SupportsKillAll",
    "SupportsLimitCounters",
    "SupportsModelNetwork",
    "SupportsUsage",
    "best_provider",
    "diagnose_providers",
    "has_own_loopback",
    "is_isolated",
    "is_owner_alive",
    "is_poolable",
    "is_remote",
    "open_provider",
    "provider_names",
    "read_start_ticks",
    "reap",
    "resolve_spec",
]

ENTRY_POINT_GROUP = "rookery.sandboxes"
PREFERRED_PROVIDER = "local"
"""The provider that is tried first, because its sandboxes start fastest."""
FALLBACK_PROVIDER = "subprocess"
"""The provider that works on every Linux machine and isolates nothing: programs run as ordinary processes."""
NO_ISOLATION_HELP = (
    "`rookery doctor` says what is missing; to run programs without isolation, as you and on your files, "
    "consent with --unsafe (in Python: SandboxSpec(untrusted_ok=True)) or name the provider subprocess"
)


class ProviderChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The provider that `best_provider` chose for this machine."""

    name: str
    isolated: bool
    refused: dict[str, str] = {}
    """Maps the name of each provider that was tried and cannot be used on this machine to the reason."""


def best_provider(spec: SandboxSpec | None = None) -> ProviderChoice:
    """Return the first installed provider that isolates and supports `spec` on this machine; else `subprocess`.

    `local`, whose sandboxes start fastest, is tried first, then the others by name. To find out whether it works,
    a provider may create test sandboxes, which are removed before this function returns. `local` does so only once
    in a process.
    """
    refused: dict[str, str] = {}
    for name, entry in _by_preference().items():
        if name == FALLBACK_PROVIDER:
            continue
        try:
            provider: Provider = entry.load()(_no_home())
            if not provider.isolated:
                continue
            problems = provider.check(msgspec.structs.replace(spec or SandboxSpec(), provider=name))
        except Exception as error:  # noqa: BLE001  (a broken plug-in must not hide the other providers)
            problems = [describe(error)]
        if not problems:
            return ProviderChoice(name=name, isolated=True, refused=refused)
        refused[name] = " ".join(problems)
    return ProviderChoice(name=FALLBACK_PROVIDER, isolated=False, refused=refused)


def resolve_spec(spec: SandboxSpec) -> tuple[SandboxSpec, str]:
    """Return `spec` with a provider and an absolute image path, and an error message that is empty on success.

    A provider that `spec` names is kept without a check. If no provider isolates programs on this machine and
    `spec` does not consent to that (`untrusted_ok`), the message says what to do, and the returned spec names no
    provider. Raise `UsageError` if the network rules in `spec` are invalid for every provider.
    """
    if spec.image is not None:
        from rookery.sandboxes.images.references import make_absolute  # rarely needed

        # A run that is resumed from another directory must use the same image.
        spec = msgspec.structs.replace(spec, image=make_absolute(spec.image))
    if spec.provider:
        return spec, ""
    if spec.network == "allow" or spec.allow:
        from rookery.sandboxes.egress.rules import find_rule_problems  # slow to import

        if problems := find_rule_problems(spec):
            raise UsageError(" ".join(problems))
    choice = best_provider(spec)
    if choice.isolated or spec.untrusted_ok:
        return msgspec.structs.replace(spec, provider=choice.name), ""
    reasons = "".join(f" ({name}: {reason})" for name, reason in choice.refused.items())
    return spec, f"no provider can isolate programs here{reasons}; {NO_ISOLATION_HELP}"


def diagnose_providers() -> dict[str, Sequence[MachineCheck]]:
    """Run the machine checks that providers contribute to `rookery doctor`; return them by provider name."""
    found: dict[str, Sequence[MachineCheck]] = {}
    for name, entry in _by_preference().items():
        try:
            provider = entry.load()(_no_home())
            if isinstance(provider, DiagnosableProvider):
                found[name] = provider.diagnose()
        except Exception as error:  # noqa: BLE001  (a broken plug-in must not hide the other providers)
            found[name] = [MachineCheck(name, "info", describe(error))]
    return found


def is_isolated(name: str) -> bool:
    """Return whether a provider keeps programs off the user's files and network. Does not start the provider."""
    return open_provider(name, _no_home()).isolated


def is_poolable(name: str) -> bool:
    """Return whether a provider's sandboxes start so slowly that a pool should create some in advance."""
    provider = open_provider(name, _no_home())
    return isinstance(provider, PoolableProvider) and provider.poolable


def has_own_loopback(name: str) -> bool:
    """Return whether sandboxes of a provider do not share this machine's loopback interface (network `all`)."""
    provider = open_provider(name, _no_home())
    return isinstance(provider, SeparateNetworkProvider) and provider.own_loopback


def is_remote(name: str) -> bool:
    """Return whether a provider's sandboxes are on other machines, which do not have this machine's files."""
    provider = open_provider(name, _no_home())
    return isinstance(provider, RemoteProvider) and provider.remote


def provider_names() -> list[str]:
    """Return the names of all installed providers."""
    return list_plugin_names(ENTRY_POINT_GROUP)


def open_provider(name: str, home: ProviderHome) -> Provider:
    """Open the provider with this name, which stores its files in `home`. Starts no process.

    Raise `UsageError` if no provider of this name is installed.
    """
    provider: Provider = load_plugin(ENTRY_POINT_GROUP, name, "sandbox provider")(home)
    return provider


def _no_home() -> ProviderHome:
    """Return a placeholder home for providers that are only asked what they support and write no files."""
    return ProviderHome(folder=Path(), run="check")


def _by_preference() -> "dict[str, EntryPoint]":
    return dict(sorted(_entry_points().items(), key=lambda pair: (pair[0] != PREFERRED_PROVIDER, pair[0])))


def _entry_points() -> "dict[str, EntryPoint]":
    """Return the entry points of the installed providers by name. If two have the same name, the first is used."""
    from importlib.metadata import entry_points  # slow to import

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(entry.name, entry)
    return found
