"""Copy the memory pages that every sandbox writes to at the time of its fork. Runs in the keeper and in pid 1.

After a fork, parent and child share all pages. Each of them gets its own copy of a page by a page fault, at its
first write to that page. A Python process writes to hundreds of pages at once, because reference counts are
everywhere: page faults were two fifths of the CPU time of a short run. The kernel copies a page during the fork
itself if the page is pinned for I/O. That costs less than half, and spares the parent its own page fault.

Registering pages as a buffer of an io_uring instance pins them. The instance is used for nothing else. On kernels
without io_uring nothing is pinned, and forks work as usual. The benchmark `sandbox` shows the effect.
"""

import ctypes
import mmap
import os

from rookery.sandbox_runtime.lightweight import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)
_IO_URING_SETUP, _IO_URING_REGISTER, _REGISTER_BUFFERS = 425, 427, 0
_PARAMETERS_SIZE = 120
_MAX_PAGES = 1 << 14
_PRESENT, _FILE_OR_SHARED, _EXCLUSIVE = 1 << 63, 1 << 61, 1 << 56
_ENTRY = 8
"""Bytes of one page's entry in /proc/self/pagemap."""


class PageRecorder:
    """Shared memory in which a child marks the pages that it has written to since it was forked."""

    def __init__(self) -> None:
        self.areas = _list_private_areas()
        pages = sum((end - start) // mmap.PAGESIZE for start, end in self.areas)
        self._marks = mmap.mmap(-1, pages + 1)

    def record(self, pagemap_fd: int) -> None:
        """Mark the pages of which this process has its own copy. `pagemap_fd` is its /proc/self/pagemap."""
        at = 1
        for start, end in self.areas:
            count = (end - start) // mmap.PAGESIZE
            entries = os.pread(pagemap_fd, count * _ENTRY, start // mmap.PAGESIZE * _ENTRY)
            for offset, entry in enumerate(memoryview(entries).cast("Q")):
                if entry & _PRESENT and entry & _EXCLUSIVE and not entry & _FILE_OR_SHARED:
                    self._marks[at + offset] = 1
            at += count
        self._marks[0] = 1

    @property
    def done(self) -> bool:
        return self._marks[0] == 1

    def read_areas(self) -> "list[tuple[int, int]]":
        """Return the marked pages as address ranges."""
        found: list[tuple[int, int]] = []
        at = 1
        for start, end in self.areas:
            for address in range(start, end, mmap.PAGESIZE):
                if self._marks[at]:
                    if found and found[-1][1] == address:
                        found[-1] = (found[-1][0], address + mmap.PAGESIZE)
                    else:
                        found.append((address, address + mmap.PAGESIZE))
                at += 1
        return found

    def close(self) -> None:
        self._marks.close()


class _IoVector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def pin(areas: "Iterable[tuple[int, int]]") -> int:
    """Pin the pages of some address ranges of this process.

    Return a descriptor that keeps them pinned; -1 if they cannot be pinned here.
    """
    vectors = [_IoVector(start, end - start) for start, end in areas][:_MAX_PAGES]
    parameters = ctypes.create_string_buffer(_PARAMETERS_SIZE)
    fd: int = _libc.syscall(ctypes.c_long(_IO_URING_SETUP), 1, parameters) if vectors else -1
    if fd < 0:
        return -1
    os.set_inheritable(fd, False)
    array = (_IoVector * len(vectors))(*vectors)
    if _libc.syscall(ctypes.c_long(_IO_URING_REGISTER), fd, _REGISTER_BUFFERS, array, len(vectors)) < 0:
        os.close(fd)
        return -1
    return fd


def open_pagemap() -> int:
    """Open the page map of this process; return -1 if it cannot be opened."""
    with suppress(OSError):
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    return -1


def _list_private_areas() -> "list[tuple[int, int]]":
    """Return the private writable mappings of this process, without its stack."""
    found: list[tuple[int, int]] = []
    with open("/proc/self/maps") as file:
        for line in file:
            fields = line.split()
            if fields[1].startswith("rw") and fields[1].endswith("p") and fields[-1] != "[stack]":
                start, _, end = fields[0].partition("-")
                found.append((int(start, 16), int(end, 16)))
    return found
