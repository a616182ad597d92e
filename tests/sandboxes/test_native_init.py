"""The C library for pid 1: what it does not do itself is continued in Python, and sandboxes work without it."""

import asyncio
import errno
import io
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from rookery.sandbox_runtime import guard_protocol, processes
from rookery.sandbox_runtime.pid1 import native_init
from rookery.sandbox_runtime.pid1.native_init import NativeInit, ZygoteEndedError
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.channel import GuardChannel
from rookery.sandboxes.conformance import CHECKS, Check
from rookery.sandboxes.local import machine_checks, native_library
from rookery.sandboxes.local.keeper_client import list_keeper_children
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from rookery.sandboxes.probe import ProviderProof
from rookery.sandboxes.remote import bootstrap
from tests.processes import send_signal
from tests.sandboxes.hostile import warm_programs
from tests.sandboxes.hostile.inspection import get_keeper_pid
from tests.sandboxes.hostile.program import isolation_check
from tests.sandboxes.owner_process import SPEC, wait_while
from tests.waiting import wait_until

WITHOUT_LIBRARY = (
    "a_missing_program_is_a_result",
    "a_time_limit_kills_the_whole_tree",
    "a_prewarmed_python_behaves_like_a_new_one",
    "another_user_is_isolated_or_refused",
    "a_shell_survives_the_timeout_of_a_script",
)
WARM_PATH = f"{Path(sys.base_prefix).resolve() / 'bin'}:/usr/bin:/bin"
"""Search path on which `python3` is the keeper's interpreter."""
needs_library = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("cc") or shutil.which("gcc")),
    reason="needs root and a C compiler",
)


@pytest.fixture
async def local(home: ProviderHome) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(home)
    yield provider
    await provider.close()


async def is_native(provider: LocalProvider) -> bool:
    return bool((await (await provider.keeper()).status())["native"])


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check.__name__ in WITHOUT_LIBRARY], ids=lambda check: check.__name__
)
async def test_sandboxes_conform_without_the_library(
    check: Check, local: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_NATIVE", "0")
    assert not await is_native(local)
    await check(local)


@needs_library
async def test_command_that_python_has_to_start_continues_in_python(local: LocalProvider) -> None:
    assert await is_native(local)
    sandbox = await local.create(SPEC, attempt="test")
    try:
        show = Command(argv=("sh", "-c", "ls /proc/self/fd; cat"), stdin=b"input")
        before = await sandbox.exec(show)
        running = asyncio.create_task(sandbox.exec(Command(argv=("sh", "-c", "read line; exit 7"), stdin=b"")))
        missing = await sandbox.exec(Command(argv=("no-such-program",)))
        assert (missing.exit_code, missing.status) == (127, "exited")
        assert (await running).exit_code == 7
        after = await sandbox.exec(show)
        assert (after.exit_code, after.stdout) == (before.exit_code, before.stdout) == (0, b"0\n1\n2\n3\ninput")
        warm = Command(argv=("python3", "-c", "import sys; print(sys.argv)", "x"), warm=True)
        assert (await sandbox.exec(warm)).stdout == b"['-c', 'x']\n"
    finally:
        await sandbox.close()


def private_kilobytes(sandbox: LocalSandbox) -> int:
    """Return the memory that only pid 1 of a sandbox has: more than a megabyte if it runs Python code."""
    assert sandbox.handle is not None
    text = Path(f"/proc/{sandbox.handle.pid}/smaps_rollup").read_text()
    return int(text.partition("Private_Dirty:")[2].split()[0])


@needs_library
async def test_pid_1_stays_in_the_library_with_a_snapshot_or_a_model_network(local: LocalProvider) -> None:
    sandbox = await local.create(replace(SPEC, network="model"), attempt="test")
    try:
        await sandbox.write("file", b"content")
        assert (await sandbox.exec(Command(argv=("cat", "file")))).stdout == b"content"
        again = await sandbox.fork(await sandbox.snapshot())
        try:
            assert await again.read("file") == b"content"
            process = await again.start(Command(argv=("sleep", "600")))
            await again.kill_all()
            assert (await process.wait(timeout=60)).signal == signal.SIGKILL
            owners = await again.exec(Command(argv=("stat", "-c", "%a:%U", "/tmp", "/work")))
            assert owners.stdout == b"1777:root\n755:user\n"
            await again.kill_all()
            assert max(private_kilobytes(sandbox), private_kilobytes(again)) < 600
            missing = await again.exec(Command(argv=("no-such-program",)))
            assert (missing.exit_code, private_kilobytes(again) > 600) == (127, True)
        finally:
            await again.close()
    finally:
        await sandbox.close()


def find_zygote(keeper: int) -> int | None:
    """Return the PID of a keeper's zygote, or None if a new sandbox still has the same name."""
    found = set(processes.list_children(keeper)) - set(list_keeper_children(keeper))
    return found.pop() if len(found) == 1 else None


@needs_library
async def test_keeper_forks_sandboxes_itself_when_the_zygote_is_killed(local: LocalProvider) -> None:
    keeper = await get_keeper_pid(local)
    sandbox = await local.create(SPEC, attempt="test")
    try:
        zygote = await wait_until(lambda: find_zygote(keeper))
        send_signal({zygote}, signal.SIGKILL)
        await wait_while(lambda: Path(f"/proc/{zygote}").exists())
        others = [await local.create(SPEC, attempt="test") for _ in range(4)]
        try:
            for one in (sandbox, *others):
                assert (await one.exec(Command(argv=("true",)))).ok
        finally:
            for one in others:
                await one.close()
    finally:
        await sandbox.close()


@needs_library
async def test_zygote_that_is_killed_with_a_request_fails_no_creation(local: LocalProvider) -> None:
    keeper = await get_keeper_pid(local)
    first = await local.create(SPEC, attempt="test")
    try:
        zygote = await wait_until(lambda: find_zygote(keeper))
        send_signal({zygote}, signal.SIGSTOP)
        creations = [asyncio.create_task(local.create(SPEC, attempt="test")) for _ in range(4)]
        await wait_until(lambda: is_in_receive(keeper))
        send_signal({zygote}, signal.SIGKILL)
        others = await asyncio.gather(*creations)
        try:
            for one in (first, *others):
                assert (await one.exec(Command(argv=("true",)))).ok
        finally:
            for one in others:
                await one.close()
    finally:
        await first.close()


def is_in_receive(pid: int) -> bool:
    """Return whether a process waits in recvmsg, as a keeper does for an answer of its zygote."""
    number = {"x86_64": "47", "aarch64": "212"}[os.uname().machine]
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] == number


