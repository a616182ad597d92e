"""Whose a container is, in its labels; and the end of those whose owner is dead.

Promises:
- a container of a live owner within its deadline is never touched, whoever's run it is; nor is one whose owner
  cannot be seen from here (another machine, another process namespace) before its deadline;
- containers without our labels are never touched;
- what programs wrote does not keep a container from being removed, where we may remove it ourselves;
- it works after a SIGKILL of the owner and after a new start of the machine; while the engine does not answer
  nothing is forgotten: leases stay until their container is gone.
"""

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rookery.core import SandboxError
from rookery.sandboxes import leases, procs
from rookery.sandboxes.docker import asking
from rookery.sandboxes.protocol import Lease

SANDBOX, RUN, ATTEMPT = "rookery.sandbox", "rookery.run", "rookery.attempt"
OWNER, DEADLINE, MACHINE, BOOT = "rookery.owner", "rookery.deadline", "rookery.machine", "rookery.boot"
OURS = (SANDBOX, RUN, ATTEMPT, OWNER, DEADLINE, MACHINE, BOOT)
ENGINE = "engine"
"""The file in a sandbox's folder that says which engine has its container."""
_MOST = 1 << 12
AT_ONCE = 8
"""Removed at a time: an engine takes a good part of a second for each, most of which it waits."""


def name_of(identity: str) -> str:
    """The container's: known before there is one, so that it can be removed whatever became of its creation."""
    return f"rookery-{identity}"


def labels(granted: Lease) -> dict[str, str]:
    """A lease as the engine keeps it."""
    return {
        SANDBOX: granted.id,
        RUN: granted.run,
        ATTEMPT: granted.attempt,
        OWNER: f"{granted.owner_pid}.{granted.owner_started}",
        DEADLINE: f"{granted.deadline:.0f}",
        MACHINE: _machine(),
        BOOT: _boot(),
    }


def is_orphan(said: Mapping[str, str], *, now: float) -> bool:
    """Whether what these labels say may be ended."""
    if not said.get(SANDBOX):
        return False
    with contextlib.suppress(ValueError):
        if now >= float(said.get(DEADLINE, "inf")):
            return True
    if said.get(MACHINE) != _machine():
        return False
    if said.get(BOOT, "").partition("/")[0] != _boot().partition("/")[0]:
        return True  # the machine was started anew since: no process is that old
    if said.get(BOOT) != _boot():
        return False  # a process namespace that we cannot look into
    try:
        pid, started = map(int, said.get(OWNER, "").split("."))
    except ValueError:
        return False
    return not leases.owner_alive(pid, started)


def reap(place: str, *, now: float | None = None) -> list[str]:
    """Ends the containers of dead owners at this engine; their sandboxes' ids."""
    moment = time.time() if now is None else now
    where = asking.path("containers", "json", all="1", **asking.filters(label=[SANDBOX]))
    found: list[dict[str, Any]] = asking.ask(place, "GET", where, timeout=asking.SLOW_SECONDS)
    left = [one for one in found if is_orphan(one.get("Labels") or {}, now=moment)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        gone = list(pool.map(lambda one: _went(place, one["Id"]), left))
    _reap_images(place, moment)
    return [str(one["Labels"][SANDBOX]) for one, went in zip(left, gone, strict=True) if went]


def _went(place: str, which: str) -> bool:
    try:
        remove(place, which)
    except asking.Refused:  # it goes by itself at this moment
        return False
    return True


def _reap_images(place: str, moment: float) -> None:
    """Snapshots that dead owners left."""
    where = asking.path("images", "json", **asking.filters(label=[SANDBOX]))
    found = asking.ask(place, "GET", where, timeout=asking.SLOW_SECONDS)
    for one in found:
        if is_orphan(one.get("Labels") or {}, now=moment):
            asking.ask(place, "DELETE", asking.path("images", one["Id"], force="1"), ok=(404, 409), timeout=30.0)


def remove(place: str, which: str, *, seconds: float = 15.0) -> None:
    """A container, and sees it gone."""
    end = time.monotonic() + seconds
    while True:
        where = asking.path("containers", which, force="1", v="1")
        try:
            asking.ask(place, "DELETE", where, ok=(404,), timeout=seconds)
        except asking.Refused as error:
            if error.status < 500 and error.status != 409:  # it is being removed already
                raise
        told = asking.ask(place, "GET", asking.path("containers", which, "json"), ok=(404,), timeout=seconds)
        if told is None:
            return
        if time.monotonic() > end - seconds + 1.0:
            flatten(told)
        if time.monotonic() > end:
            raise SandboxError(f"container {which} would not go")
        time.sleep(0.05)  # nothing tells


def flatten(told: Mapping[str, Any] | None) -> bool:
    """Removes what a container wrote, for an engine that failed to; whether there was anything we could remove.

    An engine opens a descriptor for every level of a folder tree that it removes. Programs can make trees that are
    deeper than it has descriptors: such a container would stay for ever."""
    driver = (told or {}).get("GraphDriver") or {}
    upper = Path(str((driver.get("Data") or {}).get("UpperDir") or ""))
    if upper.name != "diff" or not str(driver.get("Name", "")).startswith("overlay") or os.geteuid() != 0:
        return False
    for _ in range(10):
        try:
            procs.remove_tree(str(upper))
        except FileNotFoundError:
            continue  # the engine is at it too
        except OSError:
            return False  # it is the engine's to say what is wrong
        return True
    return False


def end_leased(folder: Path, found: Lease) -> bool:
    """The end of a sandbox whose lease lies below `folder`; False where the engine has to be asked again."""
    place = folder / found.id
    try:
        with (place / ENGINE).open("rb") as file:
            engine = os.fsdecode(file.read(_MOST)).strip()
    except OSError:
        engine = ""  # it ended before it asked for a container
    if engine:
        try:
            remove(engine, name_of(found.id))
        except SandboxError:
            return False
    procs.remove_tree(str(place))
    leases.path_of(folder, found.id).unlink(missing_ok=True)
    return True


def _machine() -> str:
    for place in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            text = Path(place).read_text().strip()
            if text:
                return text[:12]
    return socket.gethostname()


def _boot() -> str:
    """This start of the machine, and the processes that we can see."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"  # noqa: PTH115
    return ""
