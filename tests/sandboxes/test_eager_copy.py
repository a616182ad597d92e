"""Tests of the pages that the kernel copies during a fork instead of after it."""

import ctypes
import mmap
import os
import resource
from collections.abc import Callable

import pytest

from rookery.sandbox_runtime import eager_copy

PAGES = 512


@pytest.fixture
def memory() -> mmap.mmap:
    area = mmap.mmap(-1, PAGES * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    write(area, PAGES)
    return area


def write(area: mmap.mmap, pages: int) -> None:
    for page in range(pages):
        area[page * mmap.PAGESIZE] = 1


def address_of(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def in_fork(work: Callable[[], int]) -> int:
    """Return the result (0 to 100) of a function that runs in a forked process."""
    pid = os.fork()
    if pid == 0:
        code = 101
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_recorder_finds_the_pages_that_a_child_has_written(memory: mmap.mmap) -> None:
    start = address_of(memory)
    recorder = eager_copy.PageRecorder()
    assert any(first <= start < last for first, last in recorder.areas)
    recorder.areas = [(start, start + PAGES * mmap.PAGESIZE)]

    def child() -> int:
        write(memory, 3)
        recorder.record(eager_copy.open_pagemap())
        return 0

    assert not recorder.done
    assert in_fork(child) == 0
    assert recorder.done
    assert recorder.read_areas() == [(start, start + 3 * mmap.PAGESIZE)]
    recorder.close()


def test_pinned_pages_cause_no_page_faults_after_a_fork(memory: mmap.mmap) -> None:
    start = address_of(memory)
    fd = eager_copy.pin([(start, start + PAGES * mmap.PAGESIZE)])
    if fd < 0:
        pytest.skip("probed: this machine has no io_uring")

    def child() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        write(memory, PAGES)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before  # some are those of the interpreter
        return min(100, faults * 100 // PAGES)

    assert not os.get_inheritable(fd)
    try:
        assert in_fork(child) < 50
    finally:
        os.close(fd)


def test_nothing_to_pin_is_not_an_error() -> None:
    assert eager_copy.pin([]) == -1