@needs_library
async def test_keeper_without_a_zygote_says_why(
    local: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library = tmp_path / "library.c", tmp_path / "library.so"
    source.write_text("#include <unistd.h>\nchar state[1 << 18];\nvoid run_zygote(void *shared) { _exit(1); }\n")
    subprocess.run(["gcc", "-fPIC", "-shared", "-o", library, source], check=True)
    monkeypatch.setattr(native_library, "find_library", lambda: native_library.NativeLibrary(str(library), "", ""))
    about = await (await local.keeper()).status()
    assert (about["native"], bool(about["native_problem"])) == (False, True)
    check = machine_checks._check_library(ProviderProof(about=about))
    assert (check.status, about["native_problem"] in check.found) == ("info", True)
    sandbox = await local.create(SPEC, attempt="test")
    try:
        assert (await sandbox.exec(Command(argv=("true",)))).ok
    finally:
        await sandbox.close()


def fail_to_prepare() -> None:
    raise ValueError("reason")


@pytest.mark.parametrize(
    ("prepare", "expected", "output"),
    [(fail_to_prepare, ZygoteEndedError, "zygote: ValueError: reason\n"), (signal.pause, TimeoutError, "")],
)
def test_zygote_that_does_not_become_ready_is_an_error(
    prepare: Callable[[], None],
    expected: type[OSError],
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if prepare is signal.pause:
        monkeypatch.setattr(native_init, "PREPARE_SECONDS", 0.1)
    native = NativeInit.__new__(NativeInit)
    with pytest.raises(expected):
        native.start_zygote(prepare)
    with pytest.raises(ChildProcessError):
        os.waitpid(native.pid, 0)
    assert capfd.readouterr().err == output


@needs_library
async def test_pid_1_has_no_page_tables_for_the_memory_of_the_warm_interpreter(local: LocalProvider) -> None:
    keeper = await get_keeper_pid(local)
    sandbox = await local.create(SPEC, attempt="test")
    try:
        assert (await sandbox.exec(Command(argv=("true",)))).ok
        assert sandbox.handle is not None
        assert _anonymous_kb(sandbox.handle.pid) < 0.2 * _anonymous_kb(keeper)
    finally:
        await sandbox.close()


def _anonymous_kb(pid: int) -> int:
    (line,) = [one for one in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if "Anonymous:" in one]
    return int(line.split()[1])


@pytest.mark.parametrize(("flags", "known"), [("", True), ("d", True), ("t", False), ("td", False)])
def test_memory_of_a_free_threaded_interpreter_is_not_shared(
    flags: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "abiflags", flags)
    assert native_init._has_known_allocator() == known


@needs_library
async def test_warm_interpreter_has_no_list_that_grows_by_mremap(local: LocalProvider) -> None:
    program = """
import gc
gc.unfreeze()
print(max(one.__sizeof__() for one in gc.get_objects() if isinstance(one, list)) < 128 << 10)
"""
    sandbox = await local.create(SPEC, attempt="test")
    try:
        command = Command(argv=("python3", "-c", program), env={"PATH": WARM_PATH}, warm=True)
        assert (await sandbox.exec(command)).stdout == b"True\n"
    finally:
        await sandbox.close()


@needs_library
async def test_command_that_changes_memory_of_the_warm_interpreter_changes_only_its_own(
    local: LocalProvider,
) -> None:
    change = "import ctypes; ctypes.c_char.from_address(id(b'x') + bytes.__basicsize__ - 1).value = b'y'"
    sandboxes = [await local.create(SPEC, attempt="test") for _ in range(2)]
    try:
        for source, found in ((f"{change}; print(b'x')", b"b'y'\n"), ("print(b'x')", b"b'x'\n")):
            for sandbox in sandboxes:
                command = Command(argv=("python3", "-c", source), env={"PATH": WARM_PATH}, warm=True)
                assert (await sandbox.exec(command)).stdout == found
    finally:
        for sandbox in sandboxes:
            await sandbox.close()


@needs_library
async def test_command_that_python_starts_in_pid_1_shows_its_arguments_and_environment(
    local: LocalProvider,
) -> None:
    program = "for name in ('cmdline', 'environ'): print(open(f'/proc/self/{name}').read().split('\\0'))"
    sandbox = await local.create(SPEC, attempt="test")
    try:
        for python in (False, True):
            if python:
                assert (await sandbox.exec(Command(argv=("no-such-program",)))).exit_code == 127
            for size in (1, 40, 300, 600, 5_000, 60_000, 250_000):  # of blocks from different parts of the heap
                padding = "x" * size
                env = {"PATH": WARM_PATH, "PADDING": padding}
                shown = await sandbox.exec(Command(argv=("python3", "-c", program, padding), env=env, warm=True))
                arguments, environment = shown.stdout.decode().splitlines()
                assert arguments == str(["python3", "-c", program, padding, ""])
                assert f"'PADDING={padding}'" in environment
    finally:
        await sandbox.close()


@needs_library
async def test_largest_message_arrives_complete(local: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    send, sizes = GuardChannel._send, []

    async def send_padded(self: GuardChannel, head: bytes, body: bytes, fds: Sequence[int]) -> None:
        sizes.append(guard_protocol.MAX_MESSAGE - len(body) - len(b"\0PADDING="))
        await send(self, head, body + b"\0PADDING=" + b"x" * sizes[-1], fds)

    sandbox = await local.create(SPEC, attempt="test")
    monkeypatch.setattr(GuardChannel, "_send", send_padded)
    try:
        result = await sandbox.exec(Command(argv=("env",)))
        assert result.stdout.splitlines()[-1] == b"PADDING=" + b"x" * sizes[0]
    finally:
        monkeypatch.undo()
        await sandbox.close()


@needs_library
async def test_command_that_starts_python_in_pid_1_leaves_nothing_in_its_memory(local: LocalProvider) -> None:
    sandbox = await local.create(SPEC, attempt="test")
    try:
        secret = os.urandom(16).hex()
        missing = Command(argv=("no-such-program", f"secret-{secret}"), env={"GIVEN": f"secret-{secret}"})
        assert (await sandbox.exec(missing)).exit_code == 127
        inverted = bytes(byte ^ 0x55 for byte in secret.encode()).hex()
        scan = isolation_check("looks_for_a_secret", warm_programs.MEMORY_SCAN).command
        found = await sandbox.exec(Command(argv=scan, env={"PATH": WARM_PATH, "INVERTED": inverted}, warm=True))
        assert (found.exit_code, found.stdout) == (0, b"contained\n")
    finally:
        await sandbox.close()


@needs_library
async def test_failed_start_is_reported_by_python_for_a_command_of_the_library(local: LocalProvider) -> None:
    sandbox = await local.create(SPEC, attempt="test")
    try:
        nowhere = Command(argv=("python3", "-c", ""), cwd="missing", env={"PATH": WARM_PATH}, warm=True)
        results = await asyncio.gather(sandbox.exec(nowhere), sandbox.exec(Command(argv=("no-such-program",))))
        assert [one.exit_code for one in results] == [127, 127]
    finally:
        await sandbox.close()


def test_fork_fails_once_if_the_zygote_ends_or_the_keeper_has_no_descriptor_left() -> None:
    native = NativeInit.__new__(NativeInit)
    native._zygote, zygote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with native._zygote, zygote, subprocess.Popen(["sleep", "600"]) as sandbox:

        def fork() -> int | None:
            with pytest.raises(OSError) as caught:
                native.fork(0, 0, 0, 0, -1, [])
            return caught.value.errno

        try:
            zygote.send(struct.pack("<i", sandbox.pid))  # without the pidfd
            assert fork() == errno.EMFILE
            assert not Path(f"/proc/{sandbox.pid}").exists()
        finally:
            sandbox.kill()
        zygote.shutdown(socket.SHUT_WR)
        assert fork() == errno.EIO  # it has the request: perhaps there is a new process
        zygote.close()
        assert fork() in (errno.EPIPE, errno.ECONNRESET)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new cache directory for the library. It is not compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_library.compile_once.cache_clear()
    yield tmp_path
    native_library.compile_once.cache_clear()


def own_by_another_user(directory: Path) -> None:
    os.chown(directory, 1000, 1000)


def replace_by_a_link_of_another_user(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))
    directory.symlink_to("elsewhere")
    os.chown(directory, 1000, 1000, follow_symlinks=False)


@needs_library
@pytest.mark.parametrize("level", ["rookery", "rookery/native"])
@pytest.mark.parametrize(
    "change", [lambda path: path.chmod(0o777), own_by_another_user, replace_by_a_link_of_another_user]
)
def test_library_is_not_used_where_others_can_change_its_path(
    cache: Path, change: Callable[[Path], None], level: str
) -> None:
    assert Path(native_library.find_library().path).is_file()
    native_library.compile_once.cache_clear()
    change(cache / level)
    found = native_library.find_library()
    assert (found.path, bool(found.problem)) == ("", True)


@needs_library
def test_library_is_used_below_a_sticky_directory(cache: Path) -> None:
    cache.chmod(0o1777)
    assert Path(native_library.find_library().path).is_file()


@needs_library
def test_library_is_not_used_without_a_compiler_or_a_place_for_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setenv("PATH", "")
        assert native_library.find_library().path == ""
    native_library.compile_once.cache_clear()
    shutil.rmtree(cache / "rookery")
    (cache / "rookery").write_text("a file")
    assert native_library.find_library().path == ""


@needs_library
def test_processes_that_start_together_compile_the_library_once(cache: Path) -> None:
    compiler, log = cache / "bin" / "cc", cache / "log"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\necho compiled >> {log}\nexec {shutil.which("cc") or "gcc"} "$@"\n')
    compiler.chmod(0o755)
    program = "from rookery.sandboxes.local import native_library as n; print(n.find_library().path)"
    environment = {**os.environ, "PATH": f"{compiler.parent}:{os.environ['PATH']}"}
    started = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    found = {one.communicate()[0].strip() for one in started}
    assert found == {str(native_library.library_path())}
    assert log.read_text().splitlines() == ["compiled"]


@needs_library
def test_library_compiles_without_warnings(tmp_path: Path) -> None:
    flags = (*native_library._FLAGS, "-Wall", "-Wextra", "-Werror")
    sources = native_library._SOURCES.glob("*.c")
    subprocess.run(["gcc", *flags, "-o", tmp_path / "library.so", *sources], check=True)


@needs_library
def test_special_kinds_of_memory_are_not_replaced(tmp_path: Path) -> None:
    program = tmp_path / "program.c"
    program.write_text(
        f'#include "{native_library._SOURCES / "memory.c"}"\n'
        'int main(int count, char **flags) { while (--count) putchar("01"[is_replaceable(*++flags)]); }\n'
    )
    messages = native_library._SOURCES / "messages.c"
    subprocess.run(["gcc", "-o", tmp_path / "program", program, messages], check=True)
    shadow_stack, tagged, ordinary = (f"VmFlags: rd wr mr mw me {flag} \n" for flag in ("ss", "mt", "ac"))
    output = subprocess.check_output([tmp_path / "program", shadow_stack, tagged, ordinary])
    assert output == b"001"


def test_other_machines_get_the_sources_of_the_library() -> None:
    with tarfile.open(fileobj=io.BytesIO(bootstrap.build_archive()[1])) as archive:
        names = archive.getnames()
    assert {f"rookery/sandbox_runtime/pid1/native/{one.name}" for one in native_library._SOURCES.iterdir()} <= {
        *names
    }
