"""One container: how it is confined, how its first process is spoken to, and how it is taken away."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from t1_env.errors import SandboxDied, SandboxError, T1Error, TransportLost
from t1_env.sandbox.base import SandboxSpec
from t1_env.sandbox.docker.daemon import Daemon
from t1_env.sandbox.docker.holdings import Holding, let_go_of_image
from t1_env.sandbox.docker.runtime import volume_mount
from t1_env.sandbox.docker.stream import AttachStream

MEMORY_HEADROOM_MB: Final = 128
"""The outpost lives in the container beside the agent; this much memory is for it, on top of the agent's own limit."""
PROCESS_HEADROOM: Final = 48
"""The outpost's own threads and helpers, on top of the agent's limit."""

_CAPABILITIES: Final = (
    # What root of an ordinary image needs to do an administrator's work inside its own container; each is bounded by its namespaces.
    "AUDIT_WRITE",  # PAM: su, login and sshd end with an error where they cannot log
    "CHOWN",  # install, tar and package managers give files to their owners
    "DAC_OVERRIDE",  # root reads and writes what belongs to the image's other users
    "FOWNER",  # ... and changes its modes and times
    "FSETID",  # chmod keeps setuid and setgid bits on files of another group
    "KILL",  # root ends processes of the image's other users
    "NET_BIND_SERVICE",  # servers on ports below 1024 of the container's own loopback
    "SETGID",  # su, setpriv and daemons that drop to a group ...
    "SETUID",  # ... and to a user
    "SETPCAP",  # daemons that drop capabilities for good
    "SYS_CHROOT",  # sshd and package managers lock their helpers in
    # Left out of Docker's own list: MKNOD, NET_RAW, SETFCAP. No task needs them, and each has been part of an escape.
)
_MAX_OPEN_FILES: Final = 4096
_CPU_PERIOD_US: Final = 100_000
_SHM_MB: Final = 64
_REMOVE_TIMEOUT_S: Final = 30.0
_END_ROUNDS: Final = 40
_END_ROUND_S: Final = 0.05
_UNSUPPORTED_STORAGE: Final = ("--storage-opt", "storage-opt")


@dataclass(frozen=True, slots=True)
class Order:
    """A container to make.

    Args:
        image: Identity of the image.
        command: First process and its arguments.
        spec: Limits and host name.
        kind: What it is for (label ``t1.kind``).
        runtime_volume: Volume that holds the outpost's files.
        fresh: Paths that hide whatever the image has there behind an empty volume of the container's own.
        workdir: Working directory of the first process; made if it is not there.
        user: Who runs the first process, as the image's ``USER`` would say it.
        network_mode: Docker network.
        env: Variables of the first process that differ from the image's.
    """

    image: str
    command: Sequence[str]
    spec: SandboxSpec
    kind: str
    runtime_volume: str
    fresh: Sequence[str] = ()
    workdir: str = "/"
    user: str = "0:0"
    network_mode: str = "none"
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layers:
    """Directories of this machine that hold a container's files.

    Args:
        written: What its processes wrote.
        below: The image's layers, topmost first.
        merged: Where the daemon has them all mounted as one.
        identity: Device and inode of that mount.
    """

    written: str
    below: tuple[str, ...]
    merged: str
    identity: tuple[int, int]


