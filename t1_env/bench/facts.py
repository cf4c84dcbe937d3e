"""The machine and the versions that figures were measured with: a figure without them says little."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from t1_env._version import __version__

_PACKAGES: Final = ("gymnasium", "numpy", "pyte", "docker", "paramiko", "swe-rex", "pexpect")
_VERSION_TIMEOUT_S: Final = 10.0


def machine_facts() -> dict[str, Any]:
    """Return processor, memory, kernel and the like, without anything that names the machine or its user."""
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": _meminfo("MemTotal"),
        "virtual": "hypervisor" in _cpu_flags(),
        "privileged": os.geteuid() == 0,
    }


def versions(programs: dict[str, list[str]] | None = None) -> dict[str, str]:
    """Return versions of T1, Python, bash, the packages that take part, and of ``programs``.

    Args:
        programs: Name -> command line that prints the version.

    Returns:
        Name -> version; what is not installed is left out.
    """
    found = {"t1-terminal": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    for name, command in {"bash": ["bash", "--version"], **(programs or {})}.items():
        version = _ask(command)
        if version is not None:
            found[name] = version
    return found


def load_average() -> list[float]:
    """Return the mean number of runnable processes over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def available_memory_bytes() -> int:
    """Return how much memory new processes could get, as the kernel estimates it."""
    return _meminfo("MemAvailable")


def _ask(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\d+\.\d+(?:[.\w]*\w)?", done.stdout.decode("utf-8", "replace"))
    return match.group() if match else None


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return 0


def _cpuinfo(key: str) -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    return _cpuinfo("flags").split()
