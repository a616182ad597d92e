"""Inspect processes through /proc, lower resource limits, and remove directory trees.

Runs in the process that uses sandboxes, in guards, in the keeper and in pid 1 of sandboxes. Standard library
only. A process that ends while it is inspected counts as absent; that is never an error.
"""

import os
import resource
import time

from rookery.sandbox_runtime.lightweight import _signal, suppress

SANDBOX_VARIABLE = "ROOKERY_SANDBOX"
"""Environment variable of every process of a sandbox. Its value identifies the run and the sandbox."""
COMMAND_VARIABLE = "ROOKERY_COMMAND"
"""Environment variable with the number of the command that a process belongs to."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
RESET_SIGNALS = [s for s in range(1, 32) if s not in (_signal.SIGKILL, _signal.SIGSTOP)]
"""Numbers of the signals that are set to their default action in a new program."""
HAS_CHILDREN_FILES = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
"""True if the kernel was built with CONFIG_PROC_CHILDREN. Without it, children are found by their parent pid."""


def now_ticks() -> int:
    """Return the current time in clock ticks since boot, the unit of the start time in /proc/PID/stat."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_SECOND)


def read_stat(pid: int) -> tuple[str, int, int] | None:
    """Return a process's state, parent pid and start time in ticks; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[1]), int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def read_variable(pid: int, name: str) -> str | None:
    """Return the value that an environment variable had when a process started; None if it cannot be read."""
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


def list_children(pid: int) -> list[int]:
    """Return the direct children of all threads of a process."""
    if not HAS_CHILDREN_FILES:
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [other for other in pids if (read_stat(other) or ("", 0))[1] == pid]
    children: list[int] = []
    with suppress(OSError):  # the process ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                children += map(int, file.read().split())  # if one thread ended, the others are still listed
    return children


def remove_tree(path: str) -> None:
    """Remove a directory of any depth and with any file modes, without following symbolic links.

    Subdirectories are moved to the top before they are emptied, so that depth costs neither file descriptors nor
    recursion.
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
                for entry, is_directory in listed:
                    if not is_directory:
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


def find_programs(name: bytes, path: bytes) -> list[bytes]:
    """Return the executables that `name` can refer to, in the order of the search path `path`, as a shell does."""
    if b"/" in name or not name:
        return [name]
    candidates = [(directory or b".") + b"/" + name for directory in path.split(b":")]
    return [file for file in candidates if os.access(file, os.X_OK) and not os.path.isdir(file)]


def lower_limit(which: int, hard: int, soft: int | None = None, *, pid: int = 0) -> None:
    """Set a resource limit (`RLIMIT_*`) of a process; pid 0 is this process.

    The limit is never raised above the current hard limit, because that needs a privilege.
    """
    present = resource.prlimit(pid, which)[1]
    if present != resource.RLIM_INFINITY:
        hard = min(hard, present)
    with suppress(ProcessLookupError):  # the process may have ended
        resource.prlimit(pid, which, (hard if soft is None else min(soft, hard), hard))
