"""CPU and memory accounting, on real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.process_usage import CpuMeter, ProcessLost, cpu_ns, family, memory_mb

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


def test_cpu_time_is_monotone_and_between_two_readings_of_the_own_clock() -> None:
    for _ in range(100):
        before = time.process_time_ns()
        read = cpu_ns(os.getpid())
        assert before <= read <= time.process_time_ns()


def test_the_cpu_of_another_process_is_seen(worker: subprocess.Popen[str]) -> None:
    meter = CpuMeter([worker.pid])
    burn(worker, 0.05)
    first = meter.used()
    burn(worker, 0.05)
    assert 0.05 <= first < meter.used()
    meter.start()
    assert meter.used() < 0.05


def test_a_process_that_appears_counts_from_its_birth() -> None:
    meter = CpuMeter([os.getpid()])
    own = time.process_time()
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        burn(process, 0.05)
        assert process.pid in family([os.getpid()])
        assert meter.used() >= 0.05 + (time.process_time() - own) * 0.5
        process.kill()


def test_a_process_left_out_is_not_counted(worker: subprocess.Popen[str]) -> None:
    assert worker.pid in family([os.getpid()])
    assert worker.pid not in family([os.getpid()], without=[worker.pid])


def test_a_lost_process_fails_the_measurement(worker: subprocess.Popen[str]) -> None:
    meter = CpuMeter([os.getpid()])
    worker.kill()
    worker.wait()
    with pytest.raises(ProcessLost):
        meter.used()
    with pytest.raises(ProcessLost):
        cpu_ns(worker.pid)
    with pytest.raises(ProcessLost):
        memory_mb([worker.pid])


def test_memory_of_processes_adds_up(worker: subprocess.Popen[str]) -> None:
    one = memory_mb([worker.pid])
    assert one > 0
    assert memory_mb([worker.pid, os.getpid()]) > one
