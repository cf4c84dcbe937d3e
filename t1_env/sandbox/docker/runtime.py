"""The outpost's files on a Docker daemon: a named volume for each version of them, filled once and mounted read-only into every sandbox."""

from __future__ import annotations

import contextlib
import io
import tarfile
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from t1_env.errors import SandboxError
from t1_env.sandbox.docker.daemon import KIND_LABEL, Daemon
from t1_env.sandbox.docker.holdings import Holding
from t1_env.sandbox.outpost.runtime import Runtime
from t1_env.sandbox.owner import LABEL as OWNER_LABEL
from t1_env.sandbox.owner import is_alive

ROOT: Final = "/.t1"
"""Where the volume is mounted."""

_MARKER: Final = "complete"
_WAIT_S: Final = 300.0
_STALE_S: Final = 120.0
_ROUND_S: Final = 0.2

_ready: Final[set[tuple[str, str]]] = set()
_lock: Final = threading.Lock()


def ensure_volume(daemon: Daemon, runtime: Runtime, image: str) -> str:
    """Make sure that the daemon has a volume with a runtime in it.

    Whoever fills it holds a container of a fixed name meanwhile, which the daemon gives to one at a time; that container is never started.

    Args:
        daemon: Where.
        runtime: What belongs in the volume.
        image: Any image that the daemon has; a container cannot be without one.

    Returns:
        The volume's name.

    Raises:
        SandboxError: It cannot be filled.
        TransportLost: The daemon does not answer.
    """
    name = f"t1-runtime-{runtime.digest[:24]}"
    key = (daemon.identity, name)
    with _lock:
        if key not in _ready:
            _fill(daemon, runtime, name, image)
            _ready.add(key)
    return name


def forget_volume(daemon: Daemon, name: str) -> None:
    """Note that somebody removed the volume or what was in it."""
    _ready.discard((daemon.identity, name))


def volume_mount(daemon: Daemon, name: str, *, read_only: bool) -> Any:
    """The mount of a runtime's volume; the daemon makes the volume if it is not there."""
    labels = {**daemon.config.labels, KIND_LABEL: "runtime"}
    return daemon.sdk.types.Mount(ROOT, name, type="volume", read_only=read_only, no_copy=True, labels=labels)


def _fill(daemon: Daemon, runtime: Runtime, name: str, image: str) -> None:
    api = daemon.api
    holding, removed = Holding(daemon, "runtime-filler"), False
    filler = ""
    try:
        filler = _hold_filler(daemon, name, image, holding.labels)
        with daemon.doing(f"fill volume {name}"):
            try:
                chunks, _ = api.get_archive(filler, f"{ROOT}/{_MARKER}")
                b"".join(chunks)
                return
            except daemon.sdk.errors.NotFound:
                pass  # new, or left half full by somebody who was killed
            with runtime.tar().open("rb") as archive:
                api.put_archive(filler, ROOT, archive)
            api.put_archive(filler, ROOT, _marker(runtime))
    finally:
        if filler:
            removed = _remove(daemon, filler)
        holding.let_go(removed=removed)


def _hold_filler(daemon: Daemon, name: str, image: str, labels: Mapping[str, str]) -> str:
    """Make the container through which the volume is filled, when it is our turn."""
    api, errors = daemon.api, daemon.sdk.errors
    filler = f"{name}-filler"
    deadline = time.monotonic() + _WAIT_S
    first_seen: dict[str, float] = {}
    while True:
        with daemon.doing(f"make volume {name}"):
            try:
                host_config = api.create_host_config(mounts=[volume_mount(daemon, name, read_only=False)], network_mode="none")
                created = api.create_container(
                    image, command=["true"], name=filler, labels=dict(labels), host_config=host_config, use_config_proxy=False
                )
                return str(created["Id"])
            except errors.APIError as error:
                if error.status_code != 409:
                    raise
            with contextlib.suppress(errors.NotFound):  # it was just finished
                other = api.inspect_container(filler)
                alive = is_alive(other["Config"]["Labels"].get(OWNER_LABEL, ""))
                waited_s = time.monotonic() - first_seen.setdefault(other["Id"], time.monotonic())
                if alive is False or (alive is None and waited_s > _STALE_S):
                    _remove(daemon, other["Id"])
                    continue
        if time.monotonic() > deadline:
            raise SandboxError(
                f"volume {name} has been filled by another process for {_WAIT_S:g} s; remove container {filler} and try again"
            )
        time.sleep(_ROUND_S)


def _remove(daemon: Daemon, container: str) -> bool:
    with contextlib.suppress(SandboxError), daemon.doing("remove a container"):
        daemon.api.remove_container(container, force=True)
        return True
    return False


def _marker(runtime: Runtime) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(_MARKER)
        entry.size, entry.mode = len(runtime.digest), 0o444
        archive.addfile(entry, io.BytesIO(runtime.digest.encode()))
    return buffer.getvalue()
