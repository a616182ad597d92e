"""What every provider must do, as checks that need nothing but the provider; each raises AssertionError.

    for check in CHECKS:
        await check(provider)

A sandbox of the provider must have `sh`, `bash`, `python3` and the usual small tools. Each check is named
after the promise it holds and leaves nothing open.
"""

from rookery.sandboxes.conformance import commands, files, mounts, networks, shells, snapshots
from rookery.sandboxes.conformance.tools import Check

CHECKS: tuple[Check, ...] = (
    *commands.CHECKS,
    *shells.CHECKS,
    *files.CHECKS,
    *mounts.CHECKS,
    *snapshots.CHECKS,
    *networks.CHECKS,
)

__all__ = ["CHECKS", "Check"]
