"""``t1-env doctor``: what this machine can run, and what to install for the rest."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from t1_env._version import __version__
from t1_env.sandbox.local import unavailable_reason

EXIT_OK, EXIT_FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table.

    Args:
        name: Backend or extra.
        kind: ``"sandbox"`` or ``"extra"``.
        ok: Whether it can be used now.
        detail: What was found, or what to do.
    """

    name: str
    kind: str
    ok: bool
    detail: str


_EXTRAS = {"agent": ("torch", "transformers", "tokenizers", "safetensors", "scipy", "matplotlib"), "sb3": ("stable_baselines3",)}


def findings() -> list[Finding]:
    """Look at this machine; nothing is started, and no optional package is imported."""
    reason = unavailable_reason()
    local = Finding("local", "sandbox", reason is None, reason or "Linux namespaces and overlay mounts work")
    return [local, _docker(), _ssh(), *(_extra(name, modules) for name, modules in _EXTRAS.items())]


def _docker() -> Finding:
    engine = shutil.which("docker")
    socket = "/var/run/docker.sock"
    found = "engine found" if engine and os.access(socket, os.R_OK | os.W_OK) else "no reachable engine (install Docker Engine)"
    return Finding("docker", "sandbox", False, f"not in version {__version__}, use local; {found}")


def _ssh() -> Finding:
    client = shutil.which("ssh")
    found = f"client found ({client})" if client else "no client (install the openssh-client package)"
    return Finding("ssh", "sandbox", False, f"not in version {__version__}, use local; {found}")


def _extra(name: str, modules: tuple[str, ...]) -> Finding:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    detail = f"missing {', '.join(missing)}: python -m pip install 't1-terminal[{name}]'" if missing else "installed"
    return Finding(name, "extra", not missing, detail)


def doctor() -> int:
    """Print the findings.

    Returns:
        0 if the local sandbox works, else 1.
    """
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"t1-terminal {__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}", markup=False)
    table = Table()
    for heading in ("what", "kind", "usable", "detail"):
        table.add_column(heading, overflow="fold")
    found = findings()
    for finding in found:
        table.add_row(finding.name, finding.kind, Text("yes", "green") if finding.ok else Text("no", "red"), Text(finding.detail))
    console.print(table)
    if not found[0].ok:
        print("t1-env: the local sandbox cannot run here; see the table", file=sys.stderr)
        return EXIT_FAILED
    console.print("next: t1-env run --agent oracle seeds/hello-file", markup=False)
    return EXIT_OK
