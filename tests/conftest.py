"""What every test is held to: a skip needs a probed reason, and the run leaves nothing on the machine."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

# No test depends on the machine's speed: a case that is slow, for whatever reason, is no failure.
hypothesis.settings.register_profile(
    "any-speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-speed")

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


# Under nohup, or behind a shell, these are ignored, and commands would inherit and rightly obey that.
for _number, _handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

TOKENIZERS = Path(__file__).resolve().parent.parent / ".peers" / "tokenizers"
"""What `make tokenizers` makes."""


def _has_tokenizers() -> bool:
    return all((TOKENIZERS / name / "rookery-made").is_file() for name in ("qwen3", "llama-3", "gemma4"))


DOCKERD = TOKENIZERS.parent / "sandboxes" / "root" / "usr" / "sbin" / "dockerd"
"""What `make docker-engine` makes."""


def _has_docker() -> bool:
    """Whether an engine can be started for the tests alone; one that runs here already is left alone."""
    return os.geteuid() == 0 and os.access(DOCKERD, os.X_OK) and _can_mount()


PODMAN = TOKENIZERS.parent / "podman" / "root" / "usr" / "bin" / "podman"
"""What `make podman` makes."""


def _has_podman() -> bool:
    """Likewise."""
    return os.geteuid() == 0 and os.access(PODMAN, os.X_OK) and _can_mount()


SSHD = TOKENIZERS.parent / "ssh" / "root" / "usr" / "sbin" / "sshd"
"""What `make ssh-server` makes."""


def _has_ssh() -> bool:
    return os.geteuid() == 0 and os.access(SSHD, os.X_OK) and shutil.which("ssh") is not None and _can_mount()


_loaded = 0


@pytest.fixture(autouse=True, scope="module")
def no_weight_of_the_last_modules() -> None:
    """What packages hold for good is not looked at again by each `gc.collect` of a test: with those of a trainer
    loaded, one takes half a second."""
    global _loaded  # noqa: PLW0603  (of this process, as what is loaded is)
    if len(sys.modules) > _loaded + 200:
        gc.collect()
        gc.freeze()
        _loaded = len(sys.modules)


@pytest.fixture(autouse=True, scope="module")
def no_programs_of_the_last_module() -> Iterator[None]:
    """`run_code` keeps a thread and a keeper until its process ends. Here the next module has the same process."""
    yield
    service = sys.modules.get("rookery.scoring.code_execution")
    if service is not None:
        service._stop_thread()


PROBES: dict[str, Callable[[], bool]] = {
    "mount": _can_mount,
    "tokenizers": _has_tokenizers,
    "docker": _has_docker,
    "podman": _has_podman,
    "ssh": _has_ssh,
}
HINTS = {
    "tokenizers": " (make tokenizers)",
    "docker": " engine of its own for the tests (make docker-engine, as root)",
    "podman": " service of its own for the tests (make podman, as root)",
    "ssh": " and a server of its own for the tests (make ssh-server, as root)",
}
_found: dict[str, bool] = {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for capability in mark.args:
            if capability not in _found:
                _found[capability] = PROBES[capability]()
            if not _found[capability]:
                pytest.skip(f"[probed] this machine has no {capability}{HINTS.get(capability, '')}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if NO_SKIP and report.skipped and "[probed]" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"skipped without a probed reason: {report.longrepr}"
    return report


def _ours() -> set[tuple[int, str]]:
    """Processes of sandboxes, runners and shards, by pid and start time."""
    found = set()
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
        if ours and _parent(int(name)) in (1, os.getpid()):  # another session's have a parent of their own
            found.add((int(name), started))
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _mounts() -> int:
    return Path("/proc/self/mounts").read_text().count("\n")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.stash[_BEFORE] = (_ours(), _mounts())


_BEFORE = pytest.StashKey[tuple[set[tuple[int, str]], int]]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The whole run leaves no process, mount or temp folder behind; asked once, by the process that leads."""
    if hasattr(session.config, "workerinput"):
        return
    processes, mounts = session.config.stash[_BEFORE]
    left = _ours() - processes
    if left or _mounts() > mounts:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"LEFT BEHIND: processes {sorted(left)}, mounts {_mounts() - mounts}", red=True)
    session.config.stash[_CLEAN] = session.exitstatus == 0


_CLEAN = pytest.StashKey[bool]()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Temp folders of a run without failures go last, when the workers that wrote into them are gone."""
    factory = getattr(config, "_tmp_path_factory", None)
    if not config.stash.get(_CLEAN, False) or factory is None or config.getoption("basetemp"):
        return
    folder = factory.getbasetemp()
    shutil.rmtree(folder, ignore_errors=True)
    current = folder.parent / "pytest-current"
    if current.is_symlink() and not current.exists():
        current.unlink()
    with suppress(OSError):  # other sessions' folders are still in it
        folder.parent.rmdir()
