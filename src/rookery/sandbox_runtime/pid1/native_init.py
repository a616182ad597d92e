"""ctypes interface to the library in `native`, which does the common work of pid 1 in C.

Runs in the keeper and in pid 1. Without the library everything is done by `local_init` and `init`, with the same
results and guarantees. The library is only for keepers that give every sandbox its own range of user IDs and can
mount overlays.
"""

import _socket
import ctypes
import errno
import mmap
import os
import struct
import sys

from rookery.sandbox_runtime import root_filesystem, syscalls
from rookery.sandbox_runtime.guard_protocol import MAX_MESSAGE, REPORT, REQUEST
from rookery.sandbox_runtime.lightweight import _signal, receive_message, send_message, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

AT_MOUNT, AT_CONFIGURE, AT_SERVE, IN_COMMAND = range(1, 5)
"""Stages at which the library hands pid 1 over to Python: with a message about the file system, with one about
limits, while it serves the owner, or in a fork that becomes a Python command."""
KEEPER_FD = 3
ZYGOTE_NAME = "zygote"
"""Name of the zygote's process, as `ps` shows it."""
PREPARE_SECONDS = 10.0
"""Time limit for the preparation of the zygote, for which the keeper waits."""
_MESSAGE = struct.Struct("<cxHIQ")
_MAX_LAYERS_BYTES = 3500
"""The library mounts an overlay with one string of options, which has to fit into a memory page."""
_FORK_REQUEST, _FORK_ANSWER = struct.Struct("<QII"), struct.Struct("<i")


class ZygoteEndedError(OSError):
    """The zygote ended before it answered. It may have forked a sandbox."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "the process that forks sandboxes has ended")


class _Command(ctypes.Structure):
    _fields_ = [
        ("number", ctypes.c_uint32),
        ("pid", ctypes.c_int32),
        ("tag", ctypes.c_int32),
        ("started_alone", ctypes.c_int32),
        ("started", ctypes.c_double),
        ("deadline", ctypes.c_double),
        ("start_ticks", ctypes.c_int64),
    ]


class _Shared(ctypes.Structure):
    _fields_ = [
        ("keeper_pid", ctypes.c_int32),
        ("warm", ctypes.c_int32),
        ("shares_memory", ctypes.c_int32),
        ("interpreter_device", ctypes.c_uint64),
        ("interpreter_inode", ctypes.c_uint64),
        ("trees", ctypes.POINTER(ctypes.c_char_p)),
        ("masks", ctypes.POINTER(ctypes.c_char_p)),
        ("skeleton", ctypes.c_char_p),
        ("mount_point", ctypes.c_char_p),
        ("devpts_options", ctypes.c_char_p),
        ("filter", ctypes.c_void_p),
    ]


class State(ctypes.Structure):
    """State in which the library hands pid 1 over to Python: `struct State` of `native.h`."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in (
                "stage",
                "channel",
                "layer",
                "oom_score_fd",
                "listener",
                "start_errors_fd",
                "user",
                "last_tag",
                "childless",
                "piped",
            )
        ),
        ("disk", ctypes.c_uint64),
        ("tag_base", ctypes.c_uint64),
        ("plan_uid", ctypes.c_uint32),
        ("last_number", ctypes.c_uint32),
        ("message_size", ctypes.c_int32),
        ("fd_count", ctypes.c_int32),
        ("report_size", ctypes.c_int32),
        ("command_count", ctypes.c_int32),
        ("fds", ctypes.c_int32 * 20),
        ("commands", _Command * 16),
        ("report", ctypes.c_char * REPORT.size),
        ("argc", ctypes.c_int32),
        ("string_count", ctypes.c_int32),
        ("program", ctypes.c_char * 4096),
        ("oom_score", ctypes.c_char * 16),
        ("message", ctypes.c_char * (MAX_MESSAGE + 4096)),
    ]


