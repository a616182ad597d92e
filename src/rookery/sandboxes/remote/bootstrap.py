"""Copy the program that runs sandboxes (`remote.host`) to another machine and start it, over one connection.

The other machine needs Python 3.11 or newer and nothing of Rookery. It keeps a copy of the code per version of its
contents, so that a later start sends nothing. The library msgspec is sent, too; a machine with another version of
Python or another architecture must have it installed. If the connection breaks, another one is opened to the same
program (`remote.resumable`).
"""

import base64
import functools
import hashlib
import io
import json
import secrets
import sysconfig
import tarfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import rookery
from rookery.core import SandboxError
from rookery.sandboxes.remote import resumable
from rookery.sandboxes.remote.link import Connection

OpenProgram = Callable[[Sequence[str]], Awaitable[Connection]]
"""Starts Python with the given arguments on another machine and returns its standard input and output."""
MARKER = b"rookery-host "
FIND_PYTHON = (
    'command -v python3 >/dev/null 2>&1 && exec python3 "$@"; '
    'echo; echo "rookery-host missing it has no program python3: use an image with Python 3.11 or newer"'
)
"""Shell program that runs Python with its arguments, or says that there is none."""
_MAX_NOISE = 1 << 20
"""Number of bytes that a login shell may print before the program answers."""
_PACKAGES = ("core", "sandboxes", "sandbox_runtime")
# Runs on the other machine, before anything else. It must give a clear answer on every Python 3.
_PROGRAM = r"""
import json, os, sys
def say(text):
    os.write(1, b"\nrookery-host " + text.encode() + b"\n")
def read(count):
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 18))
        if not part:
            sys.exit(1)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
def main():
    header = json.loads(read(int(read(8))).decode())
    if sys.version_info < (3, 11):
        return say("missing it has Python " + sys.version.split()[0] + ", and 3.11 or newer is needed")
    import sysconfig
    with_library = sysconfig.get_config_var("SOABI") == header["abi"]
    if not with_library:
        try:
            import msgspec
        except ImportError:
            version = sys.version.split()[0]
            return say("missing its Python (" + version + ") needs the library msgspec: pip install msgspec")
    state = os.environ.get("ROOKERY_HOST_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "rookery", "host")
    code = os.path.join(state, header["hash"])
    if os.path.isdir(code):
        say("have")
    else:
        import io, shutil, tarfile, tempfile
        os.makedirs(state, mode=0o700, exist_ok=True)
        say("need")
        staging = tempfile.mkdtemp(dir=state)
        try:
            with tarfile.open(fileobj=io.BytesIO(read(header["size"]))) as tar:
                tar.extractall(staging)
            os.rename(staging, code)
        except OSError:
            if not os.path.isdir(code):
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    library = os.path.join(code, "library") if with_library else ""
    start = "import sys; sys.path[:0] = [p for p in sys.argv[2:] if p]; " \
        "from rookery.sandboxes.remote.host import main; main()"
    settings = dict(header["settings"], state=state)
    # All programs of the machine can read the arguments of a process, and the settings contain a secret.
    source, target = os.pipe()
    os.write(target, json.dumps(settings).encode())
    os.close(target)
    os.set_inheritable(source, True)
    say("start")
    os.execv(sys.executable, [sys.executable, "-P", "-c", start, str(source), code, library])
try:
    main()
except Exception as error:
    say("error " + type(error).__name__ + ": " + str(error).replace("\n", " "))
    sys.exit(1)
"""

# Hands its standard input and output to the running program, and waits until that does not need them any more.
_RESUME_PROGRAM = r"""
import array, hashlib, os, socket, sys
token = b""
while len(token) < 64:
    token += os.read(0, 64 - len(token)) or sys.exit(1)
control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
try:
    control.connect("\0rookery-host-" + hashlib.sha256(token).hexdigest())
except OSError:
    os.write(1, b"\nrookery-host gone\n")
else:
    os.write(1, b"\nrookery-host resumed\n")
    control.sendmsg([token], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))])
    control.recv(1)
"""


class UnsuitableMachine(SandboxError):  # noqa: N818  (a property of the machine)
    """A machine cannot run sandboxes, because Python 3.11 or a library is missing there."""

    cause = "sandbox.refused"


