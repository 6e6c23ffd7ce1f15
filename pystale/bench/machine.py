"""What the measurements ran on."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np

from pystale import build_info

__all__ = ["available_bytes", "description", "words"]


def description() -> dict[str, Any]:
    """Processor, CPU level of the kernels, and versions."""
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pystale": dict(build_info()),
    }


def words(machine: dict[str, Any]) -> str:
    """The same in a line."""
    build = machine["pystale"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, kernels at {build['cpu_level']}; Python {machine['python']}, "
        f"NumPy {machine['numpy']}, pystale {build['version']} ({build['compiler']})"
    )


def available_bytes() -> int | None:
    """Memory that can be used without swapping, as the kernel and the control group see it; None where unknown."""
    found = []
    if kibibytes := re.search(r"^MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE):
        found.append(1024 * int(kibibytes[1]))
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        found.append(max(int(limit) - int(used), 0))
    return min(found, default=None)


def _cpu() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "unknown processor"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