class NativeInit:
    """The library, loaded into the keeper. Raises `OSError` if it cannot be loaded."""

    def __init__(
        self, path: str, tree: root_filesystem.SharedTree, seccomp_filter: syscalls.SeccompFilter, *, warm: bool
    ) -> None:
        # Keeps the GIL during the call: the child that returns from it must hold it.
        library = ctypes.PyDLL(path)
        self._run_zygote = library.run_zygote
        self._run_zygote.restype = None
        self._zygote: _socket.socket | None = None
        self.pid = -1
        self.state = State.in_dll(library, "state")
        self._message_address = ctypes.addressof(self.state) + State.message.offset
        # Slices of it are faster and write to fewer pages than fields of `state`.
        self._bytes: Any = (ctypes.c_char * ctypes.sizeof(State)).in_dll(library, "state")
        interpreter = os.stat("/proc/self/exe")
        trees, masks = root_filesystem.list_trees(tree), root_filesystem.list_masks()
        self._shared = _Shared(
            os.getpid(),
            warm,
            _has_known_allocator(),
            interpreter.st_dev,
            interpreter.st_ino,
            _build_array(trees),
            _build_array(masks),
            root_filesystem.SKELETON.encode(),
            root_filesystem.MOUNT_POINT.encode(),
            root_filesystem.DEVPTS_OPTIONS.encode(),
            ctypes.addressof(seccomp_filter),
        )
        self._filter = seccomp_filter

    def start_zygote(self, prepare: "Callable[[], None]") -> None:
        """Fork the zygote, the process that forks sandboxes. It calls `prepare` first.

        It returns in the keeper when the zygote is ready, and in pid 1 of a sandbox, with `pid` 0, when Python has
        to take over. Raises `OSError` if the zygote does not become ready; then there is no zygote.
        """
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                # Detached: in a sandbox, the garbage collector would close descriptors of the same numbers.
                ours.detach()
                os.dup2(theirs.detach(), KEEPER_FD, inheritable=False)
                syscalls.close_range(KEEPER_FD + 1)
                prepare()
            except BaseException as error:
                try:
                    os.write(2, f"zygote: {type(error).__name__}: {error}\n".encode())
                finally:
                    os._exit(1)  # the keeper continues without a zygote
            self._run_zygote(ctypes.byref(self._shared))
            return
        theirs.close()
        ours.settimeout(PREPARE_SECONDS)
        try:
            if not ours.recv(_FORK_ANSWER.size):
                raise ZygoteEndedError
        except OSError:
            ours.close()
            self.stop_zygote()
            raise
        ours.settimeout(None)
        self._zygote = ours

    def stop_zygote(self) -> None:
        """Kill the zygote and wait until it is gone."""
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:  # still our child: the pid has not been reused
                os.kill(self.pid, _signal.SIGKILL)
                os.waitpid(self.pid, 0)

    def fork(
        self, flags: int, uid: int, sync: int, network: int, cgroup: int, tasks: list[int]
    ) -> tuple[int, int]:
        """Let the zygote fork pid 1 of a sandbox. Return its pid and pidfd.

        `uid` is the effective user that creates the namespaces in `flags`. The other arguments are descriptors:
        the sandbox's connection to the keeper, its network namespace, its v2 cgroup or -1, and `tasks` files of
        v1 cgroups.

        Raises `ConnectionError` only if the zygote did not get the request: then the caller can fork the sandbox.
        A zygote that ends later may have forked it already, which is reported as `ZygoteEndedError`.
        """
        assert self._zygote is not None
        fds = [sync, network, *((cgroup,) if cgroup >= 0 else ()), *tasks]
        send_message(self._zygote, _FORK_REQUEST.pack(flags, uid, cgroup >= 0), fds)
        data, received = b"", list[int]()
        with suppress(ConnectionError):
            data, received = receive_message(self._zygote, 16, 1)
        if not data:
            raise ZygoteEndedError
        (pid,) = _FORK_ANSWER.unpack(data)
        if pid < 0:
            raise OSError(-pid, f"clone3: {os.strerror(-pid)}")
        if not received:  # this process has no descriptor left for it
            os.kill(pid, _signal.SIGKILL)
            os.waitpid(pid, 0)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pid, received[0]

    def take_message(self) -> tuple[bytes, list[int]]:
        """Return the message that the library could not handle, and its file descriptors, and clear it."""
        state = self.state
        data = ctypes.string_at(self._message_address, state.message_size)
        ctypes.memset(self._message_address, 0, state.message_size)
        return data, list(state.fds[: state.fd_count])

    def move_message(self, buffer: mmap.mmap) -> tuple[int, list[int]]:
        """Move the message that the library could not handle to `buffer`. Return its size and file descriptors.

        The message never becomes a Python object: it holds arguments and environment of a command, and later
        commands are forks of this process.
        """
        state = self.state
        size = state.message_size
        buffer[:size] = (ctypes.c_char * size).from_address(self._message_address)
        ctypes.memset(self._message_address, 0, size)
        return size, list(state.fds[: state.fd_count])

    def report(self) -> bytes:
        """Return the report that the owner's socket did not accept."""
        return ctypes.string_at(ctypes.addressof(self.state) + State.report.offset, self.state.report_size)

    def read_command(self) -> tuple[bytes, list[bytes], list[bytes]]:
        """Return the program, the arguments and the environment of the command that this process becomes."""
        state = self._bytes
        argc, size = _read_int(state, State.argc.offset), _read_int(state, State.message_size.offset)
        first = State.message.offset
        strings = state[first + REQUEST.size : first + size].split(b"\0")
        program = state[State.program.offset : State.program.offset + State.program.size].partition(b"\0")[0]
        return program, strings[1 : argc + 1], strings[argc + 1 :]

    def is_piped(self) -> bool:
        """Return whether the command's standard streams are a seekable file at its start and two pipes."""
        return _read_int(self._bytes, State.piped.offset) == 1


def _read_int(data: "Any", offset: int) -> int:
    return int.from_bytes(data[offset : offset + 4], sys.byteorder)


def encode_mount_plan(plan: root_filesystem.MountPlan) -> bytes | None:
    """Return the message for a sandbox without an image; None if only Python can mount its file system."""
    layers = "".join(f"../{path}:" for path in plan.snapshots).encode()
    if plan.mounts or plan.host_resolver or len(layers) > _MAX_LAYERS_BYTES:
        return None
    return _MESSAGE.pack(b"M", 0, plan.uid, plan.size) + layers


def encode_limits(uid: int, disk: int, port: int) -> bytes:
    """Return the message for a sandbox whose other limits are enforced by its cgroup."""
    return _MESSAGE.pack(b"L", port, uid, disk)


def _has_known_allocator() -> bool:
    """Return whether this is CPython with the GIL, whose memory `share_memory` of the library can replace."""
    return sys.implementation.name == "cpython" and "t" not in sys.abiflags


def _build_array(pairs: list[tuple[str, str]]) -> "ctypes.Array[ctypes.c_char_p]":
    """Return a NULL-terminated array of C strings: source and target of each pair."""
    strings = [part.encode() for source, target in pairs for part in (source, target)]
    return (ctypes.c_char_p * (len(strings) + 1))(*strings, None)
