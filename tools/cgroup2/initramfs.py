"""Build the initramfs of the guest: a static shell, kernel modules, and a script that mounts this machine's root.

The guest's root is this machine's, read-only, below a tmpfs layer. Equal parts give an identical archive.
"""

from pathlib import Path
from typing import Final

INIT: Final = """#!/bin/busybox sh
set -e
say() { echo "guest: $*" > /dev/console; }
stop() { say "$* failed"; poweroff -f; }
/bin/busybox --install -s /bin
mount -t devtmpfs none /dev
mount -t proc none /proc
mount -t sysfs none /sys
ip link set lo up
for module in $(cat /modules); do insmod /lib/$module || stop "insmod $module"; done
say "modules are loaded"
mkdir -p /host /layer /root
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host || stop "mount of the host"
say "the host's files are mounted"
mount -t tmpfs -o mode=755 layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work root /root || stop "mount of the root"
umount /sys /proc
mount --move /dev /root/dev || stop "move of /dev"
mount -t proc -o nosuid,nodev,noexec proc /root/proc
mount -t sysfs -o nosuid,nodev,noexec sysfs /root/sys
mount -t tmpfs -o nosuid,nodev,mode=755 run /root/run
say "the root is mounted"
cp /request.json /root/run/request.json
say "starting @PYTHON@"
exec switch_root /root @PYTHON@ -I @GUEST_INIT@ /run/request.json
"""


def build(busybox: Path, modules: tuple[Path, ...], python: str, guest_init: str, request: bytes) -> bytes:
    """Return the initramfs as a cpio archive."""
    init = INIT.replace("@PYTHON@", _quote(python)).replace("@GUEST_INIT@", _quote(guest_init))
    folders = ["bin", "dev", "lib", "proc", "sys"]
    parts = [_entry(name, b"", 0o040755) for name in folders]
    parts.append(_entry("dev/console", b"", 0o020600, (5, 1)))
    parts.append(_entry("bin/busybox", busybox.read_bytes(), 0o100755))
    parts.append(_entry("init", init.encode(), 0o100755))
    parts.append(_entry("modules", "".join(f"{path.name}\n" for path in modules).encode(), 0o100644))
    parts.append(_entry("request.json", request, 0o100600))
    parts += [_entry(f"lib/{path.name}", path.read_bytes(), 0o100644) for path in modules]
    parts.append(_entry("TRAILER!!!", b"", 0))
    return b"".join(parts)


def _entry(name: str, data: bytes, mode: int, device: tuple[int, int] = (0, 0)) -> bytes:
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    return _pad(head) + _pad(data)


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