class Container:
    """A container of this process. Its first process runs once `start` returned.

    Args:
        daemon: Where.
        order: What to make.

    Raises:
        SandboxError: The daemon refused.
        TransportLost: It does not answer.
    """

    def __init__(self, daemon: Daemon, order: Order) -> None:
        self._daemon = daemon
        self._order = order
        self.storage_limited = False
        self.stream: AttachStream | None = None
        self._removed = False
        self._owner_pid = os.getpid()
        self._holding = Holding(daemon, order.kind)
        try:
            self.id = self._create()
        except BaseException:
            self._holding.let_go(removed=False)
            raise

    # ------------------------------------------------------------------------------------------------------------------ life cycle
    def start(self) -> AttachStream:
        """Attach to the container, then start it, so that nothing of what it says is lost.

        Returns:
            Its standard streams.

        Raises:
            SandboxError: The first process cannot be started.
            TransportLost: The daemon does not answer.
        """
        api = self._daemon.api
        with self._daemon.doing("start a container"):
            parameters = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            self.stream = AttachStream(api.attach_socket(self.id, params=parameters))
            api.start(self.id)
        return self.stream

    def remove(self) -> None:
        """End it and remove it with its volumes. Idempotent, never raises."""
        if self._removed or os.getpid() != self._owner_pid:
            return
        self._removed = True
        if self.stream is not None:
            self.stream.close()
        removed = False
        try:
            with contextlib.suppress(SandboxError):  # if the daemon is away, the next start finds what is left
                removed = self._remove()
        finally:
            self._holding.let_go(removed=removed)

    def running(self) -> bool:
        """Whether its first process runs.

        Raises:
            TransportLost: The daemon does not answer.
            SandboxError: It refused.
        """
        with self._daemon.doing("look at a container"):
            try:
                return bool(self._daemon.api.inspect_container(self.id)["State"]["Running"])
            except self._daemon.sdk.errors.NotFound:
                return False

    def explain_loss(self) -> T1Error:
        """Why its stream ended, as the error to raise."""
        try:
            for _ in range(_END_ROUNDS):  # the stream ends a moment before the daemon knows that the container did
                if not self.running():
                    break
                time.sleep(_END_ROUND_S)
            else:
                return TransportLost(f"the Docker daemon ended the connection to container {self.id[:12]}, which still runs")
        except SandboxError as error:
            return error
        said = "" if self.stream is None else self.stream.stderr.strip()
        return SandboxDied(f"{self._gone}" + (f"; its first process said: {said[-2000:]}" if said else ""))

    # ----------------------------------------------------------------------------------------------------------------------- files
    def put(self, path: str, archive: bytes) -> None:
        """Unpack a tar archive into the directory ``path``; the container need not run."""
        with self._daemon.doing(f"put files into {path}", gone=self._gone):
            self._daemon.api.put_archive(self.id, path, archive)

    def fetch(self, path: str) -> bytes | None:
        """A tar archive of a file or directory, whose top is its last name; None if there is nothing at this path."""
        with self._daemon.doing(f"read {path}"):
            try:
                chunks, _ = self._daemon.api.get_archive(self.id, path)
            except self._daemon.sdk.errors.NotFound:
                return None
            return b"".join(chunks)

    def changes(self) -> list[tuple[str, int]]:
        """Paths that differ from the image, with 0 for changed, 1 for new and 2 for removed."""
        with self._daemon.doing("list the changes of a container", gone=self._gone):
            return [(str(entry["Path"]), int(entry["Kind"])) for entry in self._daemon.api.diff(self.id) or ()]

    def layers(self) -> Layers | None:
        """Where its files lie on this machine; None if they are not to be seen."""
        if not self._daemon.is_local:
            return None
        with self._daemon.doing("look at a container", gone=self._gone):
            driver = self._daemon.api.inspect_container(self.id).get("GraphDriver") or {}
        data = driver.get("Data") or {}
        upper, lower, merged = data.get("UpperDir"), data.get("LowerDir"), data.get("MergedDir")
        if driver.get("Name") != "overlay2" or not (upper and lower and merged) or not os.access(upper, os.R_OK | os.X_OK):
            return None
        try:
            status = os.stat(merged)
        except OSError:  # it ended meanwhile
            return None
        return Layers(str(upper), tuple(str(lower).split(":")), str(merged), (status.st_dev, status.st_ino))

    def execute(self, command: Sequence[str]) -> AttachStream:
        """Start another process in it, as root; returns its standard streams."""
        with self._daemon.doing("start a process in a container", gone=self._gone):
            made = self._daemon.api.exec_create(self.id, list(command), stdin=True, user="0:0", workdir="/")
            return AttachStream(self._daemon.api.exec_start(made["Id"], socket=True))

    # ------------------------------------------------------------------------------------------------------------------ snapshots
    def commit(self, kind: str) -> str:
        """Make an image of its files as they stand; its processes stand still meanwhile.

        Returns:
            The image's identity.
        """
        holding = Holding(self._daemon, kind)
        try:
            with self._daemon.doing("commit a container", gone=self._gone):
                image = str(self._daemon.api.commit(self.id, conf={"Labels": holding.labels})["Id"])
        except BaseException:
            holding.let_go(removed=False)
            raise
        holding.name(image)
        return image

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Every process in it stands still inside the block."""
        with self._daemon.doing("pause a container", gone=self._gone):
            self._daemon.api.pause(self.id)
        try:
            yield
        finally:
            with self._daemon.doing("let a container go on", gone=self._gone):
                self._daemon.api.unpause(self.id)

    # ---------------------------------------------------------------------------------------------------------------------- details
    def _remove(self) -> bool:
        api, errors = self._daemon.api, self._daemon.sdk.errors
        deadline = time.monotonic() + _REMOVE_TIMEOUT_S
        with self._daemon.doing("remove a container"):
            while time.monotonic() < deadline:
                try:
                    api.remove_container(self.id, force=True, v=True)
                except errors.NotFound:
                    return True
                except errors.APIError as error:
                    if error.status_code != 409:
                        raise
                    time.sleep(0.01)  # it is on its way out by itself (auto-remove)
        return False

    @property
    def _gone(self) -> str:
        return f"the container of the sandbox ({self.id[:12]}) is gone"

    def _create(self) -> str:
        daemon, order = self._daemon, self._order
        limited = order.spec.storage_mb if _may_limit_storage(daemon) else None
        try:
            container = self._create_with(limited)
        except SandboxError as error:
            if limited is None or not any(word in str(error) for word in _UNSUPPORTED_STORAGE):
                raise
            _no_storage_limit.add(daemon.identity)
            limited = None
            container = self._create_with(None)
        self.storage_limited = limited is not None
        return container

    def _create_with(self, storage_mb: int | None) -> str:
        daemon, order, spec = self._daemon, self._order, self._order.spec
        api = daemon.api
        with daemon.doing(f"create a container of image {order.image}"):
            created = api.create_container(
                order.image,
                entrypoint=list(order.command),
                command=[],
                stdin_open=True,  # with StdinOnce, which the SDK adds: the first process's input ends with our connection
                hostname=None if order.network_mode.startswith("container:") else spec.hostname,  # it has that of the other one
                user=order.user,
                working_dir=order.workdir,
                environment=dict(order.env),
                labels=self._holding.labels,
                healthcheck={"test": ["NONE"]},
                use_config_proxy=False,  # nothing of this host's settings gets into an episode
                host_config=api.create_host_config(**self._host_config(storage_mb)),
            )
        return str(created["Id"])

    def _host_config(self, storage_mb: int | None) -> dict[str, Any]:
        spec, types = self._order.spec, self._daemon.sdk.types
        mounts = [types.Mount(path, None, type="volume", no_copy=True) for path in self._order.fresh]
        mounts.append(volume_mount(self._daemon, self._order.runtime_volume, read_only=True))
        memory = None if spec.memory_mb is None else (spec.memory_mb + MEMORY_HEADROOM_MB) << 20
        ulimits = {"nofile": _MAX_OPEN_FILES, "core": 0, "fsize": spec.storage_mb << 20}
        options: dict[str, Any] = {
            "mounts": mounts,
            "auto_remove": True,
            "init": False,
            "log_config": {"Type": "none"},
            "network_mode": self._order.network_mode,
            "cap_drop": ["ALL"],
            "cap_add": list(_CAPABILITIES),
            "security_opt": ["no-new-privileges"],
            "pids_limit": spec.max_processes + PROCESS_HEADROOM,
            "shm_size": min(_SHM_MB, spec.storage_mb) << 20,
            "ulimits": [types.Ulimit(name=name, soft=limit, hard=limit) for name, limit in ulimits.items()],
            "runtime": self._daemon.config.runtime,
        }
        if memory is not None:
            options |= {"mem_limit": memory, "memswap_limit": memory}  # equal: no swap
        if spec.cpus is not None:
            # A quota, not a number of CPUs: the daemon refuses more of those than it has, and a task may ask for more.
            options |= {"cpu_period": _CPU_PERIOD_US, "cpu_quota": max(1000, int(spec.cpus * _CPU_PERIOD_US))}
        if storage_mb is not None:
            options["storage_opt"] = {"size": f"{storage_mb}m"}
        return options


def archive_of_mounts(mounts: Mapping[str, Path]) -> bytes:
    """A tar archive that, unpacked at the root of a container, puts files and directories of this host in place of whatever is there.

    Unpacking a file over a directory takes the directory away with all it holds, and unpacking a directory over a link or a file takes
    that away; so nothing that stands at a target or above it can add to what is mounted or lead it somewhere else.

    Args:
        mounts: Absolute path inside -> path on this host. Owners become root.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for target, source in mounts.items():
            parts = [part for part in target.split("/") if part not in ("", ".")]
            for count in range(1, len(parts)):
                entry = tarfile.TarInfo("/".join(parts[:count]))
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
            name = "/".join(parts)
            archive.addfile(tarfile.TarInfo(name))
            archive.add(source, name, filter=_owned_by_root)
    return buffer.getvalue()


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


_no_storage_limit: Final[set[str]] = set()


def _may_limit_storage(daemon: Daemon) -> bool:
    """Whether it is worth asking: only some storage drivers take a size, overlay2 on xfs mounted with project quotas among them."""
    if daemon.identity in _no_storage_limit:
        return False
    status = {str(pair[0]): str(pair[1]) for pair in daemon.info.get("DriverStatus") or ()}
    driver = daemon.info.get("Driver")
    return driver in ("btrfs", "zfs", "devicemapper") or (driver == "overlay2" and status.get("Backing Filesystem") == "xfs")


def remove_image(daemon: Daemon, image: str) -> None:
    """Remove an image made by a commit, but not what it was made from. Never raises: the next start finds what is left by its label."""
    removed = False
    try:
        with contextlib.suppress(SandboxError), daemon.doing("remove an image"):
            daemon.api.remove_image(image, force=True, noprune=True)
            removed = True
    finally:
        let_go_of_image(image, removed=removed)
