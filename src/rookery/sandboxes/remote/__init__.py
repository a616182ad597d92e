"""Sandboxes on other machines: a program there runs them, and calls reach it over one connection.

To add a provider for a service that rents machines, implement `SandboxService` and return
`ServiceProvider(service, home)` from the entry point.
"""

from rookery.sandboxes.remote.link import Connection, HostLost, MachineGone
from rookery.sandboxes.remote.process_connection import ProcessConnection
from rookery.sandboxes.remote.service import QuotaExceeded, SandboxService, ServiceProvider

__all__ = [
    "Connection",
    "HostLost",
    "MachineGone",
    "ProcessConnection",
    "QuotaExceeded",
    "SandboxService",
    "ServiceProvider",
]
