"""Checks of what callers hand to a sandbox; every message says what was expected."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

from t1_env.errors import ConfigError
from t1_env.sandbox import wire
from t1_env.sandbox.base import SandboxSpec

_MAX_CHILD_FD: Final = 1023


def check_spec(spec: SandboxSpec) -> None:
    """Raise ``ConfigError`` unless a sandbox can be what ``spec`` says."""
    check_path(spec.workdir)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62})", spec.hostname):
        raise ConfigError(f"SandboxSpec.hostname must be 1 to 63 letters, digits, dots or hyphens, got {spec.hostname!r}")
    for name, value, least in (
        ("memory_mb", spec.memory_mb, 16),
        ("storage_mb", spec.storage_mb, 1),
        ("max_processes", spec.max_processes, 4),
        ("cpus", spec.cpus, 0.01),
    ):
        if value is None and name in ("memory_mb", "cpus"):
            continue
        if not isinstance(value, (int, float)) or value < least:
            raise ConfigError(f"SandboxSpec.{name} must be at least {least}, got {value!r}")
    check_env(spec.env)


def check_env(env: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` unless ``env`` can be the environment of a process."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ConfigError(f"environment variable {name!r}={value!r}: a name must be non-empty without '=', and neither may hold NUL")


def check_path(path: str) -> None:
    """Raise ``ConfigError`` unless ``path`` is an absolute path."""
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"a path inside a sandbox must be absolute and without NUL, got {path!r}")


def check_spawn(argv: Sequence[str], env: Mapping[str, str] | None, fds: Mapping[int, int]) -> None:
    """Raise ``ConfigError`` unless these can be the arguments of ``Sandbox.spawn``."""
    if isinstance(argv, str) or not argv or any("\0" in part for part in argv):
        raise ConfigError(f"argv must be a non-empty sequence of strings without NUL, got {argv!r}")
    if any(not 0 <= number <= _MAX_CHILD_FD for number in fds) or len(fds) > wire.MAX_DESCRIPTORS:
        raise ConfigError(f"fds must map child descriptors 0..{_MAX_CHILD_FD} (at most {wire.MAX_DESCRIPTORS}), got {sorted(fds)}")
    for number, fd in fds.items():
        try:
            os.fstat(fd)
        except OSError as error:
            raise ConfigError(f"fds[{number}] = {fd} is not an open descriptor of this process") from error
    check_env(env or {})
