"""Boot a kernel on the files of this machine, run commands in it, and return how they ended.

- The guest has no network device, limited memory and processors, and cannot write to this machine.
- Its output is shown as it arrives. A guest that had to be stopped raises `GuestError`.
- It ends at its deadline, on Ctrl-C, and when this process dies; nothing is left on disk.
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
GUEST_INIT: Final = Path(__file__).with_name("guest_init.py")
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class GuestError(Exception):
    """The guest crashed or had to be stopped. The message has the end of its console output."""


def has_kvm() -> bool:
    """Return whether the processor supports virtual machines.

    /dev/kvm alone is not enough: without that support, it runs specially built kernels only, not Debian's.
    """
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
    """Run the guest and return its report of each run."""
    packed = initramfs.build(parts.busybox, parts.modules, python, str(GUEST_INIT), json.dumps(request).encode())
    # Memory files: however this process ends, nothing is left.
    initrd, results, console = (os.memfd_create(name) for name in ("initramfs", "results", "console"))
    try:
        with os.fdopen(os.dup(initrd), "wb") as file:
            file.write(packed)
        command = _command(parts, (initrd, results, console), memory_mb=memory_mb, cores=cores, fast=fast)
        began = time.monotonic()
        ended = _run_and_show(parts, command, (initrd, results, console), seconds)
        runs = [json.loads(line) for line in _read_text(results).splitlines() if line.startswith("{")]
        if not ended:
            raise GuestError(f"the guest did not finish within {seconds:g} s\n{_read_console_tail(console)}")
        if not runs or not runs[-1].get("done"):
            after = time.monotonic() - began
            raise GuestError(f"the guest crashed after {after:.0f} s\n{_read_console_tail(console)}")
        return runs
    finally:
        for fd in (initrd, results, console):
            os.close(fd)


def _command(parts: Parts, files: tuple[int, int, int], *, memory_mb: int, cores: int, fast: bool) -> list[str]:
    initrd, results, console = (f"/proc/self/fd/{fd}" for fd in files)
    # No cgroup v1 hierarchy. A kernel fault ends the guest at once, with a message.
    kernel_arguments = (
        "console=ttyS0 quiet cgroup_no_v1=all panic=-1 oops=panic systemd.unified_cgroup_hierarchy=1"
    )
    return [
        *parts.qemu,
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none"),
        *("-machine", "q35", "-accel", "kvm" if fast else "tcg,thread=multi", "-cpu", "host" if fast else "max"),
        *("-m", f"{memory_mb}M", "-smp", str(cores), "-nic", "none"),
        *("-kernel", str(parts.kernel), "-initrd", initrd, "-append", kernel_arguments),
        *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
        *("-chardev", f"file,id=console,path={console}", "-serial", "chardev:console"),
        *("-chardev", "file,id=out,path=/proc/self/fd/1", "-chardev", f"file,id=results,path={results}"),
        *("-device", "virtio-serial-pci"),
        *("-device", "virtserialport,chardev=out,name=rookery.out"),
        *("-device", "virtserialport,chardev=results,name=rookery.results"),
    ]


def _run_and_show(parts: Parts, command: Sequence[str], files: tuple[int, ...], seconds: float) -> bool:
    """Run the emulator and show its output; return whether it ended in time."""
    owner = os.getpid()

    def die_with_parent() -> None:
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
        start_new_session=True,  # Ctrl-C reaches only us; we end the guest
        preexec_fn=die_with_parent,  # noqa: PLW1509  (no thread has been started)
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


def _read_text(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, min(size, 1 << 20), 0).decode("utf-8", "replace")


def _read_console_tail(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, 4000, max(0, size - 4000)).decode("utf-8", "replace").strip() or "(its console is empty)"
