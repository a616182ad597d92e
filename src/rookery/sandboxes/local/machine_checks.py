"""Check what this machine's kernel and configuration allow local sandboxes to isolate and limit.

The checks change nothing. Every check that is not fine names the command or setting that would fix it. A check is
`missing` if no sandbox can be created without it, and `weaker` if sandboxes then isolate or limit less.
"""

import contextlib
import errno
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rookery.sandbox_runtime import cgroups
from rookery.sandboxes.local import native_library
from rookery.sandboxes.protocol import MachineCheck

if TYPE_CHECKING:
    from rookery.sandboxes.probe import ProviderProof

MIN_KERNEL, FULL_KERNEL = (5, 9), (5, 14)
"""The first kernel with all required system calls (close_range), and the first with all features (cgroup.kill)."""
MACHINES: Final = ("x86_64", "aarch64")
_CONTAINER = "--security-opt seccomp=unconfined"
_DELEGATE = "systemd-run --user --scope -p Delegate=yes -- rookery …"
# Exits with the errno of unshare, or with 128 plus the errno of mount.
_TRY_NAMESPACES = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10020000):
    sys.exit(ctypes.get_errno())
if libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(128 + ctypes.get_errno())
"""


def run_checks(proof: "ProviderProof") -> list[MachineCheck]:
    """Return all checks of this machine. `proof` is the result of an attempt to create local sandboxes."""
    found = [_check_kernel()]
    if found[0].status == "missing":
        return found
    found += [_check_namespaces(), _check_seccomp(), _check_users()]
    if proof.error:
        found += _explain_error(proof.error, found)
    overlay = proof.about.get("overlay")
    if overlay is not None:
        found.append(_check_overlay(usable=bool(overlay)))
    found += _check_limits(proof)
    found += [_check_library(proof), _check_kvm()]
    return found


@functools.cache
def find_problem() -> str:
    """Return why no local sandbox can be created here and what would help, or "" if one can."""
    from rookery.sandboxes.probe import probe_provider

    proof = probe_provider("local")
    if not proof.error:
        return ""
    missing = (check for check in run_checks(proof) if check.status == "missing")
    fixes = [f"{check.found[:1].upper()}{check.found[1:]}; to change that: {check.fix}." for check in missing]
    return " ".join([f"No local sandbox can be created on this machine: {proof.error}.", *fixes])


def _read_sysctl(name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/sys/{name}").read_text().strip()
    return ""


def _check_kernel() -> MachineCheck:
    system = os.uname()
    finding = f"{system.sysname} {system.release} on {system.machine}"
    if sys.platform != "linux" or system.machine not in MACHINES:
        return MachineCheck("kernel", "missing", finding, f"use Linux on {' or '.join(MACHINES)}")
    version = _kernel_version()
    if version < MIN_KERNEL:
        return MachineCheck("kernel", "missing", finding, "boot Linux 5.9 or newer; 5.14 has all features")
    if version < FULL_KERNEL:
        return MachineCheck(
            "kernel", "weaker", f"{finding}: sandboxes are killed through their first process", "boot Linux 5.14"
        )
    return MachineCheck("kernel", "ok", finding)


def _kernel_version() -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _check_namespaces() -> MachineCheck:
    name = "user namespaces"
    command = [sys.executable, "-I", "-S", "-c", _TRY_NAMESPACES]
    try:
        code = subprocess.run(command, capture_output=True, timeout=20, check=False, env={}).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        return MachineCheck(name, "missing", f"could not be tried: {error}", "try again when the load is lower")
    if code == 0:
        return MachineCheck(name, "ok", "this user may create them")
    mounting, number = code >= 128, code & 127
    text = os.strerror(number)
    if _read_sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        finding, fix = (
            "AppArmor restricts user namespaces",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        )
    elif mounting:
        finding = f"user namespaces can be created, but file systems cannot be mounted in them ({text})"
        fix = f"start the container with {_CONTAINER} --security-opt apparmor=unconfined, or --privileged"
    elif number in (errno.ENOSPC, errno.EUSERS):
        most = _read_sysctl("user/max_user_namespaces")
        finding = f"the kernel allows no more user namespaces (user.max_user_namespaces is {most or 'unknown'})"
        fix = "sysctl -w user.max_user_namespaces=15000"
    elif _read_sysctl("kernel/unprivileged_userns_clone") == "0" and os.geteuid() != 0:
        finding, fix = (
            "ordinary users may not create user namespaces",
            "sysctl -w kernel.unprivileged_userns_clone=1",
        )
    elif number == errno.EINVAL:
        finding, fix = "this kernel has no user namespaces", "boot a kernel built with CONFIG_USER_NS"
    elif _has_seccomp_filter():
        finding = "a seccomp filter, probably of a container, refuses new user namespaces"
        fix = f"start the container with {_CONTAINER}, or --privileged"
    else:
        finding = f"user namespaces cannot be created ({text})"
        fix = "run outside of a chroot, or start the container with --privileged"
    return MachineCheck(name, "missing", finding, fix)


def _has_seccomp_filter() -> bool:
    with contextlib.suppress(OSError):
        return re.search(r"^Seccomp:\s*2$", Path("/proc/self/status").read_text(), re.MULTILINE) is not None
    return False


def _check_seccomp() -> MachineCheck:
    if "errno" in _read_sysctl("kernel/seccomp/actions_avail").split():
        return MachineCheck("seccomp", "ok", "filters can be installed")
    return MachineCheck(
        "seccomp",
        "missing",
        "this kernel has no seccomp filters",
        "boot a kernel built with CONFIG_SECCOMP_FILTER",
    )


def _check_users() -> MachineCheck:
    if os.geteuid() == 0:
        return MachineCheck("users", "ok", "each sandbox has its own range of user IDs")
    return MachineCheck(
        "users", "ok", "sandboxes run as your own user in their own namespaces; newuidmap is not needed"
    )


def _explain_error(error: str, before: list[MachineCheck]) -> list[MachineCheck]:
    """Return a check that explains why the probe could not create a sandbox, if the checks `before` were fine."""
    if any(check.status == "missing" for check in before):
        return []
    if "mount proc" in error:
        fix = "start the container with --security-opt systempaths=unconfined, or --privileged"
        return [MachineCheck("proc", "missing", "a new /proc cannot be mounted", fix)]
    if os.geteuid() == 0 and not _has_all_ids():
        fix = "run as an ordinary user of the container, or in a container with all user IDs"
        return [MachineCheck("user ids", "missing", "this root has too few user IDs for sandboxes", fix)]
    if "mount" in error:
        fix = f"start the container with {_CONTAINER} --security-opt apparmor=unconfined, or --privileged"
        return [MachineCheck("mounts", "missing", "a sandbox cannot mount its file system", fix)]
    return []


def _has_all_ids() -> bool:
    """Return whether this process's user namespace has all user IDs, as on the host, and not a container's few."""
    with contextlib.suppress(OSError, ValueError):
        ranges = [
            [int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()
        ]
        return any(first + count > 1 << 30 for first, _, count in ranges)
    return True


def _check_overlay(*, usable: bool) -> MachineCheck:
    if usable:
        return MachineCheck("overlay", "ok", "overlays can be mounted in user namespaces")
    finding = "overlays cannot be mounted in user namespaces: system directories are read-only in sandboxes"
    known = False
    with contextlib.suppress(OSError):
        known = "\toverlay\n" in Path("/proc/filesystems").read_text()
    if not known:
        return MachineCheck("overlay", "weaker", finding, "modprobe overlay")
    return MachineCheck(
        "overlay", "weaker", finding, "boot Linux 5.11 or newer" if _kernel_version() < (5, 11) else "run as root"
    )


def _check_limits(proof: "ProviderProof") -> list[MachineCheck]:
    about = proof.about
    if about:
        unified, v1, v2 = str(about.get("unified", "")), dict(about.get("v1", {})), set(about.get("v2", ()))
        kills = bool(about.get("can_kill"))  # its directory was removed with the last sandbox
    else:
        manager = cgroups.find_cgroups()
        unified, v1, v2, kills = manager.unified, manager.v1, set(manager.v2), manager.can_kill
        manager.close()
    without = {
        cgroups.MEMORY: "applies to each process, not to a sandbox as a whole",
        cgroups.PIDS: "applies to each user, not to each sandbox",
        cgroups.CPU: "not enforced",
    }
    found = []
    for name, weaker in without.items():
        if name in v2:
            found.append(MachineCheck(f"limit: {name}", "ok", f"cgroup v2 at {unified}"))
        elif name in v1:
            found.append(MachineCheck(f"limit: {name}", "ok", f"cgroup v1 at {v1[name]}"))
        else:
            found.append(
                MachineCheck(
                    f"limit: {name}",
                    "weaker",
                    f"{weaker}: we have no cgroup with the {name} controller",
                    _suggest_delegation(),
                )
            )
    if kills:
        found.append(MachineCheck("killing", "ok", f"a whole sandbox at once, through {unified}"))
    else:
        found.append(
            MachineCheck(
                "killing",
                "weaker",
                "through the first process of a sandbox, which is slower",
                _suggest_delegation(),
            )
        )
    return found


def _suggest_delegation() -> str:
    if os.geteuid() != 0:
        return f"{_DELEGATE} (a service: Delegate=yes in its unit)"
    return "mount /sys/fs/cgroup writable; a container: --privileged, or -v /sys/fs/cgroup:/sys/fs/cgroup:rw"


def _check_library(proof: "ProviderProof") -> MachineCheck:
    library = native_library.find_library()
    problem = library.problem or proof.about.get("native_problem", "")
    if not problem:
        return MachineCheck("C library", "ok", "creates sandboxes and starts their commands")
    finding = f"not used, because {problem}: sandboxes need twice the CPU time"
    return MachineCheck("C library", "info", finding, library.fix)


def _check_kvm() -> MachineCheck:
    usable = os.access("/dev/kvm", os.R_OK | os.W_OK)
    return MachineCheck("/dev/kvm", "info", "usable" if usable else "not usable, and not needed")
