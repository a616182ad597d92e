"""Access to CPython's internals through ctypes: flags, stack frames, and the command line in /proc.

Runs in interpreters that fork Python commands inside sandboxes, on Python 3.8 and newer. If an internal
structure is not found, it is left alone. Programs then see Rookery's stack frames above their own, and nothing
breaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_python = ctypes.pythonapi
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_libc.sbrk.argtypes = [ctypes.c_ssize_t]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS, _MAP_FAILED = 0x3, 0x22, ctypes.c_void_p(-1).value
_python.PyThreadState_Get.restype = ctypes.c_void_p
_python.PyStructSequence_New.restype = ctypes.py_object
_python.PyStructSequence_New.argtypes = [ctypes.py_object]
_python.PyStructSequence_SetItem.argtypes = [ctypes.py_object, ctypes.c_ssize_t, ctypes.py_object]
_python.PyStructSequence_SetItem.restype = None
_python.Py_IncRef.argtypes = [ctypes.py_object]
_WORD = ctypes.sizeof(ctypes.c_void_p)
_FRAME_OFFSET = 3 * _WORD
"""Offset of `f_frame` in a frame object: after the object header and `f_back`."""
_THREAD_STATE_WORDS = 24
"""Number of words at the start of `PyThreadState` that are searched."""
_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_FLAG_SYMBOLS = {
    "isolated": "Py_IsolatedFlag",
    "ignore_environment": "Py_IgnoreEnvironmentFlag",
    "no_site": "Py_NoSiteFlag",
    "no_user_site": "Py_NoUserSiteDirectory",
    "dont_write_bytecode": "Py_DontWriteBytecodeFlag",
    "unbuffered": "Py_UnbufferedStdioFlag",
}


def build_flags(**values: Any) -> Any:
    """Return a copy of `sys.flags` with changed values, and set the interpreter's C variables accordingly."""
    kind = type(sys.flags)
    names = getattr(kind, "__match_args__", None) or tuple(
        item.partition("=")[0] for item in repr(sys.flags)[10:-1].split(", ")
    )
    flags = _python.PyStructSequence_New(kind)
    for position, name in enumerate(names):
        old = getattr(sys.flags, name)
        value = type(old)(values[name]) if name in values else old
        _python.Py_IncRef(value)
        _python.PyStructSequence_SetItem(flags, position, value)
    for name, symbol in _FLAG_SYMBOLS.items():
        if name in values:
            try:
                ctypes.c_int.in_dll(_python, symbol).value = int(values[name])
            except ValueError:
                continue  # newer versions do not have the symbol
    return flags


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map`."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in (
                "start_code",
                "end_code",
                "start_data",
                "end_data",
                "start_brk",
                "brk",
                "start_stack",
                "arg_start",
                "arg_end",
                "env_start",
                "env_end",
                "auxv",
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


_MAP_SIZE = ctypes.c_ulong(ctypes.sizeof(_MemoryMap))
_memory_map: _MemoryMap | None = None


def read_memory_map() -> _MemoryMap:
    """Read the memory layout of this process (where code, data, heap and stack begin and end) and cache it.

    Forks of this process have the same layout and inherit the cached result, so they need not read it again.
    """
    global _memory_map  # noqa: PLW0603
    with open("/proc/self/stat", "rb") as file:
        fields = [int(field) for field in file.read().rpartition(b")")[2].split()[1:]]
    _memory_map = _MemoryMap(*fields[22:24], *fields[41:44], 0, fields[24], 0, 0, 0, 0, 0, 0, 0xFFFFFFFF)
    return _memory_map


def set_command_line(argv: list[bytes], environ: list[bytes]) -> None:
    """Make the process name, /proc/self/cmdline and /proc/self/environ show this command, if permitted."""
    name = os.path.basename(argv[0])[:15]
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0)
    layout = _memory_map or read_memory_map()
    arguments = b"".join(argument + b"\0" for argument in argv)
    text = arguments + b"".join(pair + b"\0" for pair in environ)
    # The kernel shows only anonymous memory, which the heap of a fork of the zygote is not (`native/memory.c`).
    start = _libc.mmap(None, len(text), _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
    if start == _MAP_FAILED:
        return
    ctypes.memmove(start, text, len(text))
    middle, end = start + len(arguments), start + len(text)
    layout.brk = _libc.sbrk(0)
    layout.arg_start, layout.arg_end, layout.env_start, layout.env_end = start, middle, middle, end
    _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), _MAP_SIZE, 0)


# ---- stack frames

_CALIBRATION_RUNS = 50
_OLD = sys.version_info < (3, 11)
"""Before Python 3.11, frames are Python objects and the recursion depth is counted upwards."""
_depth_offset = -1
"""Offset of the recursion depth in `PyThreadState`; -1 if unknown."""
_frame_offset = -1
"""Offset in `PyThreadState` of the current frame, or of a pointer to the structure that holds it; -1 if
unknown."""
_indirect_offset = -1
"""Offset of the current frame in the structure at `_frame_offset`; -1 if the frame is in `PyThreadState`
itself."""
_hidden_depth = 0
"""Recursion depth that `call_hidden` itself uses and must hide from the called program."""


def calibrate() -> None:
    """Find out where this interpreter stores its current frame and recursion depth."""
    global _depth_offset, _frame_offset, _indirect_offset, _hidden_depth  # noqa: PLW0603
    if sys.implementation.name != "cpython":
        return
    thread = _python.PyThreadState_Get()
    frame = id(sys._getframe())
    if not _OLD:
        frame = ctypes.c_size_t.from_address(frame + _FRAME_OFFSET).value
    words = (ctypes.c_size_t * _THREAD_STATE_WORDS).from_address(thread)
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for index, word in enumerate(words):
            if word == frame:
                _frame_offset, _indirect_offset = index * _WORD, -1
                break
            # Not in a function of its own: that would have another current frame.
            with contextlib.suppress(OSError, OverflowError):
                target = os.pread(memory, 2 * _WORD, word) if word > 1 << 16 and word % _WORD == 0 else b""
                if not _OLD and (offset := target.find(frame.to_bytes(_WORD, sys.byteorder))) >= 0:
                    _frame_offset, _indirect_offset = index * _WORD, offset
                    break
    finally:
        os.close(memory)
    _depth_offset = _find_depth_offset(thread)
    if _frame_offset < 0 or _depth_offset < 0:
        _frame_offset = _depth_offset = -1
        return
    depths: list[int] = []
    names = {"look": lambda: depths.append(ctypes.c_int.from_address(thread + _depth_offset).value)}
    for _ in range(_CALIBRATION_RUNS):  # specialised code uses fewer levels
        call_hidden(exec, compile("look()", "<look>", "exec"), names)
    # `look` itself is the second level.
    _hidden_depth = depths[-1] - 2 if _OLD else sys.getrecursionlimit() - 2 - depths[-1]


def _find_depth_offset(thread: int) -> int:
    numbers = (ctypes.c_int * (2 * _THREAD_STATE_WORDS)).from_address(thread)
    if _OLD:
        before = list(numbers)
        after = _copy_one_level_deeper(numbers)
        risen = [index for index in range(2 * _THREAD_STATE_WORDS) if after[index] == before[index] + 1]
        return 4 * risen[0] if len(risen) == 1 else -1
    limit = sys.getrecursionlimit()
    for index in range(2 * _THREAD_STATE_WORDS - 1):
        if numbers[index + 1] == limit and limit - 200 < numbers[index] < limit:
            return 4 * index
    return -1


def _copy_one_level_deeper(numbers: Any) -> list[int]:
    return list(numbers)


def call_hidden(function: Callable[..., object], *args: object) -> object:
    """Call a function so that it sees neither the stack frames above it nor their recursion depth."""
    call = map(function, *([arg] for arg in args)) if args else _call_without_frame(function)
    if _frame_offset < 0:
        return next(call)
    thread = _python.PyThreadState_Get()
    address = thread + _frame_offset
    if _indirect_offset >= 0:
        address = ctypes.c_size_t.from_address(address).value + _indirect_offset
    current = ctypes.c_size_t.from_address(address)
    depth = ctypes.c_int.from_address(thread + _depth_offset)
    saved_frame, saved_depth = current.value, depth.value
    own = id(sys._getframe())
    if saved_frame != (own if _OLD else ctypes.c_size_t.from_address(own + _FRAME_OFFSET).value):
        return next(call)
    depth.value = -_hidden_depth if _OLD else sys.getrecursionlimit() + _hidden_depth
    try:
        current.value = 0
        return next(call)
    finally:
        current.value = saved_frame
        depth.value = saved_depth


def _call_without_frame(function: Callable[..., object]) -> Any:
    """Return an iterator that calls the function from C when it is advanced."""
    return iter(function, object())
