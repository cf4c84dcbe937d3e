"""``t1-env doctor``: what this machine can run, and what to install for the rest."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from t1_env._version import __version__
from t1_env.errors import ConfigError, SandboxError
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.hierarchies import find_hierarchies
from t1_env.sandbox.local import LocalSandbox
from t1_env.sandbox.registry import ENTRY_POINT_GROUP

EXIT_OK, EXIT_FAILED = 0, 1

_EXTRAS: Final = {
    "docker": ("docker",),
    "ssh": ("paramiko",),
    "agent": ("torch", "transformers", "tokenizers", "safetensors", "scipy", "matplotlib"),
    "sb3": ("stable_baselines3",),
}
_LIMITS: Final = {
    "memory_limit": "memory",
    "process_limit": "processes",
    "cpu_limit": "CPU time",
    "storage_limit": "storage",
    "freeze": "freezing",
    "network_off": "no network",
}
_DELEGATE: Final = "run as root, or with a cgroup of your own: systemd-run --user --scope -p Delegate=yes t1-env ..."


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table.

    Args:
        name: Backend or extra.
        kind: ``"sandbox"``, ``"limits"`` or ``"extra"``.
        ok: Whether it can be used now.
        detail: What was found, or what to do.
    """

    name: str
    kind: str
    ok: bool
    detail: str


def findings() -> list[Finding]:
    """Look at this machine; no container is started and no other machine is asked."""
    with ThreadPoolExecutor(1) as pool:
        docker = pool.submit(_docker)  # importing its SDK and asking the engine takes as long as starting a local sandbox
        found = _local()
        found += [docker.result(), _ssh(), *_third_party()]
    return found + [_extra(name, modules) for name, modules in _EXTRAS.items()]


def _local() -> list[Finding]:
    """Start one, run a command in it, and see which of its limits hold."""
    try:
        with LocalSandbox(SandboxSpec(storage_mb=16, memory_mb=64, cpus=1.0)) as sandbox:
            result = sandbox.run(["true"], timeout_s=20)
            capabilities = sandbox.capabilities
    except SandboxError as error:
        return [Finding("local", "sandbox", False, str(error))]
    if result.exit_code != 0:
        return [Finding("local", "sandbox", False, f"a probe command in the local sandbox failed: {result}")]
    local = Finding("local", "sandbox", True, "Linux namespaces and overlay mounts work; nothing to install")
    return [local, _limits(capabilities)]


def _limits(capabilities: frozenset[str]) -> Finding:
    hierarchies = find_hierarchies()
    versions = [text for text, there in (("version 1", hierarchies.v1), ("version 2", hierarchies.v2)) if there]
    hold = [text for name, text in _LIMITS.items() if name in capabilities]
    missing = [text for name, text in _LIMITS.items() if name not in capabilities]
    detail = f"cgroups {' and '.join(versions) or 'not mounted'}; enforced: {', '.join(hold)}"
    if missing:
        detail += f"; not enforced: {', '.join(missing)} ({_DELEGATE})"
    return Finding("local", "limits", not missing, detail)


def _docker() -> Finding:
    if (missing := _missing("docker", _EXTRAS["docker"])) is not None:
        return Finding("docker", "sandbox", False, missing)
    from t1_env.sandbox.docker.config import DockerConfig
    from t1_env.sandbox.docker.daemon import Daemon

    try:
        with contextlib.closing(Daemon(DockerConfig())) as daemon:
            return Finding("docker", "sandbox", True, f"engine {daemon.info.get('ServerVersion', '')} answers at {daemon.url}")
    except SandboxError as error:
        return Finding("docker", "sandbox", False, str(error))


def _ssh() -> Finding:
    if (missing := _missing("ssh", _EXTRAS["ssh"])) is not None:
        return Finding("ssh", "sandbox", False, missing)
    from t1_env.sandbox.ssh.config import SshConfig

    try:
        config = SshConfig.load()
    except ConfigError as error:
        return Finding("ssh", "sandbox", False, str(error))
    detail = f"configured for {config.host} (not contacted; try it: t1-env run --sandbox ssh --agent oracle seeds/hello-file)"
    return Finding("ssh", "sandbox", True, detail)


def _third_party() -> list[Finding]:
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return [Finding(point.name, "sandbox", True, f"offered by {point.value} (not tried)") for point in sorted(points, key=lambda p: p.name)]


def _extra(name: str, modules: tuple[str, ...]) -> Finding:
    missing = _missing(name, modules)
    return Finding(name, "extra", missing is None, missing or "installed")


def _missing(extra: str, modules: Iterable[str]) -> str | None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return f"missing {', '.join(missing)}: python -m pip install 't1-terminal[{extra}]'" if missing else None


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
        table.add_row(finding.name, finding.kind, _answer(finding), Text(finding.detail))
    console.print(table)
    if not found[0].ok:
        print("t1-env: the local sandbox cannot run here; see the table", file=sys.stderr)
        return EXIT_FAILED
    console.print("next: t1-env run --agent oracle seeds/hello-file", markup=False)
    return EXIT_OK


def _answer(finding: Finding) -> Text:
    if finding.ok:
        return Text("yes", "green")
    return Text("in part", "yellow") if finding.kind == "limits" else Text("no", "red")
