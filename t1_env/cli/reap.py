"""``t1-env reap``: remove what runs that were killed left behind, here, in the Docker engine and on an SSH server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from t1_env.errors import ConfigError, DependencyMissing, SandboxError
from t1_env.sandbox.reaper import Finding, reap_local

EXIT_OK, EXIT_FAILED = 0, 1

_STYLES = {"removed": "green", "would be removed": "yellow", "kept": "dim", "failed": "red"}


def reap(*, dry_run: bool, ssh: bool, show_kept: bool) -> int:
    """Look everywhere, remove, and print what was found.

    Args:
        dry_run: Only say what would be removed.
        ssh: Whether to look at the configured SSH server too; nothing is sent anywhere otherwise.
        show_kept: List also what stays because it is in use or because its owner cannot be seen from here.

    Returns:
        0, or 1 if something could not be removed or a place that was asked for could not be looked at.
    """
    console = Console(highlight=False, soft_wrap=True)
    found = reap_local(dry_run=dry_run)
    unseen: list[str] = []
    failed = False
    for name, look, required in (("docker", _docker, False), ("ssh", _ssh, True)):
        if name == "ssh" and not ssh:
            continue
        try:
            found += look(dry_run)
        except (DependencyMissing, ConfigError, SandboxError) as error:
            unseen.append(f"{name} not looked at: {' '.join(str(error).split())}")
            failed = failed or required
    _print(console, found, dry_run=dry_run, show_kept=show_kept)
    for line in unseen:
        console.print(line, markup=False)
    return EXIT_FAILED if failed or any(finding.action == "failed" for finding in found) else EXIT_OK


def _docker(dry_run: bool) -> list[Finding]:
    from t1_env.sandbox.docker.leftovers import list_leftovers, remove_leftovers

    look: Callable[[], list[Finding]] = list_leftovers if dry_run else remove_leftovers
    return look()


def _ssh(dry_run: bool) -> list[Finding]:
    from t1_env.sandbox.ssh import list_leftovers, remove_leftovers
    from t1_env.sandbox.ssh.config import SshConfig

    look: Callable[[SshConfig], list[Finding]] = list_leftovers if dry_run else remove_leftovers
    return look(SshConfig.load())


def _print(console: Console, found: list[Finding], *, dry_run: bool, show_kept: bool) -> None:
    shown = [finding for finding in found if show_kept or finding.action != "kept"]
    if shown:
        table = Table()
        for heading in ("what", "name", "done", "why"):
            table.add_column(heading, overflow="fold")
        for finding in shown:
            table.add_row(finding.kind, Text(finding.name), Text(finding.action, _STYLES[finding.action]), Text(finding.reason))
        console.print(table)
    counts = Counter(finding.action for finding in found)
    kept = f"; {counts['kept']} kept" + ("" if show_kept else " (list them with --all)") if counts["kept"] else ""
    done = f"{counts['would be removed']} would be removed" if dry_run else f"{counts['removed']} removed"
    failed = f", {counts['failed']} could not be removed" if counts["failed"] else ""
    console.print(f"{done}{failed}{kept}" if found else "nothing is left of any run", markup=False)
