"""What only the insides of an interpreter can change; by ctypes, where there is one. Stand-alone.

Promises:
- what cannot be found where it was looked for is left alone: then frames of ours can be seen, and nothing breaks;
- `/proc/self/cmdline`, `environ` and the process's name are those of the command, where the kernel allows it.
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
_python.PyThreadState_Get.restype = ctypes.c_void_p
_python.PyStructSequence_New.restype = ctypes.py_object
_python.PyStructSequence_New.argtypes = [ctypes.py_object]
_python.PyStructSequence_SetItem.argtypes = [ctypes.py_object, ctypes.c_ssize_t, ctypes.py_object]
_python.PyStructSequence_SetItem.restype = None
_python.Py_IncRef.argtypes = [ctypes.py_object]
_WORD = ctypes.sizeof(ctypes.c_void_p)
_FRAME = 3 * _WORD
"""Of a frame object: its head, the frame below, then the frame proper."""
_SPAN = 24
"""Words of a thread's state that are looked at."""
_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_GLOBALS = {
    "isolated": "Py_IsolatedFlag",
    "ignore_environment": "Py_IgnoreEnvironmentFlag",
    "no_site": "Py_NoSiteFlag",
    "no_user_site": "Py_NoUserSiteDirectory",
    "dont_write_bytecode": "Py_DontWriteBytecodeFlag",
    "unbuffered": "Py_UnbufferedStdioFlag",
}


def flags(**values: Any) -> Any:
    """`sys.flags` with other values."""
    kind = type(sys.flags)
    names = getattr(kind, "__match_args__", None) or tuple(
        word.partition("=")[0] for word in repr(sys.flags)[10:-1].split(", ")
    )
    made = _python.PyStructSequence_New(kind)
    for at, name in enumerate(names):
        old = getattr(sys.flags, name)
        value = type(old)(values[name]) if name in values else old
        _python.Py_IncRef(value)
        _python.PyStructSequence_SetItem(made, at, value)
    for name, symbol in _GLOBALS.items():
        if name in values:
            try:
                ctypes.c_int.in_dll(_python, symbol).value = int(values[name])
            except ValueError:
                continue  # newer versions do without
    return made


class _Map(ctypes.Structure):
    """struct prctl_mm_map."""

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


_SIZE = ctypes.c_ulong(ctypes.sizeof(_Map))
_layout: _Map | None = None


def layout() -> _Map:
    """Of this process's memory. Its forks have the same."""
    global _layout  # noqa: PLW0603
    with open("/proc/self/stat", "rb") as file:
        fields = [int(word) for word in file.read().rpartition(b")")[2].split()[1:]]
    _layout = _Map(*fields[22:24], *fields[41:44], 0, fields[24], 0, 0, 0, 0, 0, 0, 0xFFFFFFFF)
    return _layout


def show(words: list[bytes], pairs: list[bytes]) -> None:
    """In /proc: what was run, and with which variables."""
    name = os.path.basename(words[0])[:15]
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0)
    asked = _layout or layout()
    first = b"".join(word + b"\0" for word in words)
    text = first + b"".join(pair + b"\0" for pair in pairs)
    start = id(text) + bytes.__basicsize__ - 1
    middle, end = start + len(first), start + len(text)
    asked.brk = _libc.sbrk(0)
    asked.arg_start, asked.arg_end, asked.env_start, asked.env_end = start, middle, middle, end
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(asked), _SIZE, 0) == 0:
        _python.Py_IncRef(text)  # the kernel looks there as long as there is a process


# ---- frames

_OFTEN = 50
_OLD = sys.version_info < (3, 11)
"""Frames are objects, and nested calls are counted upwards."""
_depth_at = -1
"""Where a thread's state says how deep its calls are nested."""
_frame_at = -1
"""Where it says which frame runs, or (`_through`) who knows it."""
_through = -1
_spare = 0
"""Calls that are nested between a program and the one that starts it."""


def calibrate() -> None:
    """Finds out where this interpreter keeps its frames. Where it cannot, nothing is hidden."""
    global _depth_at, _frame_at, _through, _spare  # noqa: PLW0603
    if sys.implementation.name != "cpython":
        return
    thread = _python.PyThreadState_Get()
    frame = id(sys._getframe())
    if not _OLD:
        frame = ctypes.c_size_t.from_address(frame + _FRAME).value
    words = (ctypes.c_size_t * _SPAN).from_address(thread)
    mem = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at, word in enumerate(words):
            if word == frame:
                _frame_at, _through = at * _WORD, -1
                break
            # Read here, not by a function of ours: that would be the frame that runs.
            with contextlib.suppress(OSError, OverflowError):
                there = os.pread(mem, 2 * _WORD, word) if word > 1 << 16 and word % _WORD == 0 else b""
                if not _OLD and (step := there.find(frame.to_bytes(_WORD, sys.byteorder))) >= 0:
                    _frame_at, _through = at * _WORD, step
                    break
    finally:
        os.close(mem)
    _depth_at = _depth(thread)
    if _frame_at < 0 or _depth_at < 0:
        _frame_at = _depth_at = -1
        return
    found: list[int] = []
    names = {"look": lambda: found.append(ctypes.c_int.from_address(thread + _depth_at).value)}
    for _ in range(_OFTEN):  # code that runs often is nested less deep
        hidden(exec, compile("look()", "<look>", "exec"), names)
    # `look` itself is the second call.
    _spare = found[-1] - 2 if _OLD else sys.getrecursionlimit() - 2 - found[-1]


def _depth(thread: int) -> int:
    numbers = (ctypes.c_int * (2 * _SPAN)).from_address(thread)
    if _OLD:
        one = list(numbers)
        two = _copied(numbers)
        risen = [at for at in range(2 * _SPAN) if two[at] == one[at] + 1]
        return 4 * risen[0] if len(risen) == 1 else -1
    limit = sys.getrecursionlimit()
    for at in range(2 * _SPAN - 1):
        if numbers[at + 1] == limit and limit - 200 < numbers[at] < limit:
            return 4 * at
    return -1


def _copied(numbers: Any) -> list[int]:
    return list(numbers)


def hidden(function: Callable[..., object], *args: object) -> object:
    """A call for which the frames above it, and their depth, do not exist."""
    call = map(function, *([arg] for arg in args)) if args else _call(function)
    if _frame_at < 0:
        return next(call)
    thread = _python.PyThreadState_Get()
    slot = thread + _frame_at
    if _through >= 0:
        slot = ctypes.c_size_t.from_address(slot).value + _through
    present = ctypes.c_size_t.from_address(slot)
    depth = ctypes.c_int.from_address(thread + _depth_at)
    frame, left = present.value, depth.value
    own = id(sys._getframe())
    if frame != (own if _OLD else ctypes.c_size_t.from_address(own + _FRAME).value):
        return next(call)
    depth.value = -_spare if _OLD else sys.getrecursionlimit() + _spare
    try:
        present.value = 0
        return next(call)
    finally:
        present.value = frame
        depth.value = left


def _call(function: Callable[..., object]) -> Any:
    return iter(function, object())