def _make_arguments(source: str) -> list[str]:
    """Return the arguments with which Python runs a program. They need no quoting in any shell."""
    program = base64.b64encode(source.encode()).decode()
    return ["-c", f"__import__('builtins').exec(__import__('base64').b64decode('{program}'))"]


@functools.cache
def build_archive() -> tuple[str, bytes]:
    """Return the code that the other machine needs, as a compressed archive, and a hash of its contents."""
    files: dict[str, Path] = {}
    package = Path(rookery.__file__).parent
    files["rookery/__init__.py"] = package / "__init__.py"
    for name in _PACKAGES:
        for pattern in ("*.py", "*.[ch]"):
            files |= {f"rookery/{path.relative_to(package)}": path for path in (package / name).rglob(pattern)}
    library = Path(msgspec.__file__).parent
    for path in library.rglob("*"):
        if path.suffix in (".py", ".so") and path.is_file():
            files[f"library/msgspec/{path.relative_to(library)}"] = path
    digest = hashlib.sha256()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=5) as tar:
        for name, path in sorted(files.items()):
            data = path.read_bytes()
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return digest.hexdigest()[:20], buffer.getvalue()


async def start_host(open_program: OpenProgram, settings: dict[str, Any], name: str) -> Connection:
    """Start `remote.host` on another machine and return a connection to it that can be resumed.

    Raise `UnsuitableMachine` if it lacks Python or a library, and `SandboxError(sandbox.host)` if starting fails
    for another reason. Messages name the host `name`.
    """
    token = secrets.token_hex(32).encode()
    seconds = resumable.RESUME_SECONDS
    connection = await open_program(_make_arguments(_PROGRAM))
    try:
        own = {**settings, "token": token.decode(), "resume_seconds": seconds}
        started = await _start(_Answers(connection, name), own, name)
    except BaseException:
        await connection.close()
        raise

    async def reopen() -> Connection | None:
        connection = await open_program(_make_arguments(_RESUME_PROGRAM))
        try:
            await connection.write(token)
            answers = _Answers(connection, name)
            if await answers.next() == "resumed":
                return answers
        except BaseException:
            await connection.close()
            raise
        await connection.close()
        return None

    return resumable.ResumableConnection(started, reopen, seconds=seconds)


async def _start(answers: "_Answers", settings: dict[str, Any], name: str) -> Connection:
    identity, archive = build_archive()
    abi = sysconfig.get_config_var("SOABI")
    header = json.dumps({"hash": identity, "size": len(archive), "abi": abi, "settings": settings}).encode()
    await _send(answers, b"%8d" % len(header) + header)
    answer = await answers.next()
    if answer == "need":
        await _send(answers, archive)
        answer = await answers.next()
    elif answer == "have":
        answer = await answers.next()
    if answer.startswith("missing "):
        raise UnsuitableMachine(f"{name} cannot run sandboxes: {answer.removeprefix('missing ')}")
    if answer != "start":
        raise SandboxError(f"{name} cannot run sandboxes: {answer.removeprefix('error ')}", cause="sandbox.host")
    return answers


async def _send(answers: "_Answers", data: bytes) -> None:
    """Write to a program that may have ended. Its answer or the end of its output then says why."""
    with suppress(BrokenPipeError, ConnectionResetError):
        await answers.write(data)


class _Answers:
    """A connection whose first lines are answers of a program of this module, amid a login shell's output."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._unread = b""

    async def next(self) -> str:
        """Return the next answer. Raise `SandboxError` if the connection ends before it."""
        noise = 0
        while True:
            line, end, rest = self._unread.partition(b"\n")
            if end:
                self._unread = rest
                noise += len(line) + 1
                if line.startswith(MARKER):
                    return line.removeprefix(MARKER).decode("utf-8", "replace")
                continue
            data = await self._connection.read()
            if not data or noise + len(self._unread) > _MAX_NOISE:
                text = self._unread[-200:].decode("utf-8", "replace").strip()
                raise SandboxError(
                    f"{self._name} did not start Python{': ' + text if text else ''}", cause="sandbox.host"
                )
            self._unread += data

    async def read(self) -> bytes:
        data, self._unread = self._unread, b""
        return data or await self._connection.read()

    async def write(self, data: bytes) -> None:
        await self._connection.write(data)

    async def close(self) -> None:
        await self._connection.close()
