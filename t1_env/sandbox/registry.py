"""Sandboxes by name: ours, and those that other packages offer through the entry point group ``t1_env.sandboxes``."""

from __future__ import annotations

import difflib
from importlib import metadata
from typing import Final

from t1_env.errors import ConfigError, SandboxError
from t1_env.sandbox.base import Sandbox, SandboxSpec

ENTRY_POINT_GROUP: Final = "t1_env.sandboxes"
"""An entry point here names a callable that takes a ``SandboxSpec`` and returns a ``Sandbox`` that is not started."""

_OURS: Final = ("local", "docker", "ssh")


def sandbox_names() -> tuple[str, ...]:
    """Names that ``make_sandbox`` takes on this machine, ours first."""
    others = sorted(point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP))
    return (*_OURS, *(name for name in others if name not in _OURS))


def make_sandbox(name: str, spec: SandboxSpec | None = None) -> Sandbox:
    """Make a sandbox that is not started yet.

    Args:
        name: ``"local"``, ``"docker"``, ``"ssh"``, or a name from the entry point group ``t1_env.sandboxes``.
        spec: What to build; default ``SandboxSpec()``.

    Returns:
        A sandbox; call ``start()`` on it.

    Raises:
        ConfigError: Nothing has this name, or the sandbox cannot be what the specification asks.
        SandboxError: A third-party sandbox could not be loaded.
    """
    spec = spec if spec is not None else SandboxSpec()
    if name == "local":
        from t1_env.sandbox.local import LocalSandbox

        return LocalSandbox(spec)
    if name == "docker":
        from t1_env.sandbox.docker import DockerSandbox

        return DockerSandbox(spec)
    if name == "ssh":
        from t1_env.sandbox.ssh import SshSandbox

        return SshSandbox(spec)
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            factory = point.load()
        except (ImportError, AttributeError) as error:
            raise SandboxError(f"sandbox {name!r} ({point.value}) could not be loaded: {error}") from error
        sandbox = factory(spec)
        if not isinstance(sandbox, Sandbox):
            raise SandboxError(f"sandbox {name!r} ({point.value}) returned {type(sandbox).__name__}, which is not a Sandbox")
        return sandbox
    known = sandbox_names()
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"unknown sandbox {name!r}: expected one of {', '.join(known)}{hint}")
