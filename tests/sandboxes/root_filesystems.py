"""Build small root file systems from programs of this machine, without a registry or a builder."""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

PROGRAMS = (
    "sh",
    "bash",
    "cat",
    "ls",
    "id",
    "stat",
    "chown",
    "chmod",
    "touch",
    "rm",
    "mkdir",
    "env",
    "readlink",
    "ln",
)


def list_libraries(program: str) -> list[str]:
    output = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return re.findall(r"(/[^ ]+) \(0x", output)


def build_root_filesystem(folder: Path, programs: tuple[str, ...] = PROGRAMS) -> Path:
    """Fill a directory with these programs, their libraries, and files of several owners."""
    for name in programs:
        found = shutil.which(name)
        assert found is not None, name
        for path in (found, *list_libraries(found)):
            target = folder / ("bin" if path == found else path[1:])
            target = target / name if path == found else target
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy(os.path.realpath(path), target)
    for name in ("etc", "srv/data", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/work:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    (folder / "etc/of-the-image").write_text("image\n")
    (folder / "srv/data/file").write_text("data\n")
    (folder / "srv/data/link").symlink_to("file")
    if os.geteuid() == 0:
        os.chown(folder / "srv/data/file", 1000, 1000)
    (folder / "srv/data/file").chmod(0o640 if os.geteuid() == 0 else 0o600)
    return folder


def pack_root_filesystem(folder: Path, target: Path, mode: str = "w:gz") -> Path:
    with tarfile.open(target, mode) as file:  # type: ignore[call-overload]
        file.add(folder, arcname=".")
    return target
