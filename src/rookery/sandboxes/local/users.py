"""Look up the user that a command of a sandbox runs as, by name or number. Runs in the sandbox's owner.

A number from 0 to 65534 is taken as a user ID. A name is looked up in the sandbox's own /etc/passwd, which is
untrusted: it is read up to a limit, and only IDs from 0 to 65534 are accepted.
"""

import contextlib
from collections.abc import Awaitable, Callable

from rookery.core import SandboxError
from rookery.sandboxes.guarded_sandbox import CommandUser

MAX_ID = 65534
PASSWD = "/etc/passwd"  # noqa: S105
MAX_PASSWD = 1 << 20
WELL_KNOWN = {"root": 0, "nobody": MAX_ID}


async def find_user(user: str, read: Callable[[str], Awaitable[bytes]]) -> CommandUser:
    """Return the IDs of a user given by name or number. `read` reads a file of the sandbox.

    Raise `SandboxError(sandbox.refused)` if there is no such user.
    """
    if user.isascii() and user.isdecimal():
        if len(user) > 5 or int(user) > MAX_ID:
            raise _refuse(user, f"user IDs are numbers from 0 to {MAX_ID}")
        name = next((name for name, uid in WELL_KNOWN.items() if uid == int(user)), user)
        return CommandUser(int(user), int(user), name)
    if user in WELL_KNOWN:
        return CommandUser(WELL_KNOWN[user], WELL_KNOWN[user], user)
    try:
        data = await read(PASSWD)
    except OSError as error:
        raise _refuse(user, f"{PASSWD} cannot be read: {error.strerror or error}") from error
    for line in data.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if fields[0] == user and len(fields) > 3:
            with contextlib.suppress(ValueError):
                uid, gid = int(fields[2]), int(fields[3])
                if 0 <= uid <= MAX_ID and 0 <= gid <= MAX_ID:
                    return CommandUser(uid, gid, user)
            raise _refuse(user, f"its entry in {PASSWD} has no valid IDs")
    raise _refuse(user, f"{PASSWD} has no such user")


def _refuse(user: str, reason: str) -> SandboxError:
    return SandboxError(f"a command cannot run as {user!r}: {reason}", cause="sandbox.refused")
