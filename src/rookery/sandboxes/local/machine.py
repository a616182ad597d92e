"""What this machine can isolate and how, asked of its kernel; and for all that is missing, what would add it.

Promises:
- it looks, and changes nothing of the machine;
- every check that is not fine names the command or setting that would make it so;
- a check is `missing` where no box can be made without it, `weaker` where boxes can be made that hold less.
"""

import contextlib
import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from rookery.sandboxes.local import groups

if TYPE_CHECKING:
    from rookery.sandboxes.local.probe import Proof

Status: TypeAlias = Literal["ok", "weaker", "missing", "info"]
NEEDED, WANTED = (5, 9), (5, 14)
"""Kernels: the first that has all calls we need (close_range), the first that misses nothing (cgroup.kill)."""
MACHINES: Final = ("x86_64", "aarch64")
_CONTAINER = "--security-opt seccomp=unconfined"
_DELEGATE = "systemd-run --user --scope -p Delegate=yes -- rookery …"
# Exits with the errno of what failed; 128 more when it was the mount.
_TRY = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10020000):
    sys.exit(ctypes.get_errno())
if libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(128 + ctypes.get_errno())
"""


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    fix: str = ""
    """The command or setting that would make it fine."""


def checks(proof: "Proof") -> list[Check]:
    """All of them, in the order in which one depends on the other."""
    found = [_kernel()]
    if found[0].status == "missing":
        return found
    found += [_namespaces(), _seccomp(), _rights()]
    if proof.error:
        found += _of_error(proof.error, found)
    overlay = proof.about.get("overlay")
    if overlay is not None:
        found.append(_overlay(usable=bool(overlay)))
    found += _limits(proof)
    found.append(_kvm())
    return found


def _setting(name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/sys/{name}").read_text().strip()
    return ""


def _kernel() -> Check:
    system = os.uname()
    said = f"{system.sysname} {system.release} on {system.machine}"
    if sys.platform != "linux" or system.machine not in MACHINES:
        return Check("kernel", "missing", said, f"use Linux on {' or '.join(MACHINES)}")
    version = _version()
    if version < NEEDED:
        return Check("kernel", "missing", said, "boot Linux 5.9 or newer (5.14 misses nothing)")
    if version < WANTED:
        return Check("kernel", "weaker", f"{said}: boxes are ended through their first process", "boot Linux 5.14")
    return Check("kernel", "ok", said)


def _version() -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _namespaces() -> Check:
    name = "user namespaces"
    command = [sys.executable, "-I", "-S", "-c", _TRY]
    try:
        code = subprocess.run(command, capture_output=True, timeout=20, check=False, env={}).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, "missing", f"could not be tried: {error}", "try again when the machine is less loaded")
    if code == 0:
        return Check(name, "ok", "this user may make them")
    mounting, number = code >= 128, code & 127
    text = os.strerror(number)
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        said, fix = (
            "AppArmor restricts user namespaces",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        )
    elif mounting:
        said = f"user namespaces can be made, but not mounted in ({text})"
        fix = f"start the container with {_CONTAINER} --security-opt apparmor=unconfined, or --privileged"
    elif number in (errno.ENOSPC, errno.EUSERS):
        most = _setting("user/max_user_namespaces")
        said = f"the kernel allows no more user namespaces (user.max_user_namespaces is {most or 'unknown'})"
        fix = "sysctl -w user.max_user_namespaces=15000"
    elif _setting("kernel/unprivileged_userns_clone") == "0" and os.geteuid() != 0:
        said, fix = "user namespaces are closed to ordinary users", "sysctl -w kernel.unprivileged_userns_clone=1"
    elif number == errno.EINVAL:
        said, fix = "this kernel has no user namespaces", "boot a kernel built with CONFIG_USER_NS"
    elif _filtered():
        said = "a seccomp filter, a container's perhaps, refuses new user namespaces"
        fix = f"start the container with {_CONTAINER}, or --privileged"
    else:
        said = f"user namespaces cannot be made ({text})"
        fix = "run outside of a chroot, or start the container with --privileged"
    return Check(name, "missing", said, fix)


def _filtered() -> bool:
    with contextlib.suppress(OSError):
        return re.search(r"^Seccomp:\s*2$", Path("/proc/self/status").read_text(), re.MULTILINE) is not None
    return False


def _seccomp() -> Check:
    if "errno" in _setting("kernel/seccomp/actions_avail").split():
        return Check("seccomp", "ok", "filters can be set")
    return Check(
        "seccomp",
        "missing",
        "this kernel has no seccomp filters",
        "boot a kernel built with CONFIG_SECCOMP_FILTER",
    )


def _rights() -> Check:
    if os.geteuid() == 0:
        return Check("users", "ok", "each box is a user of its own")
    return Check("users", "ok", "boxes are your own user, in namespaces of their own; newuidmap is not needed")


def _of_error(error: str, before: list[Check]) -> list[Check]:
    """What the error itself tells, where the checks before it were fine."""
    if any(check.status == "missing" for check in before):
        return []
    if "mount proc" in error:
        fix = "start the container with --security-opt systempaths=unconfined, or --privileged"
        return [Check("proc", "missing", "a new /proc cannot be mounted", fix)]
    if os.geteuid() == 0 and not _all_ids():
        fix = "run as an ordinary user of the container, or in one that has all user ids"
        return [Check("user ids", "missing", "this root has too few user ids to give some to boxes", fix)]
    if "mount" in error:
        fix = f"start the container with {_CONTAINER} --security-opt apparmor=unconfined, or --privileged"
        return [Check("mounts", "missing", "a box cannot mount its file system", fix)]
    return []


def _all_ids() -> bool:
    """Whether the root that we are is the machine's, or a container's with as many user ids."""
    with contextlib.suppress(OSError, ValueError):
        ranges = [
            [int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()
        ]
        return any(first + count > 1 << 30 for first, _, count in ranges)
    return True


def _overlay(*, usable: bool) -> Check:
    if usable:
        return Check("overlay", "ok", "one writable layer over everything, in user namespaces")
    said = "not in user namespaces: system folders stay read-only in boxes"
    known = False
    with contextlib.suppress(OSError):
        known = "\toverlay\n" in Path("/proc/filesystems").read_text()
    if not known:
        return Check("overlay", "weaker", said, "modprobe overlay")
    return Check("overlay", "weaker", said, "boot Linux 5.11 or newer" if _version() < (5, 11) else "run as root")


def _limits(proof: "Proof") -> list[Check]:
    about = proof.about
    if about:
        unified, v1, v2 = str(about.get("unified", "")), dict(about.get("v1", {})), set(about.get("v2", ()))
        kills = bool(about.get("kills"))  # its folder is gone by now, with its last box
    else:
        held = groups.find()
        unified, v1, v2, kills = held.unified, held.v1, set(held.v2), held.kills
        held.leave()
    without = {
        groups.MEMORY: "held for each process, not for a box together",
        groups.PIDS: "held for each user, not for each box",
        groups.CPU: "not held",
    }
    found = []
    for name, weaker in without.items():
        if name in v2:
            found.append(Check(f"limit: {name}", "ok", f"cgroup v2 at {unified}"))
        elif name in v1:
            found.append(Check(f"limit: {name}", "ok", f"cgroup v1 at {v1[name]}"))
        else:
            found.append(
                Check(f"limit: {name}", "weaker", f"{weaker}: no {name} control group is ours", _delegated())
            )
    if kills:
        found.append(Check("ending", "ok", f"a whole box at once, through {unified}"))
    else:
        found.append(Check("ending", "weaker", "through the first process of a box: a moment later", _delegated()))
    return found


def _delegated() -> str:
    if os.geteuid() != 0:
        return f"{_DELEGATE} (a service: Delegate=yes in its unit)"
    return "mount /sys/fs/cgroup writable; a container: --privileged, or -v /sys/fs/cgroup:/sys/fs/cgroup:rw"


def _kvm() -> Check:
    usable = os.access("/dev/kvm", os.R_OK | os.W_OK)
    return Check("/dev/kvm", "info", "usable" if usable else "not usable; nothing here needs it")
