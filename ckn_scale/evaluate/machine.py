"""What computes here, for the record beside figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """CPU, the cores that this process may use, memory, and releases of what computes."""
    return {
        "cpu": _read_cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "releases": {name: _find_release(name) for name in ("ckn-scale", "torch", "numpy", "faiss-cpu")},
    }


def _read_cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _find_release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
