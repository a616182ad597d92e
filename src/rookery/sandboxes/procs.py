"""Looking at processes and removing trees; standard library only, since the guard uses it too.

Promises:
- a process that ends while it is looked at is simply not there, never an error;
- removing a tree follows no link and needs no recursion, however deep or oddly moded the tree is.
"""

# pathlib is slow to import
# ruff: noqa: PTH101, PTH106, PTH110, PTH112, PTH123, PTH208

import os
import resource
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes.small import _signal, suppress
else:
    from small import _signal, suppress

MARKER = "ROOKERY_SANDBOX"
COMMAND = "ROOKERY_COMMAND"
HZ = os.sysconf("SC_CLK_TCK")
DEFAULTED = [s for s in range(1, 32) if s not in (_signal.SIGKILL, _signal.SIGSTOP)]
"""Signals a new program finds in their default state."""
LISTS_CHILDREN = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
"""Some kernels are built without these lists; there every process is asked for its parent."""


def now_ticks() -> int:
    """The present in the unit of /proc/PID/stat's start time."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * HZ)


def stat_of(pid: int) -> tuple[str, int, int] | None:
    """State, parent and start ticks; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[1]), int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def variable_of(pid: int, name: str) -> str | None:
    """A variable of the environment a process was started with; None when it hides it."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            block = file.read(1 << 20)
    except OSError:
        return None
    prefix = f"{name}=".encode()
    for item in block.split(b"\0"):
        if item.startswith(prefix):
            return item[len(prefix) :].decode("utf-8", "replace")
    return None


def children_of(pid: int) -> list[int]:
    """Direct children, of all its threads."""
    if not LISTS_CHILDREN:
        every = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [other for other in every if (stat_of(other) or ("", 0))[1] == pid]
    found: list[int] = []
    with suppress(OSError):  # it ended while we looked
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())  # a thread that ended hides nothing of the others
    return found


def remove_tree(path: str) -> None:
    """Removes a folder whatever is in it: any depth, any mode, links never followed.

    Folders are moved up before they are emptied, so depth costs neither descriptors nor recursion.
    """
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        todo = ["."]
        serial = 0
        while todo:
            name = todo.pop()
            here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                with os.scandir(here) as entries:
                    listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
                for entry, folder in listed:
                    if not folder:
                        os.unlink(entry, dir_fd=here)
                        continue
                    handle = os.open(entry, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                    try:
                        os.chmod(f"/proc/self/fd/{handle}", 0o700)
                    finally:
                        os.close(handle)
                    if name == ".":
                        todo.append(entry)
                        continue
                    while True:
                        serial += 1
                        try:
                            os.stat(f"r{serial}", dir_fd=top, follow_symlinks=False)
                        except FileNotFoundError:
                            break
                    os.rename(entry, f"r{serial}", src_dir_fd=here, dst_dir_fd=top)
                    todo.append(f"r{serial}")
            finally:
                os.close(here)
            if name != ".":
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def candidates(name: bytes, path: bytes) -> list[bytes]:
    """Where the program may lie; the one that is there first, as a shell would look it up."""
    if b"/" in name or not name:
        return [name]
    places = [(folder or b".") + b"/" + name for folder in path.split(b":")]
    return [place for place in places if os.access(place, os.X_OK) and not os.path.isdir(place)]


def lower(which: int, hard: int, soft: int | None = None, *, pid: int = 0) -> None:
    """Sets a limit, never above the present hard one: raising needs a right we may not have."""
    present = resource.prlimit(pid, which)[1]
    if present != resource.RLIM_INFINITY:
        hard = min(hard, present)
    with suppress(ProcessLookupError):  # it may have ended by now
        resource.prlimit(pid, which, (hard if soft is None else min(soft, hard), hard))
