"""What a figure was measured on. Says nothing that names the machine or its owner."""

import os
import platform
from pathlib import Path
from typing import Any

import rookery


def machine() -> dict[str, Any]:
    """Processor, cores we may use, memory, kernel, Python, and how busy it was."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "rookery": rookery.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
