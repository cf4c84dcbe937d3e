"""What killed runs left on a Docker daemon: containers, and images of commits. Nothing without T1's owner label is ever touched.

Containers end by themselves with the process that made them, so this finds them only after a crash of the daemon, or half made. Volumes
with the outpost's files and images of tasks are a cache; they stay.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from t1_env.errors import SandboxError
from t1_env.sandbox import owner
from t1_env.sandbox.docker.config import DockerConfig
from t1_env.sandbox.docker.daemon import KIND_LABEL, Daemon, daemon_for
from t1_env.sandbox.docker.holdings import is_left_over, mark_untidy, take_untidy
from t1_env.sandbox.reaper import Finding, decide

_COMMITS: Final = ("commit", "clone-commit")
_DEAD: Final = "its owner is gone"
_LEFT_OVER: Final = "this process could not remove it when it was done with it"

_reaped: Final[set[str]] = set()
_lock: Final = threading.Lock()


def list_leftovers(config: DockerConfig | None = None) -> list[Finding]:
    """Say what is there and what `remove_leftovers` would do with it.

    Args:
        config: Where the daemon is; default ``DockerConfig()``.

    Raises:
        DependencyMissing: The docker SDK is not installed.
        SandboxUnavailable: No daemon answers.
        SandboxError: It refused.
    """
    return _look(daemon_for(config or DockerConfig()), dry_run=True)


def remove_leftovers(config: DockerConfig | None = None) -> list[Finding]:
    """Remove containers and committed images whose owner is gone, or that this process failed to remove.

    Args:
        config: Where the daemon is; default ``DockerConfig()``.

    Returns:
        What was found, also what stays and why.

    Raises:
        DependencyMissing: The docker SDK is not installed.
        SandboxUnavailable: No daemon answers.
        SandboxError: It refused to say what it has.
    """
    return _look(daemon_for(config or DockerConfig()), dry_run=False)


def tidy_up(daemon: Daemon) -> None:
    """Remove what is left the first time this process uses a daemon, and whenever it could not remove something of its own since.

    A failure is no reason not to start.
    """
    with _lock:
        if not take_untidy(daemon) and daemon.identity in _reaped:
            return
        _reaped.add(daemon.identity)
    try:
        if any(finding.action == "failed" for finding in _look(daemon, dry_run=False)):
            mark_untidy(daemon)
    except SandboxError:
        mark_untidy(daemon)


def _look(daemon: Daemon, *, dry_run: bool) -> list[Finding]:
    api = daemon.api
    is_alive = functools.cache(owner.is_alive)
    with daemon.doing("list what is left"):
        containers = api.containers(all=True, filters={"label": owner.LABEL})
        images = [
            image
            for image in api.images(all=True, filters={"label": owner.LABEL})
            if (image.get("Labels") or {}).get(KIND_LABEL) in _COMMITS
        ]
    found = []
    for entry in containers:
        remove = functools.partial(api.remove_container, entry["Id"], force=True, v=True)
        found.append(_settle(daemon, "container", entry, is_alive, dry_run, remove))
    for entry in sorted(images, key=lambda image: image["Created"], reverse=True):  # a fork's image is made of its parent's
        remove = functools.partial(api.remove_image, entry["Id"], force=True, noprune=True)
        found.append(_settle(daemon, "image", entry, is_alive, dry_run, remove))
    return found


def _settle(
    daemon: Daemon, kind: str, entry: Any, is_alive: Callable[[str], bool | None], dry_run: bool, remove: Callable[[], Any]
) -> Finding:
    labels = entry.get("Labels") or {}
    name = f"{entry['Id'].removeprefix('sha256:')[:12]} ({labels.get(KIND_LABEL, 'unknown')})"
    left_over = labels.get(owner.LABEL) == owner.owner_id() and is_left_over(labels)
    keep = None if left_over else decide(labels.get(owner.LABEL), is_alive)
    reason = _LEFT_OVER if left_over else _DEAD
    if keep is not None:
        return Finding(kind, name, "kept", keep)
    if dry_run:
        return Finding(kind, name, "would be removed", reason)
    try:
        with daemon.doing(f"remove {kind} {name}"):
            try:
                remove()
            except daemon.sdk.errors.NotFound:
                pass  # by itself, or by another process's reaper
            except daemon.sdk.errors.APIError as error:
                if "already in progress" not in str(error.explanation):
                    raise
    except SandboxError as error:
        return Finding(kind, name, "failed", str(error))
    return Finding(kind, name, "removed", reason)
