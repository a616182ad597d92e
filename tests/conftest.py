"""What every test is held to: a skip needs a probed reason, and the run leaves nothing on the machine."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NO_SKIP = bool(os.environ.get("ROOKERY_NO_SKIP"))


def _can_mount() -> bool:
    """Whether a tmpfs can be mounted here: tried, not guessed."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory() as folder:
        if libc.mount(b"rookery-probe", folder.encode(), b"tmpfs", 0, b"size=64k") != 0:
            return False
        libc.umount2(folder.encode(), 2)
    return True


PROBES: dict[str, Callable[[], bool]] = {"mount": _can_mount}
_found: dict[str, bool] = {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for capability in mark.args:
            if capability not in _found:
                _found[capability] = PROBES[capability]()
            if not _found[capability]:
                pytest.skip(f"[probed] this machine has no {capability}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if NO_SKIP and report.skipped and "[probed]" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"skipped without a probed reason: {report.longrepr}"


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_on_the_machine() -> Iterator[None]:
    """No process, mount or shared-memory file of ours outlives the tests."""
    mounts = Path("/proc/self/mounts").read_text() if Path("/proc/self/mounts").exists() else ""
    yield
    ours = [pid for pid in _processes() if _marked(pid)]
    assert ours == [], f"processes left: {ours}"
    if mounts:
        assert Path("/proc/self/mounts").read_text().count("rookery") <= mounts.count("rookery")


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if Path("/proc").exists() else []


def _marked(pid: int) -> bool:
    """Below this test process, by parent chain, or carrying the marker of one of its sandboxes."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return b"ROOKERY_SANDBOX=" in environ and f"ROOKERY_TEST_SESSION={os.getpid()}".encode() in environ
