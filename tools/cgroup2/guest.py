"""Boots a kernel on this machine's own files, runs commands in it, and hands back how they ended.

Promises:
- the guest has no network device, a bounded part of memory and processors, and cannot write to this machine;
- its output is shown as it comes, and how it ended is told apart from how it was stopped;
- it is gone at its deadline, on Ctrl-C, and when this process dies in any way; nothing of it is left on disk.
"""

import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cgroup2 import initramfs
from cgroup2.parts import Parts

KVM: Final = "/dev/kvm"
INSIDE: Final = Path(__file__).with_name("inside.py")
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class GuestError(Exception):
    """The guest did not come to an end of its own; the text holds its last words."""


def has_kvm() -> bool:
    """Whether the processor itself runs guests. Where /dev/kvm works by other means (a machine that is a guest
    without such a processor), it runs kernels made for it alone: Debian's stop before their first line."""
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    known = {"vmx", "svm"} & set(flags[1].split() if flags else ())
    return bool(known) and os.access(KVM, os.R_OK | os.W_OK)


def run(
    parts: Parts,
    request: dict[str, Any],
    *,
    memory_mb: int,
    cores: int,
    seconds: float,
    fast: bool = True,
    python: str = sys.executable,
) -> list[dict[str, Any]]:
    """What the guest tells of each of its runs."""
    packed = initramfs.archive(parts.busybox, parts.modules, python, str(INSIDE), json.dumps(request).encode())
    # Files without a name: whatever ends us, nothing is left.
    first, told, console = (os.memfd_create(name) for name in ("initramfs", "told", "console"))
    try:
        with os.fdopen(os.dup(first), "wb") as file:
            file.write(packed)
        command = _command(parts, (first, told, console), memory_mb=memory_mb, cores=cores, fast=fast)
        began = time.monotonic()
        ended = _watched(parts, command, (first, told, console), seconds)
        runs = [json.loads(line) for line in _text(told).splitlines() if line.startswith("{")]
        if not ended:
            raise GuestError(f"the guest was not done after {seconds:g} s\n{_last_words(console)}")
        if not runs or not runs[-1].get("done"):
            after = time.monotonic() - began
            raise GuestError(f"the guest broke down after {after:.0f} s\n{_last_words(console)}")
        return runs
    finally:
        for fd in (first, told, console):
            os.close(fd)


def _command(parts: Parts, files: tuple[int, int, int], *, memory_mb: int, cores: int, fast: bool) -> list[str]:
    first, told, console = (f"/proc/self/fd/{fd}" for fd in files)
    # No v1 tree at all; a fault of the kernel ends the guest, at once and with a message.
    line = "console=ttyS0 quiet cgroup_no_v1=all panic=-1 oops=panic systemd.unified_cgroup_hierarchy=1"
    return [
        *parts.qemu,
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none"),
        *("-machine", "q35", "-accel", "kvm" if fast else "tcg,thread=multi", "-cpu", "host" if fast else "max"),
        *("-m", f"{memory_mb}M", "-smp", str(cores), "-nic", "none"),
        *("-kernel", str(parts.kernel), "-initrd", first, "-append", line),
        *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
        *("-chardev", f"file,id=console,path={console}", "-serial", "chardev:console"),
        *("-chardev", "file,id=out,path=/proc/self/fd/1", "-chardev", f"file,id=told,path={told}"),
        *("-device", "virtio-serial-pci"),
        *("-device", "virtserialport,chardev=out,name=rookery.out"),
        *("-device", "virtserialport,chardev=told,name=rookery.told"),
    ]


def _watched(parts: Parts, command: Sequence[str], files: tuple[int, ...], seconds: float) -> bool:
    """Shows what the guest says until it is over; whether it was over in time."""
    owner = os.getpid()

    def mortal() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != owner:
            os._exit(1)

    end = time.monotonic() + seconds
    guest = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        pass_fds=files,
        env={**os.environ, **parts.environ},
        start_new_session=True,  # Ctrl-C is for us; we end it
        preexec_fn=mortal,  # noqa: PLW1509  (no thread has been started)
    )
    try:
        assert guest.stdout is not None
        source = guest.stdout.fileno()
        while (left := end - time.monotonic()) > 0:
            if not select.select([source], [], [], left)[0]:
                break
            data = os.read(source, 1 << 16)
            if not data:
                guest.wait(timeout=max(left, 1.0))
                return True
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        return False
    finally:
        guest.kill()
        guest.wait()
        if guest.stdout is not None:
            guest.stdout.close()


def _text(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, min(size, 1 << 20), 0).decode("utf-8", "replace")


def _last_words(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, 4000, max(0, size - 4000)).decode("utf-8", "replace").strip() or "(its console is empty)"
