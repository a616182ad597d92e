"""Whom a command of a box can run as, by name or number.

Promises:
- a number from 0 to 65534 is that user; a name is looked up in the box's own list, which is data of the box:
  read with a bound, and believed only as far as a number of that range;
- a user that there is not, or that no command can be, is refused in words.
"""

import contextlib
from collections.abc import Awaitable, Callable

from rookery.core import SandboxError
from rookery.sandboxes.guarded import User

LAST = 65534
LIST = "/etc/passwd"
MOST = 1 << 20
KNOWN = {"root": 0, "nobody": LAST}


async def find(user: str, read: Callable[[str], Awaitable[bytes]]) -> User:
    """`read` reads a file of the box."""
    if user.isascii() and user.isdecimal():
        if len(user) > 5 or int(user) > LAST:
            raise _refused(user, f"users are numbers from 0 to {LAST}")
        name = next((name for name, uid in KNOWN.items() if uid == int(user)), user)
        return User(int(user), int(user), name)
    if user in KNOWN:
        return User(KNOWN[user], KNOWN[user], user)
    try:
        data = await read(LIST)
    except OSError as error:
        raise _refused(user, f"{LIST} cannot be read: {error.strerror or error}") from error
    for line in data.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if fields[0] == user and len(fields) > 3:
            with contextlib.suppress(ValueError):
                uid, gid = int(fields[2]), int(fields[3])
                if 0 <= uid <= LAST and 0 <= gid <= LAST:
                    return User(uid, gid, user)
            raise _refused(user, f"{LIST} says nothing usable about it")
    raise _refused(user, f"{LIST} has no such user")


def _refused(user: str, why: str) -> SandboxError:
    return SandboxError(f"a command cannot run as {user!r}: {why}", cause="sandbox.refused")
