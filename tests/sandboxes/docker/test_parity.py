"""An image gives the same results with `local` and `docker`, except for documented differences."""

# ruff: noqa: E501  (a program is read best as it is)

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio

from rookery.core import ExecResult, SandboxSpec
from rookery.sandboxes import Command, ProviderHome, Sandbox
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.local.provider import LocalProvider
from tests.sandboxes.docker.engine import IMAGE, PrivateEngine
from tests.sandboxes.images_store.image_builder import BuiltImage, build_tar, directory, member, symlink

pytestmark = [pytest.mark.needs("docker"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
MB = 1 << 20
SPEC = SandboxSpec(memory=96 * MB, pids=32, disk=64 * MB, wall=30.0, output=16 << 10, env={"OF_SPEC": "s"})
AS_ROOT = msgspec.structs.replace(SPEC, user="root")
AS_IMAGE = msgspec.structs.replace(SPEC, user="image", workdir="sub")


class Program(NamedTuple):
    name: str
    command: Command
    spec: SandboxSpec = SPEC


def py(name: str, source: str, spec: SandboxSpec = SPEC, **more: Any) -> Program:
    return Program(name, Command(argv=("python3", "-c", source), **more), spec)


def sh(name: str, script: str, spec: SandboxSpec = SPEC, **more: Any) -> Program:
    return Program(name, Command(argv=("bash", "-c", script), **more), spec)


STATUS = "^(Cap|NoNewPrivs|Seccomp:|Uid|Gid|Groups|SigBlk|SigIgn|SigCgt|Umask)"
PROGRAMS = [
    py("prints", "print('hello'); import sys; print('there', file=sys.stderr)"),
    py("raises", "def f(): return 1 / 0\nf()"),
    py("version and paths", "import sys; print(sys.version, sys.prefix, sys.executable, sys.path, sys.flags)"),
    py("modules", "import json, ssl, sqlite3, ctypes, zlib, hashlib, socket; print(ssl.OPENSSL_VERSION)"),
    py("exit code", "import sys; sys.exit(17)"),
    py("exit with words", "raise SystemExit('no')"),
    py("unicode", "print('ünï ☃ 漢', ascii(input()))", stdin="später\n".encode()),
    py("encodings", "import sys, locale; print(sys.stdout.encoding, locale.getlocale(), sys.getfilesystemencoding())"),
    py("bytes in and out", "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])", stdin=bytes(range(256))),
    py("no input", "import sys, os; print(repr(sys.stdin.read()), os.isatty(0), os.isatty(1))"),
    py("large input", "import sys; print(len(sys.stdin.read()))", stdin=b"x" * (2 * MB)),
    py("big output", "for n in range(20000): print(n)"),
    py("flood", "while True: print('x' * 1000)"),
    py("arguments", "import sys; print(sys.argv)\n"),
    py("time limit", "import time; print('begun', flush=True); time.sleep(600)", wall=5.0),
    py("processor limit", "while True: pass", cpu_seconds=0.5),
    py("memory limit", "held = []\nwhile True: held.append(bytearray(8 << 20))"),
    py("memory limit of one process", "import resource as r\nwhile r.getrlimit(r.RLIMIT_DATA)[0] < 0: pass\nbytearray(1 << 30)", memory=64 * MB),
    py("recursion", "def f(n): return f(n + 1)\nf(0)"),
    py("kills itself", "import os; os.kill(os.getpid(), 9)"),
    py("segmentation fault", "import ctypes; ctypes.string_at(0)"),
    py("pids", "import os; print(os.getpid() > 1, os.getppid(), os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid())"),
    py("fork", "import os\nif os.fork() == 0: os._exit(5)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"),
    py("multiprocessing", "import multiprocessing as m; print(m.get_context('fork').Pool(3).map(abs, [-1, -2]))"),
    py("threads", "import threading; t = threading.Thread(target=print, args=('x',)); t.start(); t.join()"),
    py("limits", "import resource as r; print([(n, r.getrlimit(getattr(r, n))) for n in ('RLIMIT_CORE', 'RLIMIT_NOFILE', 'RLIMIT_MEMLOCK', 'RLIMIT_MSGQUEUE', 'RLIMIT_STACK')])"),
    py("descriptors", "import os; print(sorted(os.listdir('/proc/self/fd'))[:-1])"),
    py("signals", "import signal; print([s for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN], signal.pthread_sigmask(0, []))"),
    py("network refused", "import socket\nfor family, where in ((2, ('10.0.0.1', 80)), (2, ('127.0.0.1', 81))):\n    try: socket.create_connection(where, 5)\n    except OSError as e: print(type(e).__name__, e.errno)"),
    py("its own name", "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"),
    py("the sixth version", "import socket; s = socket.create_server(('::1', 0), family=socket.AF_INET6); print(bool(socket.create_connection(s.getsockname()[:2])))"),
    sh("control groups", "cut -d: -f3 /proc/self/cgroup | sort -u"),
    py("names of hosts", "import socket\nprint(socket.gethostbyname('localhost'))\ntry: print(socket.gethostbyname('nowhere.invalid'))\nexcept OSError as e: print(type(e).__name__)"),
    py("loopback", "import socket; s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); print(bool(s.accept()))"),
    py("raw sockets", "import socket\nfor kind in ((17, 3), (2, 3), (40, 1), (16, 3)):\n    try: print(socket.socket(*kind).family)\n    except OSError as e: print(kind, type(e).__name__)"),
    py("temporary files", "import tempfile, os; f = tempfile.NamedTemporaryFile(); print(os.path.dirname(f.name), oct(os.stat('/tmp').st_mode), oct(os.stat(f.name).st_mode))"),
    py("time", "import time; print(time.tzname, time.strftime('%Z'), time.time() > 1.7e9)"),
    py("users", "import os, pwd, getpass; print(os.getuid(), os.getgid(), os.getgroups(), pwd.getpwuid(os.getuid()), getpass.getuser(), os.path.expanduser('~'))"),
    sh("variables", "env | grep -v ^ROOKERY_ | sort"),
    sh("variables of the command", "echo $OF_SPEC $OF_IMAGE $MINE; echo $PATH", env={"MINE": "m", "OF_SPEC": "over"}),
    sh("user", "id; id -u; whoami 2>/dev/null; echo ~"),
    sh("folder", "pwd; ls -a; ls -ldn . /tmp | cut -d' ' -f1,3,4"),
    sh("another folder", "pwd; cat data", cwd="/srv"),
    sh("a folder below", "mkdir -p below && cd below && pwd"),
    sh("exit code of a shell", "false; echo $?; exit 200"),
    sh("killed by a signal", "kill -TERM $$"),
    sh("child killed", "exec 2>/dev/null; bash -c 'kill -SEGV $$' 2>/dev/null; echo $?"),
    sh("trap", "trap 'echo caught; exit 4' USR1; kill -USR1 $$; sleep 5"),
    sh("pipeline", "set -o pipefail; yes | head -n 3; echo ${PIPESTATUS[0]} $?"),
    sh("background", "sleep 600 & echo started"),
    sh("not found", "no-such-program; echo $?; /etc/passwd; echo $?"),
    Program("no such program", Command(argv=("no-such-program",))),
    Program("no program", Command(argv=("/etc/passwd",))),
    Program("a folder as a program", Command(argv=("/srv",))),
    sh("modes", "umask; touch f; mkdir -p d; chmod 751 d; stat -c '%a %u %g %h %F' f d /srv/*; rm -rf f d"),
    sh("links", "ln -sf /etc/passwd l; ln -f /srv/../work/l h; readlink l; stat -c '%h %F' l; cat l | head -n 1; rm l h"),
    sh("files of the image", "find /srv | sort; cat /srv/link; ls /opt; stat -c '%a %u:%g %Y %n' /srv/data /srv/private /srv"),
    sh("what may not be written", "echo x > /srv/data; echo x > /etc/new; mkdir /new; rm -f /etc/passwd; cat /srv/private"),
    sh("root writes", "echo x > /srv/data && cat /srv/data; id -u; touch /etc/new && ls -n /etc/new | cut -d' ' -f3,4; chown 1000 /etc/new; echo $?", AS_ROOT),
    sh("root without rights", "mknod n c 1 3; mount -t tmpfs x /mnt 2>&1 | head -c 5; chroot / 2>&1 | head -c 0; kill -9 1; echo $?", AS_ROOT),
    sh("users of the image", "id -un; id -u; pwd; echo x > mine && stat -c %u mine", AS_IMAGE),
    sh("rights", f"grep -E '{STATUS}' /proc/self/status"),
    sh("pid 1", "cat /proc/1/comm; tr -d '\\0 ' < /proc/1/cmdline; ls -l /proc/1/exe /proc/1/root 2>&1 | wc -l; cat /proc/1/environ 2>&1 | wc -c; kill -9 1"),
    sh("processes", "for p in /proc/[0-9]*; do echo ${p#/proc/}; done | head -n 1"),
    py("too many processes", "import os, time\nheld = []\ntry:\n    while True:\n        held.append(os.fork())\n        if not held[-1]: time.sleep(60)\nexcept OSError as e:\n    for pid in held: os.kill(pid, 9), os.waitpid(pid, 0)\n    raise SystemExit(f'{e}')"),
    sh("devices", "for d in null zero full random urandom tty; do ls -l /dev/$d | cut -c1-10; done; head -c 4 /dev/zero | wc -c; echo x > /dev/full"),
    sh("standard streams", "echo a > /dev/stdout; echo b > /dev/stderr; cat < /dev/stdin; echo c | cat /dev/fd/0", stdin=b"in"),
    sh("shared memory", "echo x > /dev/shm/f && cat /dev/shm/f && rm /dev/shm/f"),
    sh("limits of a shell", "ulimit -c; ulimit -n; ulimit -Hn; ulimit -l"),
    sh("the kernel's switches", "cat /proc/sys/kernel/osrelease > /dev/null; echo $?; cat /proc/kmsg; cat /proc/kcore | head -c 1"),
    sh("interfaces", "grep -c : /proc/net/dev; cut -d: -f1 /proc/net/dev | tail -n 1"),
    sh("sparse files", "dd if=/dev/zero of=sparse bs=1 count=1 seek=20M 2>/dev/null; stat -c %s sparse; rm sparse"),
    sh("fifos", "mkfifo p; (echo through > p &); cat p; rm p"),
    sh("sorting", "printf 'b\\nA\\na\\nB\\nä\\n' | sort"),
    sh("sessions", "setsid bash -c 'trap \"\" TERM HUP; sleep 600' & sleep 0.1; echo left", wall=10.0),
    sh("a switch of the kernel", "echo x > /proc/sys/kernel/core_pattern"),
]  # fmt: skip


DIFFERENCES = [
    (sh("one file that is too large", "trap '' XFSZ; head -c 100000000 /dev/zero > big; rm -f big"), "No space left", "File too large"),
    (sh("the largest file", "ulimit -f"), "unlimited", "65536"),
    (sh("what a folder takes", "mkdir -p d; stat -c %s d"), "40", "[0-9]+"),
    (sh("what the engine mounts", "ls -d /sys /dev/mqueue /.rookery 2>/dev/null"), "", "/.rookery\n/dev/mqueue\n/sys"),
    (sh("files of the engine's", "cat /etc/resolv.conf 2>/dev/null"), "", "nameserver 127.0.0.1"),
]  # fmt: skip
"""Programs whose output differs, with patterns for both. docs/guides/containers.md documents the differences."""


@pytest.fixture(scope="module")
def image(image_archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of an archive of `docker save` for both providers."""
    more = build_tar(
        directory("srv/"),
        member("srv/data", b"data\n"),
        member("srv/private", b"private\n", mode=0o600),
        member("opt/gone", b"x"),
        symlink("srv/link", "data"),
        member("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/work:/bin/sh\nagent:x:1234:1234::/:/bin/sh\n"),
        member("etc/hosts", b"127.0.0.1 localhost\n"),
    )  # fmt: skip
    last = build_tar(directory("opt/"), member("opt/.wh.gone"), member("opt/here", b"x"))
    path = ["PATH=/usr/local/bin:/usr/bin:/bin", "OF_IMAGE=i"]
    made = BuiltImage(image_archives[IMAGE].read_bytes(), more, last, compress=False, Env=path, User="agent")
    return str(made.save_docker_archive(tmp_path_factory.mktemp("same") / "saved.tar"))


class ProviderPair:
    """A provider of each kind, and one sandbox of each per spec."""

    def __init__(self, providers: "tuple[LocalProvider, DockerProvider]", image: str) -> None:
        self.providers = providers
        self.image = image
        self._sandboxes: dict[str, list[Sandbox]] = {}

    async def get_sandboxes(self, spec: SandboxSpec) -> list[Sandbox]:
        key = repr(spec)
        if key not in self._sandboxes:
            spec = msgspec.structs.replace(spec, image=self.image)
            made: list[Sandbox] = [await one.create(spec, attempt="same", timeout=120.0) for one in self.providers]
            self._sandboxes[key] = made
        return self._sandboxes[key]

    async def run(self, program: Program) -> list[ExecResult]:
        return await asyncio.gather(
            *(sandbox.exec(program.command) for sandbox in await self.get_sandboxes(program.spec))
        )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pair(
    engine: PrivateEngine, image: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ProviderPair]:
    top = tmp_path_factory.mktemp("pair")
    patch = pytest.MonkeyPatch()
    patch.setenv("ROOKERY_IMAGES", str(top / "store"))
    patch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    local = LocalProvider(ProviderHome(folder=top / "local", run="same-local"))
    docker = DockerProvider(ProviderHome(folder=top / "docker", run="same-docker"), engine=engine.socket)
    try:
        yield ProviderPair((local, docker), image)
    finally:
        await asyncio.gather(local.close(), docker.close())
        patch.undo()


def comparable(result: ExecResult) -> tuple[object, ...]:
    return result.status, result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name.replace(" ", "-"))
async def test_program_gives_the_same_result_in_both_providers(pair: ProviderPair, program: Program) -> None:
    local, docker = await pair.run(program)
    assert comparable(docker) == comparable(local)


@pytest.mark.parametrize(
    ("program", "in_local", "in_docker"),
    DIFFERENCES,
    ids=[program.name.replace(" ", "-") for program, *_ in DIFFERENCES],
)
async def test_known_differences_between_providers(
    pair: ProviderPair, program: Program, in_local: str, in_docker: str
) -> None:
    local, docker = await pair.run(program)
    for result, words in ((local, in_local), (docker, in_docker)):
        text = (result.stdout + result.stderr).decode().strip()
        assert re.search(words, text) if words else not text, result
    assert comparable(local) != comparable(docker)


async def test_container_only_specs_are_refused_by_local(pair: ProviderPair) -> None:
    local, docker = pair.providers
    for changes in ({"read_only": True}, {"user": "1234"}):
        spec = msgspec.structs.replace(SPEC, image=pair.image, **changes)
        assert local.check(spec)
        assert not docker.check(spec)
