"""Rules for the whole test suite: a skip needs a probed reason, and the run leaves nothing on the machine."""

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

from tests.waiting import block_until

# No test depends on the speed of the machine: a slow example is not a failure.
hypothesis.settings.register_profile(
    "any-speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-speed")

NO_SKIP = bool(os.environ.get("ROOKERY_NO_SKIP"))


def _can_mount() -> bool:
    """Check whether this process can mount a tmpfs, by mounting one."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory() as directory:
        if libc.mount(b"rookery-probe", directory.encode(), b"tmpfs", 0, b"size=64k") != 0:
            return False
        libc.umount2(directory.encode(), 2)
    return True


def _can_create_network_namespaces() -> bool:
    """Check whether this process can create a network namespace with a virtual cable, by creating one."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        return False
    cable = ["ip", "link", "add", "name", "probe-a", "type", "veth", "peer", "name", "probe-b"]
    return subprocess.run(["unshare", "--net", *cable], capture_output=True, check=False).returncode == 0


# nohup and some shells ignore these signals, and the commands that the tests start would inherit that.
for _number, _handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

TOKENIZERS = Path(__file__).resolve().parent.parent / ".peers" / "tokenizers"
"""Directory that `make tokenizers` creates."""


def _has_tokenizers() -> bool:
    return all((TOKENIZERS / name / "rookery-made").is_file() for name in ("qwen3", "llama-3", "gemma4"))


DOCKERD = TOKENIZERS.parent / "sandboxes" / "root" / "usr" / "sbin" / "dockerd"
"""Program that `make docker-engine` installs."""


def _has_docker() -> bool:
    """Check whether the tests can start their own Docker engine. They never use one that is already running."""
    return os.geteuid() == 0 and os.access(DOCKERD, os.X_OK) and _can_mount()


PODMAN = TOKENIZERS.parent / "podman" / "root" / "usr" / "bin" / "podman"
"""Program that `make podman` installs."""


def _has_podman() -> bool:
    """Check whether the tests can start their own Podman service."""
    return os.geteuid() == 0 and os.access(PODMAN, os.X_OK) and _can_mount()


SSHD = TOKENIZERS.parent / "ssh" / "root" / "usr" / "sbin" / "sshd"
"""Program that `make ssh-server` installs."""


def _has_ssh() -> bool:
    return os.geteuid() == 0 and os.access(SSHD, os.X_OK) and shutil.which("ssh") is not None and _can_mount()


PROMETHEUS = TOKENIZERS.parent / "prometheus" / "root" / "usr" / "bin" / "prometheus"
"""Program that `make prometheus` installs."""


def _has_prometheus() -> bool:
    return os.access(PROMETHEUS, os.X_OK)


KUBECTL = TOKENIZERS.parent / "kubectl" / "root" / "usr" / "bin" / "kubectl"
"""Program that `make kubectl` installs."""


def _has_kubectl() -> bool:
    return os.access(KUBECTL, os.X_OK)


_loaded = 0


@pytest.fixture(autouse=True, scope="module")
def freeze_imported_modules() -> None:
    """Exclude the objects of imported packages from garbage collection.

    Many tests call `gc.collect`, which takes half a second once a trainer's packages are loaded.
    """
    global _loaded  # noqa: PLW0603  (the number of loaded modules is state of the process)
    if len(sys.modules) > _loaded + 200:
        gc.collect()
        gc.freeze()
        _loaded = len(sys.modules)


@pytest.fixture(autouse=True, scope="module")
def stop_code_execution_thread() -> Iterator[None]:
    """Stop the thread and the keeper that `run_code` otherwise keeps until its process ends."""
    yield
    service = sys.modules.get("rookery.scoring.code_execution")
    if service is not None:
        service.stop_thread()


TRAINERS = ("areal", "inspect_ai", "nemo_gym", "openenv", "openrlhf", "skyrl", "tinker", "verifiers", "verl")
"""Packages of other trainers, which are in virtual environments of their own (`make test-trainers`)."""


def _probe_package(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


PROBES: dict[str, Callable[[], bool]] = {
    "mount": _can_mount,
    "network namespaces": _can_create_network_namespaces,
    "tokenizers": _has_tokenizers,
    "docker": _has_docker,
    "podman": _has_podman,
    "ssh": _has_ssh,
    "prometheus": _has_prometheus,
    "kubectl": _has_kubectl,
    **{name: _probe_package(name) for name in TRAINERS},
}
HINTS = {
    **dict.fromkeys(TRAINERS, " (make test-trainers)"),
    "tokenizers": " (make tokenizers)",
    "docker": " engine of its own for the tests (make docker-engine, as root)",
    "podman": " service of its own for the tests (make podman, as root)",
    "ssh": " and a server of its own for the tests (make ssh-server, as root)",
    "prometheus": " (make prometheus)",
    "kubectl": " (make kubectl)",
}
_probed: dict[str, bool] = {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for capability in mark.args:
            if capability not in _probed:
                _probed[capability] = PROBES[capability]()
            if not _probed[capability]:
                pytest.skip(f"[probed] this machine has no {capability}{HINTS.get(capability, '')}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files whose tests may take minutes, and then with those that have most tests.

    So no worker runs a long file alone at the end.
    """
    if not hasattr(config, "workerinput"):
        return
    minutes = {item.path for item in items if (mark := item.get_closest_marker("timeout")) and mark.args[0] >= 600}
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in minutes, -counts[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if NO_SKIP and report.skipped and "[probed]" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"skipped without a probed reason: {report.longrepr}"
    return report


def _our_processes() -> set[tuple[int, str]]:
    """List processes of sandboxes, runners and shards as (pid, start time)."""
    processes = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes()
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            started = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[19]
        except OSError:
            continue
        modules = (b"rookery.engine.runner", b"rookery.gateway.shard")
        ours = b"ROOKERY_SANDBOX=" in environ or any(module in command for module in modules)
        # A child of another process belongs to another test session.
        if ours and _parent(int(name)) in (1, os.getpid()):
            processes.add((int(name), started))
    return processes


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _count_mounts() -> int:
    return Path("/proc/self/mounts").read_text().count("\n")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.stash[_BEFORE] = (_our_processes(), _count_mounts())


_BEFORE = pytest.StashKey[tuple[set[tuple[int, str]], int]]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if it leaves a process or mount behind. Checked once, by the controlling process."""
    if hasattr(session.config, "workerinput"):
        return
    processes, mounts = session.config.stash[_BEFORE]
    with suppress(TimeoutError):  # what a test killed may still be ending
        block_until(lambda: not _our_processes() - processes and _count_mounts() <= mounts)
    left = _our_processes() - processes
    if left or _count_mounts() > mounts:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"LEFT BEHIND: processes {sorted(left)}, mounts {_count_mounts() - mounts}", red=True)
    session.config.stash[_CLEAN] = session.exitstatus == 0


_CLEAN = pytest.StashKey[bool]()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the temporary directories of a run without failures, after the workers have ended."""
    factory = getattr(config, "_tmp_path_factory", None)
    if not config.stash.get(_CLEAN, False) or factory is None or config.getoption("basetemp"):
        return
    directory = factory.getbasetemp()
    shutil.rmtree(directory, ignore_errors=True)
    current = directory.parent / "pytest-current"
    if current.is_symlink() and not current.exists():
        current.unlink()
    with suppress(OSError):  # it still holds directories of other sessions
        directory.parent.rmdir()
