"""Checks that every sandbox provider must pass, as functions that need only the provider.

    for check in CHECKS:
        await check(provider)

Each check is named after the behaviour that it tests, raises `AssertionError` if the provider lacks it, and closes
its sandboxes. A feature that the provider may lack, as `find_capabilities` reports, must work or be refused.
A sandbox of the provider must have `sh`, `bash`, `python3` and the usual Unix tools.
"""

from rookery.sandboxes.conformance import commands, files, mounts, networks, shells, snapshots
from rookery.sandboxes.conformance.capabilities import find_capabilities
from rookery.sandboxes.conformance.tools import Check

CHECKS: tuple[Check, ...] = (
    *commands.CHECKS,
    *shells.CHECKS,
    *files.CHECKS,
    *mounts.CHECKS,
    *snapshots.CHECKS,
    *networks.CHECKS,
)

__all__ = ["CHECKS", "Check", "find_capabilities"]
