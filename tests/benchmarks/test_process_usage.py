"""Tests of CPU and memory accounting with real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.process_usage import (
    CpuMeter,
    ProcessLostError,
    cpu_ns,
    cpu_with_ended_children,
    memory_mb,
    process_tree,
)

WORKER = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + float(line)
    while time.process_time() < end: pass
    print(flush=True)
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        burn(process, 0.0)
        yield process
        process.kill()


def burn(process: subprocess.Popen[str], seconds: float) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{seconds}\n")
    process.stdin.flush()
    process.stdout.readline()


def test_cpu_time_agrees_with_the_process_clock() -> None:
    for _ in range(100):
        before = time.process_time_ns()
        read = cpu_ns(os.getpid())
        assert before <= read <= time.process_time_ns()


def test_cpu_time_of_another_process_is_measured(worker: subprocess.Popen[str]) -> None:
    meter = CpuMeter([worker.pid])
    burn(worker, 0.05)
    first = meter.used()
    burn(worker, 0.05)
    assert 0.05 <= first < meter.used()
    meter.start()
    assert meter.used() < 0.05


def test_cpu_time_includes_running_and_ended_children(worker: subprocess.Popen[str]) -> None:
    before = cpu_with_ended_children(os.getpid())
    burn(worker, 0.1)
    running = cpu_with_ended_children(os.getpid())
    worker.kill()
    worker.wait()
    ended = cpu_with_ended_children(os.getpid())
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert before + 0.1 - 4 * tick <= running <= ended + 4 * tick


def test_new_process_counts_from_its_start() -> None:
    meter = CpuMeter([os.getpid()])
    own = time.process_time()
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        burn(process, 0.05)
        assert process.pid in process_tree([os.getpid()])
        assert meter.used() >= 0.05 + (time.process_time() - own) * 0.5
        process.kill()


def test_excluded_process_is_not_counted(worker: subprocess.Popen[str]) -> None:
    assert worker.pid in process_tree([os.getpid()])
    assert worker.pid not in process_tree([os.getpid()], exclude=[worker.pid])


def test_ended_process_fails_the_measurement(worker: subprocess.Popen[str]) -> None:
    meter = CpuMeter([os.getpid()])
    worker.kill()
    worker.wait()
    with pytest.raises(ProcessLostError):
        meter.used()
    with pytest.raises(ProcessLostError):
        cpu_ns(worker.pid)
    with pytest.raises(ProcessLostError):
        memory_mb([worker.pid])


def test_memory_of_processes_is_added_up(worker: subprocess.Popen[str]) -> None:
    one = memory_mb([worker.pid])
    assert one > 0
    assert memory_mb([worker.pid, os.getpid()]) > one
