"""The Docker sandbox: a container whose first process is T1's outpost, on any Docker daemon that can be reached."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from t1_env.errors import SandboxDied, SandboxError, SandboxUnavailable, TransportLost
from t1_env.sandbox import checks, files
from t1_env.sandbox.base import BuiltEnvironment, CloneResult, CloneView, SandboxSpec
from t1_env.sandbox.docker.clone import Call, call_in_clone, call_on_layers, copy_volumes
from t1_env.sandbox.docker.config import DockerConfig
from t1_env.sandbox.docker.container import Container, Layers, Order, remove_image
from t1_env.sandbox.docker.daemon import Daemon, daemon_for
from t1_env.sandbox.docker.images import Image, find_image
from t1_env.sandbox.docker.leftovers import tidy_up
from t1_env.sandbox.docker.runtime import ROOT, ensure_volume, forget_volume
from t1_env.sandbox.docker.stream import AttachStream
from t1_env.sandbox.keeper import BASE_ENV
from t1_env.sandbox.local import unavailable_reason
from t1_env.sandbox.outpost.client import OutpostClient
from t1_env.sandbox.outpost.frames import Header
from t1_env.sandbox.outpost.remote import RemoteSandbox
from t1_env.sandbox.outpost.runtime import make_runtime

LEASE_S: Final = 120.0
"""The container ends when nothing was heard from this process for so long; normally it ends with the connection, at once."""

_SYSTEM_DIRECTORIES: Final = ("bin", "etc", "lib", "lib32", "lib64", "libx32", "opt", "sbin", "usr")
# The outpost's interpreter is started by a loader that would obey these; what the image sets is for the agent's processes only.
_LOADER_VARIABLES: Final = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT")
_ROOT_USERS: Final = ("", "0", "root", "0:0", "root:root")


class DockerSandbox(RemoteSandbox):
    """A private machine for one episode, made of a Docker container.

    ``SandboxSpec.image`` names an image or a directory with a Dockerfile, which the daemon builds. The container has no network unless the
    specification asks for one, bounded memory, processes and CPU time, few capabilities and no way to gain more. It vanishes with this
    process, however that ends. docs/docker.md describes the anatomy and the limits.

    Args:
        spec: What to build; default ``SandboxSpec()``.
        config: Where the daemon is and how to use it; default ``DockerConfig()``.

    Raises:
        ConfigError: The specification asks for something no sandbox can be.
    """

    isolation = "container"

    def __init__(self, spec: SandboxSpec | None = None, config: DockerConfig | None = None) -> None:
        super().__init__(spec)
        checks.check_spec(self.spec)
        self.config = config if config is not None else DockerConfig()
        self._daemon: Daemon | None = None
        self._image: Image | None = None
        self._container: Container | None = None
        self._volume = ""
        self._layers: Layers | None = None
        self.clone_mode: Literal["layers", "commit"] = "commit"
        self._origin: Container | None = None  # what this one is a fork of, while it starts
        self._commits: tuple[str, ...] = ()  # images that only this sandbox and its forks are made of, the newest first

    # ------------------------------------------------------------------------------------------------------------------ life cycle
    def start(self) -> None:
        """Create it; does nothing when it is started already.

        Raises:
            DependencyMissing: The docker SDK is not installed.
            SandboxUnavailable: No daemon answers; the message says what to do.
            ImageBuildError: The image cannot be built or pulled; names the Dockerfile line.
            SandboxError: The daemon refused the container.
        """
        try:
            super().start()
        except TransportLost as error:
            raise SandboxUnavailable(str(error)) from error

    def _connect(self) -> OutpostClient:
        daemon = self._daemon = daemon_for(self.config)
        tidy_up(daemon)
        if self._image is None:
            self._image = find_image(daemon, self.spec.image)
        try:
            return self._make_container(daemon, self._image)
        except SandboxError as error:
            self._remove_container()
            if f"{ROOT}/" not in str(error):
                raise
            forget_volume(daemon, self._volume)  # somebody removed the volume or emptied it: fill it again
        try:
            return self._make_container(daemon, self._image)
        except BaseException:
            self._remove_container()
            raise

    def _make_container(self, daemon: Daemon, image: Image) -> OutpostClient:
        runtime = make_runtime("complete")
        self._volume = ensure_volume(daemon, runtime, image.id)
        order = Order(
            image=image.id,
            command=runtime.command(ROOT, "native", "--lease-s", f"{LEASE_S:g}"),
            spec=self.spec,
            kind="sandbox",
            runtime_volume=self._volume,
            workdir=self.spec.workdir,
            user=image.user or "0:0",
            network_mode=daemon.config.network_mode if self.spec.network else "none",
            env={name: "" for name in _LOADER_VARIABLES if name in image.env},
            fresh=() if self._origin is None else image.volumes,
        )
        with daemon.start_slot():
            container = self._container = Container(daemon, order)
            if self._origin is not None:
                copy_volumes(self._origin, container, image.volumes)
            stream = container.start()
        try:
            return OutpostClient(stream, explain_loss=container.explain_loss)
        except TransportLost as error:
            # Whoever ended it in its first moments may not do so again: this is no machine that cannot.
            loss = container.explain_loss()
            raise type(loss)(f"{loss}: {error}") from error

    def _far_spec(self) -> SandboxSpec:
        assert self._image is not None
        withheld = {name: self._image.env[name] for name in _LOADER_VARIABLES if name in self._image.env}
        return dataclasses.replace(self.spec, env={**withheld, **self.spec.env})

    def _adopt(self, client: OutpostClient, reply: Header) -> None:
        super()._adopt(client, reply)
        assert self._container is not None
        self.isolation = "container"
        found = {"clone", "fork", "freeze", "process_limit"}
        found |= {"memory_limit"} if self.spec.memory_mb is not None else set()
        found |= {"cpu_limit"} if self.spec.cpus is not None else set()
        found |= {"storage_limit"} if self._container.storage_limited else set()
        found |= set() if self.spec.network else {"network_off"}
        self.capabilities = frozenset(found)
        self._layers = self._container.layers()
        self.clone_mode = "layers" if self._can_clone_layers() else "commit"
        self.capabilities |= {"live"} if self.clone_mode == "commit" else {"live", "views"}

    def _can_clone_layers(self) -> bool:
        """Whether a local sandbox on this machine can stand on the container's files; another runtime keeps its clones to itself."""
        assert self._image is not None
        if self._layers is None or self._image.volumes or self.config.clones == "commit" or self.config.runtime is not None:
            return False
        return os.geteuid() == 0 and os.path.ismount(self._layers.merged) and unavailable_reason() is None

    def _build(self) -> BuiltEnvironment:
        assert self._image is not None
        return BuiltEnvironment(dict(self._image.env), self._image.workdir)

    def _remove(self) -> None:
        self._remove_container()
        if self._daemon is not None:
            for image in self._commits:
                remove_image(self._daemon, image)

    def _remove_container(self) -> None:
        if self._container is not None:
            self._container.remove()
            self._container = None

    def close(self) -> None:
        """Kill every process and remove every trace. Idempotent, never raises."""
        container = self._container
        if container is not None and not self._closed:
            container.remove()  # at once, and also if the outpost stands still
        super().close()

    # ---------------------------------------------------------------------------------------------------------------------- files
    def put(self, source: Path | bytes, dest: str, *, mode: int | None = None) -> None:
        """Copy a host file, a whole host directory or bytes to an absolute path, owned by root; see ``Sandbox.put``."""
        self._of_container()
        assert self._image is not None
        if self._image.user in _ROOT_USERS:
            super().put(source, dest, mode=mode)
        else:
            with self._root_files() as files_of_root:
                files_of_root.put(source, dest, mode=mode)

    def generation(self) -> str:
        """A fingerprint of everything the sandbox's processes wrote; see ``Sandbox.generation``.

        With a daemon on this machine it is taken from the container's own layer, at a cost that depends only on what was written; else the
        outpost looks at all files.
        """
        self._of_container()
        if self._layers is None or self._image is None or self._image.volumes:
            return super().generation()
        found = files.fingerprint([self._layers.written])
        if not os.path.isdir(self._layers.written):
            raise SandboxDied("the container of the sandbox is gone, and its files with it")
        return found

    def system_changes(self) -> dict[str, str]:
        """Files of the image's system directories that were changed, replaced or removed since the start.

        Returns:
            Absolute path -> a mark that changes whenever the file changes again (with a daemon elsewhere: only when it is removed).
        """
        container = self._of_container()
        if self._layers is not None:
            found: dict[str, str] = {}
            for name in _SYSTEM_DIRECTORIES:
                below = tuple(f"{layer}/{name}" for layer in self._layers.below)
                found |= files.changed_files(f"{self._layers.written}/{name}", below, f"/{name}")
            return found
        changes = container.changes()
        directories = {os.path.dirname(path) for path, _ in changes}
        return {
            path: "removed" if kind == 2 else "changed"
            for path, kind in changes
            if kind != 1 and path not in directories and path.split("/")[1] in _SYSTEM_DIRECTORIES
        }

    # --------------------------------------------------------------------------------------------------------------------- clones
    def run_in_clone(
        self,
        entry: str,
        payload: Any,
        *,
        mounts: Mapping[str, Path] | None = None,
        timeout_s: float = 60.0,
        view: CloneView | None = None,
    ) -> CloneResult:
        """Run a trusted function in a copy-on-write clone of the container; see ``Sandbox.run_in_clone``.

        The clone stands on the container's own layers, in namespaces of this machine, while the container is paused; or it is a container
        made of a commit (``clone_mode`` says which). Such a container can share the network of the agent's, which goes on beside it, but
        knows no restored view.
        """
        container = self._of_container()
        assert self._daemon is not None
        assert self._image is not None
        call = Call(
            entry=entry,
            payload=payload,
            mounts={target: Path(source) for target, source in (mounts or {}).items()},
            timeout_s=timeout_s,
            env={**BASE_ENV, **self._image.env, **self.spec.env},
            command=make_runtime("complete").command(ROOT, "call"),
            runtime_volume=self._volume,
            volumes=self._image.volumes,
            view=view,
        )
        live = view is not None and view.live
        if self.clone_mode == "layers" and self._layers is not None and not live:
            result = call_on_layers(container, self._layers, self.spec, call)
            if result is not None:
                return result
            self.clone_mode = "commit"
            self.capabilities -= {"views"}
        return call_in_clone(self._daemon, container, self.spec, call)

    def fork(self) -> DockerSandbox:
        """Return a started sandbox whose filesystem is a copy of this one's as it stands; see ``Sandbox.fork``."""
        container = self._of_container()
        assert self._daemon is not None
        assert self._image is not None
        copy = DockerSandbox(self.spec, self.config)
        with container.paused() if self._image.volumes else contextlib.nullcontext():
            with self._daemon.start_slot():
                commit = container.commit("commit")
            copy._image, copy._origin = dataclasses.replace(self._image, id=commit), container
            copy._commits = (commit, *self._commits)
            try:
                copy.start()
            except BaseException:
                remove_image(self._daemon, commit)
                raise
        copy._origin = None
        return copy

    def _root_files(self) -> RemoteSandbox:
        """Another outpost in the container, for work that the image's own user may not do."""
        container = self._of_container()
        return _RootFiles(lambda: container.execute(make_runtime("complete").command(ROOT, "native")))

    def _of_container(self) -> Container:
        client, container = self._live(), self._container
        if container is None:
            raise SandboxDied("this sandbox was closed")
        if not client.alive:
            client.submit("alive").forget()  # raises what is known of its end
        return container


class _RootFiles(RemoteSandbox):
    """The files of a container in the hands of root, through an outpost that is started for it and ends with it."""

    def __init__(self, execute: Callable[[], AttachStream]) -> None:
        super().__init__(SandboxSpec(workdir="/"))
        self._execute = execute

    def _connect(self) -> OutpostClient:
        return OutpostClient(self._execute())
