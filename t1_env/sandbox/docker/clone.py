"""Verification in a clone of a container.

On the daemon's own machine the clone is a local sandbox that stands on the container's files while the container is paused. With any other
daemon it is a commit of its files, run as a throw-away container of its own. Nothing of the agent's processes is in either.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from t1_env.errors import ConfigError, SandboxDied, SandboxError, TransportLost
from t1_env.sandbox import checks, syscalls
from t1_env.sandbox.base import CloneResult, CloneView, SandboxSpec
from t1_env.sandbox.docker.container import Container, Layers, Order, archive_of_mounts, remove_image
from t1_env.sandbox.docker.daemon import Daemon
from t1_env.sandbox.docker.stream import AttachStream
from t1_env.sandbox.local import LocalSandbox
from t1_env.sandbox.stacking import Stack

_MAX_RESULT_BYTES: Final = 1 << 27
_FORBIDDEN: Final = ("proc", "dev", "sys", ".t1")


@dataclass(frozen=True, slots=True)
class Call:
    """One function to call in a clone.

    Args:
        entry: ``"package.module:function"``.
        payload: Its argument.
        mounts: Absolute path in the clone -> host path.
        timeout_s: Limit from the moment the agent's files are committed.
        env: Whole environment of the call.
        command: What makes the container's first process answer a request.
        runtime_volume: Where that comes from.
        volumes: Paths of the agent's container that a commit leaves out.
        view: How the clone sees the sandbox.
    """

    entry: str
    payload: Any
    mounts: Mapping[str, Path]
    timeout_s: float
    env: Mapping[str, str]
    command: Sequence[str]
    runtime_volume: str
    volumes: Sequence[str] = ()
    view: CloneView | None = None


def call_in_clone(daemon: Daemon, container: Container, spec: SandboxSpec, call: Call) -> CloneResult:
    """Call a function in a clone of a container as it stands.

    Args:
        daemon: Where.
        container: The agent's; it stands still while its files are committed, and a live clone shares its network.
        spec: Limits of the clone, which are those of the sandbox.
        call: What to call.

    Returns:
        What it returned; ``error`` if the clone could not be made, the function raised or ran out of time.

    Raises:
        ConfigError: A mount cannot be made.
        SandboxDied: The agent's container is gone.
        TransportLost: The daemon does not answer.
    """
    _check_mounts(call.mounts)
    started = time.monotonic()
    clone: Container | None = None
    image = ""
    try:
        with daemon.start_slot(), container.paused() if call.volumes else contextlib.nullcontext():
            image = container.commit("clone-commit")
            order = Order(
                image=image,
                command=call.command,
                spec=spec,
                kind="clone",
                runtime_volume=call.runtime_volume,
                fresh=call.volumes,
                user="0:0",
                network_mode=f"container:{container.id}" if call.view is not None and call.view.live else "none",
            )
            clone = Container(daemon, order)
            if call.mounts:
                clone.put("/", archive_of_mounts({target: source.resolve() for target, source in call.mounts.items()}))
            copy_volumes(container, clone, call.volumes)
            stream = clone.start()
        result, error = _converse(stream, clone, call, spec.workdir)
    except (SandboxDied, TransportLost):
        raise
    except SandboxError as failure:
        result, error = None, f"the clone could not be made: {failure}"
    finally:
        if clone is not None:
            clone.remove()
        if image:
            remove_image(daemon, image)
    return CloneResult(result, time.monotonic() - started, error)


def call_on_layers(container: Container, layers: Layers, spec: SandboxSpec, call: Call) -> CloneResult | None:
    """Call a function in a clone that a local sandbox makes of a container's files; see `call_in_clone`.

    None if no local sandbox can stand on them, as where the daemon's mounts do not reach this process's launcher.

    A local sandbox whose root is an overlay over the container's: made anew each time, because what lies under an overlay must not change.
    """
    _check_mounts(call.mounts)
    started = time.monotonic()
    with container.paused():
        try:
            workdir = spec.workdir if _has_directory(layers.merged, spec.workdir) else "/"
            inside = replace(spec, env=dict(call.env), workdir=workdir, network=False, image=None, hide=())
            stack = Stack(rootfs=layers.merged, foreign=True, identity=layers.identity, written=layers.written, below=layers.below)
            box = LocalSandbox(inside, stack=stack)
            try:
                box.start()
            except SandboxError:
                return None
            with box:
                result = box.run_in_clone(call.entry, call.payload, mounts=call.mounts, timeout_s=call.timeout_s, view=call.view)
        except SandboxError as failure:
            result = CloneResult(None, 0.0, f"the clone could not be made: {failure}")
    return replace(result, seconds=time.monotonic() - started)


def _has_directory(root: str, path: str) -> bool:
    """Whether a path leads to a directory inside ``root``; the agent may have put anything there."""
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(syscalls.open_in_root(root_fd, path, os.O_PATH | os.O_DIRECTORY))
    except OSError:
        return False
    finally:
        os.close(root_fd)
    return True


def _converse(stream: AttachStream, clone: Container, call: Call, workdir: str) -> tuple[Any, str | None]:
    request = {"entry": call.entry, "payload": call.payload, "env": dict(call.env), "workdir": workdir}
    with stream.limited(call.timeout_s):
        try:
            stream.send(json.dumps(request).encode("ascii") + b"\n")
            data = bytearray()
            while not data.endswith(b"\n") and (part := stream.receive()):
                data += part
                if len(data) > _MAX_RESULT_BYTES:
                    return None, f"{call.entry} returned more than {_MAX_RESULT_BYTES >> 20} MiB"
        except TransportLost:
            if clone.running():
                raise
            data = bytearray()
    if stream.expired:
        return None, f"{call.entry} ran out of time ({call.timeout_s:.3g} s) and was killed"
    if not data.endswith(b"\n"):
        said = stream.stderr.strip()[-2000:]
        return None, f"{call.entry} ended without a result" + (f"; it said: {said}" if said else "")
    answer = json.loads(data)
    return answer.get("payload"), answer.get("error")


def copy_volumes(container: Container, clone: Container, paths: Sequence[str]) -> None:
    """Copy what a commit leaves out, the volumes of a container, into another that is not started yet."""
    for path in paths:
        archive = container.fetch(path)
        if archive is not None:  # else the agent moved a directory above it away
            clone.put(posixpath.dirname(path), archive)


def _check_mounts(mounts: Mapping[str, Path]) -> None:
    for target, source in mounts.items():
        checks.check_path(target)
        parts = [part for part in target.split("/") if part]
        if not parts or parts[0] in _FORBIDDEN or ".." in parts:
            raise ConfigError(f"cannot mount at {target!r} in a clone: give an absolute path outside /proc, /dev, /sys and /.t1")
        if not source.exists():
            raise ConfigError(f"run_in_clone: mounts[{target!r}] = {str(source)!r} does not exist on the host")
