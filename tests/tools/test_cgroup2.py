"""The tool behind `make test-cgroup2`, as far as it needs neither an archive nor a guest."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from cgroup2 import initramfs, parts  # noqa: E402  (after the path to it)


def unpacked(archive: bytes) -> dict[str, tuple[int, bytes]]:
    """A cpio archive, read as the kernel reads it: name → mode and content."""
    found, at = {}, 0
    while at < len(archive):
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = archive[at + 110 : at + 110 + fields[11] - 1].decode()
        at += 110 + fields[11]
        at += -at % 4
        found[name] = (fields[1], archive[at : at + fields[6]])
        at += fields[6]
        at += -at % 4
    return found


def test_initramfs_contains_all_requested_files(tmp_path: Path) -> None:
    busybox, module = tmp_path / "busybox", tmp_path / "9p.ko"
    busybox.write_bytes(b"shell")
    module.write_bytes(b"module!")
    packed = initramfs.build(busybox, (module,), "/it's/python", "/guest_init.py", b"{}")
    found = unpacked(packed)
    assert found["bin/busybox"] == (0o100755, b"shell")
    assert found["lib/9p.ko"] == (0o100644, b"module!")
    assert found["modules"][1] == b"9p.ko\n"
    assert found["request.json"] == (0o100600, b"{}")
    assert b"'/it'\\''s/python' -I '/guest_init.py' /run/request.json" in found["init"][1]
    assert list(found)[-1] == "TRAILER!!!"
    assert packed == initramfs.build(busybox, (module,), "/it's/python", "/guest_init.py", b"{}")


def test_kernel_modules_follow_their_dependencies() -> None:
    known = {
        "9p": b"\0depends=9pnet,netfs\0",
        "9pnet": b"\0depends=\0",
        "netfs": b"\0license=GPL\0depends=fscache,built-in\0",
        "fscache": b"\0depends=\0",
        "other": b"\0depends=\0",
    }
    order: list[str] = []
    parts.append_with_dependencies("9p", known, order)
    assert order == ["9pnet", "fscache", "netfs", "9p"]


@pytest.mark.parametrize(("wanted", "found"), [("", "new"), ("6.1", "old"), ("6.12", "new"), ("6.2", None)])
def test_kernel_is_chosen_by_version_prefix(wanted: str, found: str | None) -> None:
    assert parts.choose_version([("6.12.95-1", "new"), ("6.1.176-1", "old")], wanted) == found


def test_guest_init_refuses_to_run_outside_a_guest() -> None:
    command = [sys.executable, "-I", TOOLS / "cgroup2" / "guest_init.py", "/none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr


def test_unknown_cgroup_location_is_refused() -> None:
    command = [sys.executable, TOOLS / "run_cgroup2.py", "--scenarios", "moon"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "bare, service, delegated, user" in done.stderr
